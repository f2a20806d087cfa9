"""Integer weights and the draw: one token per row, independent of the rest of the batch.

Probabilities become integers: ``weight = trunc(exp((x - max) / T) * 2**shift)`` in int64, with
``shift`` chosen so that a whole row sums to at most 2**62. Integer sums do not depend on the order
of addition, so sums, cuts and draws are the same whatever the batch size, the row's place in it,
the thread count or the device's reduction tree. What is lost are tokens below 2**-shift of the best
one (2**-44 for 262,144 tokens); the others carry fp32's own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 512  # columns summed into one entry of the coarse cumulative sum
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment, as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood 2014), a bijection of 64-bit integers; wraps as int64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, step: Tensor) -> Tensor:
    """One number of [0, 1) per row, a pure function of (seed, step).

    The seed is mixed first, so that neighbouring seeds (or seeds one increment apart) give unrelated
    streams; then splitmix64 runs as a counter over ``step``. The top 53 bits become a double.

    Args:
        seed, step: [N] int64.

    Returns:
        [N] float64.
    """
    bits = _mix64(_mix64(seed + _GAMMA) + (step + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of a request's ``index``-th sequence (``n > 1``); index 0 keeps the seed itself."""
    if index == 0:
        return seed
    return int(_mix64(_mix64(torch.tensor(seed)) + torch.tensor(index) * _GAMMA))


def weight_shift(vocab_size: int) -> int:
    """Bits after the binary point of a weight, so that ``vocab_size`` of them stay below 2**62."""
    return 62 - max(1, (vocab_size - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How the logits of R rows become weights.

    maximum, inverse_temperature: [R, 1] float32. min_p: [R, 1] float32 or None when no row uses it;
    a token below this share of the best one's probability weighs nothing.
    """

    maximum: Tensor
    inverse_temperature: Tensor
    min_p: Tensor | None
    shift: int

    @classmethod
    def plain(cls, x: Tensor) -> Scale:
        """Temperature 1 and no min_p for logits x [R, V] float32."""
        maximum = x.amax(-1, keepdim=True)
        shift = weight_shift(x.shape[-1])
        return cls(maximum=maximum, inverse_temperature=torch.ones_like(maximum), min_p=None, shift=shift)

    def __getitem__(self, rows: Tensor) -> Scale:
        return Scale(
            maximum=self.maximum[rows],
            inverse_temperature=self.inverse_temperature[rows],
            min_p=None if self.min_p is None else self.min_p[rows],
            shift=self.shift,
        )

    def weights(self, x: Tensor) -> Tensor:
        """[R, C] float32, any columns in any order -> [R, C] int64."""
        w = (x - self.maximum).mul_(self.inverse_temperature).exp_()
        if self.min_p is not None:
            w.masked_fill_(w < self.min_p, 0.0)
        return w.mul_(float(2**self.shift)).to(torch.int64)


def inverse_cdf(w: Tensor, u: Tensor) -> Tensor:
    """The first column whose cumulative weight, in order of token ids, exceeds ``floor(u * total)``.

    Args:
        w: [R, V] int64; each row sums to at least 1.
        u: [R] float64 in [0, 1).

    Returns:
        [R] int64 columns.
    """
    rows, columns = w.shape
    full = columns // BLOCK * BLOCK
    sums = w[:, :full].reshape(rows, -1, BLOCK).sum(-1)
    coarse = torch.cat([sums, w[:, full:].sum(-1, keepdim=True)], dim=-1).cumsum(-1)
    total = coarse[:, -1]
    # total can round up as a double, so the product can reach it.
    goal = torch.minimum((u * total.to(torch.float64)).to(torch.int64), total - 1)[:, None]
    # Rows of garbage (NaN logits) may point anywhere; the caller discards them.
    block = torch.searchsorted(coarse, goal, right=True).clamp_(max=coarse.shape[-1] - 1)
    before = torch.where(block > 0, coarse.gather(-1, (block - 1).clamp_(min=0)), 0)
    place = block * BLOCK + torch.arange(BLOCK, device=w.device)
    inside = w.gather(-1, place.clamp(max=columns - 1)).masked_fill_(place >= columns, 0).cumsum(-1)
    column = torch.searchsorted(inside, goal - before, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + column)[:, 0]
