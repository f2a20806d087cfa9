"""Parts of the answer's document, as plain values. Bytes are whole numbers wherever they are exact."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

from kvloom.planner.accounting import ACCOUNTINGS, Accounting, segment_at, segments
from kvloom.planner.architecture import Architecture
from kvloom.planner.choose import Choice
from kvloom.planner.fit import DeviceCache, DevicePlan, Fit
from kvloom.planner.formats import CacheFormat
from kvloom.planner.question import Question
from kvloom.planner.roofline import (
    break_even,
    break_even_bandwidth,
    prefill_flops_per_token,
    prefill_seconds,
)
from kvloom.planner.setting import Setting, step_report
from kvloom.planner.sources import ModelSource
from kvloom.planner.whatif import what_if


def size_report(architecture: Architecture, accounting: Accounting, tokens: int, batch: int) -> dict[str, Any]:
    """Bytes of one sequence and of all, the curve, and the groups."""
    sequence = accounting.sequence(tokens)
    total = accounting.total(tokens, batch)
    parts = segments(accounting)
    here = segment_at(parts, tokens)
    return {
        "bytes_per_token": number(here.slope),
        "fixed_bytes": number(here.fixed),
        "bytes_per_sequence": sequence.total,
        "bytes_total": total,
        "gib": {"bytes_per_sequence": sequence.total / 2**30, "bytes_total": total / 2**30},
        "curve": [
            {
                "from_tokens": part.start,
                "to_tokens": part.end,
                "fixed_bytes": number(part.fixed),
                "bytes_per_token": number(part.slope),
            }
            for part in parts
        ],
        "groups": [
            {
                "name": group.name,
                "layers": list(group.layers),
                "kv_heads": group.num_heads,
                "planes": {plane.name: plane.dim for plane in group.planes},
                "codecs": dict(group.codecs),
                "window": group.window,
                "chunked": any(architecture.positions[i] in group.layers for i in architecture.chunked),
                "stored_tokens": group.stored_tokens,
                "bytes_per_token": number(group.marginal),
                "bytes_per_sequence": ceil(group.sequence_bytes),
            }
            for group in sequence.groups
        ]
        + [
            {
                "name": f"state.{state.name}",
                "layers": list(state.layers),
                "window": None,
                "bytes_per_token": 0,
                "bytes_per_sequence": state.bytes_per_request(accounting.form.element_bytes),
            }
            for state in architecture.states
        ],
    }


def device_report(
    architecture: Architecture, plan: DevicePlan, ideal: CacheFormat, accounting: str, tokens: int, batch: int
) -> dict[str, Any]:
    """One device's share."""
    parallel = plan.parallel
    return {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "devices": parallel.devices,
        "batch": plan.batch,
        "kv_heads": plan.kv_heads,
        "head_replicas": plan.head_replicas,
        "cache_bytes": plan.cache_bytes,
        "cache_bytes_ideal": DeviceCache(architecture, ideal, "ideal", parallel).bytes(tokens, batch),
        "cache_accounting": accounting,
        "weights_bytes": plan.weights_bytes,
        "activation_bytes_estimate": plan.activation_bytes,
        "overhead_bytes_estimate": plan.overhead_bytes,
        "total_bytes": plan.total_bytes,
    }


def number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def architecture_report(source: ModelSource, architecture: Architecture) -> dict[str, Any]:
    parameters = architecture.parameters
    return {
        "model_type": architecture.model_type,
        "kind": architecture.kind,
        "origin": source.origin,
        "layers": architecture.num_layers,
        "attention_layers": len(architecture.layers),
        "shared_layers": len(architecture.layout.shared),
        "query_heads": architecture.num_query_heads,
        "kv_heads": max((layer.num_heads for layer in architecture.layers), default=0),
        "max_positions": architecture.max_positions,
        "parameters": None if parameters is None else parameters.total,
        "active_parameters": None if parameters is None else parameters.active,
    }


def what_if_report(question: Question, original: Architecture, form: CacheFormat, tokens: int) -> dict[str, Any]:
    before = ACCOUNTINGS["ideal"](original, form).sequence(tokens).total
    assert question.what_if is not None
    after = ACCOUNTINGS["ideal"](what_if(original, question.what_if), form).sequence(tokens).total
    return {
        "asked": question.what_if,
        "as_published_bytes_per_sequence": before,
        "bytes_per_sequence": after,
        "times_as_published": after / before if before else None,
        "note": "shapes only: such a model's weights and quality are not claimed",
    }


