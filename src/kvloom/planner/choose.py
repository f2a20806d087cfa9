"""Ranking pipelines for a situation: codecs × protection × press × tiers × prefix caching.

Each candidate is sized with the engine's own accounting and timed by the roofline; its loss comes
from the measured tables. Those within the accepted loss come first, ordered by what the situation
aims at; the rest follow, so that the trade is visible. What no table covers ranks behind what one
does, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvloom.core.codec_sizes import CODEC_CHOICES, parse_codec
from kvloom.core.sizes import format_bytes
from kvloom.planner.formats import CacheFormat
from kvloom.planner.quality import (
    LOSSLESS,
    NOT_MEASURED,
    UNMEASURED,
    Quality,
    expected_loss,
    known_results,
    loss_elsewhere,
)
from kvloom.planner.replay import TierSpec
from kvloom.planner.setting import Setting
from kvloom.planner.situations import Situation
from kvloom.planner.workload import Workload

CANDIDATES: tuple[str, ...] = (
    "raw",
    "q8_0",
    "int8",
    "fp8",
    "kvarn-k4v4",
    "int4",
    "kivi4",
    "kvquant4",
    "loom4",
    "turboquant4",
    "kvarn-k4v2",
    "loom3",
    "turboquant3",
    "kvquant3",
    "kivi2",
    "loom2",
    "turboquant2",
    "kvquant2",
)
PRESS_KEEP = 0.5
LONG_CONTEXT = 2048  # from here on the 4,096-token quality table is asked first
FRAGILE_KEYS = ("qwen2",)  # families whose key biases break low-bit keys
ASSUMED_TIERS = (TierSpec(name="host", num_bytes=64 * 2**30), TierSpec(name="disk", num_bytes=500 * 2**30))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A whole choice. ``keep`` is the press's share of tokens kept; None: no press."""

    form: CacheFormat
    press: str | None = None
    keep: float | None = None
    tiers: tuple[TierSpec, ...] = ()
    prefix_cache: bool = True

    @property
    def name(self) -> str:
        parts = [self.form.codec.name]
        if self.form.sink_tokens or self.form.recent_tokens:
            parts.append(f"S{self.form.sink_tokens}R{self.form.recent_tokens}")
        if self.press:
            parts.append(f"{self.press}-{self.keep:g}")
        parts += [tier.name for tier in self.tiers]
        return "+".join(parts)

    @property
    def served(self) -> bool:
        """Whether this version of kvloom serves it whole."""
        return self.form.served and self.press is None and not self.tiers

    def held_tokens(self, tokens: int) -> int:
        """Tokens that stay after the press."""
        return tokens if self.keep is None else max(1, int(tokens * self.keep))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A pipeline with its predicted price.

    ``accepted``: its loss is; ``accepted_bare``: it is with every token encoded too, measured at such a length.
    """

    pipeline: Pipeline
    bytes_per_sequence: int
    bytes_total: int
    ratio: float
    fits: bool | None
    largest_batch: int | None
    longest_context: int | None
    batch: int
    step_s: float | None
    tokens_per_s: float | None
    bound: str | None
    conversations: int | None
    quality: Quality
    accepted: bool
    accepted_bare: bool
    reasons: tuple[str, ...]
    pareto: bool = False


def choose(
    setting: Setting,
    base: CacheFormat,
    situation: Situation,
    *,
    workload: Workload | None,
    max_kl: float | None,
    tiers: Sequence[TierSpec],
) -> tuple[Choice, ...]:
    """All candidates, best first."""
    limit = situation.max_kl if max_kl is None else max_kl
    raw = replace(base, codec=CODEC_CHOICES["raw"], sink_tokens=0, recent_tokens=0)
    plain = setting.sequence_bytes(raw, setting.tokens)
    candidates = [
        _evaluate(setting, pipeline, situation, workload=workload, limit=limit, plain=plain)
        for pipeline in _pipelines(base, situation, tiers)
    ]
    ranked = sorted(candidates, key=lambda choice: _order(choice, situation))
    return tuple(replace(choice, pareto=_undominated(choice, ranked)) for choice in ranked)


def _pipelines(base: CacheFormat, situation: Situation, tiers: Sequence[TierSpec]) -> list[Pipeline]:
    chosen_tiers = tuple(tiers) or (ASSUMED_TIERS if situation.tiers else ())
    result: list[Pipeline] = []
    for name in CANDIDATES:
        codec = parse_codec(name)
        form = replace(base, codec=codec, sink_tokens=codec.sink_tokens, recent_tokens=codec.recent_tokens)
        result.append(Pipeline(form=form, tiers=chosen_tiers))
        if situation.tiers and name == "raw":
            result.append(Pipeline(form=form))
        if situation.press and name in ("raw", "int8", "loom4"):
            result.append(Pipeline(form=form, press="snapkv", keep=PRESS_KEEP, tiers=chosen_tiers))
    return result


def _evaluate(
    setting: Setting,
    pipeline: Pipeline,
    situation: Situation,
    *,
    workload: Workload | None,
    limit: float,
    plain: int,
) -> Choice:
    form, tokens = pipeline.form, pipeline.held_tokens(setting.tokens)
    reasons: list[str] = []
    one = setting.sequence_bytes(form, tokens)
    total = setting.batch * one
    shared = workload.shared_tokens if workload is not None and pipeline.prefix_cache else 0
    if shared and setting.batch > 1:
        saved = (setting.batch - 1) * setting.sequence_bytes(form, min(shared, tokens))
        total = max(one, total - saved)
        reasons.append(f"{shared:,} shared prompt tokens are stored once: {format_bytes(saved)} less")
    largest = setting.largest_batch(form, tokens)
    fits = (
        None
        if setting.budget_bytes is None
        else setting.device_bytes(form, tokens, setting.batch) <= (setting.budget_bytes)
    )
    batch = setting.batch
    if situation.aim in ("speed", "reuse") and largest:
        batch = _within_latency(setting, form, tokens, min(largest, 4096), workload)
    step = setting.step(form, tokens, batch) if batch else None
    long = setting.tokens >= LONG_CONTEXT
    quality = _quality(setting, pipeline, long)
    fragile = _fragile(setting, pipeline)
    if fragile:
        reasons.append(fragile)
    bare = LOSSLESS if form.lossless else loss_elsewhere(form.codec.name, model=setting.model, long=long)
    sound = not fragile and pipeline.press is None
    if quality.kl_mean is None:
        reasons.append("its loss is not measured at this protection")
    elif not quality.measured_for_this_model:
        reasons.append(f"loss {NOT_MEASURED}: the number is {quality.model}'s")
    if quality.short_text:
        reasons.append("measured in 1,024-token windows only; loss grows with context, so it ranks behind longer ones")
    if quality.kl_mean is not None and quality.kl_mean > limit:
        reasons.append(f"KL {quality.kl_mean:.3g} is above the accepted {limit:g}")
    if pipeline.press is not None:
        reasons.append("drops tokens: what is dropped cannot be asked about later; its loss is not measured here")
    held = None
    if setting.budget_bytes is not None and one:
        held = int(max(0, setting.budget_bytes) * setting.parallel.tp * setting.parallel.pp // one)
        held += sum(tier.num_bytes // one for tier in pipeline.tiers)
    if pipeline.tiers:
        reasons.append(
            "finished conversations wait in "
            + " and ".join(f"{tier.name} ({format_bytes(tier.num_bytes)})" for tier in pipeline.tiers)
        )
    if one < plain:
        reasons.append(f"{plain / one:.2f} times fewer bytes than raw, side data and raw tokens counted")
    if step is not None:
        reasons.append(f"decode bound by {step.bound} at batch {batch}")
    return Choice(
        pipeline=pipeline,
        bytes_per_sequence=one,
        bytes_total=total,
        ratio=plain / one if one else 1.0,
        fits=fits,
        largest_batch=largest,
        longest_context=None if pipeline.keep is not None else setting.longest_context(form, setting.batch),
        batch=batch,
        step_s=None if step is None else step.seconds,
        tokens_per_s=None if step is None else batch / step.seconds,
        bound=None if step is None else step.bound,
        conversations=held,
        quality=quality,
        accepted=sound and _within(quality, limit),
        accepted_bare=sound and _within(bare, limit) and not bare.short_text,
        reasons=tuple(reasons),
    )


def _within(quality: Quality, limit: float) -> bool:
    return quality.kl_mean is not None and quality.kl_mean <= limit


def _within_latency(setting: Setting, form: CacheFormat, tokens: int, largest: int, workload: Workload | None) -> int:
    """The largest batch, up to ``largest``, whose step meets the target time per token."""
    target = workload.target_tpot_s if workload is not None else None
    if target is None:
        return largest
    low, high = 0, largest + 1
    while high - low > 1:
        middle = (low + high) // 2
        step = setting.step(form, tokens, middle)
        low, high = (middle, high) if step is None or step.seconds <= target else (low, middle)
    return max(1, low)


def _quality(setting: Setting, pipeline: Pipeline, long: bool) -> Quality:
    if pipeline.press is not None:
        return UNMEASURED
    if pipeline.form.lossless:
        return LOSSLESS
    return expected_loss(
        pipeline.form.codec.name,
        sink_tokens=pipeline.form.sink_tokens,
        recent_tokens=pipeline.form.recent_tokens,
        model=setting.model,
        block_size=pipeline.form.block_size,
        long=long,
    )


def _fragile(setting: Setting, pipeline: Pipeline) -> str | None:
    """Why low-bit keys are refused for this family, or None."""
    key = pipeline.form.codec.key
    eight_bit = key in ("raw", "fp8", "fp8_e5m2", "int8", "q8_0") or pipeline.form.lossless
    if setting.architecture.model_type in FRAGILE_KEYS and not eight_bit:
        known = known_results(setting.model, setting.architecture.model_type)
        why = f" ({known[0]['result']}; {known[0]['source']})" if known else ""
        return f"low-bit keys are known to break this family{why}: keep keys at 8 bits or protect those layers"
    return None


def _order(choice: Choice, situation: Situation) -> tuple[Any, ...]:
    """Smaller is better: accepted, fitting and measured at length first, then the situation's aim."""
    kl = choice.quality.kl_mean
    unknown = 1e9 if kl is None else kl
    first = (not choice.accepted, choice.fits is False, choice.quality.short_text)
    if situation.aim == "quality":
        return (*first, unknown, choice.bytes_per_sequence)
    if not choice.accepted:
        return (*first, unknown, choice.bytes_per_sequence)
    if situation.aim == "speed" and choice.tokens_per_s is not None:
        return (*first, -choice.tokens_per_s, unknown)
    if situation.aim == "reuse":
        return (*first, not choice.pipeline.tiers, choice.bytes_per_sequence, unknown)
    return (*first, choice.bytes_per_sequence, unknown)


