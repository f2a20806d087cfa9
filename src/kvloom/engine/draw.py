"""Drawing one token per row from logits, exactly and independently of the rest of the batch.

Probabilities become integers: ``weight = trunc(exp((x - max) / T) * 2**shift)`` in int64, with
``shift`` chosen so that a whole row sums to at most 2**62. Integer sums do not depend on the order
of addition, so sums, cuts and draws are the same whatever the batch size, the row's place in it,
the thread count or the device's reduction tree. What is lost are tokens below 2**-shift of the best
one (2**-44 for 262,144 tokens), under fp32's own rounding of the others.

Truncation works on thresholds: the few largest values of a row settle where top-k and top-p cut;
only rows that these do not settle (a flat distribution) are sorted whole. Among equal values the
lower token id wins, so top-k keeps exactly k tokens and ``top_k=1`` is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 512  # columns summed into one entry of the coarse cumulative sum
WINDOW = 256  # largest values looked at before a row is sorted whole
MAX_WINDOW = 4096
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


def weights(x: Tensor, maximum: Tensor, inverse_temperature: Tensor, min_p: Tensor | None, shift: int) -> Tensor:
    """Integer weights of logits.

    Args:
        x: [R, C] float32, any subset of a row's columns in any order.
        maximum, inverse_temperature: [R, 1] float32.
        min_p: [R, 1] float32, or None when no row uses it. Weights below this share of the best are 0.

    Returns:
        [R, C] int64.
    """
    w = (x - maximum).mul_(inverse_temperature).exp_()
    if min_p is not None:
        w.masked_fill_(w < min_p, 0.0)
    return w.mul_(float(2**shift)).to(torch.int64)


def top_values(x: Tensor, count: int) -> Tensor:
    """The ``count`` largest values per row, largest first: [R, V] -> [R, count].

    numpy's vectorised selection is several times faster than torch's on a CPU.
    """
    vocab_size = x.shape[-1]
    if x.device.type != "cpu":
        if count == vocab_size:
            return torch.sort(x, dim=-1, descending=True).values
        return torch.topk(x, count, dim=-1).values
    values = x.numpy()
    if count < vocab_size:
        values = np.partition(values, vocab_size - count, axis=-1)[:, vocab_size - count :]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def truncate(
    x: Tensor,
    w: Tensor,
    maximum: Tensor,
    inverse_temperature: Tensor,
    min_p: Tensor | None,
    top_k: Sequence[int],
    top_p: Sequence[float],
    shift: int,
) -> None:
    """Set the weights outside top-k, then top-p of what top-k left, to zero, in place.

    Args:
        x: [R, V] float32 logits, whose order decides.
        w: [R, >= V] int64 weights of x.
        maximum, inverse_temperature, min_p: as for `weights`.
        top_k: R counts, V when off.
        top_p: R shares, 1.0 when off. The shortest prefix that reaches the share is kept.
    """
    vocab_size = x.shape[-1]
    bounded = [k for k in top_k if k <= MAX_WINDOW]
    window = max([WINDOW, *(k + 1 for k in bounded)])
    if x.device.type != "cpu" and len(bounded) < len(top_k):
        window = vocab_size  # a device sorts quickly, and asking which rows are settled would stall it
    rows = list(range(len(top_k)))
    while rows:
        window = min(window, vocab_size)
        unsettled = _truncate_rows(
            x, w, maximum, inverse_temperature, min_p, rows, top_k, top_p, window=window, shift=shift
        )
        rows = unsettled
        window = vocab_size


def _truncate_rows(
    x: Tensor,
    w: Tensor,
    maximum: Tensor,
    inverse_temperature: Tensor,
    min_p: Tensor | None,
    rows: list[int],
    top_k: Sequence[int],
    top_p: Sequence[float],
    *,
    window: int,
    shift: int,
) -> list[int]:
    """Truncate ``rows`` by their ``window`` largest values; return the rows that these do not settle."""
    vocab_size = x.shape[-1]
    device = x.device
    everything = len(rows) == x.shape[0]
    index = torch.tensor(rows, device=device)

    def pick(t: Tensor) -> Tensor:
        return t if everything else t[index]

    xs = pick(x)
    values = top_values(xs, window)
    value_weights = weights(
        values, pick(maximum), pick(inverse_temperature), None if min_p is None else pick(min_p), shift
    )
    cumulative = value_weights.cumsum(-1)
    k = torch.tensor([min(top_k[r], vocab_size) for r in rows], device=device)
    p = torch.tensor([top_p[r] for r in rows], dtype=torch.float64, device=device)
    within = k.clamp(max=window)
    mass = cumulative.gather(-1, (within - 1)[:, None])[:, 0]
    if any(top_k[r] > window for r in rows):
        mass = torch.where(k > window, pick(w).sum(-1), mass)
    goal = torch.minimum((p * mass.to(torch.float64)).ceil().to(torch.int64), mass).clamp(min=1)
    goal = torch.where(p < 1.0, goal, mass)
    # The cut is after `keep` values; cumulative sums below the goal are too short.
    keep = torch.minimum((cumulative < goal[:, None]).sum(-1) + 1, within)
    threshold = values.gather(-1, (keep - 1)[:, None])
    ties = keep - (values > threshold).sum(-1)  # how many of those equal to the threshold stay
    unsettled: list[int] = []
    if window < vocab_size:
        settled = (k <= window) | (cumulative[:, -1] >= goal)
        if device.type == "cpu" or any(top_k[r] > window for r in rows):
            done = settled.tolist()
            unsettled = [r for r, ok in zip(rows, done, strict=True) if not ok]
        if unsettled:
            chosen = torch.tensor([i for i, ok in enumerate(done) if ok], device=device, dtype=torch.int64)
            index, xs = index[chosen], xs[chosen]
            values, threshold, keep, ties = values[chosen], threshold[chosen], keep[chosen], ties[chosen]
            everything = False
    if len(unsettled) == len(rows):
        return unsettled
    drop = xs < threshold
    following = values.gather(-1, keep.clamp(max=window - 1)[:, None])[:, 0]
    tied = (keep >= window) | (following == threshold[:, 0])
    if device.type != "cpu" or bool(tied.any()):
        equal = xs == threshold
        drop |= equal & (equal.cumsum(-1) > ties[:, None])
    if everything:
        w[:, :vocab_size].masked_fill_(drop, 0)
    else:
        w[index, :vocab_size] = w[index, :vocab_size].masked_fill_(drop, 0)
    return unsettled


def inverse_cdf(w: Tensor, u: Tensor) -> Tensor:
    """The first column whose cumulative weight, in order of token ids, exceeds ``floor(u * total)``.

    Args:
        w: [R, C] int64, C a multiple of BLOCK; each row sums to at least 1.
        u: [R] float64 in [0, 1).

    Returns:
        [R] int64 columns.
    """
    rows, columns = w.shape
    blocks = w.view(rows, columns // BLOCK, BLOCK)
    coarse = blocks.sum(-1).cumsum(-1)
    total = coarse[:, -1]
    # total can round up as a double, so the product can reach it.
    goal = torch.minimum((u * total.to(torch.float64)).to(torch.int64), total - 1)[:, None]
    # Rows of garbage (NaN logits) may point anywhere; the caller discards them.
    block = torch.searchsorted(coarse, goal, right=True).clamp_(max=columns // BLOCK - 1)
    before = torch.where(block > 0, coarse.gather(-1, (block - 1).clamp(min=0)), 0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].cumsum(-1)
    column = torch.searchsorted(inside, goal - before, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + column)[:, 0]