def fit_report(
    question: Question, setting: Setting, form: CacheFormat, verdict: Fit, usable: int, *, asked: bool
) -> dict[str, Any]:
    assert setting.hardware is not None
    device = setting.hardware.device
    known = setting.weights is not None
    limit = setting.architecture.max_positions
    report: dict[str, Any] = {
        "device": device.name,
        "device_source": device.source,
        "count": setting.hardware.count,
        "asked": asked,
        "memory_bytes": device.memory_bytes,
        "usable_bytes": usable,
        "utilisation": question.utilisation,
        "fits": verdict.fits if known else None,
        "available_for_cache_bytes": verdict.available_bytes if known else None,
        "longest_context": _bounded(verdict.longest_context) if known else None,
        "longest_context_model_limit": limit,
        "largest_batch": _bounded(verdict.largest_batch) if known else None,
        "concurrency": verdict.concurrency if known else None,
    }
    if setting.accounting == "vllm" and known:
        stage = DeviceCache(setting.architecture, form, "vllm", setting.parallel).stages[0]
        pool = getattr(stage, "pool_tokens", None)
        if pool is not None and len(stage.groups) == 1:
            report["vllm_pool_tokens"] = pool(verdict.available_bytes)
    return report


def _bounded(value: int) -> int | None:
    """A search that hit its cap found no limit: the cache does not grow."""
    return None if value >= 2**36 else value


def roofline_report(question: Question, setting: Setting, ideal: CacheFormat, assumptions: list[str]) -> dict[str, Any]:
    roofline, architecture = setting.roofline, setting.architecture
    if roofline is None:
        return {"speed": None, "speed_note": "bandwidth and FLOP/s unknown: give --device, or --bandwidth and --tflops"}
    assumptions.append(
        f"roofline: {100 * question.memory_efficiency:g} % of peak bandwidth, {100 * question.compute_efficiency:g} % "
        "of peak 16-bit compute; communication between devices not counted"
    )
    step = setting.step(ideal, setting.tokens, setting.batch)
    seconds = prefill_seconds(architecture, roofline, setting.tokens)
    report: dict[str, Any] = {}
    if step is None or seconds is None:
        return {"speed": None, "speed_note": "no verified weight formula for this family: speeds are unknown"}
    report["decode"] = dict(step_report(step, setting.batch))
    report["prefill"] = {"seconds": seconds, "tokens_per_second": setting.tokens / seconds}
    prefix = (
        setting.sequence_bytes(ideal, setting.tokens)
        if setting.accounting == "ideal"
        else (ACCOUNTINGS["ideal"](architecture, ideal).sequence(setting.tokens).total)
    )
    bandwidth = break_even_bandwidth(architecture, roofline, tokens=setting.tokens, prefix_bytes=prefix)
    report["break_even"] = {
        "bandwidth_bytes_per_second": bandwidth,
        "rule": "loading a stored prefix beats recomputing it above this bandwidth",
        "flops_per_token": prefill_flops_per_token(architecture, setting.tokens),
        "stores": [
            {
                "store": row.store,
                "bandwidth_bytes_per_second": row.bandwidth,
                "load_seconds": row.load_s,
                "recompute_seconds": row.recompute_s,
                "load_wins": row.load_wins,
                "minimum_tokens": row.minimum_tokens,
            }
            for row in break_even(architecture, roofline, tokens=setting.tokens, prefix_bytes=prefix)
        ],
    }
    if question.price_per_hour is not None:
        assert setting.hardware is not None
        hourly = question.price_per_hour * setting.parallel.devices
        rate = setting.batch / step.seconds
        report["cost"] = {
            "price_per_device_hour": question.price_per_hour,
            "devices": setting.parallel.devices,
            "per_million_output_tokens": hourly / 3600 / rate * 1e6,
            "per_million_input_tokens": hourly / 3600 * seconds / setting.tokens * 1e6 / setting.parallel.dp,
        }
    return report


def choice_report(rank: int, choice: Choice) -> dict[str, Any]:
    form = choice.pipeline.form
    return {
        "rank": rank,
        "name": choice.pipeline.name,
        "codec": form.codec.name,
        "protect": {"sink_tokens": form.sink_tokens, "recent_tokens": form.recent_tokens},
        "press": None
        if choice.pipeline.press is None
        else {"name": choice.pipeline.press, "keep": choice.pipeline.keep},
        "tiers": [{"kind": tier.name, "bytes": tier.num_bytes} for tier in choice.pipeline.tiers],
        "prefix_cache": choice.pipeline.prefix_cache,
        "bytes_per_sequence": choice.bytes_per_sequence,
        "bytes_total": choice.bytes_total,
        "times_smaller": choice.ratio,
        "fits": choice.fits,
        "largest_batch": choice.largest_batch,
        "longest_context": choice.longest_context,
        "at_batch": choice.batch,
        "step_seconds": choice.step_s,
        "tokens_per_second": choice.tokens_per_s,
        "bound": choice.bound,
        "conversations_held": choice.conversations,
        "quality": {
            "kl_mean": choice.quality.kl_mean,
            "top1_percent": choice.quality.top1_percent,
            "perplexity_change_percent": choice.quality.perplexity_change_percent,
            "model": choice.quality.model,
            "text": choice.quality.text,
            "protection": choice.quality.protection,
            "note": "lossless" if form.lossless and choice.pipeline.press is None else choice.quality.note,
        },
        "accepted": choice.accepted,
        "pareto": choice.pareto,
        "served_by_this_version": choice.pipeline.served,
        "reasons": list(choice.reasons),
    }
