"""Uniform codes between a minimum and a maximum: x ≈ code * scale + minimum.

Scale and minimum are float16. The minimum is rounded down and the scale up, so that every value of
the group lies within the codes' range. All planes follow from ``dim``, the axis a group runs along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.codecs.numbers import half_down, positive_scale


@dataclass(frozen=True, slots=True)
class AffineCodes:
    """``codes`` uint8 as the values; ``scale`` and ``minimum`` float16 with the group's axis of length 1."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


def affine_encode(x: torch.Tensor, bits: int, dim: int) -> AffineCodes:
    """Quantise float32 ``x``, one group along axis ``dim`` for each index of the others."""
    top = float((1 << bits) - 1)
    minimum = half_down(x.amin(dim=dim, keepdim=True) + 0.0)  # of -0 and 0 either may be the least: never -0
    scale = positive_scale((x.amax(dim=dim, keepdim=True) - minimum.to(torch.float32)) / top)
    steps = (x - minimum.to(torch.float32)) / scale.to(torch.float32)
    return AffineCodes(torch.round(steps).clamp(0.0, top).to(torch.uint8), scale, minimum)


def affine_decode(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """float32 values; ``scale`` and ``minimum`` broadcast against ``codes``."""
    return codes.to(torch.float32) * scale.to(torch.float32) + minimum.to(torch.float32)
