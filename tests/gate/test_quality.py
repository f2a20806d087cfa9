"""The loss of a codec, measured through two engines, and the page made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.errors import RequestError
from kvloom.gate.command import COLUMNS, _settings, markdown
from kvloom.gate.needle import plant
from kvloom.gate.quality import Setting, measure
from tests.engine.tiny import load_tiny, prompt_of


def test_more_bits_lose_less_and_raw_loses_nothing() -> None:
    config = EngineConfig(kv_cache_memory="16MiB", max_batch_tokens=512, pipeline=PipelineConfig(block_size=16))
    windows = [np.array(prompt_of(seed, 200), dtype=np.int32) for seed in range(2)]
    settings = [
        Setting(codec="raw"),
        *(Setting(codec=name, sink_tokens=0, recent_tokens=0) for name in ("int8", "kivi2")),
    ]
    raw, int8, kivi2 = measure(config, settings, windows, load_tiny("llama"))
    assert raw.kl_mean < 1e-6 and raw.top1 == 1.0 and abs(raw.perplexity_change) < 1e-4 and raw.bits == 32.0
    assert raw.kl_mean < int8.kl_mean < kivi2.kl_mean
    assert int8.tokens == 400 and int8.bits == 8.5 and kivi2.bits < int8.bits
    assert int8.bits < int8.kept_bits < 12  # one raw block of 13, of 32 bits
    page = markdown("tiny", ["a.txt"], 16, {(200, 2): [raw, int8, kivi2]})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == 5 and all(row.count("|") == len(COLUMNS) + 1 for row in rows)


def test_protections_are_measured_once_each() -> None:
    found = _settings(["int8", "turboquant4", "kivi2"], ["default", "s16r64", "none"])
    assert [(setting.codec, setting.sink_tokens, setting.recent_tokens) for setting in found] == [
        ("int8", None, None), ("int8", 16, 64), ("turboquant4", None, None), ("turboquant4", 0, 0),
        ("kivi2", None, None), ("kivi2", 16, 64), ("kivi2", 0, 0),
    ]  # fmt: skip
    alone = _settings(["int8"], ["none"])
    assert [(setting.sink_tokens, setting.recent_tokens) for setting in alone] == [(0, 0)]


def test_needles_are_told_once_and_found_by_who_says_them() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    haystack = plant(encode, encode("hay " * 300), 800, 4, seed=3)
    assert len(haystack.ids) == 800 and len(haystack.answers) == 4
    text = bytes(haystack.ids.tolist()).decode()
    for start, end in haystack.answers:
        assert text.count(f"is{text[start:end]}") == 2  # told and asked
    first = haystack.first_wanted
    right = torch.nn.functional.one_hot(torch.from_numpy(haystack.ids[first + 1 :].astype(np.int64)), 256)
    assert haystack.found(right.float()) == 4
    wrong = right.clone()
    wrong[haystack.answers[2][1] - 2 - first] = 0  # one digit of the third answer
    assert haystack.found(wrong.float()) == 3
    with pytest.raises(RequestError, match="do not fit"):
        plant(encode, encode("hay"), 800, 4, seed=3)
