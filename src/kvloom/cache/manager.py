"""The cache manager: gives sequences their spans, shares equal prefixes, evicts, accounts.

Who owns a block of a sequence, from the sequence's start to its end::

    |<---- shared or shareable, sealed ---->|<-- private, open -->|
    0                                  published                computed        in tokens

Only committed tokens are published. No writable span has two owners: a fork copies the open span
and shares the rest, so there is no copy-on-write fault to handle.

A layer group whose blocks are encoded has two storage groups (``core/storage.py``), and each of its
blocks is in one of them: what a pass is to encode has its spans in both from ``reserve`` on, and
loses the raw one at ``commit``. So sealing needs no memory beyond what the pass has reserved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvloom.cache.eviction import EvictionQueue
from kvloom.cache.keys import next_key, root_key
from kvloom.cache.prefix import PrefixIndex
from kvloom.cache.slabs import SlabAllocator
from kvloom.cache.span import Span, SpanState
from kvloom.core.sizes import MemoryPlan
from kvloom.core.stats import CacheSnapshot
from kvloom.core.storage import StorageGroup

SLABS_CONSIDERED = 32  # oldest spans whose slabs are weighed when a format starves
ABSENT = -1  # table entry of a block that the sequence does not hold


class SequenceCache:
    """The spans of one sequence, per group, in block order, and the same as a table of offsets.

    ``num_computed`` tokens are committed; ``keys[i]`` is block i's key, computed when first needed.
    ``num_encoded[g]`` blocks are encoded in the encoded storage group g, its sinks counted, which it
    lacks; 0 for others.
    """

    __slots__ = ("keys", "num_computed", "num_encoded", "num_published", "root", "spans", "tables")

    def __init__(self, num_groups: int, root: bytes) -> None:
        self.root = root
        self.keys: list[bytes] = []
        self.spans: list[list[Span | None]] = [[] for _ in range(num_groups)]
        self.tables: list[np.ndarray] = [np.full(8, ABSENT, dtype=np.int64) for _ in range(num_groups)]
        self.num_computed = 0
        self.num_encoded = [0] * num_groups  # blocks
        self.num_published = 0  # blocks

    def table(self, group: int) -> np.ndarray:
        """int64 [blocks]: arena offsets of the group's spans, ABSENT where none is held."""
        return self.tables[group][: len(self.spans[group])]

    def append(self, group: int, span: Span | None) -> None:
        index = len(self.spans[group])
        if index == len(self.tables[group]):
            grown = np.full(2 * index, ABSENT, dtype=np.int64)
            grown[:index] = self.tables[group]
            self.tables[group] = grown
        self.spans[group].append(span)
        self.tables[group][index] = ABSENT if span is None else span.offset

    def replace(self, group: int, index: int, span: Span | None) -> None:
        self.spans[group][index] = span
        self.tables[group][index] = ABSENT if span is None else span.offset


@dataclass(frozen=True, slots=True)
class Hit:
    """Outcome of a prefix lookup, in tokens. ``reason`` says why it was no longer (None: it was)."""

    tokens: int
    queried: int
    reason: str | None


