"""The arithmetic alone: what queries must be able to read, nothing rounded."""

from __future__ import annotations

from fractions import Fraction

from kvloom.planner.accounting.base import Accounting, GroupBytes
from kvloom.planner.formats import PlannedGroup


class Ideal(Accounting):
    """min(context, window) tokens, side data and protected tokens counted, nothing rounded."""

    name = "ideal"
    version = "arithmetic"

    def knees(self) -> tuple[int, ...]:
        found: set[int] = set()
        for planned in self.groups:
            window = planned.group.window
            if window is not None:
                found.add(window)
            if planned.encoded:
                found.add(self._protected(planned))
        return tuple(sorted(found - {0}))

    def _protected(self, planned: PlannedGroup) -> int:
        sinks = self.form.sink_tokens if planned.group.window is None else 0
        return sinks + self.form.recent_tokens

    def _token_bytes(self, planned: PlannedGroup, *, encoded: bool) -> Fraction:
        group, size = planned.group, self.form.block_size
        per_head = sum(
            (Fraction(self.form.plane_block_bytes(plane, size, encoded=encoded), size) for plane in group.planes),
            Fraction(0),
        )
        return per_head * group.num_heads * group.num_layers

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        window = planned.group.window
        stored = tokens if window is None else min(tokens, window)
        growing = window is None or tokens <= window
        raw_rate = self._token_bytes(planned, encoded=False)
        if not planned.encoded:
            return self._describe(
                planned, stored=stored, sequence_bytes=stored * raw_rate, marginal=raw_rate if growing else Fraction(0)
            )
        rate = self._token_bytes(planned, encoded=True)
        raw = min(stored, self._protected(planned))
        marginal = raw_rate if tokens <= self._protected(planned) else rate
        return self._describe(
            planned,
            stored=stored,
            sequence_bytes=raw * raw_rate + (stored - raw) * rate,
            marginal=marginal if growing else Fraction(0),
        )
