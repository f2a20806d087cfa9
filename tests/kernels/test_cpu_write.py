"""Native writes leave the bytes that reference writes leave, and no other byte changes."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.reference import ReferenceBackend

from .world import LAYER, LAYERS, batch_of, make_format

REFERENCE = ReferenceBackend()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def write_both(backend, fmt, steps, values) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arenas after the same writes: native and reference."""
    sequences = len(steps[0][0])
    blocks = 6
    span = LAYERS * fmt.layer_bytes
    tables = (torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(3)) * span).view(sequences, -1)
    arenas = tuple(torch.full((sequences * blocks * span,), 0xFF, dtype=torch.uint8) for _ in range(2))
    for (lengths, firsts), rows in zip(steps, values, strict=True):
        for writer, arena in zip((backend, REFERENCE), arenas, strict=True):
            writer.write(rows, arena, fmt, LAYER * fmt.layer_bytes, tables, batch_of(lengths, firsts))
    return arenas


def random_rows(steps, fmt, dtype, scale=1.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        [
            (torch.randn(sum(lengths), fmt.num_heads, plane.dim, generator=generator) * scale).to(dtype)
            for plane in fmt.planes
        ]
        for lengths, _ in steps
    ]


@pytest.mark.parametrize("source", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 32])
def test_bytes_equal_the_reference(stored: torch.dtype, source: torch.dtype, block_size: int) -> None:
    backend = CpuBackend()
    fmt = make_format(backend, stored, heads=2, k_dim=40, v_dim=24, block_size=block_size)
    steps = [([30, 1, 0], [0, 0, 0]), ([1, 3, 5], [30, 1, 0]), ([2, 1, 1], [31, 4, 5])]
    native, reference = write_both(backend, fmt, steps, random_rows(steps, fmt, source))
    assert torch.equal(native, reference)
    assert not backend.fallbacks


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_of_every_magnitude(stored: torch.dtype) -> None:
    """Ties, subnormals, overflow to infinity, signed zeros."""
    backend = CpuBackend()
    fmt = make_format(backend, stored, heads=1, k_dim=64, block_size=32)
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 2**32, (2, 32 * 64), generator=generator, dtype=torch.int64)
    ties = (bits & 0xFFFF0000) | torch.tensor([0x1000, 0x8000])[:, None]  # halfway for fp16, for bf16
    values = torch.cat([bits, ties], dim=1).to(torch.uint32).view(torch.float32)
    values = torch.where(values.isnan(), torch.tensor(-0.0), values).view(4, 32, 64)
    small = (values.abs().log2().clamp(-30, 17).exp2() * values.sign()).nan_to_num()  # about fp16's range
    for rows in (*values, *small):
        native, reference = write_both(backend, fmt, [([32], [0])], [[rows.view(32, 1, 64)] * 2])
        assert torch.equal(native, reference)


def test_strided_rows() -> None:
    backend = CpuBackend()
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=32, block_size=16)
    fused = torch.randn(25, 6, 32).to(torch.bfloat16)
    heads_first = torch.randn(2, 25, 32).to(torch.bfloat16).transpose(0, 1)
    dim_first = torch.randn(25, 32, 2).to(torch.bfloat16).transpose(1, 2)
    for rows in ([fused[:, 2:4], fused[:, 4:6]], [heads_first, fused[:, :2]], [dim_first, heads_first]):
        native, reference = write_both(backend, fmt, [([25], [3])], [rows])
        assert torch.equal(native, reference)


def test_large_writes_use_all_threads_and_agree() -> None:
    backend = CpuBackend(num_threads=2)
    fmt = make_format(backend, torch.bfloat16, heads=4, k_dim=128, block_size=256)
    steps = [([700, 300], [1, 7])]
    native, reference = write_both(backend, fmt, steps, random_rows(steps, fmt, torch.bfloat16))
    assert torch.equal(native, reference)


def test_wrong_arguments_are_refused() -> None:
    backend = CpuBackend()
    fmt = make_format(backend, torch.float32, heads=1, k_dim=32, block_size=16)
    arena = torch.zeros(4 * fmt.layer_bytes, dtype=torch.uint8)
    tables = torch.tensor([[0, -1]])
    rows = torch.zeros(17, 1, 32)
    with pytest.raises(ValueError, match="block 1 of sequence 0"):
        backend.write([rows, rows], arena, fmt, 0, tables, batch_of([17], [0]))
    with pytest.raises(ValueError, match="expected"):
        backend.write([rows[:3], rows], arena, fmt, 0, tables, batch_of([17], [0]))
    with pytest.raises(ValueError, match="int64"):
        backend.write([rows, rows], arena, fmt, 0, tables.int(), batch_of([17], [0]))
    assert not arena.any()
