"""Round-trip errors against theory and the measured table of the published algorithms, on Gaussian rows."""

from __future__ import annotations

import math

import pytest
import torch

from kvloom.codecs.unit_codes import UnitCodes

from .world import HEADS, LAYER, codec_of, gaussian, positions_of

ROWS = 320  # blocks of 32 tokens and 2 heads: 20,480 vectors

# Relative mean squared error of Gaussian vectors of 64 channels. int4 and kivi: min/max rounding over
# groups of 64 and 32; turboquant: matched norm; fp8: per-token scale. Sources: docs/codecs.md.
MEASURED = {
    "int8": 3.5e-5,
    "q8_0": 2.9e-5,
    "fp8": 6.3e-4,
    "fp8_e5m2": 2.5e-3,
    "int4": 0.0080,
    "kivi4.key": 0.0061,
    "kivi2.key": 0.154,
    "kivi4.value": 0.0061,
    "kivi2.value": 0.154,
    "turboquant2": 0.1165,
    "turboquant3": 0.0328,
    "turboquant4": 0.0089,
    # An orthogonal second rotation leaves (π/2 − 1) of what the codes of one bit fewer miss; at one
    # bit with matched norm that is 2 − 2 √(2/π) = 0.404.
    "turboquant2.prod": 0.5708 * 0.404,
    "turboquant3.prod": 0.5708 * 0.1165,
    "turboquant4.prod": 0.5708 * 0.0328,
}


@pytest.mark.parametrize("name", MEASURED)
def test_error_is_what_theory_says(name: str) -> None:
    rows = gaussian(ROWS, HEADS, 32, 64, seed=11)
    codec = codec_of(name, 64, 32)
    back = codec.decode(codec.encode(rows, layer=LAYER), layer=LAYER)
    error = float((back - rows).square().mean() / rows.square().mean())
    assert error == pytest.approx(MEASURED[name], rel=0.03)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_turboquant_bound_holds_for_concentrated_vectors(bits: int, dim: int) -> None:
    """A few channels hold nearly all energy, which plain rounding would not survive.

    (One channel alone is the rotation's worst case: its image is constant up to signs.)
    """
    x = 0.05 * gaussian(4000, dim, seed=3)
    x[:, ::8] += 3.0 * gaussian(4000, len(range(0, dim, 8)), seed=4)
    unit = UnitCodes(dim, bits)
    back = unit.decode(*unit.encode(x))
    error = float(((back - x).square().sum(-1) / x.square().sum(-1)).mean())
    assert error <= math.sqrt(3) * math.pi / 2 * 4.0**-bits


def test_norms_are_kept() -> None:
    x = gaussian(1000, 64, seed=4)
    unit = UnitCodes(64, 3)
    back = unit.decode(*unit.encode(x))
    assert torch.allclose(back.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)


def test_orderings_that_must_hold() -> None:
    rows = gaussian(40, HEADS, 32, 64, seed=12)

    def error(name: str) -> float:
        codec = codec_of(name, 64, 32)
        where = positions_of(40, 32)
        back = codec.decode(codec.encode(rows, layer=LAYER, first_position=where), layer=LAYER, first_position=where)
        return float((back - rows).square().mean())

    assert error("q8_0") < error("int8") < error("fp8") < error("fp8_e5m2") < error("turboquant4")
    assert error("turboquant4") < error("turboquant3") < error("turboquant2")


def test_a_removed_mean_is_not_coded() -> None:
    """Keys of mean m and unit noise: loom's error is the noise's share, turboquant's that of the whole."""
    loom, plain = codec_of("loom4", 64, 32), codec_of("turboquant4", 64, 32)
    mean = loom.removed_mean(LAYER)
    assert mean is not None
    shifted = mean * 4  # far larger than the noise
    rows = gaussian(40, HEADS, 32, 64, seed=13) * 0.1 + shifted.unsqueeze(1)
    near = gaussian(40, HEADS, 32, 64, seed=13) * 0.1 + mean.unsqueeze(1)

    def error(codec: object, x: torch.Tensor) -> float:
        back = codec.decode(codec.encode(x, layer=LAYER), layer=LAYER)  # type: ignore[attr-defined]
        return float((back - x).square().mean())

    assert error(loom, near) < 0.0089 * 0.01
    assert error(plain, near) > 2 * error(loom, near)
    assert error(loom, rows) > error(loom, near)
