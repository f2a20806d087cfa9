"""Falcon: one KV head (7B) or a few (40B), and code that knows no attention interface.

transformers' Falcon computes attention itself, after repeating keys and values for every query head,
and hands its layers no keyword arguments. So ``prepare`` gives this model instance another attention
forward, which splits the fused projection as Falcon's does, keeps the KV heads as they are, and calls
our attention; the batch reaches it through ``_Carrier``, which belongs to the instance.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.attention.batch import KVBatch
from kvloom.attention.interface import ATTENTION_NAME, paged_attention
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import LayerSpec
from kvloom.models.families.base import DecoderFamily


@dataclass(slots=True)
class _Carrier:
    """The batch of the forward pass in progress, if there is one."""

    kv: KVBatch | None = None


class Falcon(DecoderFamily):
    """Rotary Falcon; ALiBi variants (falcon-rw) are refused."""

    build_attention = "eager"  # Falcon's constructor knows only its own implementations

    def layers(self, config: Any) -> list[LayerSpec]:
        return [LayerSpec.kv(num_heads=_kv_heads(config), k_dim=int(config.head_dim))] * int(config.num_hidden_layers)

    def unsupported(self, config: Any) -> str | None:
        if config.alibi:
            return "it adds position biases to its logits (alibi), which the kernels do not"
        return super().unsupported(config)

    def prepare(self, model: Any, max_model_len: int) -> None:
        super().prepare(model, max_model_len)
        carrier = _Carrier()
        for block in model.transformer.h:
            attention = block.self_attention
            attention.forward = functools.partial(_attend, attention, carrier)
        model.forward = functools.partial(_forward, model, carrier)
        # transformers refuses to switch a model whose code it does not find the interface in.
        model.set_attn_implementation = functools.partial(setattr, model.config, "_attn_implementation")
        model.set_attn_implementation(ATTENTION_NAME)


def _kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _forward(model: Any, carrier: _Carrier, *arguments: Any, kv: KVBatch | None = None, **named: Any) -> Any:
    """The model's own forward, with ``kv`` in reach of its attention."""
    carrier.kv = kv
    try:
        return type(model).forward(model, *arguments, **named)
    finally:
        carrier.kv = None


def _attend(
    attention: Any,
    carrier: _Carrier,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Falcon's attention on [1, T, hidden], through ours or, switched to eager, through its own.

    Raises:
        UnsupportedModelError: position biases, or no rotary positions.
    """
    config = attention.config
    if config._attn_implementation != ATTENTION_NAME:
        own: tuple[torch.Tensor, None] = type(attention).forward(
            attention,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **named,
        )
        return own
    if named.get("alibi") is not None or position_embeddings is None:
        raise UnsupportedModelError("Falcon asks for position biases (alibi), which the kernels do not add")
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    rows, heads = hidden_states.shape[1], attention.num_heads
    kv_heads = _kv_heads(config)
    # [1, T, kv_heads, queries of one KV head and its key and value, D], in all three variants
    fused = attention.query_key_value(hidden_states).view(1, rows, kv_heads, heads // kv_heads + 2, -1)
    query = fused[..., :-2, :].reshape(1, rows, heads, -1).transpose(1, 2)
    key, value = fused[..., -2, :].transpose(1, 2), fused[..., -1, :].transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out, _ = paged_attention(attention, query, key, value, attention_mask, kv=carrier.kv)
    return attention.dense(out.reshape(1, rows, -1)), None
