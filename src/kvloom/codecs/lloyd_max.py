"""Lloyd-Max quantisers: the levels with least mean squared error for a known density.

Two densities: the normal one, and that of one coordinate of a point uniform on the sphere in d
dimensions, scaled by √d to unit variance: f(u) ∝ (1 − u²/d)^((d−3)/2). Both are symmetric, so only
the positive half is solved, by Lloyd's iteration (Lloyd 1982, Max 1960) in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_SWEEPS = 20_000
_TOLERANCE = 1e-12

Density = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """``levels`` ascending, symmetric about 0; ``distortion`` is the mean squared error at unit variance."""

    levels: tuple[float, ...]
    distortion: float


def gaussian_density(u: np.ndarray) -> np.ndarray:
    """The standard normal density."""
    values: np.ndarray = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    return values


def sphere_density(dim: int) -> Density:
    """The density of √dim times a coordinate of a uniform point on the unit sphere in ``dim`` ≥ 4 dimensions."""
    log_norm = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi * dim)

    def density(u: np.ndarray) -> np.ndarray:
        inside = np.clip(1.0 - u * u / dim, 0.0, None)
        values: np.ndarray = math.exp(log_norm) * inside ** ((dim - 3) / 2)
        return values

    return density


@functools.cache
def gaussian(bits: int) -> Quantizer:
    """The Lloyd-Max quantiser of the standard normal density with 2^bits levels."""
    return _solve(gaussian_density, bits, 12.0)


@functools.cache
def sphere(bits: int, dim: int) -> Quantizer:
    """The Lloyd-Max quantiser of ``sphere_density(dim)`` with 2^bits levels (TurboQuant, arXiv 2504.19874)."""
    return _solve(sphere_density(dim), bits, min(12.0, math.sqrt(dim)))


def distortion(density: Density, levels: np.ndarray, limit: float) -> float:
    """Mean squared error of nearest-level coding with positive ``levels`` and their mirror images."""
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [limit]])
    mass, first, second = _moments(density, edges)
    return float(2 * (second - 2 * levels * first + levels**2 * mass).sum())


def _moments(density: Density, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """∫ f, ∫ u f, ∫ u² f over each cell, by Gauss-Legendre quadrature."""
    half = np.diff(edges)[:, None] / 2
    u = (edges[:-1, None] + edges[1:, None]) / 2 + half * _NODES
    weight = density(u) * half * _WEIGHTS
    return weight.sum(axis=1), (u * weight).sum(axis=1), (u * u * weight).sum(axis=1)


def _solve(density: Density, bits: int, limit: float) -> Quantizer:
    count = 1 << (bits - 1)
    levels = np.linspace(0.0, min(limit, 1.2 + bits * 0.7), count + 1)[:-1]
    levels = levels + (levels[1] - levels[0] if count > 1 else 1.0) / 2
    for _ in range(_SWEEPS):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [limit]])
        mass, first, _ = _moments(density, edges)
        moved = first / mass
        change = float(np.abs(moved - levels).max())
        levels = moved
        if change < _TOLERANCE:
            break
    positive = [float(level) for level in levels]
    return Quantizer(
        levels=tuple([-level for level in reversed(positive)] + positive), distortion=distortion(density, levels, limit)
    )
