"""A trace through the planned cache and through older allocators, as plain values."""

from __future__ import annotations

from math import ceil
from typing import Any

from kvloom.planner.accounting import Accounting, segments
from kvloom.planner.contiguous import AllocatorResult, compare
from kvloom.planner.fit import Fit
from kvloom.planner.question import Question
from kvloom.planner.replay import ServiceModel, parse_tier, replay
from kvloom.planner.roofline import prefill_seconds
from kvloom.planner.setting import Setting
from kvloom.planner.trace import unlimited_hit_rate

REPLAY_PREFILL_S = 1e-4  # per token, when no device is named: 10,000 tokens a second
REPLAY_DECODE_S = 0.03
ALLOCATOR_MEMORY_REQUESTS = 16  # without a device, memory for this many of the longest requests


def replay_report(question: Question, setting: Setting, accounting: Accounting, verdict: Fit | None) -> dict[str, Any]:
    """Replay ``question.trace`` and compare allocators, as plain values. ``verdict`` None: no device named."""
    trace = question.trace
    assert trace is not None
    longest = max(request.input_tokens + request.output_tokens for request in trace.requests)
    # the size of a sequence beyond its last knee: what a token costs, and what each request holds besides
    last = segments(accounting)[-1]
    slope, fixed = float(last.slope), max(0, ceil(last.fixed))
    prefill, decode = REPLAY_PREFILL_S, REPLAY_DECODE_S
    timing = f"prefill {1 / prefill:,.0f} tokens/s and {decode * 1e3:g} ms per output token (no device named)"
    capacity: int | None = None
    if verdict is not None:
        capacity = verdict.available_bytes * setting.parallel.tp * setting.parallel.pp * setting.parallel.dp
        typical = sorted(request.input_tokens for request in trace.requests)[len(trace.requests) // 2]
        step = setting.step(accounting.form, typical, max(1, min(64, verdict.largest_batch)))
        if setting.roofline is not None and step is not None:
            seconds = prefill_seconds(setting.architecture, setting.roofline, typical)
            prefill = (seconds or prefill * typical) / typical
            decode = step.seconds
            timing = f"prefill {1 / prefill:,.0f} tokens/s and {decode * 1e3:.2f} ms per output token (roofline)"
    service = ServiceModel(prefill_s_per_token=prefill, decode_s_per_token=decode)
    tiers = [parse_tier(text) for text in question.tiers]
    result = replay(
        trace,
        bytes_per_token=slope,
        fixed_bytes=fixed,
        block_size=question.block_size,
        capacity=capacity,
        tiers=tiers,
        service=service,
        unlimited=unlimited_hit_rate(trace),
    )
    memory = capacity if capacity is not None else int(ALLOCATOR_MEMORY_REQUESTS * longest * slope)
    memory_tokens = int(memory // slope) if slope else 0
    limit = question.context or longest
    allocators: tuple[AllocatorResult, ...] = ()
    if memory_tokens > 0:
        allocators = compare(
            trace.requests,
            memory_tokens=memory_tokens,
            max_tokens=max(limit, longest),
            block_size=question.block_size,
            service=service,
        )
    return {
        "trace": trace.name,
        "format": trace.kind,
        "hash_block_tokens": trace.block_tokens,
        "requests": result.requests,
        "rejected": result.rejected,
        "prompt_tokens": result.prompt_tokens,
        "unlimited_hit_rate": result.unlimited_hit_rate,
        "hit_rate": result.hit_rate,
        "hit_rate_by_tier": {
            name: (tokens / result.prompt_tokens if result.prompt_tokens else 0.0)
            for name, tokens in result.hit_tokens.items()
        },
        "capacity_bytes": capacity,
        "tiers": [{"kind": tier.name, "bytes": tier.num_bytes} for tier in tiers],
        "bytes_per_token": slope,
        "fixed_bytes_per_request": fixed,
        "block_size": question.block_size,
        "peak_pinned_bytes": result.peak_pinned_bytes,
        "peak_held_bytes": result.peak_held_bytes,
        "peak_running": result.peak_running,
        "mean_wait_seconds": result.mean_wait_s,
        "evicted_blocks": result.evicted_blocks,
        "timing": timing,
        "usage": [
            {
                "time_s": point.time_s,
                "pinned_bytes": point.pinned,
                "held_bytes": point.held,
                "running": point.running,
                "waiting": point.waiting,
            }
            for point in result.series
        ],
        "allocators": {
            "memory_bytes": memory,
            "memory_tokens": memory_tokens,
            "maximum_length": max(limit, longest),
            "load": "all requests queue from the start; shares of memory while a queue waits",
            "results": [_allocator_report(result) for result in allocators],
        },
        "simplifications": [
            "output blocks are reserved at admission in the replay",
            "outputs are not shared with later turns: traces do not name them",
            "loads from tiers take no time",
        ],
    }


def _allocator_report(result: AllocatorResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "stored": result.stored,
        "reserved": result.reserved,
        "internal": result.internal,
        "rounding": result.rounding,
        "free": result.free,
        "waste_of_allocated": result.waste_of_allocated,
        "waste_of_memory": 1 - result.stored,
        "mean_running": result.mean_running,
        "preemptions": result.preemptions,
        "rejected": result.rejected,
        "seconds": result.seconds,
    }
