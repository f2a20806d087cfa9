"""Which cached span to drop: least recently used first, a chain's children before their parents.

A sequence that lets its spans go pushes them deepest first, so within one release children get
older stamps than parents; and whoever uses a child pins its parents too, so a parent is never
older than a cached child. Windowed groups push oldest position first.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from kvloom.cache.span import Span


class EvictionQueue:
    """Cached spans nobody references, oldest first, per group, on one clock for all groups."""

    def __init__(self, num_groups: int) -> None:
        self._queues: list[OrderedDict[int, Span]] = [OrderedDict() for _ in range(num_groups)]
        self._clock = 0

    def count(self, group: int) -> int:
        return len(self._queues[group])

    def push(self, span: Span) -> None:
        """``span`` lost its last reference."""
        self._clock += 1
        span.stamp = self._clock
        self._queues[span.group][id(span)] = span

    def remove(self, span: Span) -> None:
        """``span`` is used again, or evicted."""
        del self._queues[span.group][id(span)]

    def __contains__(self, span: Span) -> bool:
        return id(span) in self._queues[span.group]

    def oldest(self, group: int) -> Span | None:
        """The next victim within ``group``."""
        return next(iter(self._queues[group].values()), None)

    def first(self, group: int, count: int) -> list[Span]:
        """Up to ``count`` next victims within ``group``, oldest first."""
        return list(islice(self._queues[group].values(), count))

    def oldest_elsewhere(self, group: int) -> Span | None:
        """The next victim among all other groups."""
        heads = [self.oldest(other) for other in range(len(self._queues)) if other != group]
        return min((head for head in heads if head is not None), key=lambda span: span.stamp, default=None)
