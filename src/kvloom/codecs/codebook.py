"""Lloyd-Max levels on a grid of 8-bit integers, as codecs store and kernels look them up.

The levels of ``lloyd_max.sphere`` are rounded to integers in -127 … 127 after a common stretch, the
one that costs least (under 0.5 % of the distortion at 4 bits). A vector's scale absorbs the stretch.
With integer levels a table fits a byte shuffle, products with int8 queries are exact, and the sum of
squares of a code vector, which the stored scale needs, is exact in float32 in any order.

Code j means the j-th level in ascending order, so the top bit is the sign.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.codecs import lloyd_max

PEAKS = range(64, 128)  # magnitudes that the outermost level may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebook:
    """``levels``: ascending integers in -127 … 127. ``stretch``: grid units per standard deviation."""

    bits: int
    levels: tuple[int, ...]
    stretch: float
    distortion: float

    @property
    def edges(self) -> tuple[float, ...]:
        """Where the next level becomes the nearest, in grid units."""
        return tuple((a + b) / 2 for a, b in zip(self.levels, self.levels[1:], strict=False))

    def encode(self, z: torch.Tensor) -> torch.Tensor:
        """uint8 codes of the nearest levels to float32 ``z``, given in standard deviations."""
        return self.nearest(z * self.stretch)

    def nearest(self, y: torch.Tensor) -> torch.Tensor:
        """uint8 codes of the nearest levels to float32 ``y``, given in grid units."""
        edges = torch.tensor(self.edges, dtype=torch.float32, device=y.device)
        return torch.bucketize(y, edges).to(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """float32 levels, in grid units."""
        table = torch.tensor(self.levels, dtype=torch.float32, device=codes.device)
        return table[codes.to(torch.int64)]


@functools.cache
def sphere_codebook(bits: int, dim: int) -> Codebook:
    """The integer codebook for coordinates of unit vectors in ``dim`` dimensions, scaled by √dim."""
    exact = lloyd_max.sphere(bits, dim)
    positive = np.array(exact.levels[len(exact.levels) // 2 :])
    density = lloyd_max.sphere_density(dim)
    best: Codebook | None = None
    for peak in PEAKS:
        stretch = round(peak / float(positive[-1]), 3)
        grid = np.rint(positive * stretch)
        cost = lloyd_max.distortion(density, grid / stretch, float(np.sqrt(dim)))
        if best is None or cost < best.distortion:
            half = [int(level) for level in grid]
            levels = tuple([-level for level in reversed(half)] + half)
            best = Codebook(bits=bits, levels=levels, stretch=stretch, distortion=cost)
    assert best is not None
    return best