class CacheManager:
    """See the module.

    Args:
        plan: sizes; the allocator is cut to it.
        namespace: digest of all that cached bytes depend on besides tokens.
        prefix_cache: False publishes nothing and looks nothing up.
        copy: ``copy(source, target, num_bytes)`` copies arena bytes (forks, moves).
        on_free: ``on_free(offset, num_bytes)`` is told of freed bytes (debug poison), or None.
        on_event: ``on_event("stored" | "removed", span)`` follows the prefix index, or None.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        namespace: bytes,
        prefix_cache: bool,
        copy: Callable[[int, int, int], None],
        on_free: Callable[[int, int], None] | None = None,
        on_event: Callable[[str, Span], None] | None = None,
    ) -> None:
        self.plan = plan
        self.block_size = plan.block_size
        self.prefix_cache = prefix_cache
        self.num_evicted = 0
        self.num_moved = 0
        self._namespace = namespace
        self._copy = copy
        self._on_free = on_free
        self._on_event = on_event
        self._groups = plan.storage
        self._run_bytes = [span.span_bytes for span in plan.spans]
        self.slabs = SlabAllocator(
            self._run_bytes,
            slab_bytes=plan.slab_bytes,
            num_slabs=plan.num_slabs,
            reserve_slabs=plan.reserve_slabs,
        )
        self.index = PrefixIndex(self._groups)
        self.queue = EvictionQueue(len(self._groups))
        self._live: dict[int, SequenceCache] = {}
        self._span_at: dict[int, Span] = {}
        self._empty_rows = [0] * len(self._groups)  # rows of used spans that hold no token

    # -- a sequence's life ---------------------------------------------------------------------

    def open(self, salt: bytes) -> SequenceCache:
        """A cache for a new sequence; it holds nothing yet."""
        cache = SequenceCache(len(self._groups), root_key(self._namespace, salt))
        self._live[id(cache)] = cache
        return cache

    def attach_prefix(self, cache: SequenceCache, tokens: np.ndarray) -> Hit:
        """Pin the longest known prefix of ``tokens`` beyond what the sequence has computed.

        At most ⌊(len - 1) / block_size⌋ blocks, so that the last token is always computed. Call it
        only on a block boundary; looking up and pinning come before any allocation.
        """
        assert cache.num_computed % self.block_size == 0
        start = cache.num_computed // self.block_size
        limit = (len(tokens) - 1) // self.block_size
        queried = len(tokens) - cache.num_computed
        if not self.prefix_cache:
            return Hit(0, queried, "disabled")
        if limit <= start:
            return Hit(0, queried, "shorter than a block" if start == 0 else None)
        keys = self.keys(cache, tokens, limit)
        found = self.index.longest(keys[:limit], start, cache.num_encoded)
        if found > start:
            self._take_hit(cache, keys, start, found)
        cache.num_computed = found * self.block_size
        cache.num_published = max(cache.num_published, found)
        reason = self.index.miss_reason(keys, found) if found < limit else None
        return Hit((found - start) * self.block_size, queried, reason)

    def _take_hit(self, cache: SequenceCache, keys: list[bytes], start: int, found: int) -> None:
        """Pin what a query after ``found`` blocks reads of them, and let go what it no longer does."""
        for group, item in enumerate(self._groups):
            if item.encoded:
                continue  # with its raw twin, below
            needed = self.index.first_needed(group, found)
            if item.twin is not None:
                held = cache.num_encoded[item.twin]
                needed = self.index.num_encoded(group, keys, found, held)
                for block in range(held, needed):
                    self._append_known(cache, item.twin, keys[block] if block >= item.sinks else None)
                cache.num_encoded[item.twin] = needed
            self._drop_before(cache, group, needed)
            for block in range(start, found):
                self._append_known(cache, group, keys[block] if block >= needed or block < item.sinks else None)

    def _append_known(self, cache: SequenceCache, group: int, key: bytes | None) -> None:
        span = None
        if key is not None:
            span = self.index.get(group, key)
            assert span is not None, "the lookup found it"
            self._pin(span)
        cache.append(group, span)

    def keys(self, cache: SequenceCache, tokens: np.ndarray, num_blocks: int) -> list[bytes]:
        """The keys of at least the first ``num_blocks`` blocks of ``tokens``."""
        size = self.block_size
        while len(cache.keys) < num_blocks:
            block = len(cache.keys)
            parent = cache.keys[-1] if cache.keys else cache.root
            cache.keys.append(next_key(parent, tokens[block * size : (block + 1) * size]))
        return cache.keys

    def reserve(self, cache: SequenceCache, num_tokens: int) -> bool:
        """Make every group hold spans for positions up to ``num_tokens``; all of them or none.

        Evicts cached spans as needed. False when even that does not suffice.
        """
        before = [len(spans) for spans in cache.spans]
        for group, item in enumerate(self._groups):
            for block in range(len(cache.spans[group]), item.extent(num_tokens)):
                span = None
                if not item.encoded or block >= item.sinks:
                    span = self._new_span(group)
                    if span is None:
                        for undo, length in enumerate(before):
                            self._shorten(cache, undo, length)
                        return False
                cache.append(group, span)
        return True

    def to_encode(self, cache: SequenceCache, group: int, num_tokens: int) -> range:
        """Blocks that the pass up to ``num_tokens`` encodes into the encoded storage ``group``."""
        item = self._groups[group]
        return range(max(item.sinks, cache.num_encoded[group]), item.extent(num_tokens))

    def commit(self, cache: SequenceCache, tokens: np.ndarray, num_computed: int) -> None:
        """Positions before ``num_computed`` are written and their tokens final: publish, pass windows."""
        size = self.block_size
        for group, item in enumerate(self._groups):
            first_block, last_block = cache.num_computed // size, -(-num_computed // size)
            if item.encoded:
                blocks = self.to_encode(cache, group, num_computed)
                first_block, last_block = blocks.start, blocks.stop
            for block in range(first_block, last_block):
                span = cache.spans[group][block]
                if span is not None and span.state is SpanState.OPEN:
                    filled = min(size, num_computed - block * size)
                    self._empty_rows[group] -= filled - span.num_tokens
                    span.num_tokens = filled
                    if filled == size:
                        span.state = SpanState.FULL
        first_encoded = list(cache.num_encoded)
        self.mark_computed(cache, num_computed)
        self._publish(cache, tokens, first_encoded)
        for group, item in enumerate(self._groups):
            if not item.grows:
                self._drop_before(cache, group, item.first_kept(num_computed))

    def mark_computed(self, cache: SequenceCache, num_computed: int) -> None:
        """Positions before ``num_computed`` are written, and blocks encoded as far as their queries read them so."""
        cache.num_computed = num_computed
        for group, item in enumerate(self._groups):
            if item.encoded:
                cache.num_encoded[group] = max(cache.num_encoded[group], item.extent(num_computed))

    def fork(self, parent: SequenceCache) -> SequenceCache | None:
        """A second sequence with the same committed tokens: full spans shared, the open one copied.

        None when memory for the open span cannot be had; nothing is changed then.
        """
        child = SequenceCache(len(self._groups), parent.root)
        child.keys = list(parent.keys)
        copied: list[tuple[Span, Span]] = []
        for spans in parent.spans:
            for span in spans:
                if span is not None and span.state is SpanState.OPEN:
                    fresh = self._new_span(span.group)
                    if fresh is None:
                        for _, undo in copied:
                            self._unpin(undo)
                        return None
                    copied.append((span, fresh))
        fresh_of = {id(span): fresh for span, fresh in copied}
        for group, spans in enumerate(parent.spans):
            for span in spans:
                if span is not None and id(span) in fresh_of:
                    fresh = fresh_of[id(span)]
                    self._copy(span.offset, fresh.offset, self._run_bytes[group])
                    fresh.num_tokens = span.num_tokens
                    self._empty_rows[group] -= span.num_tokens
                    child.append(group, fresh)
                    continue
                if span is not None:
                    self._pin(span)
                child.append(group, span)
        child.num_computed = parent.num_computed
        child.num_encoded = list(parent.num_encoded)
        child.num_published = parent.num_published
        self._live[id(child)] = child
        return child

    def truncate(self, cache: SequenceCache, num_tokens: int) -> None:
        """Drop spans reserved beyond ``num_tokens``: undoes what was planned but not committed.

        ``num_tokens`` must not be below what is committed; committed tokens may be shared already.
        """
        assert num_tokens >= cache.num_computed
        for group, item in enumerate(self._groups):
            # A hit may have brought one more encoded block than its tokens call for.
            self._shorten(cache, group, max(cache.num_encoded[group], item.extent(num_tokens)))

    def _shorten(self, cache: SequenceCache, group: int, length: int) -> None:
        """Drop the group's entries from block ``length`` on."""
        spans = cache.spans[group]
        while len(spans) > length:
            span = spans[-1]
            cache.replace(group, len(spans) - 1, None)
            spans.pop()
            if span is not None:
                self._unpin(span)

    def release(self, cache: SequenceCache) -> None:
        """The sequence is over or preempted: all its references go; published spans stay cached."""
        for group, spans in enumerate(cache.spans):
            # Children before parents; groups that pass blocks oldest first, but sinks, which every hit needs, last.
            item = self._groups[group]
            order = spans[::-1] if item.grows else spans[item.sinks :] + spans[: item.sinks][::-1]
            for span in order:
                if span is not None:
                    self._unpin(span)
            spans.clear()
        cache.num_computed = 0
        cache.num_encoded = [0] * len(self._groups)
        cache.num_published = 0
        self._live.pop(id(cache), None)

    # -- sizes ----------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that admission could use at once: free runs and slabs, and all cached spans."""
        slabs = max(0, self.slabs.free_slabs - self.slabs.reserve_slabs) * self.slabs.slab_bytes
        runs = sum(
            (self.slabs.free_runs(group) + self.queue.count(group)) * run for group, run in enumerate(self._run_bytes)
        )
        return slabs + runs

    @property
    def usable_bytes(self) -> int:
        return self.plan.usable_slabs * self.plan.slab_bytes

    def bytes_for(self, num_computed: int, num_tokens: int, chunk_tokens: int) -> int:
        """Most bytes that a sequence takes on its way from one length to the other in such chunks."""
        return sum(
            item.most_new_blocks(num_computed, num_tokens, chunk_tokens) * run
            for item, run in zip(self._groups, self._run_bytes, strict=True)
        )

    def snapshot(self) -> CacheSnapshot:
        """Where every byte of the arena is now."""
        slabs = self.slabs
        used = [slabs.used_runs[group] - self.queue.count(group) for group in range(len(self._groups))]
        free_runs = sum(slabs.free_runs(group) * run for group, run in enumerate(self._run_bytes))
        remainders = sum(
            slabs.slabs_of[group] * (slabs.slab_bytes - slabs.runs_per_slab[group] * run)
            for group, run in enumerate(self._run_bytes)
        )
        tokens = sum(
            (used[group] * self.block_size - self._empty_rows[group]) * self.plan.spans[group].token_bytes
            for group in range(len(self._groups))
        )
        return CacheSnapshot(
            arena_bytes=self.plan.arena_bytes,
            used_bytes=sum(count * run for count, run in zip(used, self._run_bytes, strict=True)),
            cached_bytes=sum(self.queue.count(group) * run for group, run in enumerate(self._run_bytes)),
            free_bytes=slabs.free_slabs * slabs.slab_bytes + free_runs,
            overhead_bytes=remainders,
            stranded_bytes=free_runs if len(self._groups) > 1 else 0,
            token_bytes=tokens,
            reserve_bytes=slabs.reserve_slabs * slabs.slab_bytes,
            used_spans=sum(used),
            cached_spans=sum(self.queue.count(group) for group in range(len(self._groups))),
            block_bytes=sum(self._run_bytes[: len(self.plan.layout.groups)]),  # the raw ones come first
            block_size=self.block_size,
        )

    def check(self) -> None:
        """Assert every invariant: counts balance, references equal owners, keys equal index entries."""
        self.slabs.check()
        owners: dict[int, int] = {}
        for cache in self._live.values():
            for group, spans in enumerate(cache.spans):
                table = cache.table(group)
                for block, span in enumerate(spans):
                    assert int(table[block]) == (ABSENT if span is None else span.offset)
                    if span is not None:
                        owners[id(span)] = owners.get(id(span), 0) + 1
            for group, item in enumerate(self._groups):
                if item.encoded and item.twin is not None:
                    self._check_formats(cache, item, group, item.twin)
        empty = [0] * len(self._groups)
        for offset, span in self._span_at.items():
            assert span.offset == offset
            assert self.slabs.format_of(self.slabs.slab_of(offset)) == span.group
            assert span.refs == owners.get(id(span), 0)
            assert span.refs > 0 or (span.key is not None and span in self.queue)
            assert span.refs == 0 or span not in self.queue
            if span.key is not None:
                assert span.state is SpanState.SEALED and self.index.get(span.group, span.key) is span
            assert span.refs <= 1 or span.state is not SpanState.OPEN
            if span.refs:
                empty[span.group] += self.block_size - span.num_tokens
        assert empty == self._empty_rows
        assert len(self._span_at) == sum(self.slabs.used_runs)
        state = self.snapshot()
        assert state.used_bytes + state.cached_bytes + state.free_bytes + state.overhead_bytes == self.plan.arena_bytes

    def _check_formats(self, cache: SequenceCache, item: StorageGroup, group: int, raw: int) -> None:
        """Each committed block is kept in one format, sinks raw; a block to be encoded has its span already."""
        encoded = cache.num_encoded[group]
        assert len(cache.spans[group]) >= encoded
        for block in range(-(-cache.num_computed // self.block_size)):
            is_encoded = item.sinks <= block < encoded
            assert (cache.spans[raw][block] is None) == is_encoded
            if block < len(cache.spans[group]):
                span = cache.spans[group][block]
                assert (span is None) == (block < item.sinks)
                assert span is None or not is_encoded or span.state is SpanState.SEALED

    # -- spans ------------------------------------------------------------------------------------

    def _publish(self, cache: SequenceCache, tokens: np.ndarray, first_encoded: list[int]) -> None:
        """Seal what the commit filled, or encoded from block ``first_encoded[group]`` on, and make it known."""
        full = cache.num_computed // self.block_size
        fresh = [
            range(first_encoded[group], cache.num_encoded[group]) if item.encoded else range(cache.num_published, full)
            for group, item in enumerate(self._groups)
        ]
        cache.num_published = full
        if not self.prefix_cache:
            for spans, blocks in zip(cache.spans, fresh, strict=True):
                for block in blocks:
                    span = spans[block]
                    if span is not None:
                        span.state = SpanState.SEALED
            return
        keys = self.keys(cache, tokens, full)
        for group, blocks in enumerate(fresh):
            for block in blocks:
                span = cache.spans[group][block]
                if span is None or span.key is not None:
                    continue
                known = self.index.get(group, keys[block])
                if known is not None:
                    # Somebody computed the same block meanwhile: keep one copy.
                    self._pin(known)
                    cache.replace(group, block, known)
                    self._unpin(span)
                    continue
                span.state = SpanState.SEALED
                span.key = keys[block]
                self.index.add(span)
                if self._on_event is not None:
                    self._on_event("stored", span)

    def _drop_before(self, cache: SequenceCache, group: int, block: int) -> None:
        """Every block of ``group`` before ``block``, sinks excepted, is no longer read."""
        spans = cache.spans[group]
        index = min(block, len(spans)) - 1
        passed: list[Span] = []
        while index >= self._groups[group].sinks:
            span = spans[index]
            if span is None:
                break  # everything older went before
            cache.replace(group, index, None)
            passed.append(span)
            index -= 1
        for span in reversed(passed):
            self._unpin(span)

    def _new_span(self, group: int) -> Span | None:
        offset = self.slabs.allocate(group)
        while offset is None:
            if not self._make_room(group):
                return None
            offset = self.slabs.allocate(group)
        span = Span(group, offset)
        self._span_at[offset] = span
        self._empty_rows[group] += self.block_size
        return span

    def _pin(self, span: Span) -> None:
        if span.refs == 0:
            self.queue.remove(span)
            self._empty_rows[span.group] += self.block_size - span.num_tokens
        span.refs += 1

    def _unpin(self, span: Span) -> None:
        assert span.refs > 0
        span.refs -= 1
        if span.refs:
            return
        self._empty_rows[span.group] -= self.block_size - span.num_tokens
        if span.key is not None:
            self.queue.push(span)
        else:
            self._free(span)

    def _free(self, span: Span) -> None:
        del self._span_at[span.offset]
        self.slabs.free(span.offset)
        if self._on_free is not None:
            self._on_free(span.offset, self._run_bytes[span.group])

    def _evict(self, span: Span) -> None:
        self.queue.remove(span)
        self.index.remove(span)
        if self._on_event is not None:
            self._on_event("removed", span)
        self._free(span)
        self.num_evicted += 1

    def drop_cached(self) -> int:
        """Evict every cached span; returns how many. Live sequences keep theirs."""
        count = 0
        for group in range(len(self._groups)):
            while (span := self.queue.oldest(group)) is not None:
                self._evict(span)
                count += 1
        return count

    # -- making room ------------------------------------------------------------------------------

    def _make_room(self, group: int) -> bool:
        """Free a run for ``group``: evict its own oldest span, or empty another group's slab."""
        own = self.queue.oldest(group)
        other = self.queue.oldest_elsewhere(group)
        if own is not None and (other is None or own.stamp < other.stamp):
            self._evict(own)
            return True
        slab = self._cheapest_slab(group, thorough=own is None)
        if slab is not None:
            self._empty_slab(slab)
            return True
        if own is not None:
            self._evict(own)
            return True
        if other is not None:
            # Cached spans stand where a slab's live ones would have to go; one fewer, and try again.
            self._evict(other)
            return True
        return False

    def _cheapest_slab(self, group: int, *, thorough: bool) -> int | None:
        """Another group's slab that can be emptied: fewest moves first, then least recently used.

        Looks at the slabs of each group's oldest cached spans; ``thorough`` looks at all.
        """
        best: tuple[int, int] | None = None
        best_slab: int | None = None
        for other in range(len(self._groups)):
            if other == group:
                continue
            oldest = dict.fromkeys(
                self.slabs.slab_of(span.offset) for span in self.queue.first(other, SLABS_CONSIDERED)
            )
            for slab in self.slabs.slabs(other) if thorough else oldest:
                spans = [self._span_at[offset] for offset in self.slabs.used_offsets(slab)]
                moves = sum(span.refs > 0 for span in spans)
                free_here = self.slabs.runs_per_slab[other] - len(spans)
                if moves > self.slabs.free_runs(other) - free_here:
                    continue  # its live spans would find no room outside it
                cost = (moves, max((span.stamp for span in spans if span.refs == 0), default=0))
                if best is None or cost < best:
                    best, best_slab = cost, slab
        return best_slab

    def _empty_slab(self, slab: int) -> None:
        """Evict the slab's cached spans and move its live ones to other slabs of the same group."""
        for offset in self.slabs.used_offsets(slab):
            span = self._span_at[offset]
            if span.refs == 0:
                self._evict(span)
                continue
            target = self.slabs.allocate(span.group, avoid_slab=slab)
            assert target is not None
            self._copy(offset, target, self._run_bytes[span.group])
            self._move(span, target)
            self.num_moved += 1

    def _move(self, span: Span, target: int) -> None:
        source = span.offset
        for cache in self._live.values():
            table = cache.table(span.group)
            for block in np.flatnonzero(table == source):
                table[block] = target
        del self._span_at[source]
        self.slabs.free(source)
        if self._on_free is not None:
            self._on_free(source, self._run_bytes[span.group])
        span.offset = target
        self._span_at[target] = span
