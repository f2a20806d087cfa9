"""top_k and top_p: where to cut a row, and the draw from what is left.

A cut is a threshold on the logits, found from the largest values of a row; only rows that these do
not settle (a flat distribution) are sorted whole. Among equal values the lower token id wins, so
top-k keeps exactly k tokens and ``top_k=1`` is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvloom.engine.draw import Scale, inverse_cdf

WINDOW = 2048  # largest values looked at before a row is sorted whole; selecting fewer is no faster
MAX_WINDOW = 8192  # a top_k beyond this sorts the row


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What R rows keep: all above the threshold, and of those equal to it the ``ties`` lowest ids.

    threshold: [R, 1] float32. keep, ties: [R] int64, tokens kept in all and at the threshold.
    settled: [R] bool; False where the window was too short and the other fields mean nothing.
    """

    threshold: Tensor
    keep: Tensor
    ties: Tensor
    settled: Tensor


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


def find_cut(x: Tensor, scale: Scale, top_k: Tensor, top_p: Tensor, mass: Tensor | None, window: int) -> Cut:
    """Where top_k, then top_p of what top_k left, cut each row.

    Args:
        x: [R, V] float32 logits; their order decides.
        top_k: [R] int64, V when off.
        top_p: [R] float64, 1.0 when off. The shortest prefix that reaches the share is kept.
        mass: [R] int64, each row's whole weight; needed where top_k is off and top_p is not.
        window: largest values to look at.
    """
    vocab_size = x.shape[-1]
    values = top_values(x, window)
    cumulative = scale.weights(values).cumsum(-1)
    within = top_k.clamp(max=window)
    total = cumulative.gather(-1, (within - 1)[:, None])[:, 0]
    if mass is not None:
        total = torch.where(top_k == vocab_size, mass, total)
    # The share is rounded up; as a double it could pass the total.
    goal = torch.minimum((top_p * total.to(torch.float64)).ceil().to(torch.int64), total)
    goal = torch.where(top_p < 1.0, goal, total).clamp(min=1)
    keep = torch.minimum(torch.searchsorted(cumulative, goal[:, None])[:, 0] + 1, within)
    threshold = values.gather(-1, (keep - 1)[:, None])
    above = torch.searchsorted(-values, -threshold)[:, 0]
    reached = (top_k == vocab_size) & (cumulative[:, -1] >= goal)
    return Cut(threshold=threshold, keep=keep, ties=keep - above, settled=(top_k <= window) | reached)


def draw_truncated(x: Tensor, scale: Scale, top_k: Sequence[int], top_p: Sequence[float], u: Tensor) -> Tensor:
    """One token per row from what top_k and top_p keep.

    Args:
        x: [R, V] float32. top_k, top_p: R values as in `find_cut`. u: [R] float64 in [0, 1).

    Returns:
        [R] int64.
    """
    if x.device.type == "cpu":
        return _draw_listed(x, scale, top_k, top_p, u)
    return draw_masked(x, scale, top_k, top_p, u)


def draw_masked(x: Tensor, scale: Scale, top_k: Sequence[int], top_p: Sequence[float], u: Tensor) -> Tensor:
    """`draw_truncated` over whole rows, without waiting for the device."""
    vocab_size = x.shape[-1]
    weights = scale.weights(x)
    # Asking which rows are settled would stall a device; it sorts whole rows quickly instead.
    window = min(max(top_k), vocab_size)
    if window > MAX_WINDOW:
        window = vocab_size
    k, p = _limits(top_k, top_p, x)
    cut = find_cut(x, scale, k, p, weights.sum(-1), window)
    equal = x == cut.threshold
    keep = (x > cut.threshold) | (equal & (equal.cumsum(-1) <= cut.ties[:, None]))
    return inverse_cdf(weights.masked_fill_(~keep, 0), u)


def _draw_listed(x: Tensor, scale: Scale, top_k: Sequence[int], top_p: Sequence[float], u: Tensor) -> Tensor:
    """`draw_truncated` on a CPU: lists the tokens kept, and leaves the rest of the row alone."""
    vocab_size = x.shape[-1]
    k, p = _limits(top_k, top_p, x)
    mass = None
    if any(limit == vocab_size for limit in top_k):
        mass = scale.weights(x).sum(-1)
    window = min(vocab_size, max([WINDOW, *(limit for limit in top_k if limit <= MAX_WINDOW)]))
    cut = find_cut(x, scale, k, p, mass, window)
    tokens = torch.empty(len(x), dtype=torch.int64)
    settled = cut.settled.nonzero()[:, 0]
    _draw_kept(x, scale, cut, u, settled.tolist(), tokens)
    if len(settled) < len(x):
        rows = (~cut.settled).nonzero()[:, 0]
        xs, scales = x[rows], scale[rows]
        cut = find_cut(xs, scales, k[rows], p[rows], None if mass is None else mass[rows], vocab_size)
        found = torch.empty(len(rows), dtype=torch.int64)
        _draw_kept(xs, scales, cut, u[rows], list(range(len(rows))), found)
        tokens[rows] = found
    return tokens


def _draw_kept(x: Tensor, scale: Scale, cut: Cut, u: Tensor, rows: list[int], tokens: Tensor) -> None:
    """Draw for ``rows`` of x into ``tokens``, both indexed by row."""
    if not rows:
        return
    values = x.numpy()
    thresholds, ties, keep = cut.threshold[:, 0].numpy(), cut.ties.tolist(), cut.keep.tolist()
    kept: list[NDArray[np.int64]] = []
    for row in rows:
        ids = np.flatnonzero(values[row] >= thresholds[row])
        if len(ids) > keep[row]:
            at_threshold = np.flatnonzero(values[row][ids] == thresholds[row])
            ids = np.delete(ids, at_threshold[ties[row] :])
        # A row with NaN keeps nothing; the caller discards whatever is drawn for it.
        kept.append(ids if len(ids) else np.zeros(1, dtype=np.int64))
    # All rows' weights in one call: a row per token kept, one column.
    owner = torch.from_numpy(np.repeat(rows, [len(ids) for ids in kept]))
    weights = scale[owner].weights(x[owner, torch.from_numpy(np.concatenate(kept))][:, None])[:, 0].numpy()
    end, shares = 0, u.tolist()
    for row, ids in zip(rows, kept, strict=True):
        start, end = end, end + len(ids)
        cumulative = np.cumsum(weights[start:end])
        total = int(cumulative[-1])
        goal = min(int(shares[row] * float(total)), total - 1)
        place = int(np.searchsorted(cumulative, goal, side="right"))
        tokens[row] = int(ids[min(place, len(ids) - 1)])


def _limits(top_k: Sequence[int], top_p: Sequence[float], x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(top_k, dtype=torch.int64, device=x.device),
        torch.tensor(top_p, dtype=torch.float64, device=x.device),
    )
