"""What the requests look like: lengths, sharing, targets; given by hand or measured on a trace."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.core.errors import ConfigError
from kvloom.planner.trace import Trace, unlimited_hit_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """``shared_fraction`` is the share of prompt tokens found in earlier requests (0 to below 1).

    Targets are seconds; None means none.
    """

    input_tokens: int
    output_tokens: int
    shared_fraction: float = 0.0
    target_ttft_s: float | None = None
    target_tpot_s: float | None = None
    origin: str = "as given"

    def __post_init__(self) -> None:
        if not 0.0 <= self.shared_fraction < 1.0:
            raise ConfigError(f"--shared is {self.shared_fraction}; it must be at least 0 and below 1")
        for name in ("target_ttft_s", "target_tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value} seconds; it must be above 0")

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def shared_tokens(self) -> int:
        return int(self.input_tokens * self.shared_fraction)


def workload_of_trace(trace: Trace, *, target_ttft_s: float | None, target_tpot_s: float | None) -> Workload:
    """Median lengths and the unlimited cache's hit rate of a trace.

    Means would follow a few huge prompts; the sizes that must fit are asked with ``--context``.
    """
    requests = trace.requests
    inputs = sorted(request.input_tokens for request in requests)
    outputs = sorted(request.output_tokens for request in requests)
    middle = len(requests) // 2
    hits = unlimited_hit_rate(trace)
    return Workload(
        input_tokens=max(1, inputs[middle]),
        output_tokens=max(1, outputs[middle]),
        shared_fraction=min(hits or 0.0, 0.999),
        target_ttft_s=target_ttft_s,
        target_tpot_s=target_tpot_s,
        origin=f"medians of {len(requests):,} requests of {trace.name}"
        + ("" if hits is None else f", {100 * hits:.1f} % of prompt tokens shared"),
    )
