"""A sequence's size as fixed + slope × context between knees."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvloom.planner.accounting.base import Accounting


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Between two knees a sequence holds ``fixed + slope × context`` bytes, before rounding."""

    start: int
    end: int | None
    fixed: Fraction
    slope: Fraction


def segments(accounting: Accounting) -> tuple[Segment, ...]:
    """The piecewise-linear size of a sequence: one segment between each two knees."""
    step = accounting.step
    edges = [0, *(knee for knee in accounting.knees() if knee > 0)]
    result: list[Segment] = []
    for index, start in enumerate(edges):
        end = edges[index + 1] if index + 1 < len(edges) else None
        at = start + step
        here = accounting.sequence(at)
        exact = sum((group.sequence_bytes for group in here.groups), Fraction(here.state_bytes))
        following = accounting.sequence(at + step)
        later = sum((group.sequence_bytes for group in following.groups), Fraction(following.state_bytes))
        slope = (later - exact) / step if end is None or at + step <= end else here.marginal
        result.append(Segment(start=start, end=end, fixed=exact - slope * at, slope=slope))
    return tuple(result)


def segment_at(parts: tuple[Segment, ...], tokens: int) -> Segment:
    """The segment that ``tokens`` lies in; a knee belongs to the segment before it."""
    for part in parts:
        if part.end is None or tokens <= part.end:
            return part
    return parts[-1]
