"""What fits on given devices: memory left for the cache, longest context, largest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloom.core.errors import ConfigError
from kvloom.planner.accounting import ACCOUNTINGS, Accounting
from kvloom.planner.architecture import Architecture
from kvloom.planner.formats import CacheFormat
from kvloom.planner.hardware import Hardware
from kvloom.planner.parallel import Parallel, batch_per_replica, stages
from kvloom.planner.weights import CPU_OVERHEAD_BYTES, GPU_OVERHEAD_BYTES, Weights, activation_bytes

SEARCH_LIMIT = 2**36


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """One device's memory, in bytes, on the fullest pipeline stage."""

    parallel: Parallel
    kv_heads: int
    head_replicas: int
    batch: int
    cache_bytes: int
    weights_bytes: int | None
    activation_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + (self.weights_bytes or 0) + self.activation_bytes + self.overhead_bytes


class DeviceCache:
    """The cache of one device under one accounting, for any context and batch."""

    def __init__(self, architecture: Architecture, form: CacheFormat, accounting: str, parallel: Parallel) -> None:
        self.parallel = parallel
        self.stages: Sequence[Accounting] = [
            ACCOUNTINGS[accounting](stage, form) for stage in stages(architecture, parallel)
        ]

    def bytes(self, tokens: int, batch: int) -> int:
        """Bytes on the fullest device for ``batch`` sequences over all replicas."""
        mine = batch_per_replica(batch, self.parallel.dp)
        return max(stage.total(tokens, mine) for stage in self.stages)

    def longest_context(self, budget: int, batch: int) -> int:
        """Most tokens per sequence that fit ``budget``; 0 when not even one."""
        return _search(lambda tokens: self.bytes(tokens, batch) <= budget)

    def largest_batch(self, budget: int, tokens: int) -> int:
        """Most sequences of ``tokens`` that fit, over all replicas."""
        mine = _search(lambda batch: max(stage.total(tokens, batch) for stage in self.stages) <= budget)
        return mine if mine >= SEARCH_LIMIT else mine * self.parallel.dp


def _search(fits: Callable[[int], bool]) -> int:
    """The largest value from 1 for which ``fits`` holds (monotone), 0 if none, capped."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < SEARCH_LIMIT and fits(high):
        low, high = high, high * 2
    if high >= SEARCH_LIMIT:
        return SEARCH_LIMIT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def device_plan(
    architecture: Architecture,
    form: CacheFormat,
    *,
    accounting: str,
    parallel: Parallel,
    tokens: int,
    batch: int,
    weights: Weights | None,
    is_cpu: bool,
) -> DevicePlan:
    """One device's share of everything at a context and batch."""
    cache = DeviceCache(architecture, form, accounting, parallel)
    mine = batch_per_replica(batch, parallel.dp)
    heads = max((layer.num_heads for layer in architecture.layers), default=0)
    return DevicePlan(
        parallel=parallel,
        kv_heads=max(1, heads // parallel.tp) if heads else 0,
        head_replicas=max(1, parallel.tp // heads) if heads else 1,
        batch=mine,
        cache_bytes=cache.bytes(tokens, batch),
        weights_bytes=None if weights is None else -(-weights.num_bytes // (parallel.tp * parallel.pp)),
        activation_bytes=activation_bytes(architecture, chunk=form.chunk, batch=mine, tp=parallel.tp),
        overhead_bytes=CPU_OVERHEAD_BYTES if is_cpu else GPU_OVERHEAD_BYTES,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The verdict. ``available_bytes`` is what one device has left for the cache."""

    available_bytes: int
    fits: bool
    longest_context: int
    largest_batch: int
    concurrency: float


def fit(
    architecture: Architecture,
    form: CacheFormat,
    plan: DevicePlan,
    *,
    accounting: str,
    usable_bytes: int,
    tokens: int,
    batch: int,
) -> Fit:
    """Whether the plan fits ``usable_bytes`` a device, and what would."""
    available = usable_bytes - (plan.weights_bytes or 0) - plan.activation_bytes - plan.overhead_bytes
    cache = DeviceCache(architecture, form, accounting, plan.parallel)
    largest = cache.largest_batch(available, tokens) if available > 0 else 0
    one = max(stage.sequence(tokens).total for stage in cache.stages)
    return Fit(
        available_bytes=max(0, available),
        fits=plan.cache_bytes <= available,
        longest_context=cache.longest_context(available, batch) if available > 0 else 0,
        largest_batch=largest,
        concurrency=max(0, available) / one * plan.parallel.dp if one else float("inf"),
    )


def choose_parallel(architecture: Architecture, hardware: Hardware, asked: dict[str, int | None]) -> Parallel:
    """The degrees asked for; with none given, tensor parallelism over as many devices as divide.

    Raises:
        ConfigError: more devices asked for than there are.
    """
    if any(value is not None for value in asked.values()):
        chosen = Parallel(tp=asked["tp"] or 1, pp=asked["pp"] or 1, dp=asked["dp"] or 1)
        if chosen.devices > hardware.count:
            raise ConfigError(
                f"tp {chosen.tp} × pp {chosen.pp} × dp {chosen.dp} = {chosen.devices} devices, but there "
                f"{'is' if hardware.count == 1 else 'are'} {hardware.count}; lower them or give --device NAME:"
                f"{chosen.devices}"
            )
        return chosen
    for degree in range(hardware.count, 0, -1):
        if hardware.count % degree:
            continue
        candidate = Parallel(tp=degree)
        try:
            stages(architecture, candidate)
        except ConfigError:
            continue
        return candidate
    return Parallel()
