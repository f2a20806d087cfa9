"""A model on a paged cache without an engine: for the parity check, and for tests.

``PagedRunner`` steps arbitrary schedules of chunks over block tables with shuffled offsets. Spans
that a window has passed, or that were given back, are poisoned with NaN: reading one shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvloom.attention.batch import KVBatch
from kvloom.attention.scratch import scratch_store
from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import KernelBackend, QueryBatch, choose_backend

ABSENT = -1


@dataclass(slots=True)
class PagedSequence:
    """Tokens computed so far, and per group the arena offset of each block."""

    length: int = 0
    tables: list[list[int]] = field(default_factory=list)


class PagedRunner:
    """Steps sequences through ``model``, whose attention is kvloom's, on an arena of its own.

    ``max_tokens`` bounds the tokens of all sequences together, in every group; each sequence's last
    block counts in full.
    """

    def __init__(
        self,
        model: Any,
        layout: KVLayout,
        *,
        backend: KernelBackend | str = "reference",
        block_size: int = 16,
        max_tokens: int = 512,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        parameter = next(model.parameters())
        if isinstance(backend, str):
            backend = choose_backend(backend, parameter.device, deterministic=False, num_threads=1)
        self.model = model
        self.layout = layout
        self.block_size = block_size
        blocks = -(-max_tokens // block_size)
        self.store, self._free = scratch_store(
            layout,
            backend,
            num_spans=[blocks] * len(layout.groups),
            block_size=block_size,
            dtype=parameter.dtype if dtype is None else dtype,
            device=parameter.device,
        )
        self._random = random.Random(seed)
        for offsets in self._free:
            self._random.shuffle(offsets)
        self._shared: dict[int, int] = {}  # offset -> further owners
        self.sequences: dict[Hashable, PagedSequence] = {}

    @torch.inference_mode()
    def step(
        self, chunks: Mapping[Any, Sequence[int]], *, last_only: bool = False, rows: int | None = None
    ) -> dict[Any, torch.Tensor]:
        """Compute each named sequence's next tokens.

        Returns:
            Logits [n, vocab] of each chunk's last n tokens: all of them, ``rows`` at most, or the
            last one under ``last_only``.
        """
        device = self.store.arena.device
        batch = [self.sequences.setdefault(name, self._new()) for name in chunks]
        for sequence, chunk in zip(batch, chunks.values(), strict=True):
            self._make_room(sequence, len(chunk))
        width = max(len(sequence.tables[0]) for sequence in batch)
        tables = tuple(
            torch.tensor(
                [sequence.tables[group] + [ABSENT] * (width - len(sequence.tables[group])) for sequence in batch],
                dtype=torch.int64,
                device=device,
            )
            for group in range(len(self.layout.groups))
        )
        counts = [len(chunk) for chunk in chunks.values()]
        queries = QueryBatch.build(counts, [sequence.length for sequence in batch], device)
        ids = torch.tensor([token for chunk in chunks.values() for token in chunk], device=device)
        most = 1 if last_only else rows
        kept = [count if most is None else min(count, most) for count in counts]
        ends = torch.tensor(counts).cumsum(0).tolist()
        keep = torch.tensor([row for end, n in zip(ends, kept, strict=True) for row in range(end - n, end)])
        logits = self.model(
            input_ids=ids.unsqueeze(0),
            position_ids=queries.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep.to(device),
            kv=KVBatch(store=self.store, queries=queries, tables=tables),
        ).logits[0]
        for sequence, count in zip(batch, counts, strict=True):
            sequence.length += count
        return dict(zip(chunks, logits.split(kept), strict=True))

    def share(self, source: Hashable, target: Hashable, num_blocks: int) -> None:
        """Start ``target`` with the first ``num_blocks`` full blocks of ``source``: a prefix hit."""
        tables = [table[:num_blocks] for table in self.sequences[source].tables]
        assert num_blocks * self.block_size <= self.sequences[source].length
        for table in tables:
            for offset in table:
                self._shared[offset] = self._shared.get(offset, 0) + (offset != ABSENT)
        self.sequences[target] = PagedSequence(length=num_blocks * self.block_size, tables=[list(t) for t in tables])

    def drop(self, name: Hashable) -> None:
        """Give a sequence's blocks back, as preemption does."""
        for group, table in enumerate(self.sequences.pop(name).tables):
            for offset in table:
                self._release(group, offset)

    def held(self, name: Hashable) -> list[int]:
        """Blocks that a sequence holds, per group."""
        return [sum(offset != ABSENT for offset in table) for table in self.sequences[name].tables]

    def _new(self) -> PagedSequence:
        return PagedSequence(tables=[[] for _ in self.layout.groups])

    def _make_room(self, sequence: PagedSequence, count: int) -> None:
        for group, table in enumerate(sequence.tables):
            window = self.layout.groups[group].window
            if window is not None:
                # The chunk's first query still sees the block that holds its oldest key; older ones have passed.
                for block in range(max(0, sequence.length - window + 1) // self.block_size):
                    if table[block] != ABSENT:
                        self._release(group, table[block])
                        table[block] = ABSENT
            while len(table) * self.block_size < sequence.length + count:
                table.append(self._free[group].pop())

    def _release(self, group: int, offset: int) -> None:
        if offset == ABSENT:
            return
        if self._shared.get(offset):
            self._shared[offset] -= 1
            return
        span = self.store.formats[group].layer_bytes * self.layout.groups[group].num_layers
        self.store.arena[offset : offset + span] = 0xFF  # NaN in every float type
        self._free[group].insert(self._random.randrange(len(self._free[group]) + 1), offset)
