"""A span: block_size tokens of one layer group, the unit of memory, sharing and eviction."""

from __future__ import annotations

from enum import Enum


class SpanState(Enum):
    """OPEN: raw, private, being filled. FULL: raw, immutable. SEALED: encoded, immutable, shareable.

    A raw codec encodes nothing, so its spans go from full to sealed without a copy.
    """

    OPEN = "open"
    FULL = "full"
    SEALED = "sealed"


class Span:
    """One span: where it is, who uses it, and under which key it is known.

    ``refs`` counts live sequences. A span with no reference and a key is cached (evictable); one
    with neither is freed. ``stamp`` orders eviction.
    """

    __slots__ = ("group", "key", "num_tokens", "offset", "refs", "stamp", "state")

    def __init__(self, group: int, offset: int) -> None:
        self.group = group
        self.offset = offset
        self.state = SpanState.OPEN
        self.refs = 1
        self.key: bytes | None = None
        self.num_tokens = 0
        self.stamp = 0

    def __repr__(self) -> str:
        return f"Span(group={self.group}, offset={self.offset}, {self.state.value}, refs={self.refs})"
