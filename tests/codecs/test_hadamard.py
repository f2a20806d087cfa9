"""Rotations are orthogonal, spread energy, and hold still."""

from __future__ import annotations

import pytest
import torch

from kvloom.codecs.hadamard import Rotation, fixed_signs, hadamard, odd_factor

from .world import gaussian

SIGNS_16 = [1, -1, 1, 1, 1, -1, 1, -1, -1, -1, 1, -1, 1, -1, 1, -1]
DIMS = [8, 40, 64, 80, 96, 112, 128, 192, 256, 576]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("signed", [True, False])
def test_orthogonal(dim: int, signed: bool) -> None:
    rotation = Rotation(dim, signed=signed)
    matrix = rotation.forward(torch.eye(dim))
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=2e-6)
    x = gaussian(5, dim)
    assert torch.allclose(rotation.inverse(rotation.forward(x)), x, atol=2e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_products_with_rotated_queries(dim: int) -> None:
    rotation = Rotation(dim)
    q, k = gaussian(7, dim, seed=1), gaussian(7, dim, seed=2)
    rotated = (rotation.forward(q) * rotation.forward(k)).sum(-1)
    assert torch.allclose(rotated, (q * k).sum(-1), atol=1e-4)


def test_hadamard_is_sylvesters() -> None:
    matrix = hadamard(torch.eye(4)) * 2
    assert torch.equal(matrix, torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]))


@pytest.mark.parametrize("dim", DIMS)
def test_one_channel_is_spread(dim: int) -> None:
    odd, _ = odd_factor(dim)
    spread = Rotation(dim).forward(torch.eye(dim)).abs().amax()
    assert float(spread) <= (1.01 if odd == 1 else 1.01 * odd) / dim**0.5 * max(1, odd**0.5)


def test_signs_never_change() -> None:
    """Encoded bytes on disk would change their meaning; raise SIGNS_VERSION if this must move."""
    assert fixed_signs(16).tolist() == SIGNS_16
    assert fixed_signs(64).tolist() != fixed_signs(64, 1).tolist()
