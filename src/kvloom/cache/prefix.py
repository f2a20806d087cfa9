"""The prefix index: which spans are known under which key, and how long a prefix each group can serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvloom.cache.span import Span
from kvloom.core.layout import LayerGroup

EVICTED_KEYS_REMEMBERED = 65_536


class PrefixIndex:
    """Sealed spans by (key, group). Groups share one chain of keys."""

    def __init__(self, groups: Sequence[LayerGroup], block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size
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
        """First block that a query right after ``num_blocks`` blocks reads in ``group``."""
        window = self._groups[group].window
        if window is None:
            return 0
        # The query at position p = num_blocks * block_size sees keys from p - window + 1.
        return max(0, num_blocks * self._block_size - window + 1) // self._block_size

    def longest(self, keys: Sequence[bytes], start: int = 0) -> int:
        """Most leading blocks of ``keys`` that every group can serve; at least ``start``.

        The first ``start`` blocks are held by the caller already and not looked up. A full group
        needs every block; a windowed group only those that the next query still sees.
        """
        count = len(keys)
        for group, layer_group in enumerate(self._groups):
            if layer_group.window is None:
                spans = self._spans[group]
                count = next((i for i in range(start, count) if keys[i] not in spans), count)
        while count > start:
            shorter = count
            for group, layer_group in enumerate(self._groups):
                if layer_group.window is not None:
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

    def miss_reason(self, keys: Sequence[bytes], hit: int) -> str:
        """Why block ``hit`` could not be served: cold, evicted, or window (a full group has it)."""
        key = keys[hit]
        if any(key in spans for spans in self._spans):
            return "window"
        return "evicted" if key in self._evicted else "cold"
