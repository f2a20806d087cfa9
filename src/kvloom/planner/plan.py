"""The whole answer: from a question in plain values to one document in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.core.codec_sizes import parse_codec
from kvloom.core.errors import ConfigError
from kvloom.core.sizes import parse_bytes
from kvloom.planner.accounting import ACCOUNTINGS, DEFAULT_CHUNK, Accounting
from kvloom.planner.architecture import Architecture
from kvloom.planner.choose import Choice, choose, when_compression_does_not_help
from kvloom.planner.fit import choose_parallel, device_plan, fit
from kvloom.planner.formats import CacheFormat
from kvloom.planner.handover import handover_report
from kvloom.planner.hardware import Device, Hardware, parse_device, this_machine
from kvloom.planner.quality import known_results
from kvloom.planner.question import Question, check
from kvloom.planner.readers import read_architecture
from kvloom.planner.remarks import missed_targets, say_format, say_traps
from kvloom.planner.replay import parse_tier
from kvloom.planner.replay_report import replay_report
from kvloom.planner.report import (
    architecture_report,
    choice_report,
    device_report,
    fit_report,
    roofline_report,
    size_report,
    what_if_report,
)
from kvloom.planner.roofline import Roofline
from kvloom.planner.setting import Setting, outweighs
from kvloom.planner.situations import find_situation
from kvloom.planner.sources import ModelSource, find_model
from kvloom.planner.weights import packed_warning, weight_bytes
from kvloom.planner.whatif import what_if
from kvloom.planner.workload import Workload, workload_of_trace

FALLBACK_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The document, and the verdict for the exit status (None: not asked, or not known)."""

    document: dict[str, Any]
    fits: bool | None
    unknown: bool
    architecture: Architecture
    accountings: Mapping[str, Accounting]
    choices: tuple[Choice, ...]


