"""Bit planes: round trips, and the byte layout that kernels rely on."""

from __future__ import annotations

import pytest
import torch

from kvloom.codecs.packing import code_fields, pack, plane_widths, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [8, 16, 40, 64, 96, 128])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_round_trip(bits: int, count: int, rows: int) -> None:
    codes = torch.randint(0, 1 << bits, (2, 3, rows, count), generator=torch.Generator().manual_seed(bits))
    planes = pack("codes", codes.to(torch.uint8), bits)
    for field in code_fields("codes", bits, rows, count):
        assert tuple(planes[field.name].shape[2:]) == field.shape
    assert sum(plane.shape[-1] for plane in planes.values()) == bits * count // 8
    assert torch.equal(unpack("codes", planes, bits), codes.to(torch.uint8))


def test_every_code_at_every_place() -> None:
    for bits in range(1, 9):
        codes = torch.arange(1 << bits).repeat_interleave(8).to(torch.uint8)
        for turn in range(8):
            rolled = codes.roll(turn)
            assert torch.equal(unpack("c", pack("c", rolled, bits), bits), rolled)


def test_nibbles_of_64() -> None:
    codes = torch.arange(64) % 16
    packed = pack("codes", codes.to(torch.uint8), 4)["codes.0"]
    for i in range(32):
        assert int(packed[i]) == int(codes[i]) | int(codes[i + 32]) << 4


def test_three_bits_are_two_planes() -> None:
    codes = torch.arange(64) % 8
    planes = pack("codes", codes.to(torch.uint8), 3)
    assert plane_widths(3) == (2, 1)
    for i in range(16):
        want = sum((int(codes[i + 16 * slot]) & 3) << (2 * slot) for slot in range(4))
        assert int(planes["codes.0"][i]) == want
    for i in range(8):
        want = sum((int(codes[i + 8 * slot]) >> 2) << slot for slot in range(8))
        assert int(planes["codes.1"][i]) == want
