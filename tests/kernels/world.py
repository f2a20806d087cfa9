"""A small cache in an arena full of NaN, for kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.kernels.ops import BlockFormat, KernelBackend, PlaneFormat, QueryBatch

CPU = torch.device("cpu")
LAYERS = 2
LAYER = 1  # the one that tests use


def make_format(
    backend: KernelBackend,
    dtype: torch.dtype,
    *,
    heads: int,
    k_dim: int,
    v_dim: int | None = None,
    block_size: int = 32,
) -> BlockFormat:
    """A block format in the layout that ``backend`` wants."""
    planes = []
    offset = 0
    for name, dim in (("k", k_dim), ("v", k_dim if v_dim is None else v_dim)):
        order, pack = backend.plane_order(name, dtype, dim, block_size)
        planes.append(PlaneFormat(name=name, dim=dim, dtype=dtype, offset=offset, order=order, pack=pack))
        offset += -(-dim * block_size * dtype.itemsize // 64) * 64
    return BlockFormat(
        block_size=block_size, num_heads=heads, block_bytes=offset, layer_bytes=heads * offset, planes=tuple(planes)
    )


def batch_of(lengths: Sequence[int], first_positions: Sequence[int]) -> QueryBatch:
    return QueryBatch.build(lengths, first_positions, CPU)


@dataclass
class World:
    """``lengths[s]`` tokens of each sequence stand in spans at random places; all else is NaN.

    ``k`` and ``v`` [total tokens, heads, dim] are what was written, packed by sequence.
    """

    fmt: BlockFormat
    lengths: list[int]
    arena: torch.Tensor
    tables: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def layer_offset(self) -> int:
        return LAYER * self.fmt.layer_bytes

    @property
    def where(self) -> tuple[BlockFormat, int, torch.Tensor]:
        return self.fmt, self.layer_offset, self.tables

    def rows(self, sequence: int) -> slice:
        start = sum(self.lengths[:sequence])
        return slice(start, start + self.lengths[sequence])

    def forget_before(self, sequence: int, position: int) -> None:
        """Free the spans wholly before ``position``: absent from the table, NaN in memory."""
        for block in range(position // self.fmt.block_size):
            offset = int(self.tables[sequence, block])
            self.arena[offset : offset + LAYERS * self.fmt.layer_bytes] = 0xFF
            self.tables[sequence, block] = -1


def make_world(
    backend: KernelBackend, fmt: BlockFormat, lengths: Sequence[int], *, dtype: torch.dtype | None = None, seed: int = 0
) -> World:
    """Write ``lengths`` random tokens, in ``dtype`` (default: as stored), with ``backend``."""
    generator = torch.Generator().manual_seed(seed)
    span = LAYERS * fmt.layer_bytes
    blocks = [-(-length // fmt.block_size) for length in lengths]
    total = sum(blocks) + 3
    arena = torch.full((total * span,), 0xFF, dtype=torch.uint8)  # NaN in every storage type
    places = torch.randperm(total, generator=generator) * span
    tables = torch.full((len(lengths), max(blocks, default=0) + 1), -1, dtype=torch.int64)
    used = 0
    for sequence, count in enumerate(blocks):
        tables[sequence, :count] = places[used : used + count]
        used += count
    k, v = (
        torch.randn(sum(lengths), fmt.num_heads, plane.dim, generator=generator).to(dtype or plane.dtype)
        for plane in fmt.planes
    )
    world = World(fmt, list(lengths), arena, tables, k, v)
    backend.write([k, v], arena, fmt, world.layer_offset, tables, batch_of(lengths, [0] * len(lengths)))
    return world


def random_queries(batch: QueryBatch, heads: int, dim: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch.num_tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the expected tensor's size, NaN nowhere."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.isfinite(found).all()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    worst = float((found.float() - expected.float()).abs().max()) if expected.numel() else 0.0
    assert worst <= tolerance * scale, f"off by {worst}, allowed {tolerance * scale}"