def _undominated(choice: Choice, others: Sequence[Choice]) -> bool:
    """Whether no other is at least as good in bytes, loss and speed, and better in one."""
    if choice.quality.kl_mean is None:
        return False
    mine = (choice.bytes_per_sequence, choice.quality.kl_mean, -(choice.tokens_per_s or 0.0))
    for other in others:
        if other is choice or other.quality.kl_mean is None:
            continue
        theirs = (other.bytes_per_sequence, other.quality.kl_mean, -(other.tokens_per_s or 0.0))
        if all(t <= m for t, m in zip(theirs, mine, strict=True)) and theirs != mine:
            return False
    return True


def when_compression_does_not_help(setting: Setting, base: CacheFormat) -> list[str]:
    """Plain statements where a smaller cache would change little."""
    raw = replace(base, codec=CODEC_CHOICES["raw"], sink_tokens=0, recent_tokens=0)
    said: list[str] = []
    windowed = [layer.window is not None for layer in setting.architecture.layers]
    if windowed and all(windowed) and not base.encode_windows:
        said.append(
            "every layer is windowed, and windowed layers stay raw unless --encode-windows is given: codecs change "
            "nothing here"
        )
    if setting.budget_bytes is not None:
        used = setting.device_bytes(raw, setting.tokens, setting.batch)
        if used <= setting.budget_bytes / 2:
            said.append(
                f"fits already: the raw cache takes {format_bytes(used)} of {format_bytes(setting.budget_bytes)} a "
                "device; compression is not needed for memory"
            )
        elif used <= setting.budget_bytes:
            said.append(
                f"fits: the raw cache takes {format_bytes(used)} of {format_bytes(setting.budget_bytes)} a device; "
                "compression buys more sequences or context, not this one"
            )
    step = setting.step(raw, setting.tokens, setting.batch)
    if step is None:
        return said
    if step.bound == "compute":
        said.append(
            f"compute-bound at batch {setting.batch}: arithmetic takes {step.compute_s * 1e3:.2f} ms, memory "
            f"{step.memory_s * 1e3:.2f} ms; fewer cache bytes will not make a step faster"
        )
    elif step.bound == "weights":
        share = step.cache_bytes / (step.weight_bytes + step.cache_bytes)
        said.append(
            f"weights-bound at batch {setting.batch}: the cache is {100 * share:.1f} % of the bytes a step reads, so "
            "even a cache of no bytes would save at most that; compress the weights or raise the batch first"
        )
    return said
