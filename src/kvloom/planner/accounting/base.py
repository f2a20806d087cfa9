"""What every accounting answers: the bytes of a sequence, group by group, and of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from kvloom.core.layout import Plane
from kvloom.planner.architecture import Architecture
from kvloom.planner.formats import CacheFormat, PlannedGroup, planned_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBytes:
    """What one group of one sequence holds at a context.

    ``stored_tokens`` counts token slots held, rounding included; ``marginal`` is the bytes that one
    more token adds on average at this context (0 once a window has passed).
    """

    name: str
    layers: tuple[int, ...]
    num_heads: int
    planes: tuple[Plane, ...]
    window: int | None
    codecs: Mapping[str, str]
    stored_tokens: int
    sequence_bytes: Fraction
    marginal: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBytes:
    """What one sequence holds at a context, group by group, and its recurrent state."""

    groups: tuple[GroupBytes, ...]
    state_bytes: int

    @property
    def total(self) -> int:
        return ceil(sum((group.sequence_bytes for group in self.groups), Fraction(0))) + self.state_bytes

    @property
    def marginal(self) -> Fraction:
        return sum((group.marginal for group in self.groups), Fraction(0))


class Accounting:
    """One way of counting. Subclasses say how many slots a group holds and what a slot costs."""

    name = ""
    version = ""
    step = 1  # tokens by which a sequence grows

    def __init__(self, architecture: Architecture, form: CacheFormat) -> None:
        self.architecture = architecture
        self.form = form
        self.groups = planned_groups(architecture, form)

    def sequence(self, tokens: int) -> SequenceBytes:
        """What one sequence of ``tokens`` holds at its fullest moment."""
        return SequenceBytes(
            groups=tuple(self._group(group, tokens) for group in self.groups), state_bytes=self.state_bytes()
        )

    def total(self, tokens: int, batch: int) -> int:
        """Bytes for ``batch`` sequences of ``tokens`` at once."""
        return batch * self.sequence(tokens).total

    def state_bytes(self) -> int:
        """Recurrent bytes of one request."""
        return self.architecture.state_bytes(self.form.element_bytes)

    def knees(self) -> tuple[int, ...]:
        """Contexts at which the slope changes."""
        return ()

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        raise NotImplementedError

    def _describe(
        self, planned: PlannedGroup, *, stored: int, sequence_bytes: Fraction, marginal: Fraction
    ) -> GroupBytes:
        group = planned.group
        return GroupBytes(
            name=group.name,
            layers=tuple(self.architecture.positions[index] for index in group.layers),
            num_heads=group.num_heads,
            planes=group.planes,
            window=group.window,
            codecs={plane.name: self.plane_codec(planned, plane) for plane in group.planes},
            stored_tokens=stored,
            sequence_bytes=sequence_bytes,
            marginal=marginal,
        )

    def plane_codec(self, planned: PlannedGroup, plane: Plane) -> str:
        return self.form.codec_of(plane, encoded=planned.encoded)
