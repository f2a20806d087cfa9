"""``kvloom plan``: the command line of the planner.

Registered by ``kvloom.cli`` with ``app.command("plan")(plan)``. Exit status: 0 fits (or only sizes
were asked), 1 does not fit the named hardware, 2 bad usage or configuration, 3 unknown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.core.errors import ConfigError, KvloomError
from kvloom.planner.tokens import echo_tokens, parse_tokens

if TYPE_CHECKING:  # imported by the functions below when they run: `kvloom --help` stays fast
    from kvloom.planner.plan import Answer
    from kvloom.planner.trace import Trace
    from kvloom.planner.workload import Workload


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Preset, hub id, directory, config.json, .gguf file or package:NAME. --list-models names the presets."
        ),
    ] = None,
    context: Annotated[str | None, typer.Option(help="Tokens per sequence: 8192, 32k (32,000), 32K (32,768).")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    codec: Annotated[str, typer.Option(help="Codec for keys and values: raw, int8, loom4, or k=int8,v=int4.")] = "raw",
    dtype: Annotated[str, typer.Option(help="Raw values: bfloat16, float16 or float32.")] = "bfloat16",
    sink_tokens: Annotated[int | None, typer.Option(help="First tokens kept raw; the codec's default.")] = None,
    recent_tokens: Annotated[int | None, typer.Option(help="Last tokens kept raw; the codec's default.")] = None,
    protect_layers: Annotated[str | None, typer.Option(help="Layers kept raw, such as 0,27.")] = None,
    encode_windows: Annotated[bool, typer.Option(help="Encode windowed layers too.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens per block: 8 to 256, a power of two.")] = 32,
    chunk: Annotated[int | None, typer.Option(help="Tokens computed in one step; the accounting's default.")] = None,
    accounting: Annotated[str, typer.Option(help="ideal, kvloom, vllm or llama.cpp.")] = "ideal",
    what_if: Annotated[str | None, typer.Option(help="Other heads: mha, gqa:N, mqa or mla:RANK.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel degree.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel degree.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data parallel degree.")] = None,
    device: Annotated[str | None, typer.Option(help="Device such as h200, h200:8 or this.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device, such as 24GiB.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Memory bandwidth of one device, bytes/s: 900GB.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Dense 16-bit TFLOP/s of one device.")] = None,
    utilisation: Annotated[float, typer.Option(help="Share of memory that may be used.")] = 0.9,
    mbu: Annotated[float, typer.Option(help="Share of peak bandwidth that is reached.")] = 0.8,
    mfu: Annotated[float, typer.Option(help="Share of peak compute that is reached.")] = 0.5,
    weights: Annotated[str | None, typer.Option(help="Size of all weights, instead of counting them.")] = None,
    weight_dtype: Annotated[str | None, typer.Option(help="Dtype of the weights: bfloat16, fp8, int4 …")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of one device for an hour.")] = None,
    situation: Annotated[
        str | None, typer.Option(help="Rank pipelines for: long-context, throughput, chat-rag, edge, accuracy.")
    ] = None,
    input_tokens: Annotated[str | None, typer.Option(help="Workload: prompt tokens of a typical request.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Workload: output tokens of a typical request.")] = None,
    shared: Annotated[float, typer.Option(help="Workload: share of prompt tokens seen before, 0 to below 1.")] = 0.0,
    target_ttft: Annotated[float | None, typer.Option(help="Target time to first token, seconds.")] = None,
    target_tpot: Annotated[float | None, typer.Option(help="Target time per output token, seconds.")] = None,
    max_kl: Annotated[float | None, typer.Option(help="Accepted loss, KL in nats a token.")] = None,
    tier: Annotated[list[str] | None, typer.Option(help="Tier below the device: host:64GiB, disk:1TiB.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Take the workload from a trace.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Replay a trace through the planned cache.")] = None,
    trace_format: Annotated[
        str | None, typer.Option(help="mooncake, bailian or azure; recognised if left out.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page with charts.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the main chart as an .svg file.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    list_models: Annotated[bool, typer.Option("--list-models", help="Name the presets and stop.")] = False,
) -> None:
    """Exact KV-cache sizes of any model, what fits, and the pipeline to choose. Needs no weights."""
    from kvloom.planner.plan import answer
    from kvloom.planner.question import Question
    from kvloom.planner.replay import parse_tier

    try:
        if list_models:
            _list(json_output)
            return
        if model is None:
            raise ConfigError(
                "MODEL is missing; give a preset, hub id, directory or file (--list-models names presets)"
            )
        units = [echo_tokens(text, parse_tokens(text, flag="--context")) for text in (context,) if text]
        question = Question(
            model=model,
            context=None if context is None else parse_tokens(context, flag="--context"),
            batch=batch,
            codec=codec,
            dtype=dtype,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            protect_layers=_layers(protect_layers),
            encode_windows=encode_windows,
            block_size=block_size,
            chunk=chunk,
            accounting=accounting,
            tp=tp,
            pp=pp,
            dp=dp,
            device=device,
            memory=memory,
            bandwidth=bandwidth,
            tflops=tflops,
            utilisation=utilisation,
            memory_efficiency=mbu,
            compute_efficiency=mfu,
            weights=weights,
            weight_dtype=weight_dtype,
            price_per_hour=price_per_hour,
            what_if=what_if,
            situation=situation,
            workload=_workload(input_tokens, output_tokens, shared, target_ttft, target_tpot),
            target_ttft_s=target_ttft,
            target_tpot_s=target_tpot,
            max_kl=max_kl,
            tiers=tuple(tier or ()),
            trace=_trace(trace, replay, trace_format),
            replay=replay is not None,
            units=tuple(unit for unit in units if unit),
        )
        for text in question.tiers:
            parse_tier(text)  # refuse a bad tier before any work
        result = answer(question)
        _write(result, html, plot)
    except KvloomError as error:
        _fail(error, json_output)
    _print(result, json_output)
    if result.unknown:
        raise typer.Exit(3)
    if result.fits is False:
        raise typer.Exit(1)


def _list(json_output: bool) -> None:
    from kvloom.planner.presets import preset_names

    names = preset_names()
    typer.echo(json.dumps({"models": names}) if json_output else "\n".join(names))


def _layers(text: str | None) -> frozenset[int]:
    if text is None:
        return frozenset()
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--protect-layers is {text!r}; write layer numbers such as 0,27") from error


def _workload(
    input_tokens: str | None, output_tokens: str | None, shared: float, ttft: float | None, tpot: float | None
) -> Workload | None:
    if input_tokens is None and output_tokens is None:
        if shared:
            raise ConfigError("--shared needs --input-tokens and --output-tokens")
        return None
    if input_tokens is None or output_tokens is None:
        missing = "--output-tokens" if output_tokens is None else "--input-tokens"
        raise ConfigError(f"{missing} is missing; a workload needs both lengths")
    from kvloom.planner.workload import Workload

    return Workload(
        input_tokens=parse_tokens(input_tokens, flag="--input-tokens"),
        output_tokens=parse_tokens(output_tokens, flag="--output-tokens"),
        shared_fraction=shared,
        target_ttft_s=ttft,
        target_tpot_s=tpot,
    )


def _trace(trace: Path | None, replay: Path | None, kind: str | None) -> Trace | None:
    if trace is not None and replay is not None and trace != replay:
        raise ConfigError("--trace and --replay name different files; give one of them")
    path = replay or trace
    if path is None:
        return None
    from kvloom.planner.trace import read_trace

    return read_trace(path, kind)


def _write(result: Answer, html: Path | None, plot: Path | None) -> None:
    if html is None and plot is None:
        return
    from kvloom.planner.page import charts, render

    if html is not None:
        _save(html, render(result).encode())
    if plot is None:
        return
    drawn = charts(result)
    chart = drawn[1] if result.choices and len(drawn) > 1 else drawn[0]
    if plot.suffix == ".svg":
        _save(plot, chart.encode())
    elif plot.suffix == ".png":
        raise ConfigError(f"--plot {plot}: charts are drawn as SVG; write to {plot.with_suffix('.svg')}")
    else:
        raise ConfigError(f"--plot is {str(plot)!r}; the name must end in .svg")


def _save(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _print(result: Answer, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps(result.document, indent=2))
        return
    from kvloom.planner.sections import sections
    from kvloom.planner.text import plain, show

    parts = sections(result.document)
    if sys.stdout.isatty():
        show(parts)
    else:
        sys.stdout.write(plain(parts))


def _fail(error: KvloomError, json_output: bool) -> None:
    status = error.exit_status
    if json_output:
        kind = "unknown" if status == 3 else "does not fit" if status == 1 else "bad usage"
        typer.echo(json.dumps({"error": {"kind": kind, "message": str(error), "exit_status": status}}))
    typer.echo(f"kvloom plan: {error}", err=True)
    raise typer.Exit(status) from error
