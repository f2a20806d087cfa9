"""A model-free world for manager and scheduler: spans hold digests of the tokens before each row.

Row p of a span must hold the digest of tokens 0 … p; so a span shared wrongly, freed too early,
moved without its table, or copied badly shows as a wrong digest at the next read. The next token is
a function of the prefix alone: the cache-off answer is known without running anything. Rows of
encoded spans hold the same digests negated, made from the raw rows when the manager says so.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from kvloom.cache.manager import CacheManager
from kvloom.core.layout import LayerSpec, group_layers
from kvloom.core.request import SamplingParams
from kvloom.core.sequence import Sequence, SequenceStatus
from kvloom.core.sizes import MemoryPlan, plan_memory
from kvloom.core.storage import Encoding
from kvloom.engine.scheduler import Chunk, Scheduler

VOCAB = 3


def digest(tokens: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int32).tobytes()) + 1  # 0 marks an empty row


def next_token(tokens: np.ndarray) -> int:
    return digest(tokens) // 7 % VOCAB


def expected_output(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.array(tokens)))
    return tokens[len(prompt) :]


def plan_for(
    windows: list[int | None],
    *,
    block_size: int,
    num_slabs: int,
    max_model_len: int,
    max_batch_tokens: int,
    heads: list[int] | None = None,
    encoding: Encoding | None = None,
) -> MemoryPlan:
    """A plan over one layer per entry of ``windows``; at least ``num_slabs`` and what one sequence needs."""
    sizes = heads or [1] * len(windows)
    layout = group_layers(
        [LayerSpec.kv(num_heads=8 * h, k_dim=256, window=w) for w, h in zip(windows, sizes, strict=True)]
    )
    codecs = {"k": "float32", "v": "float32"}
    arguments = {
        "block_size": block_size,
        "codecs": codecs,
        "max_model_len": max_model_len,
        "max_batch_tokens": max_batch_tokens,
        "encoding": encoding,
    }
    probe = plan_memory(layout, budget_bytes=1 << 40, **arguments)  # type: ignore[arg-type]
    budget = max(num_slabs * probe.slab_bytes, probe.needed_bytes(max_model_len))
    return plan_memory(layout, budget_bytes=budget, **arguments)  # type: ignore[arg-type]


@dataclass
class World:
    plan: MemoryPlan
    prefix_cache: bool = True
    max_sequences: int = 4
    max_batch_tokens: int = 16
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    done: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    live: list[Sequence] = field(default_factory=list)
    order: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        self.manager = CacheManager(
            self.plan,
            namespace=b"world",
            prefix_cache=self.prefix_cache,
            copy=self._copy,
            on_free=lambda offset, size: self.rows.pop(offset, None),
        )
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            watermark=0.01,
        )

    def _copy(self, source: int, target: int, num_bytes: int) -> None:
        if source in self.rows:
            self.rows[target] = self.rows[source].copy()

    def add(
        self, prompt: list[int], max_tokens: int, *, n: int = 1, priority: int = 0, salt: bytes = b"", name: str = ""
    ) -> Sequence:
        self.order += 1
        sequence = Sequence(
            request_id=name or f"r{self.order}",
            index=0,
            prompt=np.array(prompt, dtype=np.int32),
            params=SamplingParams(n=n, max_tokens=max_tokens),
            priority=priority,
            order=self.order,
            salt=salt,
            seed=0,
            arrival_time=0.0,
            max_len=len(prompt) + max_tokens,
        )
        self.live.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.live.remove(sequence)

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.schedule()
        assert sum(chunk.count for chunk in chunks) <= self.max_batch_tokens
        assert len(self.scheduler.running) <= self.max_sequences
        self.manager.check()
        due = [self._due(chunk) for chunk in chunks]
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_computed
            if not chunk.samples:
                assert chunk.end % self.plan.block_size == 0
            self._write(chunk)
        # All rows are written and encoded before anything is read, as within a layer of a real step.
        for tasks in due:
            for raw, encoded in tasks:
                assert (self.rows[raw] > 0).all(), "a block is encoded before it is full"
                assert encoded not in self.rows, "a block is encoded twice, or over another"
                self.rows[encoded] = -self.rows[raw]
        for chunk in chunks:
            self._read(chunk)
        for chunk in chunks:
            sequence = chunk.sequence
            self.computed += chunk.count
            self.manager.commit(sequence.cache, sequence.token_ids, chunk.end)
            if chunk.start < sequence.num_prompt <= chunk.end and sequence.num_generated == 0:
                self.scheduler.note_prompt_computed(sequence)
        for chunk in chunks:
            if chunk.end == chunk.sequence.num_tokens:
                self._sample(chunk.sequence)
        self.manager.check()
        return chunks

    def _due(self, chunk: Chunk) -> list[tuple[int, int]]:
        """(raw offset, encoded offset) of the blocks that this chunk's pass encodes."""
        found = []
        cache = chunk.sequence.cache
        for group, item in enumerate(self.plan.storage):
            if item.encoded:
                assert item.twin is not None
                for block in self.manager.to_encode(cache, group, chunk.end):
                    found.append((int(cache.table(item.twin)[block]), int(cache.table(group)[block])))
        return found

    def _write(self, chunk: Chunk) -> None:
        size = self.plan.block_size
        for group in range(len(self.plan.layout.groups)):
            table = chunk.sequence.cache.table(group)
            for position in range(chunk.start, chunk.end):
                rows = self.rows.setdefault(int(table[position // size]), np.zeros(size, dtype=np.int64))
                rows[position % size] = digest(chunk.sequence.tokens[: position + 1])

    def _read(self, chunk: Chunk) -> None:
        """Every query of the chunk reads one row of every block it should, in the format it should."""
        size = self.plan.block_size
        cache = chunk.sequence.cache
        for group, item in enumerate(self.plan.storage[: len(self.plan.layout.groups)]):
            for query in range(chunk.start, chunk.end):
                low = 0 if item.window is None else max(0, query - item.window + 1)
                for block in range(low // size, query // size + 1):
                    position = min(query, (block + 1) * size - 1)
                    encoded = item.recents is not None and item.sinks <= block < query // size - item.recents
                    home = item.twin if encoded else group
                    assert home is not None
                    offset = int(cache.table(home)[block])
                    assert offset >= 0, f"position {position} is not held for the query at {query}"
                    expected = digest(chunk.sequence.tokens[: position + 1])
                    assert self.rows[offset][position % size] == (-expected if encoded else expected)

    def _sample(self, leader: Sequence) -> None:
        group = [leader]
        for index in range(1, 1 + leader.siblings):
            sibling = Sequence(
                request_id=leader.request_id,
                index=index,
                prompt=leader.tokens[: leader.num_prompt],
                params=leader.params,
                priority=leader.priority,
                order=leader.order,
                salt=leader.salt,
                seed=0,
                arrival_time=0.0,
                max_len=leader.max_len,
            )
            if self.scheduler.free_places > 0:
                sibling.cache = self.manager.fork(leader.cache)
            self.scheduler.start_forked(sibling)
            self.live.append(sibling)
            group.append(sibling)
        leader.siblings = 0
        token = next_token(leader.token_ids)
        for sequence in group:
            sequence.append(token)
            if sequence.num_tokens == sequence.max_len:
                self.done[sequence.request_id, sequence.index] = sequence.token_ids[sequence.num_prompt :].tolist()
                self.scheduler.finish(sequence)
                self.live.remove(sequence)

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            assert self.step(), "nothing advanced although there is work"
        raise AssertionError("the world did not come to rest")

    def at_rest(self) -> None:
        """Nothing is referenced, and every byte is either free or reusable."""
        state = self.manager.snapshot()
        assert state.used_bytes == 0 and state.token_bytes == 0
        assert state.cached_bytes + state.free_bytes + state.overhead_bytes == self.plan.arena_bytes
        self.manager.drop_cached()
        self.manager.check()
        assert self.manager.slabs.free_slabs == self.plan.num_slabs
        assert not self.rows
        assert all(sequence.status is SequenceStatus.FINISHED for sequence in self.live) or not self.live
