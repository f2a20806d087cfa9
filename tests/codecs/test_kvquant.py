"""KVQuant's parts: levels by k-means, outliers kept exactly, ranges of keys before RoPE."""

from __future__ import annotations

import pytest
import torch

from kvloom.codecs import make_codec
from kvloom.codecs.kvquant import furthest, normalise_values, num_outliers
from kvloom.codecs.levels import matched_levels, nearest, weighted_levels
from kvloom.core.errors import CodecError

from .world import HEADS, LAYER, calibration, codec_of, gaussian, positions_of, rope_table


def test_levels_are_lloyd_max_levels() -> None:
    """Normal values in ±4 deviations: the levels of the normal density (Max 1960) over 4."""
    values = (gaussian(200_000) / 4).clamp(-1, 1)
    found = weighted_levels(values, torch.ones_like(values), 4) * 4
    assert found.tolist() == pytest.approx([-1.510, -0.453, 0.453, 1.510], abs=0.02)


def test_levels_go_where_the_weight_is() -> None:
    values = torch.linspace(-1, 1, 10_001)
    found = weighted_levels(values, (values > 0).float(), 4)
    assert float(found.min()) > 0
    assert torch.equal(found, weighted_levels(values, 3.0 * (values > 0), 4))


def test_matched_levels_restore_mean_and_deviation() -> None:
    values = (gaussian(50_000) / 3 + 0.1).clamp(-1, 1)
    levels = weighted_levels(values, torch.ones_like(values), 4)
    decoded = matched_levels(values, levels)[nearest(values, levels)]
    assert float(decoded.mean()) == pytest.approx(float(values.mean()), abs=1e-4)
    assert float(decoded.std()) == pytest.approx(float(values.std()), rel=1e-3)


def test_the_furthest_come_in_order_and_of_equals_the_first() -> None:
    y = torch.zeros(1, 1, 4, 8)
    y[0, 0, 3, 1], y[0, 0, 0, 2] = -9.0, 5.0
    assert furthest(y, 2)[0, 0].tolist() == [2, 25]
    assert furthest(torch.zeros(1, 1, 4, 8), 3)[0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["kvquant2.key", "kvquant2.value"])
def test_outliers_come_back_exactly(name: str) -> None:
    codec = codec_of(name, 64, 32)
    rows = gaussian(1, HEADS, 32, 64, seed=30)
    rows[0, 0, 0, 5], rows[0, 1, 31, 60] = 100.0, -250.0
    if name.endswith(".key"):  # where RoPE turns by nothing
        rows[0, 1, 31, 60] = 0.0
        rows[0, 1, 0, 60] = -250.0
    where = torch.zeros(1, dtype=torch.int64)
    back = codec.decode(codec.encode(rows, layer=LAYER, first_position=where), layer=LAYER, first_position=where)
    far = rows.abs() > 50
    assert torch.equal(back[far], rows[far])
    assert float((back - rows)[~far].square().mean()) < 0.3


def test_ranges_of_values_leave_outliers_out() -> None:
    rows = gaussian(1, 1, 32, 64, seed=31)
    rows[0, 0, 3, 9] = 1000.0
    found = normalise_values(rows)
    assert found.places.shape[-1] == num_outliers(32 * 64) == 21
    assert 3 * 64 + 9 in found.places[0, 0].tolist()
    assert float(found.high.max()) < 5.0


def test_keys_are_coded_before_rope() -> None:
    """A block is worth as much wherever it stands: the rotation is taken off first."""
    codec, table = codec_of("kvquant4.key", 64, 32), rope_table(64)
    raw = gaussian(1, HEADS, 32, 64, seed=32)
    for first in (0, 1000, 4000):
        where = torch.tensor([first])
        rows = table.rotate(raw, where.unsqueeze(1) + torch.arange(32))
        back = codec.decode(codec.encode(rows, layer=LAYER, first_position=where), layer=LAYER, first_position=where)
        assert float((back - rows).square().mean()) < 0.02


def test_what_is_missing_is_named() -> None:
    with pytest.raises(CodecError, match="needs the model's RoPE table"):
        make_codec("kvquant4.key", "k", 64, 32, calibration(64))
    codec = codec_of("kvquant4.key", 64, 32)
    with pytest.raises(CodecError, match=r"needs first_position \[1\]; got none"):
        codec.encode(gaussian(1, HEADS, 32, 64), layer=LAYER)
    with pytest.raises(CodecError, match="position 4127 is beyond the 4096 positions"):
        codec.encode(gaussian(1, HEADS, 32, 64), layer=LAYER, first_position=torch.tensor([4096]))
    with pytest.raises(CodecError, match="16 bits"):
        make_codec("kvquant4.value", "v", 512, 256, calibration(512))
    assert positions_of(2, 32).tolist() == [0, 32]
