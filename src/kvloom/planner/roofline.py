"""Times from a roofline: a step takes as long as its bytes or its arithmetic, whichever is longer.

Peak figures are never reached; ``efficiency`` scales both (assumptions, printed with every answer).
Derivation: ``docs/sizing.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.planner.architecture import Architecture
from kvloom.planner.hardware import Device

MEMORY_EFFICIENCY = 0.8
COMPUTE_EFFICIENCY = 0.5

# Where stored prefixes may live: bytes per second that one device can load, and seconds of latency.
STORES: tuple[tuple[str, float, float], ...] = (
    ("host memory (PCIe 5 x16)", 50e9, 50e-6),
    ("host memory (PCIe 4 x16)", 25e9, 50e-6),
    ("NVMe", 5e9, 200e-6),
    ("network 100 Gbit/s", 12.5e9, 500e-6),
    ("network 10 Gbit/s", 1.25e9, 500e-6),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Achievable rates of one device group that works as one (tensor parallel)."""

    bandwidth: float
    flops: float

    @classmethod
    def of(
        cls,
        device: Device,
        ranks: int,
        *,
        memory_efficiency: float = MEMORY_EFFICIENCY,
        compute_efficiency: float = COMPUTE_EFFICIENCY,
    ) -> Roofline | None:
        """The roofline of ``ranks`` devices; None when the device's rates are not known."""
        if device.bandwidth is None or device.flops is None:
            return None
        return cls(
            bandwidth=device.bandwidth * memory_efficiency * ranks, flops=device.flops * compute_efficiency * ranks
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One decode step of a batch: seconds for bytes and for arithmetic, and what the bytes are."""

    memory_s: float
    compute_s: float
    weight_bytes: float
    cache_bytes: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        """``compute``, ``weights`` or ``cache``: what a faster step would need less of."""
        if self.compute_s >= self.memory_s:
            return "compute"
        return "weights" if self.weight_bytes >= self.cache_bytes else "cache"


def decode_step(
    architecture: Architecture,
    roofline: Roofline,
    *,
    batch: int,
    tokens: int,
    read_bytes: float,
    bytes_per_parameter: float,
) -> Step | None:
    """One token for each of ``batch`` sequences of ``tokens``; ``read_bytes`` is the whole cache read.

    Attention costs 4 × score_dim × tokens FLOP per layer and sequence (two products).
    None when the weights are not known.
    """
    parameters = architecture.parameters
    if parameters is None:
        return None
    weight_bytes = parameters.read_per_step(batch) * bytes_per_parameter
    flops = 2.0 * parameters.active * batch
    flops += sum(
        4.0 * architecture.score_dim * min(tokens, layer.window or tokens) * batch for layer in architecture.layers
    )
    return Step(
        memory_s=(weight_bytes + read_bytes) / roofline.bandwidth,
        compute_s=flops / roofline.flops,
        weight_bytes=weight_bytes,
        cache_bytes=read_bytes,
    )


def prefill_flops_per_token(architecture: Architecture, tokens: int) -> float | None:
    """Mean FLOP per prompt token: 2 × active weights + 2 × context × score_dim per layer (causal half)."""
    if architecture.parameters is None:
        return None
    attention = sum(2.0 * min(tokens, layer.window or tokens) * architecture.score_dim for layer in architecture.layers)
    return 2.0 * architecture.parameters.active + attention


def prefill_seconds(architecture: Architecture, roofline: Roofline, tokens: int) -> float | None:
    """Seconds to compute a prompt of ``tokens``."""
    per_token = prefill_flops_per_token(architecture, tokens)
    return None if per_token is None else per_token * tokens / roofline.flops


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Loading a stored prefix against recomputing it, from one store."""

    store: str
    bandwidth: float
    load_s: float
    recompute_s: float
    minimum_tokens: int | None  # loading pays from this prefix on; None: never

    @property
    def load_wins(self) -> bool:
        return self.load_s < self.recompute_s


def break_even_bandwidth(
    architecture: Architecture, roofline: Roofline, *, tokens: int, prefix_bytes: float
) -> float | None:
    """Bytes per second above which loading ``tokens`` beats recomputing them: bytes / prefill time."""
    seconds = prefill_seconds(architecture, roofline, tokens)
    return None if not seconds else prefix_bytes / seconds


def break_even(
    architecture: Architecture, roofline: Roofline, *, tokens: int, prefix_bytes: float
) -> tuple[BreakEven, ...]:
    """Loading against recomputing for each kind of store.

    The least prefix solves latency + n·bytes/bandwidth = n·recompute, rates taken at ``tokens``.
    """
    seconds = prefill_seconds(architecture, roofline, tokens)
    if seconds is None:
        return ()
    rows: list[BreakEven] = []
    for store, bandwidth, latency in STORES:
        load = latency + prefix_bytes / bandwidth
        gain = (seconds - prefix_bytes / bandwidth) / tokens
        rows.append(
            BreakEven(
                store=store,
                bandwidth=bandwidth,
                load_s=load,
                recompute_s=seconds,
                minimum_tokens=int(latency / gain) + 1 if gain > 0 else None,
            )
        )
    return tuple(rows)
