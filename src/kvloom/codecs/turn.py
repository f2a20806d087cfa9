"""The matrices that loom's keys are coded with, from what calibration found.

Rows of the basis A (``key_basis``) are ordered by their variances p. Within a segment of n of them, and
with g grid units per standard deviation and r the keys' root mean square::

    T = (r / 64) · g · H · diag(√√(1 / p) / √m) · A        m = mean of √p over the segment

H: a signed Hadamard matrix. So the segment's coordinates have standard deviation g · r / 64 on average,
codes cover them all alike at a scale of about r / 64, and an error of one grid unit weighs (m / g)².

Least squares shrinks: a segment of distortion D is read as (1 − D) of itself on average, unequally
where widths differ, and with it the logits, whose softmax gets flatter. So the inverse stretches
each segment's coordinates by (1 − D)^(−GAIN): more error, less bias.

T decides the bytes of keys, so it is made from the calibration by correctly rounded operations in a
fixed order; its inverse only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.codecs.hadamard import Rotation
from kvloom.codecs.numbers import tree_sum
from kvloom.codecs.segments import SegmentCodes

SCALE = 1.0 / 64  # of a typical row, as TurboQuant's: the middle of float16's range for keys of any size
GAIN = 0.75  # 1 would undo the shrinking


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """What one layer's keys are coded with; H KV heads.

    ``forward`` float32 [H, d, d]: y[i] = Σ_c forward[i, c] · (k − mean)[c]; ``backward`` is its inverse,
    stretched.
    ``mean`` float32 [H, 1, d]; ``weights`` float32 [H, 1, segments]: what errors in a segment weigh.
    """

    mean: torch.Tensor
    forward: torch.Tensor
    backward: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Turn:
        return Turn(
            mean=self.mean.to(device),
            forward=self.forward.to(device),
            backward=self.backward.to(device),
            weights=self.weights.to(device),
        )


def make_turn(mean: torch.Tensor, basis: torch.Tensor, importance: torch.Tensor, codes: SegmentCodes) -> Turn:
    """From float32 mean [H, d], A [H, d, d] and p [H, d]."""
    rows, p = basis.double(), importance.double()
    root = torch.sqrt(p)
    size = torch.sqrt(tree_sum(p) / p.shape[-1]) * SCALE  # [H]
    parts, weights, stretches = [], [], []
    for index, (one, book) in enumerate(zip(codes.segments, codes.books, strict=True)):
        here = root[:, one.start : one.stop]
        middle = tree_sum(here) / one.size  # [H]
        gains = torch.sqrt(1.0 / here) / torch.sqrt(middle).unsqueeze(-1)  # [H, n]
        balanced = rows[:, one.start : one.stop] * gains.unsqueeze(-1)
        mixed = Rotation(one.size, stream=index).forward(balanced.mT.contiguous()).mT
        parts.append(mixed * (size * book.stretch)[:, None, None])
        weights.append(middle / book.stretch)
        stretches.append(torch.full((one.size,), (1.0 - book.distortion) ** -GAIN, dtype=torch.float64))
    forward = torch.cat(parts, dim=1).float().contiguous()
    relative = torch.stack([weight / weights[0] for weight in weights], dim=-1)  # [H, segments]
    return Turn(
        mean=mean.unsqueeze(1),
        forward=forward,
        backward=(torch.linalg.inv(forward.double()) * torch.cat(stretches)).float().contiguous(),
        weights=(relative * relative).float().unsqueeze(1),
    )


def times(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """matrix · x for float32 rows x [N, H, B, d] and [H, d, d], summed over x's channels in ascending order."""
    total: torch.Tensor | None = None
    for channel in range(x.shape[-1]):
        term = x[..., channel : channel + 1] * matrix[:, None, :, channel]
        total = term if total is None else total + term
    assert total is not None
    return total
