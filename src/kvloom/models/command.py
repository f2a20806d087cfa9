"""``kvloom models``: which model types are verified; ``kvloom models check``: is this model served right?

Registered by ``kvloom.cli``. Exit status of ``check``: 0 passed, 1 failed, 2 cannot be loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.core.errors import KvloomError

if TYPE_CHECKING:  # imported by the functions below when they run: `kvloom --help` stays fast
    from kvloom.models.check import Verdict

models = typer.Typer(
    help="List the verified model types, or check a model of your own.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@models.callback()
def list_models(
    context: typer.Context,
    json_output: JsonOutput = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The tables of docs/models.md.")] = False,
) -> None:
    """List verified model types, what each keeps per token, and the transformers versions it was checked with."""
    if context.invoked_subcommand is not None:
        return
    import transformers

    from kvloom.models import listing
    from kvloom.models.families.refused import REFUSED

    transformers.logging.set_verbosity_error()  # its default configurations warn of each other's token ids
    rows = listing.list_types()
    if markdown:
        typer.echo(listing.markdown(rows), nl=False)
    elif json_output:
        document = {
            "transformers": transformers.__version__,
            "checked": listing.CHECKED,
            "models": [row.as_dict() for row in rows],
            "refused": dict(REFUSED),
        }
        typer.echo(json.dumps(document))
    else:
        header = ("model type", "layers × KV heads × planes, by default", "values/token", "verified with")
        table = [
            (row.model_type, row.layout(), f"{row.values_per_token:,}", ", ".join(row.verified_with)) for row in rows
        ]
        _table(header, table)
        _say(f"Each checked against transformers' eager attention: {', '.join(listing.CHECKED)}.")
        _say(f"Installed: transformers {transformers.__version__}. Refused: {', '.join(sorted(REFUSED))}.")
        _say("Any other model: kvloom models check MODEL")


@models.command()
def check(
    model: Annotated[str, typer.Argument(help="hub id, directory, GGUF file or package:NAME", show_default=False)],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "cpu",
    kernels: Annotated[str, typer.Option("--kernels", help="auto, reference or cpu")] = "auto",
    cache_dir: Annotated[
        str | None, typer.Option("--cache-dir", help="where converted models are kept", show_default=False)
    ] = None,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", min=1.0, help="about how long; longer windows are left out, and named")
    ] = 600.0,
    json_output: JsonOutput = False,
) -> None:
    """Compare MODEL's logits through the paged cache with transformers' eager attention, in float32."""
    from kvloom.models.check import check_model

    try:
        verdict = check_model(
            model,
            device=device,
            kernels=kernels,
            cache_dir=cache_dir,
            max_seconds=max_seconds,
            progress=lambda text: print(text, file=sys.stderr),
        )
    except KvloomError as error:
        print(f"kvloom: {error}", file=sys.stderr)
        if json_output:
            typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": str(error), "exit_status": 2}}))
        raise typer.Exit(2) from None
    if json_output:
        typer.echo(json.dumps(verdict.as_dict()))
    else:
        _print(verdict)
    raise typer.Exit(0 if verdict.passed else 1)


def _print(verdict: Verdict) -> None:
    rows = [
        (
            found.name,
            str(found.num_tokens),
            str(found.num_rows),
            f"{found.error:.1e}",
            "passed" if found.error <= verdict.tolerance else f"FAILED at {found.where}",
        )
        for found in verdict.checks
    ]
    _table(("check", "tokens", "rows compared", "max relative error", "verdict"), rows)
    _say(f"{verdict.model} ({verdict.model_type}): {'; '.join(verdict.layout)}")
    _say(f"kernels {verdict.kernels}, transformers {verdict.transformers}, {verdict.seconds:.0f} s")
    for note in verdict.notes:
        _say(f"note: {note}")
    if verdict.passed:
        use = "" if verdict.verified_type else "; serve it with --allow-unverified"
        _say(f"PASSED: logits equal eager's to {verdict.tolerance:.0e} relative{use}")
    else:
        _say(f"FAILED: logits differ from eager's by more than {verdict.tolerance:.0e} relative; do not serve it")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table for people on a terminal; aligned plain text in a pipe."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _say(text: str) -> None:
    typer.echo(text)
