"""A small store of its own, outside any engine: for the self-check at load and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvloom.attention.batch import KVStore
from kvloom.attention.formats import block_formats
from kvloom.core.layout import KVLayout
from kvloom.core.sizes import MemoryPlan, choose_slab_bytes, span_geometry
from kvloom.core.storage import storage_groups
from kvloom.kernels.ops import KernelBackend


def scratch_store(
    layout: KVLayout,
    backend: KernelBackend,
    *,
    num_spans: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KVStore, list[list[int]]]:
    """A store with ``num_spans[g]`` spans for group g, and each group's span offsets in order.

    The arena starts poisoned with NaN: a kernel that reads what was never written shows at once.
    """
    codec = str(dtype).removeprefix("torch.")
    codecs = {plane.name: codec for group in layout.groups for plane in group.planes}
    spans = tuple(span_geometry(group, block_size, codecs) for group in layout.groups)
    offsets: list[list[int]] = []
    end = 0
    for span, count in zip(spans, num_spans, strict=True):
        offsets.append([end + i * span.span_bytes for i in range(count)])
        end += count * span.span_bytes
    plan = MemoryPlan(
        layout=layout,
        spans=spans,
        storage=storage_groups(layout, block_size, None),
        slab_bytes=choose_slab_bytes([span.span_bytes for span in spans]),
        num_slabs=0,
        reserve_slabs=0,
        max_model_len=block_size * max(num_spans),
        max_batch_tokens=block_size,
    )
    arena = torch.full((end,), 0xFF, dtype=torch.uint8, device=device)  # all ones is NaN in every float type
    store = KVStore(
        layout=layout, arena=arena, formats=block_formats(plan, backend), storage=plan.storage, backend=backend
    )
    return store, offsets
