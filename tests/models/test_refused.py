"""Models that our attention would get wrong: what would happen, and that they are refused or done right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import KVLayout, LayerSpec, group_layers
from kvloom.models.families import FAMILIES, find_family
from kvloom.models.families.refused import REFUSED
from kvloom.models.seam import check_calls, check_masks
from tests.models import configs
from tests.models.harness import PagedRunner, difference, eager_logits, random_ids
from tests.models.tiny import VOCAB_SIZE

CHUNK = 16
LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "attention_chunk_size": CHUNK,
    "num_local_experts": 2,
    "intermediate_size_mlp": 96,
    "no_rope_layers": [1, 1],
    "moe_layers": [],
    "attn_temperature_tuning": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "doge": {},
    "llama4_text": LLAMA4,
    "nemotron": {"head_dim": 16},
    "stablelm": {},
}


def build(model_type: str, attention: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(configs.SHAPE | SHAPES[model_type] | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def plain_layout(model: Any, window: int | None = None) -> KVLayout:
    """What one would guess from heads and head size alone."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = LayerSpec.kv(num_heads=config.num_key_value_heads, k_dim=dim, window=window)
    return group_layers([layer] * config.num_hidden_layers)


def error(model: Any, eager: Any, layout: KVLayout, count: int) -> float:
    ids = random_ids(count, VOCAB_SIZE, 0)
    return difference(PagedRunner(model, layout).step({"a": ids})["a"], eager_logits(eager, ids))


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_with_the_reason_whatever_the_flags(model_type: str) -> None:
    assert model_type not in FAMILIES
    for allow_unverified in (False, True):
        with pytest.raises(UnsupportedModelError, match="cannot be served") as caught:
            find_family(model_type, allow_unverified=allow_unverified)
        assert REFUSED[model_type] in str(caught.value)


def test_chunked_attention_would_be_silently_wrong_and_the_mask_check_sees_it() -> None:
    register_attention()
    model, eager = build("llama4_text", ATTENTION_NAME), build("llama4_text", "eager")
    layout = plain_layout(model)
    assert check_calls(model, layout, [4, 4]) == VOCAB_SIZE  # every call looks right
    assert error(model, eager, layout, CHUNK) < 1e-4  # up to one chunk it is
    assert error(model, eager, layout, 3 * CHUNK) > 0.05
    with pytest.raises(UnsupportedModelError, match="a mask is all that states this"):
        check_masks(model, layout, model.config)


@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe"])
def test_a_window_that_only_the_mask_states_comes_from_the_layout(model_type: str) -> None:
    """The family reads it off the configuration. Without it the logits would be wrong, and the load would fail."""
    register_attention()
    model, eager = configs.build(model_type, ATTENTION_NAME), configs.build(model_type)
    family = find_family(model_type, allow_unverified=False)
    right = group_layers(family.layers(model.config))
    naive = group_layers([dataclasses.replace(layer, window=None) for layer in family.layers(model.config)])
    assert error(model, eager, right, 4 * configs.WINDOW) < 1e-4
    assert error(model, eager, naive, 4 * configs.WINDOW) > 0.01
    assert check_masks(model, right, model.config) is None
    check_calls(model, naive, [4, 4])  # nothing in the calls shows it
    with pytest.raises(UnsupportedModelError, match="a mask is all that states this"):
        check_masks(model, naive, model.config)


def test_a_learned_mask_is_refused_by_the_attention_itself() -> None:
    register_attention()
    model = build("doge", ATTENTION_NAME)
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        check_calls(model, plain_layout(model), [4, 4])


@pytest.mark.parametrize("model_type", ["nemotron", "stablelm"])
def test_layers_that_drop_keyword_arguments_are_noticed(model_type: str) -> None:
    register_attention()
    model = build(model_type, ATTENTION_NAME)
    with pytest.raises(UnsupportedModelError, match="does not pass keyword arguments on"):
        check_calls(model, plain_layout(model), [4, 4])


def test_position_biases_of_falcon_are_refused() -> None:
    config = configs.tiny_config("falcon", alibi=True)
    reason = find_family("falcon", allow_unverified=False).unsupported(config)
    assert reason is not None and "alibi" in reason


@pytest.mark.parametrize(
    "changes",
    [
        {"multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"parallel_attn": False},
        {"bias": True},
    ],
)
def test_every_falcon_variant_keeps_only_its_own_heads(changes: dict[str, Any]) -> None:
    register_attention()
    family = find_family("falcon", allow_unverified=False)
    model = configs.build("falcon", family.build_attention, **changes)
    family.prepare(model, 512)
    layout = group_layers(family.layers(model.config))
    heads = 4 if changes.get("multi_query") is False else changes.get("num_kv_heads", 1)
    assert layout.groups[0].num_heads == heads
    assert check_calls(model, layout, family.query_heads(model.config)) == VOCAB_SIZE
    eager = configs.build("falcon", **changes)
    assert error(model, eager, layout, 50) < 1e-4
    ids = random_ids(50, VOCAB_SIZE, 0)
    model.set_attn_implementation("eager")  # the same instance can be switched, and back
    assert torch.equal(eager_logits(model, ids), eager_logits(eager, ids))
    model.set_attn_implementation(ATTENTION_NAME)
    assert error(model, eager, layout, 50) < 1e-4
