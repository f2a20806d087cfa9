"""Long-RoPE's factors are chosen at load; what else is in the batch changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.core.config import EngineConfig
from kvloom.core.layout import group_layers
from kvloom.models.families import find_family
from kvloom.models.loader import load_model
from kvloom.models.rope import rope_digest
from tests.models import configs
from tests.models.harness import PagedRunner, difference, eager_logits, random_ids
from tests.models.tiny import VOCAB_SIZE, build_tokenizer

ORIGINAL = 256
PHIMOE_ROPE = configs.LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4}
TYPES: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": None},
    "phimoe": {"sliding_window": None, "rope_parameters": PHIMOE_ROPE, "original_max_position_embeddings": ORIGINAL},
}


def runner(model_type: str, max_model_len: int) -> PagedRunner:
    register_attention()
    family = find_family(model_type, allow_unverified=False)
    model = configs.build(model_type, ATTENTION_NAME, **TYPES[model_type])
    assert family.unsupported(model.config) is None
    family.prepare(model, max_model_len)
    return PagedRunner(model, group_layers(family.layers(model.config)), max_tokens=1024)


@pytest.mark.parametrize("model_type", TYPES)
def test_both_regimes_equal_eager(model_type: str) -> None:
    """Eager takes the short factors for a sequence up to the original length, the long ones beyond."""
    eager = configs.build(model_type, **TYPES[model_type])
    for length, max_model_len in ((90, ORIGINAL), (ORIGINAL + 40, 512)):
        ids = random_ids(length, VOCAB_SIZE, 0)
        paged = runner(model_type, max_model_len)
        got = torch.cat([paged.step({"a": ids[at : at + 50]})["a"] for at in range(0, length, 50)])
        assert difference(got, eager_logits(eager, ids)) < 1e-4


@pytest.mark.parametrize("model_type", TYPES)
def test_a_long_request_beside_a_short_one_changes_nothing(model_type: str) -> None:
    short, long = random_ids(40, VOCAB_SIZE, 1), random_ids(ORIGINAL + 60, VOCAB_SIZE, 2)
    alone = runner(model_type, 512).step({"short": short})["short"]
    beside = runner(model_type, 512)
    beside.step({"long": long[:-1]})
    together = beside.step({"short": short, "long": long[-1:]})["short"]
    assert difference(together, alone) < 1e-5


def test_without_the_choice_at_load_it_would() -> None:
    """Guards the test above: transformers' own rotary module lets the long request change the short one."""
    register_attention()
    model = configs.build("phi3", ATTENTION_NAME, **TYPES["phi3"])
    layout = group_layers(find_family("phi3", allow_unverified=False).layers(model.config))
    short, long = random_ids(40, VOCAB_SIZE, 1), random_ids(ORIGINAL + 60, VOCAB_SIZE, 2)
    alone = PagedRunner(model, layout).step({"short": short})["short"]
    beside = PagedRunner(model, layout, max_tokens=1024)
    beside.step({"long": long[:-1]})
    together = beside.step({"short": short, "long": long[-1:]})["short"]
    assert difference(together, alone) > 1e-2


def test_the_loader_takes_the_regime_from_max_model_len(tmp_path: Path) -> None:
    directory = tmp_path / "phi3"
    configs.build("phi3", **TYPES["phi3"]).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    own, short = (
        load_model(EngineConfig(model=str(directory), dtype="float32", max_model_len=length))
        for length in (None, ORIGINAL)
    )
    assert own.rope_digest != short.rope_digest  # so that they never share cached keys
    for loaded, regime in ((own, "long_factor"), (short, "short_factor")):
        base = loaded.model.model.rotary_emb.inv_freq[1] * configs.LONGROPE[regime][1]
        assert float(base) == pytest.approx(10000.0 ** (-1 / 8), rel=1e-5)


def test_the_digest_sees_frequencies_and_scales() -> None:
    model = configs.build("llama")
    before = rope_digest(model)
    assert rope_digest(configs.build("llama", seed=1)) == before  # weights are digested elsewhere
    changed = copy.deepcopy(model)
    changed.model.rotary_emb.inv_freq.mul_(0.5)
    assert rope_digest(changed) != before
    model.model.rotary_emb.attention_scaling = 1.5
    assert rope_digest(model) != before
