"""Non-uniform levels for normalised values in -1 … 1, learnt by weighted k-means (KVQuant's nuq).

One dimension and many values: the values are counted in fine bins, so that the result depends on no
random start and takes the same time for any number of them.
"""

from __future__ import annotations

import torch

from kvloom.codecs.numbers import tree_sum

BINS = 4096
SWEEPS = 200


def weighted_levels(values: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """float32 [count] ascending levels with least weighted squared error to float ``values`` in -1 … 1."""
    places = ((values.double().flatten() + 1.0) * (BINS / 2)).long().clamp(0, BINS - 1)
    mass = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, weights.double().flatten())
    first = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, (weights.double() * values.double()).flatten())
    centre = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 / BINS) - 1.0
    # Start where many levels would lie: with the density's cube root (Panter and Dite 1951).
    share = torch.cumsum(mass ** (1 / 3), 0)
    start = torch.searchsorted(share, share[-1] * (torch.arange(count, dtype=torch.float64) + 0.5) / count)
    levels = centre[start.clamp(max=BINS - 1)]
    for _ in range(SWEEPS):
        cell = torch.bucketize(centre, (levels[1:] + levels[:-1]) / 2)
        heavy = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, mass)
        moved = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, first) / heavy.clamp_min(1e-300)
        moved = torch.where(heavy > 0, moved, levels)
        if torch.equal(moved, levels):
            break
        levels = moved
    return levels.float()


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """int64 index of the nearest of ascending ``levels``."""
    return torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2)


def matched_levels(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """``levels`` moved and stretched so that decoded values have the mean and deviation of ``values`` (Q-Norm)."""
    values = values.double().flatten()
    decoded = levels.double()[nearest(values, levels.double())]
    mean, deviation = _mean_and_deviation(values)
    decoded_mean, decoded_deviation = _mean_and_deviation(decoded)
    stretched = (levels.double() - decoded_mean) * (deviation / decoded_deviation.clamp_min(1e-12)) + mean
    return stretched.float()


def _mean_and_deviation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float64 [n], summed in a fixed order."""
    mean = tree_sum(x) / len(x)
    return mean, torch.sqrt(tree_sum((x - mean).square()) / len(x))
