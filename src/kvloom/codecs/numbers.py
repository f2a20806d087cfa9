"""Sums and roundings whose result does not depend on what else is in the batch, or on the machine.

Only element-wise float32 operations that IEEE 754 rounds correctly (+ − × ÷ √), and reductions in a
fixed order, may enter an encoder: then the bytes are the same for a block alone and in any batch,
on every CPU and GPU.
"""

from __future__ import annotations

import torch

HALF_MAX = 65504.0  # the largest finite float16
HALF_MIN = 2.0**-24  # the smallest positive float16


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, pairwise in a fixed order: [..., n] -> [...]."""
    while x.shape[-1] > 1:
        n = x.shape[-1]
        half = n // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., 2 * half :]], dim=-1) if n % 2 else folded
    return x[..., 0]


def square_root(x: torch.Tensor) -> torch.Tensor:
    """√x of float32, to nearest. torch's own may be off by one place, depending on the library it calls."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def finite(rows: torch.Tensor) -> torch.Tensor:
    """float32 rows within float16's range: NaN and ±Inf become 0, larger values are clamped to ±65504."""
    x = rows.to(torch.float32)
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x)).clamp(-HALF_MAX, HALF_MAX)


def half_nearest(x: torch.Tensor) -> torch.Tensor:
    """float16, to nearest even, saturating."""
    return x.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)


def half_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 not below ``x``, saturating at 65504."""
    half = half_nearest(x)
    above = torch.nextafter(half, torch.full_like(half, HALF_MAX))
    return torch.where(half.to(torch.float32) < x, above, half)


def half_down(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 not above ``x``, saturating at -65504."""
    half = half_nearest(x)
    below = torch.nextafter(half, torch.full_like(half, -HALF_MAX))
    return torch.where(half.to(torch.float32) > x, below, half)


def positive_scale(x: torch.Tensor) -> torch.Tensor:
    """A float16 scale not below ``x`` ≥ 0 and never 0, so that dividing by it never overflows a code."""
    return half_up(x).clamp_min(HALF_MIN)
