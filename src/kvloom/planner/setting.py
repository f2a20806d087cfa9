"""Everything that is fixed while pipelines are compared: the model, the devices, the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from kvloom.planner.accounting import ACCOUNTINGS
from kvloom.planner.architecture import Architecture
from kvloom.planner.fit import DeviceCache
from kvloom.planner.formats import CacheFormat
from kvloom.planner.hardware import Hardware
from kvloom.planner.parallel import Parallel, batch_per_replica
from kvloom.planner.roofline import Roofline, Step, decode_step
from kvloom.planner.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """``model`` is the name that quality tables know, ``hub_name`` the one that engines download by.

    ``budget_bytes`` is one device's room for the cache; None when no device was named.
    """

    model: str
    hub_name: str
    architecture: Architecture
    weights: Weights | None
    hardware: Hardware | None
    parallel: Parallel
    roofline: Roofline | None
    budget_bytes: int | None
    tokens: int
    batch: int
    accounting: str = "kvloom"

    def device_bytes(self, form: CacheFormat, tokens: int, batch: int) -> int:
        """Cache bytes on the fullest device."""
        return DeviceCache(self.architecture, form, self.accounting, self.parallel).bytes(tokens, batch)

    def largest_batch(self, form: CacheFormat, tokens: int) -> int | None:
        if self.budget_bytes is None:
            return None
        cache = DeviceCache(self.architecture, form, self.accounting, self.parallel)
        return cache.largest_batch(self.budget_bytes, tokens) if self.budget_bytes > 0 else 0

    def longest_context(self, form: CacheFormat, batch: int) -> int | None:
        if self.budget_bytes is None:
            return None
        cache = DeviceCache(self.architecture, form, self.accounting, self.parallel)
        return cache.longest_context(self.budget_bytes, batch) if self.budget_bytes > 0 else 0

    def step(self, form: CacheFormat, tokens: int, batch: int) -> Step | None:
        """A decode step of one replica's share of ``batch``; every rank reads its own shard."""
        if self.roofline is None or self.weights is None:
            return None
        mine = batch_per_replica(batch, self.parallel.dp)
        ideal = DeviceCache(self.architecture, form, "ideal", self.parallel)
        ranks = self.parallel.tp * self.parallel.pp
        read = max(stage.sequence(tokens).total for stage in ideal.stages) * mine * ranks
        return decode_step(
            self.architecture,
            self.roofline,
            batch=mine,
            tokens=tokens,
            read_bytes=read,
            bytes_per_parameter=self.weights.bytes_per_parameter,
        )

    def sequence_bytes(self, form: CacheFormat, tokens: int) -> int:
        """Bytes of one sequence in the whole system, each head counted once."""
        return ACCOUNTINGS[self.accounting](self.architecture, form).sequence(tokens).total


def outweighs(architecture: Architecture, form: CacheFormat, weights: Weights, tokens: int) -> dict[str, int | None]:
    """Where the cache outgrows the weights: tokens at batch 1, and sequences at ``tokens`` (ideal bytes)."""
    ideal = ACCOUNTINGS["ideal"](architecture, form)
    one = ideal.sequence(tokens).total
    limit = 2**40
    context: int | None = None
    if ideal.sequence(limit).total > weights.num_bytes:
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if ideal.sequence(middle).total <= weights.num_bytes else (low, middle)
        context = high
    return {
        "context_at_batch_1": context,
        "batch_at_context": weights.num_bytes // one + 1 if one else None,
        "tokens_at_context": (weights.num_bytes // one + 1) * tokens if one else None,
    }


def step_report(step: Step, batch: int) -> Mapping[str, Any]:
    """A step as plain values."""
    return {
        "seconds": step.seconds,
        "tokens_per_second": batch / step.seconds,
        "bound": step.bound,
        "memory_seconds": step.memory_s,
        "compute_seconds": step.compute_s,
        "weight_bytes_read": ceil(step.weight_bytes),
        "cache_bytes_read": ceil(step.cache_bytes),
    }
