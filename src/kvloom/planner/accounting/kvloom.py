"""As kvloom's engine allocates: the same core.sizes, spans and slabs."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from kvloom.core.sizes import ALIGNMENT, choose_slab_bytes, round_up
from kvloom.core.storage import StorageGroup
from kvloom.planner.accounting.base import Accounting, GroupBytes
from kvloom.planner.architecture import Architecture
from kvloom.planner.formats import CacheFormat, PlannedGroup


class Kvloom(Accounting):
    """Whole spans, from the engine's own geometry: block and window rounding, alignment, slabs.

    Of an encoded group, the sink blocks, the last r blocks and the open one stay raw (design:
    "What a query reads"), r = recent_tokens / block_size rounded up.
    """

    name = "kvloom"
    version = "this version's core/sizes"

    def __init__(self, architecture: Architecture, form: CacheFormat) -> None:
        super().__init__(architecture, form)
        self.step = form.block_size

    def knees(self) -> tuple[int, ...]:
        size = self.form.block_size
        found: set[int] = set()
        for planned in self.groups:
            if planned.group.window is not None:
                found.add(size * self._storage(planned)[0].most_blocks(2**40, 0))
            if planned.encoded:
                found.add(size * self._raw_blocks(planned))
        return tuple(sorted(found))

    def span_bytes(self, planned: PlannedGroup, *, encoded: bool) -> int:
        """Bytes of one span of the group; equal to core.sizes' for formats that the engine has."""
        group, size = planned.group, self.form.block_size
        block = sum(
            round_up(self.form.plane_block_bytes(plane, size, encoded=encoded), ALIGNMENT) for plane in group.planes
        )
        return block * group.num_heads * group.num_layers

    def _storage(self, planned: PlannedGroup) -> tuple[StorageGroup, StorageGroup | None]:
        """How the engine keeps the group's raw and, where there are any, its encoded blocks."""
        size = self.form.block_size
        if not planned.encoded or planned.group.window is not None:
            return StorageGroup(group=planned.group, home=0, block_size=size), None
        sinks, recents = ceil(self.form.sink_tokens / size), ceil(self.form.recent_tokens / size)
        raw, encoded = (
            StorageGroup(group=planned.group, home=0, block_size=size, sinks=sinks, recents=recents, encoded=which)
            for which in (False, True)
        )
        return raw, encoded

    def _raw_blocks(self, planned: PlannedGroup) -> int:
        size = self.form.block_size
        sinks = self.form.sink_tokens if planned.group.window is None else 0
        return ceil(sinks / size) + ceil(self.form.recent_tokens / size) + 1

    def spans(self, planned: PlannedGroup, tokens: int, chunk: int) -> tuple[int, int]:
        """(raw, encoded) spans that a sequence of ``tokens`` holds while it computes ``chunk``; 0: at rest."""
        raw, encoded = self._storage(planned)
        blocks = raw.most_blocks(tokens, chunk)
        if encoded is not None:
            return blocks, encoded.most_blocks(tokens, chunk)
        if planned.encoded:  # an encoded window, which the engine does not have yet
            kept = min(blocks, self._raw_blocks(planned))
            return kept, blocks - kept
        return blocks, 0

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        raw, encoded = self.spans(planned, tokens, 0)
        raw_bytes = self.span_bytes(planned, encoded=False)
        encoded_bytes = self.span_bytes(planned, encoded=True) if planned.encoded else 0
        size = self.form.block_size
        window = planned.group.window
        growing = window is None or raw + encoded < self._storage(planned)[0].most_blocks(2**40, 0)
        rate = encoded_bytes if encoded else raw_bytes
        return self._describe(
            planned,
            stored=(raw + encoded) * size,
            sequence_bytes=Fraction(raw * raw_bytes + encoded * encoded_bytes),
            marginal=Fraction(rate, size) if growing else Fraction(0),
        )

    def slab_bytes(self) -> int:
        """The arena's unit, as the engine chooses it from its span sizes."""
        runs = [self.span_bytes(planned, encoded=False) for planned in self.groups]
        runs += [self.span_bytes(planned, encoded=True) for planned in self.groups if planned.encoded]
        return choose_slab_bytes(runs)

    def total(self, tokens: int, batch: int) -> int:
        """Arena bytes: whole slabs, one of the sequences computing a full chunk."""
        if not self.groups:
            return batch * self.state_bytes()
        slab = self.slab_bytes()
        slabs = 0
        for planned in self.groups:
            steady, peak = self.spans(planned, tokens, 0), self.spans(planned, tokens, self.form.chunk)
            for held, most, encoded in zip(steady, peak, (False, True), strict=True):
                if most:
                    per_slab = slab // self.span_bytes(planned, encoded=encoded)
                    slabs += -(-(batch * held + max(0, most - held)) // per_slab)
        return slabs * slab + batch * self.state_bytes()
