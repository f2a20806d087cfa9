"""The runner: turns a step's chunks into one forward pass and returns the logits asked for.

Token values live in the sequences' buffers, which only this file reads during a step; the
scheduler plans from counts.

In deterministic mode every forward pass through transformers' code has exactly ``TILE`` rows
(padded; more rows, more passes), so that each matrix product has the same shape whatever the batch
holds. A row's result then depends on its own token and keys only, as far as a product of fixed shape
treats all its rows alike; ``noise.py`` checks that at load, bit by bit, and refuses to start where it
does not hold. A native step has that property in any shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.attention.batch import EncodeTask, KVBatch, KVStore
from kvloom.cache.manager import ABSENT
from kvloom.engine.scheduler import Chunk
from kvloom.kernels.ops import QueryBatch

TILE = 16


@dataclass(frozen=True, slots=True)
class StepLogits:
    """``values`` [N, vocab] in the model's dtype; ``best``: see ``models.native.model.StepOutput``, None if unknown."""

    values: torch.Tensor
    best: tuple[torch.Tensor, torch.Tensor] | None = None


class ModelRunner:
    """Runs ``model`` over the paged cache in ``store``.

    ``model`` takes ``input_ids`` and ``position_ids`` [1, T] int64, ``logits_to_keep`` (row indices)
    and ``kv``, and returns an object with ``logits`` [1, N, vocab].
    """

    def __init__(self, model: torch.nn.Module, store: KVStore, *, deterministic: bool) -> None:
        self._model = model
        self._store = store
        self._device = store.arena.device
        # Where a row's result depends on its own token and keys only, tiles would change nothing.
        self._tiles = deterministic and not getattr(model, "batch_invariant", False)
        self._encoded = [group for group, item in enumerate(store.storage) if item.encoded]

    @torch.inference_mode()
    def forward(self, chunks: Seq[Chunk], rows: np.ndarray) -> StepLogits:
        """Logits [len(rows), vocab] of the packed rows ``rows`` (ascending).

        The chunks' tokens are packed in order; their keys and values are written on the way.
        """
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
        firsts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        ids = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks]).astype(np.int64)
        tables = self._tables(chunks)
        if not self._tiles:
            queries = QueryBatch.build(counts, firsts, self._device)
            keep = torch.from_numpy(rows).to(self._device)
            tasks = self._tasks(chunks, self._done(chunks), firsts + counts)
            return self._call(ids, queries.positions, queries, tables, keep, tasks)
        return StepLogits(self._forward_tiles(chunks, ids, counts, firsts, tables, rows))

    def recycle(self) -> None:
        """The logits of the last ``forward`` are not read any more."""
        recycle = getattr(self._model, "recycle", None)
        if recycle is not None:
            recycle()

    def _done(self, chunks: Seq[Chunk]) -> dict[int, list[int]]:
        """Per encoded group, how many blocks each chunk's sequence has encoded."""
        return {group: [chunk.sequence.cache.num_encoded[group] for chunk in chunks] for group in self._encoded}

    def _tasks(self, chunks: Seq[Chunk], done: dict[int, list[int]], ends: np.ndarray) -> dict[int, EncodeTask]:
        """What a pass up to ``ends`` encodes, per encoded group; ``done`` is counted up to it."""
        tasks: dict[int, EncodeTask] = {}
        for group in self._encoded:
            item = self._store.storage[group]
            assert item.twin is not None
            found: list[np.ndarray] = []
            for row, chunk in enumerate(chunks):
                cache, end = chunk.sequence.cache, item.extent(int(ends[row]))
                blocks = np.arange(max(item.sinks, done[group][row]), end, dtype=np.int64)
                done[group][row] = max(done[group][row], end)
                if len(blocks):
                    places = (cache.table(item.twin)[blocks], cache.table(group)[blocks], blocks * item.block_size)
                    found.append(np.stack(places))
            if found:
                raw, encoded, first = torch.from_numpy(np.concatenate(found, axis=1)).to(self._device)
                tasks[group] = EncodeTask(raw_offsets=raw, encoded_offsets=encoded, first_positions=first)
        return tasks

    def _tables(self, chunks: Seq[Chunk]) -> tuple[torch.Tensor, ...]:
        """Per group, int64 [S, max_blocks]."""
        tables: list[torch.Tensor] = []
        for group in range(len(self._store.formats)):
            rows = [chunk.sequence.cache.table(group) for chunk in chunks]
            table = np.full((len(rows), max(len(row) for row in rows)), ABSENT, dtype=np.int64)
            for index, row in enumerate(rows):
                table[index, : len(row)] = row
            tables.append(torch.from_numpy(table).to(self._device))
        return tuple(tables)

    def _call(
        self,
        ids: np.ndarray,
        positions: torch.Tensor,
        queries: QueryBatch,
        tables: tuple[torch.Tensor, ...],
        keep: torch.Tensor,
        tasks: dict[int, EncodeTask],
    ) -> StepLogits:
        last = int(np.max(queries.first_position_host + np.diff(queries.query_start_host), initial=1)) - 1
        output = self._model(
            input_ids=torch.from_numpy(ids).to(self._device).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            kv=KVBatch(
                store=self._store,
                queries=queries,
                tables=tables,
                num_padding=len(ids) - queries.num_tokens,
                encode=tasks,
                last_block=last // self._store.formats[0].block_size,
            ),
        )
        return StepLogits(output.logits[0], getattr(output, "best", None))

    def _forward_tiles(
        self,
        chunks: Seq[Chunk],
        ids: np.ndarray,
        counts: np.ndarray,
        firsts: np.ndarray,
        tables: tuple[torch.Tensor, ...],
        rows: np.ndarray,
    ) -> torch.Tensor:
        starts = np.concatenate([[0], np.cumsum(counts)])
        every_row = torch.arange(TILE, device=self._device)
        parts: list[torch.Tensor] = []
        done = self._done(chunks)
        for low in range(0, len(ids), TILE):
            high = min(low + TILE, len(ids))
            # The parts of chunks that fall into rows low … high of the packed tokens.
            begin, end = np.maximum(starts[:-1], low), np.minimum(starts[1:], high)
            inside = np.flatnonzero(begin < end)
            queries = QueryBatch.build(
                (end - begin)[inside], firsts[inside] + (begin - starts[:-1])[inside], self._device
            )
            padded = np.zeros(TILE, dtype=np.int64)
            padded[: high - low] = ids[low:high]
            positions = torch.zeros(TILE, dtype=torch.int64, device=self._device)
            positions[: high - low] = queries.positions
            select = torch.from_numpy(inside).to(self._device)
            wanted = rows[(rows >= low) & (rows < high)] - low
            # Logits of all rows or, where none is wanted, of one: the product's shape never depends on how many are.
            keep = every_row if len(wanted) else every_row[:1]
            ends = firsts + np.maximum(end - starts[:-1], 0)  # chunks that begin later have nothing due yet
            tasks = self._tasks(chunks, done, ends)
            chosen = tuple(table[select] for table in tables)
            logits = self._call(padded, positions, queries, chosen, keep, tasks).values
            if len(wanted):
                parts.append(logits[torch.from_numpy(wanted).to(self._device)])
        return torch.cat(parts) if parts else torch.empty(0, 0, device=self._device)
