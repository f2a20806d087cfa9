"""A latency histogram in plain numbers, which the collector shows under several names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Seconds. Fine where interactive use lives, coarse up to the hours that batch jobs wait.
REQUEST_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0,
    40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip


class LatencyHistogram:
    """Counts of observed seconds per bucket, their number and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last holds what is beyond every bound
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, seconds: float, times: int = 1) -> None:
        """Record ``seconds``, ``times`` times (several tokens that came together share their gap)."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self.sum += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus writes them: ``(upper bound, observations at or below it)``."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows
