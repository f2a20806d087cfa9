"""Attention over a group whose blocks are encoded: encode what is due, attend each part, merge.

With s sink and r recent blocks, a query in block b reads blocks before s raw, others before b - r
encoded, and b - r … b raw, whatever the chunk it is computed in (``core/storage.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvloom.attention.batch import EncodeTask, KVBatch, KVStore
from kvloom.codecs.base import count_non_finite
from kvloom.core.storage import StorageGroup
from kvloom.kernels.ops import BlockFormat, KeyRange, merge_partials
from kvloom.kernels.reference import ReferenceBackend

NON_FINITE = "encoded: values that are not finite stored as 0"

# attend(format, layer offset, tables, keys) -> (output [T, H, D] float32, log-sum-exp [T, H] float32)
AttendPart = Callable[[BlockFormat, int, torch.Tensor, KeyRange], tuple[torch.Tensor, torch.Tensor | None]]


def encode_due(kv: KVBatch, raw: StorageGroup, index: int) -> None:
    """Encode what the pass is due to, in layer ``index`` of the raw storage group ``raw``; its rows are written."""
    assert raw.twin is not None
    task = kv.encode.get(raw.twin)
    if task is not None:
        encode_blocks(kv.store, kv.store.formats[raw.home], kv.store.formats[raw.twin], index, task)


def encode_blocks(store: KVStore, raw: BlockFormat, encoded: BlockFormat, index: int, task: EncodeTask) -> None:
    """Encode full blocks of layer ``index`` from their raw copies, as stored: a pure function of those."""
    arena, size = store.arena, raw.block_size
    within = torch.arange(size, device=arena.device).repeat(len(task.raw_offsets))
    from_offsets = (task.raw_offsets + index * raw.layer_bytes).repeat_interleave(size)
    to_offsets = task.encoded_offsets + index * encoded.layer_bytes
    for source, target in zip(raw.planes, encoded.planes, strict=True):
        rows = arena.view(source.dtype)[
            ReferenceBackend.element_places(source, raw, from_offsets, within, arena.device)
        ]  # [N * size, heads, dim]
        if target.codec is None:
            places = ReferenceBackend.element_places(
                target, encoded, to_offsets.repeat_interleave(size), within, arena.device
            )
            arena.view(target.dtype)[places] = rows
            continue
        blocks = rows.reshape(-1, size, *rows.shape[1:]).transpose(1, 2)  # [N, heads, size, dim]
        bad = count_non_finite(blocks)
        if bad:
            store.faults[NON_FINITE] += bad
        data = target.codec.encode(blocks, layer=raw.layers[index], first_position=task.first_positions)
        arena[ReferenceBackend.encoded_index(target, encoded, to_offsets)] = data


def attend_parts(
    kv: KVBatch, raw: StorageGroup, index: int, attend: AttendPart, sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Attention over raw sinks, encoded blocks and raw recents: [T, H, D] in ``dtype``.

    A part that no query of the pass reads is left out: merging it would add exact zeros. Everything
    else is computed and merged alike whatever the pass holds.
    """
    assert raw.twin is not None and raw.recents is not None
    raw_format, encoded_format = kv.store.formats[raw.home], kv.store.formats[raw.twin]
    min_lag = raw.recents + 1
    runs = []
    if raw.sinks and kv.last_block >= min_lag:
        runs.append((raw_format, raw.home, KeyRange(end_block=raw.sinks, min_lag=min_lag)))
    if kv.last_block >= raw.sinks + min_lag:
        runs.append((encoded_format, raw.twin, KeyRange(first_block=raw.sinks, min_lag=min_lag)))
    runs.append((raw_format, raw.home, KeyRange(max_lag=raw.recents)))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for fmt, group, keys in runs:
        out, lse = attend(fmt, index * fmt.layer_bytes, kv.tables[group], keys)
        assert lse is not None
        parts.append((out, lse))
    return merge_partials(parts, sinks, dtype)
