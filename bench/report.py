"""The results for people: a table on a terminal, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

COLUMNS = (
    "cell", "engine", "ms", "tok/s", "spread", "n", "ours is", "bound ms", "reached", "weights", "cache", "rest",
)  # fmt: skip


def heading(document: dict[str, Any]) -> str:
    """What was measured where."""
    machine, model = document["machine"], document["model"]
    both = machine["start_and_end"]
    peaks = ", ".join(f"{dtype} {_range(peaks)}" for dtype, peaks in both["peak_gflop_s"].items())
    lines = [
        f"{model['name']} on {machine['processor']}, {machine['threads']} threads ({machine['capability']})",
        f"at start and end: read bandwidth {_range(both['bandwidth_gb_s'])} GB/s, matrix peak {peaks} GFLOP/s; bounds "
        "are by the better",
    ]
    for name, engine in document["engines"].items():
        if "not_run" in engine:
            lines.append(f"{name}: not run: {engine['not_run']}")
            continue
        text = f"{name}: {engine['version']}, {engine['dtype']}, cache of {8 * engine['cache_element_bytes']:g} bits"
        own = engine.get("engine")
        if own:
            text += f", kernels {own['kernels']}/{own['kernel_variant']}"
            text += "".join(f", {key} {own[key]}" for key in ("codec", "step") if key in own)
        lines.append(text + "".join(f"; {note}" for note in engine.get("notes", ())))
    return "\n".join(lines)


def _range(both: Sequence[float]) -> str:
    return " and ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in both)


@dataclass(frozen=True)
class Line:
    """One engine in one cell: its columns (fewer where it did not run) and a remark."""

    columns: list[str]
    remark: str = ""


def rows(cells: Iterable[dict[str, Any]]) -> list[Line]:
    """One line per cell and engine; a cell's name stands at its first."""
    found = []
    for cell in cells:
        title = cell["name"]
        for name, figures in cell["engines"].items():
            if "not_run" in figures:
                found.append(Line([title, name], f"not run: {figures['not_run']}"))
            else:
                found.append(Line([title, name, *_figures(figures)], _remark(figures)))
            title = ""
    return found


def _figures(figures: dict[str, Any]) -> list[str]:
    columns = [
        f"{figures['seconds'] * 1e3:.1f}",
        f"{figures['tokens_per_s']:.0f}",
        f"{figures['spread']:.0%}",
        str(figures["n"]),
        f"{figures['ours_faster']:.2f}x as fast" if "ours_faster" in figures else "",
    ]
    if "bound_s" in figures:
        columns += [f"{figures['bound_s'] * 1e3:.1f}", f"{figures['reached']:.0%}"]
        columns += [f"{figures[part]:.1f}" for part in ("weights_ms", "cache_ms", "rest_ms")]
    return columns


def _remark(figures: dict[str, Any]) -> str:
    if "without_client" not in figures:
        return ""
    return (
        f"{figures['share_of_offline']:.0%} of offline, {figures['without_client']:.0%} without the client's "
        f"{figures['client_cpu_s']:.2f} s of processor time"
    )


def show(document: dict[str, Any], out: TextIO) -> None:
    """Write the whole report."""
    lines = rows(document["cells"])
    if out.isatty():
        _show_table(heading(document), lines, out)
    else:
        print(heading(document), *plain(lines), sep="\n", file=out)


def plain(lines: Sequence[Line]) -> list[str]:
    """Titles and lines with columns aligned by spaces, remarks behind them."""
    every = [Line(list(COLUMNS)), *lines]
    width = [max(len(line.columns[i]) for line in every if i < len(line.columns)) for i in range(len(COLUMNS))]
    found = []
    for line in every:
        aligned = [text.ljust(width[i]) if i < 2 else text.rjust(width[i]) for i, text in enumerate(line.columns)]
        found.append("  ".join([*aligned, line.remark]).rstrip())
    return found


def _show_table(title: str, lines: Sequence[Line], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out)
    console.print(title, highlight=False, markup=False)
    table = Table(*COLUMNS, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    cell = ""
    remarks = []
    for line in lines:
        if line.columns[0]:
            cell = line.columns[0]
            table.add_section()
        if line.remark:  # a sentence would widen a column beyond the screen
            remarks.append(f"{cell} {line.columns[1]}: {line.remark}")
        table.add_row(*line.columns, style="bold" if line.columns[1] == "ours" else None)
    console.print(table)
    for remark in remarks:
        console.print(remark, highlight=False, markup=False)
