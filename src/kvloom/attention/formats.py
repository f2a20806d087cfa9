"""From planned byte geometry to the formats that kernels read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvloom.core.sizes import DTYPE_BYTES, MemoryPlan, PlaneGeometry
from kvloom.kernels.ops import BlockCoder, BlockFormat, KernelBackend, PlaneFormat

# (plane format, plane, dim, block size) -> the codec
MakeCoder = Callable[[str, str, int, int], BlockCoder]


def block_formats(
    plan: MemoryPlan, backend: KernelBackend, make_coder: MakeCoder | None = None
) -> tuple[BlockFormat, ...]:
    """One format per storage group. A raw plane's inner layout is the backend's choice.

    ``make_coder`` makes the codecs of encoded planes; None where the plan has none.
    """
    coders: dict[tuple[str, str, int], BlockCoder] = {}  # one object each, however many groups share it

    def coder(plane: PlaneGeometry, block_size: int) -> BlockCoder:
        key = (plane.codec, plane.name, plane.dim)
        if key not in coders:
            assert make_coder is not None, "the plan has encoded planes"
            coders[key] = make_coder(plane.codec, plane.name, plane.dim, block_size)
        return coders[key]

    formats: list[BlockFormat] = []
    for item, span in zip(plan.storage, plan.spans, strict=True):
        planes: list[PlaneFormat] = []
        for plane in span.planes:
            if plane.codec not in DTYPE_BYTES:
                planes.append(
                    PlaneFormat(
                        name=plane.name,
                        dim=plane.dim,
                        dtype=torch.uint8,
                        offset=plane.offset,
                        codec=coder(plane, span.block_size),
                    )
                )
                continue
            dtype: torch.dtype = getattr(torch, plane.codec)
            order, pack = backend.plane_order(plane.name, dtype, plane.dim, span.block_size)
            planes.append(
                PlaneFormat(name=plane.name, dim=plane.dim, dtype=dtype, offset=plane.offset, order=order, pack=pack)
            )
        formats.append(
            BlockFormat(
                block_size=span.block_size,
                num_heads=span.num_heads,
                block_bytes=span.block_bytes,
                layer_bytes=span.layer_bytes,
                planes=tuple(planes),
                layers=item.group.layers,
            )
        )
    return tuple(formats)