def answer(question: Question) -> Answer:
    """Answer a question about one model.

    Raises:
        ConfigError, ModelError: the question or the configuration is impossible (exit status 2).
        UnknownError: the architecture is not known (exit status 3).
    """
    check(question)
    source = find_model(question.model)
    original = read_architecture(source.config, origin=source.origin)
    architecture = what_if(original, question.what_if) if question.what_if else original
    _check_layers(question, architecture)
    assumptions = [*source.notes, *architecture.notes, *question.units]
    warnings: list[str] = []
    workload = _workload(question)
    tokens = _tokens(question, architecture, workload, assumptions, warnings)
    forms = _formats(question)
    ideal = forms["ideal"]
    say_format(ideal, question, architecture, assumptions, warnings)
    accountings = {
        name: ACCOUNTINGS[name](architecture, forms[name]) for name in dict.fromkeys((question.accounting, "kvloom"))
    }
    main = accountings[question.accounting]
    assumptions.append(f"accounting {main.name}: {main.version}")
    if question.chunk is None and question.accounting in ("vllm", "llama.cpp"):
        assumptions.append(f"a step computes up to {main.form.chunk:,} tokens; change it with --chunk")
    weights = weight_bytes(source, architecture, dtype=question.weight_dtype, override=question.weights)
    if weights is None:
        warnings.append(
            "the weights' size is unknown (no header at hand and no verified formula for this family): give "
            "--weights SIZE"
        )
    else:
        assumptions.append(f"weights: {weights.origin}")
        packed = packed_warning(source, weights)
        warnings += [packed] if packed else []

    hardware, asked = _hardware(question)
    parallel = choose_parallel(architecture, hardware, {"tp": question.tp, "pp": question.pp, "dp": question.dp})
    # devices hold what an engine really allocates: never the ideal
    engine = "kvloom" if question.accounting == "ideal" else question.accounting
    plan = device_plan(
        architecture,
        forms[engine],
        accounting=engine,
        parallel=parallel,
        tokens=tokens,
        batch=question.batch,
        weights=weights,
        is_cpu=hardware.device.is_cpu,
    )
    if plan.head_replicas > 1:
        heads = max(layer.num_heads for layer in architecture.layers)
        what = "the latent" if architecture.expanded is not None else f"each of the {heads} KV heads"
        warnings.append(
            f"tp {parallel.tp}: {what} is stored {plan.head_replicas} times, once for each rank that reads it"
        )
    usable = int(hardware.device.memory_bytes * question.utilisation)
    verdict = fit(
        architecture,
        forms[engine],
        plan,
        accounting=engine,
        usable_bytes=usable,
        tokens=tokens,
        batch=question.batch,
    )
    setting = Setting(
        model=_label(source),
        hub_name=source.hub_name or question.model,
        architecture=architecture,
        weights=weights,
        hardware=hardware,
        parallel=parallel,
        roofline=Roofline.of(
            hardware.device,
            parallel.tp * parallel.pp,
            memory_efficiency=question.memory_efficiency,
            compute_efficiency=question.compute_efficiency,
        )
        if asked
        else None,
        budget_bytes=verdict.available_bytes if asked and weights is not None else None,
        tokens=tokens,
        batch=question.batch,
        accounting=engine,
    )
    document: dict[str, Any] = {
        "model": question.model,
        "architecture": architecture_report(source, architecture),
        "tokens": tokens,
        "batch": question.batch,
        "accounting": question.accounting,
        "codec": ideal.codec.name,
        "dtype": ideal.raw_dtype,
        **size_report(architecture, main, tokens, question.batch),
        "accountings": {
            name: {
                "bytes_per_sequence": accounting.sequence(tokens).total,
                "bytes_total": accounting.total(tokens, question.batch),
                "version": accounting.version,
            }
            for name, accounting in accountings.items()
        },
        "weights_bytes": None if weights is None else weights.num_bytes,
        "weights": None if weights is None else {"origin": weights.origin, "estimate": weights.estimate},
        "cache_outweighs_weights": None if weights is None else outweighs(architecture, ideal, weights, tokens),
        "per_device": device_report(architecture, plan, ideal, engine, tokens, question.batch),
        "served_by_this_version": ideal.served,
        "fit": fit_report(question, setting, forms[engine], verdict, usable, asked=asked),
    }
    if question.what_if:
        document["what_if"] = what_if_report(question, original, ideal, tokens)
    if asked:
        document["fit"] |= roofline_report(question, setting, ideal, assumptions)
    choices = _choices(
        question, replace(setting, accounting="kvloom"), forms["kvloom"], workload, document, assumptions, warnings
    )
    if question.replay:
        document["replay"] = replay_report(question, setting, accountings["kvloom"], verdict if asked else None)
    say_traps(original, assumptions)
    document["assumptions"] = list(dict.fromkeys(assumptions))
    document["warnings"] = list(dict.fromkeys(warnings))
    return Answer(
        document=document,
        fits=verdict.fits if asked and weights is not None else None,
        unknown=asked and weights is None,
        architecture=architecture,
        accountings=accountings,
        choices=choices,
    )


def _choices(
    question: Question,
    setting: Setting,
    form: CacheFormat,
    workload: Workload | None,
    document: dict[str, Any],
    assumptions: list[str],
    warnings: list[str],
) -> tuple[Choice, ...]:
    """Rank pipelines when a situation or a workload was given, and add what follows to the document."""
    document["choices"] = []
    if question.situation is None and workload is None:
        return ()
    situation = find_situation(question.situation or "throughput")
    choices = choose(
        setting,
        form,
        situation,
        workload=workload,
        max_kl=question.max_kl,
        tiers=[parse_tier(text) for text in question.tiers],
    )
    document["choices"] = [choice_report(index, choice) for index, choice in enumerate(choices, start=1)]
    document["situation"] = {
        "name": situation.name,
        "rule": situation.rule,
        "accepted_kl": situation.max_kl if question.max_kl is None else question.max_kl,
        "aim": situation.aim,
    }
    document["handover"] = handover_report(choices, setting)
    document["known_results"] = known_results(setting.model, setting.architecture.model_type)
    if workload is not None:
        document["workload"] = {
            "input_tokens": workload.input_tokens,
            "output_tokens": workload.output_tokens,
            "shared_fraction": workload.shared_fraction,
            "origin": workload.origin,
        }
    warnings += when_compression_does_not_help(setting, form)
    warnings += missed_targets(setting, workload)
    assumptions.append("losses come from tables measured on the model and text named with each; see docs/sizing.md")
    return choices


