"""Attention over a group whose blocks are encoded: encode what is due, attend each part, merge.

With s sink and r recent blocks, a query in block b reads blocks before s raw, others before b - r
encoded, and b - r … b raw, whatever the chunk it is computed in (``core/storage.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvloom.attention.batch import KVBatch, KVStore
from kvloom.core.storage import StorageGroup
from kvloom.kernels.ops import BlockFormat, KeyRange, merge_partials

NON_FINITE = "encoded: values that are not finite stored as 0"

# attend(format, layer offset, tables, keys) -> (output [T, H, D] float32, log-sum-exp [T, H] float32)
AttendPart = Callable[[BlockFormat, int, torch.Tensor, KeyRange], tuple[torch.Tensor, torch.Tensor | None]]


def encode_due(kv: KVBatch, raw: StorageGroup, index: int) -> None:
    """Encode what the pass is due to, in layer ``index`` of the raw storage group ``raw``; its rows are written."""
    assert raw.twin is not None
    task, store = kv.encode.get(raw.twin), kv.store
    if task is None:
        return
    bad = store.backend.encode(
        store.arena, store.formats[raw.home], store.formats[raw.twin], index,
        task.raw_offsets, task.encoded_offsets, task.first_positions,
    )  # fmt: skip
    count_faults(store, bad)


def count_faults(store: KVStore, not_finite: int) -> None:
    """Remember that encoding hid so many numbers that were not finite."""
    if not_finite:
        store.faults[NON_FINITE] += not_finite


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
