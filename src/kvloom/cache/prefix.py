"""The prefix index: which spans are known under which key, and how long a prefix each group can serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvloom.cache.span import Span
from kvloom.core.storage import StorageGroup

EVICTED_KEYS_REMEMBERED = 65_536


class PrefixIndex:
    """Sealed spans by (key, storage group). Groups share one chain of keys.

    A prefix of n blocks can be served when every group holds what the query right after it reads:
    a full group all n; a windowed one its last window; one with encoded blocks the raw sinks, the
    last r blocks raw, those up to n - r - 1 encoded, and block n - r - 1 in either format (it is
    the next to be encoded, so its raw copy does as well).
    """

    def __init__(self, groups: Sequence[StorageGroup]) -> None:
        self._groups = groups
        self._spans: list[dict[bytes, Span]] = [{} for _ in groups]
        # Keys evicted lately, only to tell a cold miss from one that memory pressure caused.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(spans) for spans in self._spans)

    def get(self, group: int, key: bytes) -> Span | None:
        return self._spans[group].get(key)

    def add(self, span: Span) -> None:
        assert span.key is not None and span.key not in self._spans[span.group]
        self._spans[span.group][span.key] = span

    def remove(self, span: Span) -> None:
        assert span.key is not None
        del self._spans[span.group][span.key]
        self._evicted[span.key] = None
        self._evicted.move_to_end(span.key)
        if len(self._evicted) > EVICTED_KEYS_REMEMBERED:
            self._evicted.popitem(last=False)

    def first_needed(self, group: int, num_blocks: int) -> int:
        """First block that a query right after ``num_blocks`` blocks reads in ``group``, sinks excepted."""
        item = self._groups[group]
        if item.recents is not None and not item.encoded:
            return max(0, num_blocks - item.recents)
        return item.first_kept(num_blocks * item.block_size)

    def num_encoded(self, group: int, keys: Sequence[bytes], num_blocks: int, held: int) -> int:
        """Blocks before this one are encoded after a hit of ``num_blocks``, in the raw storage ``group``.

        Block n - r - 1 counts where its encoded span is known; ``held`` blocks are encoded already.
        """
        item = self._groups[group]
        assert item.recents is not None and item.twin is not None
        last = num_blocks - item.recents - 1
        if last >= max(held, item.sinks) and keys[last] in self._spans[item.twin]:
            return last + 1
        return max(held, last, 0)

    def longest(self, keys: Sequence[bytes], start: int = 0, num_encoded: Sequence[int] = ()) -> int:
        """Most leading blocks of ``keys`` that every group can serve; at least ``start``.

        The first ``start`` blocks are held by the caller already and not looked up; in an encoded
        group the first ``num_encoded[group]`` of them in that format (empty: none).
        """
        count = len(keys)
        held = num_encoded or [0] * len(self._groups)
        for group, (spans, item) in enumerate(zip(self._spans, self._groups, strict=True)):
            if item.encoded:
                assert item.recents is not None
                first = max(item.sinks, held[group])
                missing = next((i for i in range(first, count) if keys[i] not in spans), count)
                count = min(count, missing + item.recents + 1)
            elif item.grows:
                count = next((i for i in range(start, count) if keys[i] not in spans), count)
        while count > start:
            shorter = count
            for group, item in enumerate(self._groups):
                if item.twin is not None and not item.encoded:
                    shorter = self._recents_end(item, group, keys, start, held[item.twin], shorter)
                elif item.window is not None:
                    shorter = self._window_end(group, keys, start, shorter)
            if shorter == count:
                break
            count = shorter
        return max(count, start)

    def _window_end(self, group: int, keys: Sequence[bytes], start: int, limit: int) -> int:
        """Largest n in [start, limit] for which ``group`` holds every block that a query after n sees."""
        spans = self._spans[group]
        n = limit
        while n > start:
            missing = next(
                (i for i in range(n - 1, max(start, self.first_needed(group, n)) - 1, -1) if keys[i] not in spans), None
            )
            if missing is None:
                return n
            # Every shorter prefix that ends after the missing block sees it too (its window starts
            # no later), so the next candidate ends right before it.
            n = missing
        return start

    def _recents_end(
        self, item: StorageGroup, group: int, keys: Sequence[bytes], start: int, num_encoded: int, limit: int
    ) -> int:
        """Largest n in [start, limit] for which the raw sinks and recents are known, and block n - r - 1 somehow."""
        spans = self._spans[group]
        assert item.twin is not None and item.recents is not None
        encoded = self._spans[item.twin]
        n = next((i for i in range(start, min(item.sinks, limit)) if keys[i] not in spans), limit)
        while n > start:
            n = min(n, self._window_end(group, keys, start, n))
            last = n - item.recents - 1
            # What the caller holds of the blocks before start it holds in one format or the other.
            if last < max(start, item.sinks, num_encoded) or keys[last] in encoded or keys[last] in spans:
                return n
            n -= 1
        return start

    def miss_reason(self, keys: Sequence[bytes], hit: int) -> str:
        """Why block ``hit`` could not be served: cold, evicted, or window (another group has it)."""
        key = keys[hit]
        if any(key in spans for spans in self._spans):
            return "window"
        return "evicted" if key in self._evicted else "cold"
