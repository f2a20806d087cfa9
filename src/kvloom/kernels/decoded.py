"""Encoded blocks that no native kernel reads, decoded by PyTorch into raw ones that it does.

The slow way to read a codec: what a layer's queries need of the encoded blocks is decoded anew in every pass. It
serves every codec, and is counted as a fallback (``CpuBackend.fallbacks``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kvloom.kernels.ops import BlockFormat, KeyRange, Order, QueryBatch
from kvloom.kernels.reference import ReferenceBackend

PIECE_BYTES = 4 << 20  # of decoded blocks, made at a time
MOST_SPARE = 4  # times what is needed: larger memory of earlier passes is let go

# (plane, dtype, dim, block size) -> order and pack
PlaneOrder = Callable[[str, torch.dtype, int, int], tuple[Order, int]]


def decoded_format(fmt: BlockFormat, plane_order: PlaneOrder) -> BlockFormat:
    """The blocks of one layer of ``fmt`` decoded: float32, each plane as ``plane_order`` of a backend has it."""
    planes, offset = [], 0
    for plane in fmt.planes:
        order, pack = plane_order(plane.name, torch.float32, plane.dim, fmt.block_size)
        if pack != 1:
            raise ValueError(f"plane {plane.name} in float32 lies in packs of {pack}, not one by one")
        planes.append(replace(plane, dtype=torch.float32, offset=offset, order=order, pack=pack, codec=None))
        offset += 4 * fmt.block_size * plane.dim
    return replace(fmt, block_bytes=offset, layer_bytes=offset * fmt.num_heads, planes=tuple(planes))


class DecodedBlocks:
    """What one pass reads of the blocks of ``fmt``, in memory of its own; good for all layers, one at a time.

    Args:
        fmt: the encoded blocks in the arena.
        raw: ``decoded_format`` of it.
        tables: int64 [S, max_blocks], the encoded spans in the arena.
        batch: the pass's queries.
        keys, window: what they read of them.
        memory: to be used again if it is large enough; None for new memory.

    Attributes:
        arena: uint8, where ``fill`` puts a layer's blocks.
        tables: int64 [S, max_blocks] into it, -1 where nothing is read.
    """

    def __init__(
        self,
        fmt: BlockFormat,
        raw: BlockFormat,
        tables: torch.Tensor,
        batch: QueryBatch,
        keys: KeyRange,
        window: int | None,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.format = raw
        self._fmt = fmt
        size, host = fmt.block_size, tables.numpy()
        found: dict[int, int] = {}  # span -> its place; a span is the same block of all that share it
        first: list[int] = []
        places = np.full(host.shape, -1, dtype=np.int64)
        for row, (start, count) in enumerate(
            zip(batch.first_position_host, np.diff(batch.query_start_host), strict=True)
        ):
            if count == 0:
                continue
            low = max(0, keys.bounds(int(start), size, window)[0])
            high = keys.bounds(int(start + count - 1), size, window)[1]
            for block in range(low // size, -(-high // size) if low < high else 0):
                span = int(host[row, block])
                if span < 0:
                    continue
                if span not in found:
                    found[span] = len(first)
                    first.append(block * size)
                places[row, block] = found[span] * raw.layer_bytes
        self._spans = torch.tensor(list(found), dtype=torch.int64)  # arena offsets
        self._first_positions = torch.tensor(first, dtype=torch.int64)
        needed = len(first) * raw.layer_bytes
        if memory is None or not needed <= len(memory) <= max(MOST_SPARE * needed, PIECE_BYTES):
            memory = torch.empty(needed, dtype=torch.uint8)
        self.arena = memory
        self.tables = torch.from_numpy(places)

    @property
    def num_spans(self) -> int:
        """Encoded spans that the pass reads."""
        return len(self._spans)

    def fill(self, arena: torch.Tensor, layer_offset: int) -> None:
        """Decode the layer whose blocks begin ``layer_offset`` bytes behind their spans.

        Some at a time: what decoding needs in between is many times what comes out.
        """
        together = max(1, PIECE_BYTES // self.format.layer_bytes)
        for first in range(0, self.num_spans, together):
            self._fill(arena, layer_offset, slice(first, min(first + together, self.num_spans)))

    def _fill(self, arena: torch.Tensor, layer_offset: int, part: slice) -> None:
        fmt, raw = self._fmt, self.format
        spans, firsts = self._spans[part], self._first_positions[part]
        to = self.arena[part.start * raw.layer_bytes : part.stop * raw.layer_bytes]
        to = to.view(torch.float32).view(len(spans), fmt.num_heads, -1)
        for source, target in zip(fmt.planes, raw.planes, strict=True):
            rows = ReferenceBackend.read_blocks(arena, source, fmt, spans, layer_offset, firsts)
            begin = target.offset // 4
            plane = to[:, :, begin : begin + fmt.block_size * target.dim]  # rows are [N, heads, size, dim]
            if target.order == "channel":
                rows = rows.transpose(2, 3)
            plane.unflatten(2, tuple(rows.shape[2:])).copy_(rows)
