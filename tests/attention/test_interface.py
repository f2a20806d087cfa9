"""The attention function alone: what it refuses, padding, softcap, sinks, shared layers, scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvloom.attention.batch import KVBatch
from kvloom.attention.interface import ATTENTION_NAME, paged_attention, register_attention
from kvloom.attention.scratch import scratch_store
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import KVLayout, LayerSpec, group_layers
from kvloom.kernels.ops import QueryBatch, choose_backend

HEADS, QUERY_HEADS, DIM, TOKENS = 2, 4, 8, 11
CPU = torch.device("cpu")


def layer(index: int) -> nn.Module:
    module = nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def make_batch(layout: KVLayout, num_padding: int = 0) -> KVBatch:
    backend = choose_backend("reference", CPU, deterministic=False, num_threads=1)
    store, offsets = scratch_store(
        layout, backend, num_spans=[2] * len(layout.groups), block_size=8, dtype=torch.float32, device=CPU
    )
    tables = tuple(torch.tensor([list(reversed(row))]) for row in offsets)
    return KVBatch(store=store, queries=QueryBatch.build([TOKENS], [0], CPU), tables=tables, num_padding=num_padding)


def one_layer(window: int | None = None) -> KVLayout:
    return group_layers([LayerSpec.kv(num_heads=HEADS, k_dim=DIM, window=window)])


def qkv(rows: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, QUERY_HEADS, rows, DIM), (1, HEADS, rows, DIM), (1, HEADS, rows, DIM))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def expected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float = DIM**-0.5,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, T, query heads, dim], written out."""
    k, v = (x.repeat_interleave(QUERY_HEADS // HEADS, dim=1) for x in (key, value))
    logits = query @ k.transpose(2, 3) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(query.shape[2])
    lag = at[:, None] - at[None, :]
    logits = logits.masked_fill((lag < 0) | (lag >= (window or len(at))), float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(1, -1, len(at), 1)
        return (torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1] @ v).transpose(1, 2)
    return (torch.softmax(logits, -1) @ v).transpose(1, 2)


def test_it_attends_causally_over_what_it_wrote() -> None:
    out, weights = paged_attention(layer(0), *qkv(), None, scaling=DIM**-0.5, kv=make_batch(one_layer()))
    assert weights is None
    torch.testing.assert_close(out, expected(*qkv()))


def test_window_softcap_sinks_and_scaling_reach_the_kernel() -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    options: dict[str, Any] = {"softcap": 2.0, "s_aux": sinks, "scaling": 0.7, "sliding_window": 3}
    out, _ = paged_attention(layer(0), *qkv(), None, kv=make_batch(one_layer(window=3)), **options)
    torch.testing.assert_close(out, expected(*qkv(), scale=0.7, window=3, softcap=2.0, sinks=sinks))


def test_scaling_left_out_means_by_the_head_dim() -> None:
    out, _ = paged_attention(layer(0), *qkv(), None, kv=make_batch(one_layer()))
    torch.testing.assert_close(out, expected(*qkv()))


def test_rows_of_padding_are_not_stored_and_come_out_zero() -> None:
    batch = make_batch(one_layer(), num_padding=5)
    out, _ = paged_attention(layer(0), *qkv(TOKENS + 5), None, kv=batch)
    assert out.shape == (1, TOKENS + 5, QUERY_HEADS, DIM)
    assert torch.equal(out[:, TOKENS:], torch.zeros(1, 5, QUERY_HEADS, DIM))
    q, k, v = (x[:, :, :TOKENS] for x in qkv(TOKENS + 5))
    torch.testing.assert_close(out[:, :TOKENS], expected(q, k, v))
    stored = batch.store.arena.view(torch.float32)
    assert int((~stored.isnan()).sum()) == 2 * TOKENS * HEADS * DIM


def test_a_sharing_layer_reads_and_does_not_write() -> None:
    own = LayerSpec.kv(num_heads=HEADS, k_dim=DIM)
    layout = group_layers([own, LayerSpec.kv(num_heads=HEADS, k_dim=DIM, shares_with=0)])
    batch = make_batch(layout)
    query, key, value = qkv()
    paged_attention(layer(0), query, key, value, None, kv=batch)
    out, _ = paged_attention(layer(1), query + 1, key * 100, value * 100, None, kv=batch)
    torch.testing.assert_close(out, expected(query + 1, key, value))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv": None}, "called without the batch"),
        ({"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"cache": object()}, "cache"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"output_attentions": True}, "output_attentions"),
        ({"something_new": 1}, "something_new"),
        ({"sliding_window": 4}, "sliding_window=4.*window None"),
        ({"module": layer(1)}, "layer_idx 1.*layers 0 to 0"),
        ({"module": nn.Module()}, "layer_idx None"),
        ({"query": torch.zeros(1, QUERY_HEADS, TOKENS + 1, DIM)}, "shape \\(1, 4, 12, 8\\); expected \\[1, heads, 11"),
        ({"query": torch.zeros(2, QUERY_HEADS, TOKENS, DIM)}, "expected \\[1, heads"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    query, key, value = qkv()
    arguments = {
        "module": layer(0),
        "query": query,
        "key": key,
        "value": value,
        "attention_mask": None,
        "kv": make_batch(one_layer()),
    }
    with pytest.raises(UnsupportedModelError, match=words):
        paged_attention(**(arguments | changes))


def test_a_model_that_passes_no_window_where_the_layout_has_one_follows_the_layout() -> None:
    out, _ = paged_attention(layer(0), *qkv(), None, kv=make_batch(one_layer(window=3)))
    torch.testing.assert_close(out, expected(*qkv(), window=3))
    with pytest.raises(UnsupportedModelError, match=r"sliding_window=None.*window 3"):
        paged_attention(layer(0), *qkv(), None, sliding_window=None, kv=make_batch(one_layer(window=3)))


def test_harmless_and_switched_off_arguments_pass() -> None:
    harmless = {"position_ids": torch.arange(3), "use_cache": False, "position_bias": None, "output_attentions": False}
    out, _ = paged_attention(layer(0), *qkv(), None, kv=make_batch(one_layer()), **harmless)
    torch.testing.assert_close(out, expected(*qkv()))


def test_registering_makes_the_name_known_and_no_mask() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    register_attention()
    assert AttentionInterface().get_interface(ATTENTION_NAME, None) is paged_attention
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
