"""Codecs of every plane format in CODECS, with a calibration and a RoPE table of random numbers."""

from __future__ import annotations

import functools

import torch

from kvloom.codecs import CODECS, make_codec
from kvloom.codecs.base import PlaneCodec
from kvloom.codecs.calibrate import LayerSample, calibrate
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.rope import RopeTable

LAYER = 3
HEADS = 2
POSITIONS = 4096
SHAPES = [(64, 32), (128, 16), (96, 8), (80, 32), (64, 64)]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def rope_table(dim: int) -> RopeTable:
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return RopeTable.from_frequencies(frequencies, POSITIONS)


@functools.cache
def calibration(dim: int, heads: int = HEADS) -> Calibration:
    """From 512 tokens of keys with a mean and of plain values."""
    raw = gaussian(512, heads, dim, seed=1) + 0.3 * gaussian(heads, dim, seed=2)
    positions = torch.arange(512).unsqueeze(0)
    keys = rope_table(dim).rotate(raw.transpose(0, 1).unsqueeze(0), positions)[0].transpose(0, 1)
    sample = LayerSample(keys=keys, values=gaussian(512, heads, dim, seed=3), raw_keys=raw)
    return calibrate({LAYER: sample}, weights_digest="0" * 64)


def plane_of(name: str) -> str:
    return "v" if name.endswith(".value") else "k"


@functools.cache
def codec_of(name: str, dim: int, block_size: int) -> PlaneCodec:
    return make_codec(name, plane_of(name), dim, block_size, calibration(dim), rope_table(dim))


def rows_of(count: int, dim: int, block_size: int, seed: int = 5) -> torch.Tensor:
    return gaussian(count, HEADS, block_size, dim, seed=seed)


def positions_of(count: int, block_size: int) -> torch.Tensor:
    return torch.arange(count) * block_size


ALL = sorted(CODECS)
