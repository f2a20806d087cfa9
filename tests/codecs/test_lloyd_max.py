"""Quantisers against published and theoretical distortions (quantisers' tables, TurboQuant's bounds)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvloom.codecs import lloyd_max
from kvloom.codecs.codebook import sphere_codebook

GAUSSIAN = {1: 0.36338, 2: 0.117482, 3: 0.034548, 4: 0.009501, 5: 0.002505, 6: 0.000644}
SPHERE = {
    64: {1: 0.358387, 2: 0.114526, 3: 0.033391, 4: 0.009132},
    128: {1: 0.360889, 2: 0.116000, 3: 0.033966, 4: 0.009315},
}
POSITIVE = {
    1: (0.79788,),
    2: (0.45278, 1.51042),
    3: (0.24509, 0.75601, 1.34391, 2.15195),
    4: (0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
}


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_gaussian_distortion(bits: int) -> None:
    assert lloyd_max.gaussian(bits).distortion == pytest.approx(GAUSSIAN[bits], rel=1e-3)


@pytest.mark.parametrize("bits", POSITIVE)
def test_gaussian_levels(bits: int) -> None:
    levels = lloyd_max.gaussian(bits).levels
    assert levels[len(levels) // 2 :] == pytest.approx(POSITIVE[bits], abs=2e-5)
    assert levels == tuple(-level for level in reversed(levels))


@pytest.mark.parametrize("dim", SPHERE)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_sphere_distortion(dim: int, bits: int) -> None:
    found = lloyd_max.sphere(bits, dim).distortion
    assert found == pytest.approx(SPHERE[dim][bits], rel=1e-3)
    # TurboQuant, theorem 1, and the rate-distortion bound on any code.
    assert 4.0**-bits <= found <= math.sqrt(3) * math.pi / 2 * 4.0**-bits


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256, 576])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_integer_levels_cost_next_to_nothing(dim: int, bits: int) -> None:
    book = sphere_codebook(bits, dim)
    assert len(book.levels) == 1 << bits and max(book.levels) <= 127
    assert list(book.levels) == sorted(set(book.levels))
    assert book.distortion <= lloyd_max.sphere(bits, dim).distortion * 1.005


def test_densities_integrate_to_one() -> None:
    u = np.linspace(-8, 8, 160_001)
    for density in (lloyd_max.gaussian_density, lloyd_max.sphere_density(64)):
        assert float(density(u).sum() * (u[1] - u[0])) == pytest.approx(1.0, abs=1e-6)
        assert float((density(u) * u * u).sum() * (u[1] - u[0])) == pytest.approx(1.0, abs=1e-6)


def test_nearest_level_is_chosen() -> None:
    book = sphere_codebook(4, 64)
    z = torch.linspace(-4, 4, 4001)
    levels = torch.tensor(book.levels, dtype=torch.float32)
    nearest = (z[:, None] * book.stretch - levels).abs().amin(dim=1)
    assert torch.equal((z * book.stretch - book.decode(book.encode(z))).abs(), nearest)
