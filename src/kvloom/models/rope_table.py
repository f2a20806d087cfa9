"""A model's rotary positions as a table, for codecs that keep keys without them; held against the model's code."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvloom.codecs.rope import RopeTable, Style
from kvloom.core.errors import CodecError
from kvloom.models.native.model import NativeModel

TOLERANCE = 1e-4


def rope_table(model: Any, positions: int, head_dim: int) -> RopeTable | None:
    """The table of positions 0 … ``positions`` - 1, or None where the model's rotation is not one table.

    transformers' own ``apply_rotary_pos_emb`` of the model decides which channels form pairs: both
    styles are tried against it.
    """
    if isinstance(model, NativeModel):
        return model.rope_table(positions)
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    apply = getattr(sys.modules.get(type(model).__module__), "apply_rotary_pos_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    if rotary is None or apply is None or not isinstance(frequencies, torch.Tensor):
        return None
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 8, head_dim, generator=generator)
    at = torch.arange(3, 11).unsqueeze(0)
    factor = float(getattr(rotary, "attention_scaling", 1.0))
    try:
        cos, sin = rotary(keys, at.to(frequencies.device))
        _, expected = apply(keys, keys, cos.cpu().float(), sin.cpu().float())
    except (TypeError, RuntimeError, ValueError):
        return None  # called otherwise: by layer type, or with more arguments
    styles: tuple[Style, ...] = ("half", "interleaved")
    for style in styles:
        table = RopeTable.from_frequencies(frequencies.cpu(), max(positions, 16), factor=factor, style=style)
        try:
            found = table.rotate(keys, at)
        except CodecError:
            return None
        if found.shape == expected.shape and float((found - expected).abs().max()) < TOLERANCE:
            return table
    return None
