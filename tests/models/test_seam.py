"""The self-check at load notices models whose layers do otherwise than their layout says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import KVLayout, LayerSpec, group_layers
from kvloom.models.families import FAMILIES, find_family
from kvloom.models.seam import check_calls, check_masks, decoder_layers
from tests.models import tiny
from tests.models.harness import paged

CONFIGS: dict[str, Callable[[], Any]] = {"llama": tiny.llama_config, "gemma3_text": tiny.gemma3_config}


def layout_of(config: Any) -> KVLayout:
    return group_layers(find_family(config.model_type, allow_unverified=False).layers(config))


def llama_layers(**changes: Any) -> list[LayerSpec]:
    return [LayerSpec.kv(**({"num_heads": 2, "k_dim": 32} | changes)) for _ in range(3)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_right_model_passes_both_checks(name: str) -> None:
    config = CONFIGS[name]()
    model, layout = paged(tiny.build(config)), layout_of(config)
    assert check_calls(model, layout, [4] * layout.num_layers) == tiny.VOCAB_SIZE
    assert check_masks(model, layout, config) is None
    # The checks leave no trace.
    assert model.config._attn_implementation == "kvloom"
    assert all("forward" not in vars(layer) for layer in decoder_layers(model, layout.num_layers) or ())
    assert check_calls(model, layout, [4] * layout.num_layers) == tiny.VOCAB_SIZE


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (llama_layers(num_heads=1), "planes of shape"),
        (llama_layers(k_dim=16), "planes of shape"),
        (llama_layers()[:2], "layer_idx 2"),
        (llama_layers() + llama_layers(), "3 of the model's 6 layers"),
    ],
)
def test_a_wrong_layout_is_noticed(layers: list[LayerSpec], words: str) -> None:
    model = paged(tiny.build(tiny.llama_config()))
    with pytest.raises(UnsupportedModelError, match=words):
        check_calls(model, group_layers(layers), [4] * len(layers))


def test_other_query_heads_are_noticed() -> None:
    model = paged(tiny.build(tiny.llama_config()))
    with pytest.raises(UnsupportedModelError, match="layer 1 attends as"):
        check_calls(model, group_layers(llama_layers()), [4, 2, 4])


def test_a_window_that_the_model_passes_otherwise_is_noticed() -> None:
    config = tiny.gemma3_config()
    wide = layout_of(tiny.gemma3_config(sliding_window=13))
    with pytest.raises(UnsupportedModelError, match=r"sliding_window=12.*window 13"):
        check_calls(paged(tiny.build(config)), wide, [4] * 4)


def test_a_layer_that_computes_attention_elsewhere_is_noticed() -> None:
    model = paged(tiny.build(tiny.llama_config()))
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 attends as|2 of the model's 3 layers"):
        check_calls(model, group_layers(llama_layers()), [4] * 3)


def test_a_window_only_in_the_mask_is_noticed() -> None:
    """Llama's code passes no window; a layout that has one disagrees with the mask, and the other way round."""
    model = paged(tiny.build(tiny.llama_config()))
    windowed = group_layers(llama_layers(window=12))
    assert check_calls(model, windowed, [4] * 3) == tiny.VOCAB_SIZE  # the calls alone do not show it
    with pytest.raises(UnsupportedModelError, match="layer 0 masks its keys otherwise"):
        check_masks(model, windowed, model.config)
    gemma = paged(tiny.build(tiny.gemma3_config()))
    blind = group_layers([LayerSpec.kv(num_heads=1, k_dim=32)] * 4)
    with pytest.raises(UnsupportedModelError, match=r"the last sees 12, the layout shows it 20"):
        check_masks(gemma, blind, gemma.config)


def test_a_real_model_type_with_its_window_only_in_the_mask() -> None:
    """Qwen2-MoE: the naive layout (no window) answers wrongly past the window; the mask check shows it."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=12,
        use_sliding_window=True,
        max_window_layers=0,
        layer_types=["sliding_attention", "sliding_attention"],
    )
    model = paged(Qwen2MoeForCausalLM._from_config(config, attn_implementation="eager"))
    naive = group_layers([LayerSpec.kv(num_heads=2, k_dim=16)] * 2)
    with pytest.raises(UnsupportedModelError):
        check_calls(model, naive, [4] * 2)
        check_masks(model, naive, model.config)


def test_every_family_of_the_table_can_be_made() -> None:
    for model_type in FAMILIES:
        family = find_family(model_type, allow_unverified=False)
        assert family.verified_with, model_type
