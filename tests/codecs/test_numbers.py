"""Sums in a fixed order, and roundings to float16 in a direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvloom.codecs.numbers import HALF_MAX, HALF_MIN, finite, half_down, half_up, positive_scale, square_root, tree_sum

from .world import gaussian


@pytest.mark.parametrize("n", [1, 2, 3, 7, 48, 64, 80, 576])
def test_tree_sum(n: int) -> None:
    x = gaussian(50, n)
    assert torch.allclose(tree_sum(x), x.double().sum(-1).float(), atol=1e-4)
    alone = torch.stack([tree_sum(row) for row in x])
    assert torch.equal(alone, tree_sum(x))


def test_rounding_directions() -> None:
    x = torch.cat([gaussian(1000), gaussian(1000) * 1e-7, gaussian(1000) * 1e4, torch.tensor([0.0, 1.0, -2.5])])
    up, down = half_up(x), half_down(x)
    assert bool((up.float() >= x).all()) and bool((down.float() <= x).all())
    step = torch.nextafter(down, torch.full_like(down, HALF_MAX))
    assert bool(((up == down) | (up == step)).all())
    assert torch.equal(half_up(up.float()), up)


def test_limits() -> None:
    x = torch.tensor([1e30, -1e30, float("inf"), float("nan"), 3.0])
    assert finite(x).tolist() == [HALF_MAX, -HALF_MAX, 0.0, 0.0, 3.0]
    assert half_up(torch.tensor([1e9])).item() == HALF_MAX and half_down(torch.tensor([-1e9])).item() == -HALF_MAX
    assert positive_scale(torch.tensor([0.0])).item() == HALF_MIN


def test_square_roots_are_the_nearest() -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 1000
    assert np.array_equal(square_root(x).numpy(), np.sqrt(x.numpy()))
