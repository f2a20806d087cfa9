"""The physical bound of a cell: what must be read and computed, over what the machine reads and computes.

``max(bytes / bandwidth, operations / matrix peak)``. Bytes are the weights at 16 bits and every cached token once, in
the engine's cache format; spans that sequences share count once, as a step may read them once for all.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers that store and see alike, together.

    ``elements``: values kept per token. ``operations``: per query token and key that it sees.
    """

    elements: int
    operations: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Parameters that a pass multiplies with: of the body for every token, of the head only for tokens that sample."""

    body: int
    head: int
    layers: tuple[Layers, ...]

    @property
    def elements(self) -> int:
        return sum(layers.elements for layers in self.layers)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes and operations per second."""

    bandwidth: float
    peak: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a decode step or a prefill needs at least."""

    weight_bytes: float
    cache_bytes: float
    operations: float


def decode_cost(model: Model, *, sequences: int, context: float, shared: float, element_bytes: float) -> Cost:
    """One decode step of ``sequences`` that see ``context`` tokens each, the new one included."""
    cache = attention = 0.0
    for layers in model.layers:
        seen = min(context, layers.window or context)
        common = max(0.0, shared - (context - seen))  # what of the shared prefix the window has not passed
        cache += layers.elements * element_bytes * (common + sequences * (seen - common))
        attention += layers.operations * sequences * seen
    return Cost(
        weight_bytes=WEIGHT_BYTES * (model.body + model.head),
        cache_bytes=cache,
        operations=2.0 * (model.body + model.head) * sequences + attention,
    )


def prefill_cost(model: Model, *, sequences: int, context: int, element_bytes: float) -> Cost:
    """``sequences`` prompts of ``context`` tokens, one token sampled for each; the cache is written once."""
    attention = 0.0
    for layers in model.layers:
        window = min(context, layers.window or context)
        attention += layers.operations * (window * (window + 1) / 2 + (context - window) * window)
    return Cost(
        weight_bytes=WEIGHT_BYTES * (model.body + model.head),
        cache_bytes=model.elements * element_bytes * sequences * context,
        operations=sequences * (2.0 * model.body * context + 2.0 * model.head + attention),
    )


def bound(cost: Cost, machine: Machine) -> float:
    """Seconds below which no engine can be."""
    return max((cost.weight_bytes + cost.cache_bytes) / machine.bandwidth, cost.operations / machine.peak)


def split(cost: Cost, machine: Machine, seconds: float) -> dict[str, float]:
    """``seconds`` as milliseconds for reading weights, for reading the cache, and the rest."""
    weights, cache = cost.weight_bytes / machine.bandwidth, cost.cache_bytes / machine.bandwidth
    return {"weights_ms": weights * 1e3, "cache_ms": cache * 1e3, "rest_ms": (seconds - weights - cache) * 1e3}
