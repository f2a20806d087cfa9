"""The loss of a codec, measured through two engines, and the page made of it."""

from __future__ import annotations

import numpy as np

from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.gate.command import COLUMNS, markdown
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
    page = markdown("tiny", ["a.txt"], 16, 2, {200: [raw, int8, kivi2]})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == 5 and all(row.count("|") == len(COLUMNS) + 1 for row in rows)