def _formats(question: Question) -> dict[str, CacheFormat]:
    """The cache's format, with each accounting's own step size."""
    codec = parse_codec(question.codec)
    return {
        name: CacheFormat(
            codec=codec,
            dtype=question.dtype,
            sink_tokens=codec.sink_tokens if question.sink_tokens is None else question.sink_tokens,
            recent_tokens=codec.recent_tokens if question.recent_tokens is None else question.recent_tokens,
            protect_layers=question.protect_layers,
            encode_windows=question.encode_windows,
            block_size=question.block_size,
            chunk=question.chunk or DEFAULT_CHUNK[name],
        )
        for name in ACCOUNTINGS
    }


def _check_layers(question: Question, architecture: Architecture) -> None:
    for layer in question.protect_layers:
        if not 0 <= layer < architecture.num_layers:
            raise ConfigError(
                f"--protect-layers names layer {layer}; the model has layers 0 to {architecture.num_layers - 1}"
            )


def _workload(question: Question) -> Workload | None:
    if question.workload is not None:
        return question.workload
    if question.trace is not None and question.situation is not None:
        return workload_of_trace(
            question.trace, target_ttft_s=question.target_ttft_s, target_tpot_s=question.target_tpot_s
        )
    return None


def _tokens(
    question: Question,
    architecture: Architecture,
    workload: Workload | None,
    assumptions: list[str],
    warnings: list[str],
) -> int:
    limit = architecture.max_positions
    if question.context is not None:
        tokens = question.context
    elif workload is not None:
        tokens = workload.tokens
        assumptions.append(f"context {tokens:,} tokens: input plus output of the workload ({workload.origin})")
    else:
        tokens = min(FALLBACK_CONTEXT, limit or FALLBACK_CONTEXT)
        assumptions.append(f"context {tokens:,} tokens: none was given (--context)")
    if limit is not None and tokens > limit:
        warnings.append(f"context {tokens:,} is beyond the {limit:,} positions that the model's config states")
    return tokens


def _label(source: ModelSource) -> str:
    """A name that quality tables can be matched with: the preset's where there is one."""
    return source.origin.removeprefix("preset ") if source.origin.startswith("preset ") else source.name


def _hardware(question: Question) -> tuple[Hardware, bool]:
    """The devices, and whether they were asked for."""
    asked = question.device is not None or question.memory is not None
    devices = (question.tp or 1) * (question.pp or 1) * (question.dp or 1)
    if question.device is not None:
        hardware = parse_device(question.device)
        if question.memory is not None:
            hardware = replace(
                hardware, device=replace(hardware.device, memory_bytes=parse_bytes(question.memory), source="as given")
            )
    elif question.memory is not None:
        hardware = Hardware(
            device=Device(
                name="given", memory_bytes=parse_bytes(question.memory), bandwidth=None, flops=None, source="as given"
            ),
            count=devices,
        )
    else:
        # sizes only were asked: this machine's memory is shown, its speed is not measured
        hardware = Hardware(device=this_machine(measure=False), count=devices)
    device = hardware.device
    if question.bandwidth is not None:
        device = replace(device, bandwidth=float(parse_bytes(question.bandwidth)))
    if question.tflops is not None:
        device = replace(device, flops=question.tflops * 1e12)
    return replace(hardware, device=device), asked
