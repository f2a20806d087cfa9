"""From planned byte geometry to the formats that kernels read."""

from __future__ import annotations

import torch

from kvloom.core.sizes import MemoryPlan
from kvloom.kernels.ops import BlockFormat, KernelBackend, PlaneFormat


def block_formats(plan: MemoryPlan, backend: KernelBackend) -> tuple[BlockFormat, ...]:
    """One format per layer group; each plane's inner layout is the backend's choice."""
    formats: list[BlockFormat] = []
    for span in plan.spans:
        planes: list[PlaneFormat] = []
        for plane in span.planes:
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
            )
        )
    return tuple(formats)
