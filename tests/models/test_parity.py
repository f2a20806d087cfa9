"""Through our attention, tiny models give the logits of transformers' eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.core.layout import group_layers
from kvloom.models.families import find_family
from tests.models import tiny
from tests.models.harness import PagedRunner, backend_or_skip, backends, check_parity, eager_logits, paged, random_ids

TIGHT = 2e-5  # rounding in float32 stays an order below this; the promise is 1e-4

CONFIGS: dict[str, Any] = {
    "llama-gqa": lambda: tiny.llama_config(),
    "llama-mha": lambda: tiny.llama_config(num_key_value_heads=4, head_dim=64),
    "llama-mqa-bias": lambda: tiny.llama_config(num_key_value_heads=1, attention_bias=True),
    "llama3-rope": lambda: tiny.llama_config(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "llama-linear-rope": lambda: tiny.llama_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama-yarn-rope": lambda: tiny.llama_config(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    ),
    "gemma3-mqa": lambda: tiny.gemma3_config(),
    "gemma3-gqa": lambda: tiny.gemma3_config(num_key_value_heads=2, sliding_window=33),
    "gemma3-softcapped-logits": lambda: tiny.gemma3_config(final_logit_softcapping=30.0),
}


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_eager(name: str, backend: str) -> None:
    kernels = backend_or_skip(backend)
    config = CONFIGS[name]()
    family = find_family(config.model_type, allow_unverified=False)
    assert family.unsupported(config) is None
    layout = group_layers(family.layers(config))
    eager, model = tiny.build(config), paged(tiny.build(config))
    for block_size in (8, 32) if name in ("llama-gqa", "gemma3-mqa") else (16,):
        check_parity(model, eager, layout, backend=kernels, block_size=block_size, tolerance=TIGHT)


def test_the_comparison_would_notice_a_wrong_window() -> None:
    """Guards the tests above: with one token less in the window, logits are visibly off."""
    config = tiny.gemma3_config()
    narrow = tiny.gemma3_config(sliding_window=11)
    ids = random_ids(40, tiny.VOCAB_SIZE, 0)
    right, wrong = (eager_logits(tiny.build(x), ids) for x in (config, narrow))
    assert float((right - wrong).abs().max() / right.abs().max()) > 1e-2


def test_window_blocks_are_held_only_while_the_window_reads_them() -> None:
    config = tiny.gemma3_config()
    layout = group_layers(find_family("gemma3_text", allow_unverified=False).layers(config))
    runner = PagedRunner(paged(tiny.build(config)), layout, block_size=8)
    full, window = (
        next(i for i, g in enumerate(layout.groups) if (g.window is None) == kind) for kind in (True, False)
    )
    for token in random_ids(100, tiny.VOCAB_SIZE, 1):
        runner.step({"a": [token]})
    assert runner.held("a")[full] == 13
    assert runner.held("a")[window] <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    config = tiny.llama_config(initializer_range=0.05)
    layout = group_layers(find_family("llama", allow_unverified=False).layers(config))
    ids = random_ids(50, tiny.VOCAB_SIZE, 2)
    expected = eager_logits(tiny.build(config), ids)
    runner = PagedRunner(paged(tiny.build(config, dtype=dtype)), layout)
    got = runner.step({"a": ids})["a"].float()
    assert float((got - expected).abs().max() / expected.abs().max()) < 0.05
