"""Native encoders give the reference's bytes, whatever the rows, in every variant of the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import _cpu
from kvloom.codecs import make_codec
from kvloom.codecs.base import BlockCodec
from kvloom.codecs.kernel_layout import for_kernels
from kvloom.core.errors import CodecError
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import BlockFormat, PlaneFormat
from tests.codecs.world import LAYER, calibration

PAIRS = [
    *[(name, name) for name in ("fp8", "fp8_e5m2", "int8", "int4", "q8_0", "q4_0")],
    *[(f"turboquant{bits}", f"turboquant{bits}") for bits in (4, 3, 2)],
    *[(f"loom{bits}", f"loom{bits}") for bits in (4, 3, 2)],
    ("kivi2.key", "kivi2.value"),
    ("kivi4.key", "kivi4.value"),
    ("kvarn4.key", "kvarn4.value"),
    ("kvarn4.key", "kvarn2.value"),
    ("int8", None),
    (None, "turboquant3"),
]
HEADS, BLOCKS, PLACES = 3, 4, 2
LAYERS = (LAYER, LAYER)


def formats(
    backend: CpuBackend, names: tuple[str | None, str | None], dim: int, size: int, dtype: torch.dtype
) -> tuple[BlockFormat, BlockFormat]:
    """Raw and encoded blocks of one group of two layers; planes 64 bytes apart at least."""
    found = []
    for encoded in (False, True):
        planes, offset = [], 0
        for plane, name in zip(("k", "v"), names, strict=True):
            codec = None
            if encoded and name is not None:
                made = make_codec(name, plane, dim, size, calibration(dim, HEADS) if "loom" in name else None, None)
                assert isinstance(made, BlockCodec)
                codec = for_kernels(made)
                assert codec is not None
            order, pack = backend.plane_order(plane, dtype, dim, size)
            planes.append(
                PlaneFormat(
                    name=plane,
                    dim=dim,
                    dtype=dtype if codec is None else torch.uint8,
                    offset=offset,
                    order=order,
                    pack=pack,
                    codec=codec,
                )
            )
            offset += -(-(codec.num_bytes if codec is not None else size * dim * dtype.itemsize) // 64) * 64 + 64
        found.append(
            BlockFormat(
                block_size=size,
                num_heads=HEADS,
                block_bytes=offset,
                layer_bytes=HEADS * offset,
                planes=tuple(planes),
                layers=LAYERS,
            )
        )
    return found[0], found[1]


def compare(backend: CpuBackend, raw: BlockFormat, encoded: BlockFormat, rows: list[torch.Tensor], index: int) -> None:
    """Encode ``rows`` [BLOCKS, HEADS, size, dim] per plane natively and by reference: arenas must be equal."""
    half = BLOCKS * PLACES * max(raw.layer_bytes, encoded.layer_bytes)
    arena = torch.full((2 * half,), 0xA5, dtype=torch.uint8)
    raw_offsets = torch.arange(BLOCKS, dtype=torch.int64) * PLACES * raw.layer_bytes
    encoded_offsets = half + torch.tensor([2, 0, 3, 1]) * PLACES * encoded.layer_bytes
    within = torch.arange(raw.block_size).repeat(BLOCKS)
    starts = (raw_offsets + index * raw.layer_bytes).repeat_interleave(raw.block_size)
    for plane, values in zip(raw.planes, rows, strict=True):
        places = backend._reference.element_places(plane, raw, starts, within, arena.device)
        arena.view(plane.dtype)[places] = values.transpose(1, 2).flatten(0, 1).to(plane.dtype)
    expected = arena.clone()
    first = torch.zeros(BLOCKS, dtype=torch.int64)
    bad = backend._reference.encode(expected, raw, encoded, index, raw_offsets, encoded_offsets, first)
    assert backend.encode(arena, raw, encoded, index, raw_offsets, encoded_offsets, first) == bad
    assert not backend.fallbacks
    assert torch.equal(arena, expected)


def random_rows(dim: int, size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(BLOCKS, HEADS, size, dim, generator=generator) for _ in range(2)]
    for x in rows:
        x[0] *= 1e-6
        x[1, 0, 3] = 0.0
        x[1, 1] *= torch.rand(size, dim, generator=generator).mul(20).exp()
        x[2, 0, 1, 5], x[2, 0, 2, 7], x[2, 1, 4, 0] = float("nan"), float("inf"), -float("inf")
        x[2, 2] = -0.0
        x[3] = (x[3] * 4).round() / 4  # many ties
    return rows


@pytest.mark.parametrize("variant", _cpu.variant_names())
@pytest.mark.parametrize("names", PAIRS)
def test_gives_the_reference_bytes(names: tuple[str | None, str | None], variant: str) -> None:
    backend = CpuBackend(num_threads=2, isa=variant)
    for dim, size, dtype in (
        (64, 32, torch.bfloat16),
        (128, 64, torch.float16),
        (96, 32, torch.float32),
        (256, 128, torch.bfloat16),
    ):
        raw, encoded = formats(backend, names, dim, size, dtype)
        compare(backend, raw, encoded, random_rows(dim, size, seed=dim), index=1)


@pytest.mark.parametrize("names", PAIRS)
@given(seed=st.integers(0, 2**32), scale=st.floats(-30, 15), step=st.sampled_from([0.0, 1.0, 0.125]))
@settings(max_examples=12, deadline=None)
def test_gives_the_reference_bytes_for_any_scale(
    names: tuple[str | None, str | None], seed: int, scale: float, step: float
) -> None:
    backend = CpuBackend(num_threads=1)
    raw, encoded = formats(backend, names, 64, 32, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(BLOCKS, HEADS, 32, 64, generator=generator) * 2.0**scale for _ in range(2)]
    if step:
        rows = [(x / step).round() * step for x in rows]
    compare(backend, raw, encoded, rows, index=0)


def test_a_block_outside_the_arena_is_refused() -> None:
    backend = CpuBackend(num_threads=1)
    raw, encoded = formats(backend, ("int8", "int8"), 64, 32, torch.bfloat16)
    arena = torch.zeros(4 * raw.layer_bytes, dtype=torch.uint8)
    first = torch.zeros(1, dtype=torch.int64)
    for spans in ((0, 3 * raw.layer_bytes + encoded.layer_bytes), (-8, 0)):
        offsets = [torch.tensor([span]) for span in spans]
        with pytest.raises(ValueError, match="outside the arena"):
            backend.encode(arena, raw, encoded, 1, offsets[0], offsets[1], first)


def test_codecs_without_a_native_encoder_fall_back_and_are_counted() -> None:
    backend = CpuBackend(num_threads=1)
    raw, encoded = formats(backend, ("int8", "int8"), 64, 32, torch.bfloat16)
    try:
        codec = make_codec("turboquant4.prod", "v", 64, 32)
    except CodecError as error:  # pragma: no cover
        raise AssertionError from error
    plane = PlaneFormat(name="v", dim=64, dtype=torch.uint8, offset=encoded.planes[1].offset, codec=codec)
    other = BlockFormat(
        block_size=32,
        num_heads=HEADS,
        block_bytes=2 * encoded.block_bytes,
        layer_bytes=2 * encoded.layer_bytes,
        planes=(encoded.planes[0], plane),
        layers=LAYERS,
    )
    arena = torch.zeros(2 * (raw.layer_bytes + other.layer_bytes), dtype=torch.uint8)
    offsets = torch.zeros(1, dtype=torch.int64)
    backend.encode(arena, raw, other, 0, offsets, offsets + 2 * raw.layer_bytes, offsets)
    assert sum(backend.fallbacks.values()) == 1
    assert next(iter(backend.fallbacks)).startswith("encode: ")
