"""What a codec should compute, without any of the engine: eager attention over keys read as each query should.

Registered with transformers as an attention of its own. Queries of block b see, of keys and values,
blocks before the sinks' end and from b - r on as they are, and the others as ``decode(encode(·))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from kvloom.codecs import make_codec
from kvloom.core.codec_sizes import parse_codec

NAME = "simulated"


@dataclass
class Rule:
    codec: str
    block_size: int
    sinks: int  # blocks
    recents: int  # blocks
    protect: tuple[int, ...] = ()

    def quantised(self, x: torch.Tensor, plane: str, layer: int) -> torch.Tensor:
        """[1, heads, T, dim] with every full block encoded and decoded."""
        choice = parse_codec(self.codec)
        name = choice.value if plane == "v" else choice.key
        if name == "raw":
            return x
        codec = make_codec(name, plane, x.shape[-1], self.block_size)
        found = x.clone()
        for block in range(x.shape[2] // self.block_size):
            rows = slice(block * self.block_size, (block + 1) * self.block_size)
            first = torch.tensor([rows.start])
            data = codec.encode(x[:, :, rows], layer=layer, first_position=first)
            found[:, :, rows] = codec.decode(data, layer=layer, first_position=first).to(x.dtype)
        return found


def simulate(rule: Rule) -> None:
    """Make ``attn_implementation="simulated"`` follow ``rule``."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        layer, size = module.layer_idx, rule.block_size
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        raw = [key, value]
        coded = raw
        if sliding_window is None and layer not in rule.protect:
            coded = [rule.quantised(key, "k", layer), rule.quantised(value, "v", layer)]
        groups = query.shape[1] // key.shape[1]
        at = torch.arange(key.shape[2])
        block_of = at // size
        outputs = []
        for block in range(-(-key.shape[2] // size)):
            rows = slice(block * size, min((block + 1) * size, key.shape[2]))
            encoded = (block_of >= rule.sinks) & (block_of < block - rule.recents)
            k, v = (
                torch.where(encoded[None, None, :, None], b, a).repeat_interleave(groups, dim=1)
                for a, b in zip(raw, coded, strict=True)
            )
            lag = at[rows, None] - at[None, :]
            hidden = lag < 0 if sliding_window is None else (lag < 0) | (lag >= sliding_window)
            logits = (query[:, :, rows] @ k.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
            outputs.append(torch.softmax(logits, -1) @ v)
        return torch.cat(outputs, dim=2).transpose(1, 2), None

    AttentionInterface.register(NAME, attention)
