"""Properties of the four accountings, windows, states, sharing and codecs."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.core.errors import ConfigError
from kvloom.planner.accounting import ACCOUNTINGS, segment_at, segments
from kvloom.planner.readers import read_architecture

from .helpers import accounting, architecture, format_of, ideal_bytes

SHAPES = ("llama-3.1-8b", "gemma-3-4b", "gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b", "gemma-3n-e4b")
SHAPES += ("mistral-7b-v0.1", "llama-4-scout", "jamba-v0.1", "falcon-7b", "deepseek-v3.2")


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(SHAPES),
    how=st.sampled_from(sorted(ACCOUNTINGS)),
    tokens=st.integers(1, 300_000),
    more=st.integers(1, 5_000),
)
def test_monotone_in_context_and_batch(name: str, how: str, tokens: int, more: int) -> None:
    counted = accounting(how, name)
    assert counted.sequence(tokens).total <= counted.sequence(tokens + more).total
    assert counted.total(tokens, 2) <= counted.total(tokens + more, 2)
    assert counted.total(tokens, 2) <= counted.total(tokens, 3)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(SHAPES), tokens=st.integers(1, 300_000), how=st.sampled_from(["kvloom", "llama.cpp"]))
def test_engines_hold_at_least_the_ideal(name: str, tokens: int, how: str) -> None:
    assert accounting(how, name).sequence(tokens).total >= ideal_bytes(name, tokens)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SHAPES), tokens=st.integers(1, 300_000), codec=st.sampled_from(["raw", "int8", "loom4"]))
def test_ideal_is_exactly_fixed_plus_slope(name: str, tokens: int, codec: str) -> None:
    counted = accounting("ideal", name, codec)
    part = segment_at(segments(counted), tokens)
    assert ceil(part.fixed + part.slope * tokens) == counted.sequence(tokens).total


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SHAPES), blocks=st.integers(1, 4_000), codec=st.sampled_from(["raw", "int8", "kivi2"]))
def test_kvloom_is_fixed_plus_slope_at_block_ends(name: str, blocks: int, codec: str) -> None:
    counted = accounting("kvloom", name, codec)
    part = segment_at(segments(counted), 32 * blocks)
    assert part.fixed + part.slope * 32 * blocks == counted.sequence(32 * blocks).total


def test_groups_add_up() -> None:
    for name in SHAPES:
        counted = accounting("ideal", name).sequence(5_000)
        parts = sum(ceil(group.sequence_bytes) for group in counted.groups)
        assert parts + counted.state_bytes == counted.total


def test_windows_stop_growing() -> None:
    mistral = accounting("ideal", "mistral-7b-v0.1")
    assert mistral.sequence(4096).total == mistral.sequence(100_000).total == 4096 * 131_072
    part = segments(mistral)[-1]
    assert (part.slope, part.fixed) == (0, 4096 * 131_072)


def test_engine_windows_hold_more() -> None:
    """kvloom: window rounded to blocks, one more when unaligned; vLLM: window - 1 + chunk, and a block."""
    tokens = {name: accounting(name, "gemma-3-27b").sequence(65_536).groups[1].stored_tokens for name in ACCOUNTINGS}
    assert tokens == {
        "ideal": 1024,
        "kvloom": 1056,
        "vllm": 16 * (ceil((1023 + 2048) / 16) + 1),
        "llama.cpp": 3072,
    }


def test_vllm_pads_layer_groups() -> None:
    """52 windowed and 10 full layers share a pool in groups of 10: the sixth windowed group has 2 of 10."""
    counted = accounting("vllm", "gemma-3-27b")
    one_layer = 16 * 16 * 256 * 2
    assert counted.sequence(16).groups[1].sequence_bytes == 6 * 10 * one_layer


def test_chunked_windows() -> None:
    scout = architecture("llama-4-scout")
    assert len(scout.chunked) == 36
    counted = accounting("ideal", "llama-4-scout").sequence(20_000)
    assert {group.name: group.stored_tokens for group in counted.groups} == {"full": 20_000, "window8192": 8_192}


def test_cross_layer_sharing() -> None:
    """Gemma 3n E4B: 35 layers, the last 15 store nothing: 16 windowed and 4 full layers remain."""
    counted = accounting("ideal", "gemma-3n-e4b").sequence(10_000)
    assert {group.name: len(group.layers) for group in counted.groups} == {"full": 4, "window512": 16}
    assert counted.total == (4 * 10_000 + 16 * 512) * 2 * 2 * 256 * 2


def test_per_layer_head_dims() -> None:
    """Gemma 4: full layers have their own width and KV heads."""
    model = read_architecture(
        {
            "model_type": "gemma4_text",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "vocab_size": 32,
        },
        origin="test",
    )
    full, window = accounting("ideal", model).sequence(100).groups
    assert full.sequence_bytes == 100 * 1 * 2 * 2 * 32 * 2
    assert window.sequence_bytes == 8 * 5 * 4 * 2 * 16 * 2


def test_state_is_per_request() -> None:
    """Qwen3-Next: 36 recurrent layers hold 77,856,768 bytes whatever the context; 12 layers grow."""
    model = architecture("qwen3-next-80b-a3b")
    convolution, matrix = (2 * 2048 + 4096) * 4 * 2, 32 * 128 * 128 * 4
    assert model.state_bytes(2) == 36 * (convolution + matrix)
    one, two = ideal_bytes("qwen3-next-80b-a3b", 1000), ideal_bytes("qwen3-next-80b-a3b", 2000)
    assert two - one == 1000 * 12 * 2 * 2 * 256 * 2


def test_indexer_is_counted() -> None:
    """V3.2: one key of 128 values beside latent and rope, in each of 61 layers."""
    assert ideal_bytes("deepseek-v3.2", 1) == 61 * (512 + 64 + 128) * 2


def test_indexer_in_vllm() -> None:
    """vLLM keeps indexer keys as fp8 with a scale: 132 bytes beside 1,152."""
    assert accounting("vllm", "deepseek-v3.2").sequence(16).total == 16 * 61 * (576 * 2 + 132)


def test_protected_tokens_are_raw() -> None:
    raw, encoded = 131_072, 32 * 8 * 2 * (64 + 2)
    assert ideal_bytes("llama-3-8b", 1000, "loom4") == 80 * raw + 920 * encoded
    assert ideal_bytes("llama-3-8b", 80, "loom4") == 80 * raw
    assert ideal_bytes("llama-3-8b", 1000, "loom4", sink_tokens=0, recent_tokens=0) == 1000 * encoded


def test_protected_layers_split_a_group() -> None:
    counted = accounting("ideal", "qwen2.5-7b", "int8", protect_layers=frozenset({0, 27})).sequence(1000)
    assert [(group.name, len(group.layers)) for group in counted.groups] == [("full", 26), ("full.protected", 2)]
    assert counted.groups[1].codecs == {"k": "bfloat16", "v": "bfloat16"}


def test_windows_and_rope_stay_raw() -> None:
    gemma = accounting("ideal", "gemma-3-4b", "int8").sequence(5000)
    assert gemma.groups[0].codecs["k"] == "int8"
    assert gemma.groups[1].codecs["k"] == "bfloat16"
    asked = accounting("ideal", "gemma-3-4b", "int8", encode_windows=True).sequence(5000)
    assert asked.groups[1].codecs["k"] == "int8"
    latent = accounting("ideal", "deepseek-v3", "int8").sequence(5000).groups[0]
    assert latent.codecs == {"latent": "int8", "rope": "bfloat16"}


def test_kvloom_keeps_sinks_recents_and_the_open_block_raw() -> None:
    """loom4, blocks of 32: one sink block, two recent, one open; while 512 tokens are computed, theirs too."""
    counted = accounting("kvloom", "llama-3-8b", "loom4")
    planned = counted.groups[0]
    assert counted.spans(planned, 3200, 0) == (4, 96)  # type: ignore[attr-defined]
    assert counted.spans(planned, 64, 0) == (2, 0)  # type: ignore[attr-defined]
    assert counted.spans(planned, 3200, 512) == (20, 96)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("how", "codec"), [("vllm", "kivi2"), ("llama.cpp", "loom4"), ("llama.cpp", "k=q8_0,v=int4")])
def test_a_codec_that_an_engine_lacks_is_refused(how: str, codec: str) -> None:
    with pytest.raises(ConfigError, match=f"--accounting {how}"):
        accounting(how, "llama-3-8b", codec)


def test_mixed_codecs_in_llama_cpp() -> None:
    counted = accounting("llama.cpp", "llama-3-8b", "k=q8_0,v=q4_0").sequence(256)
    assert counted.total == 256 * 32 * (1024 * 34 // 32 + 1024 * 18 // 32)


def test_dtype_float32_doubles() -> None:
    assert ideal_bytes("llama-3-8b", 10, dtype="float32") == 2 * ideal_bytes("llama-3-8b", 10)
    assert format_of("float32").element_bytes == 4
