"""The results for people: a table on a terminal, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from bench.details import Line, Table, details

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
            text += _protection(own)
        lines.append(text + "".join(f"; {note}" for note in engine.get("notes", ())))
    lines += _uneven(document)
    return "\n".join(lines)


def _protection(own: dict[str, Any]) -> str:
    kept = [f"{end} {own[key]}" for end, key in (("first", "sink_tokens"), ("last", "recent_tokens")) if own.get(key)]
    return f", {' and '.join(kept)} tokens raw" if kept else ""


def _uneven(document: dict[str, Any]) -> list[str]:
    """A remark where a round's steps encode more or fewer blocks than as many steps do on the whole."""
    steps = document.get("settings", {}).get("steps")
    encoded = [engine["engine"] for engine in document["engines"].values() if engine.get("engine")]
    sizes = {own["block_size"] for own in encoded if own.get("codec", "raw") != "raw" and "block_size" in own}
    return [
        f"{steps} steps are no whole number of blocks of {size} tokens: means have too much or too little of encoding"
        for size in sorted(sizes)
        if steps and steps % size
    ]


def _range(both: Sequence[float]) -> str:
    return " and ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in both)


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
    tables = [Table(heading(document), COLUMNS, rows(document["cells"])), *details(document["cells"])]
    if out.isatty():
        for table in tables:
            _show_table(table, out)
    else:
        texts = ["\n".join([table.title, *plain(table.lines, table.columns)]) for table in tables]
        print(*texts, sep="\n\n", file=out)


def plain(lines: Sequence[Line], titles: Sequence[str] = COLUMNS) -> list[str]:
    """Titles and lines with columns aligned by spaces, remarks behind them."""
    every = [Line(list(titles)), *lines]
    width = [max(len(line.columns[i]) for line in every if i < len(line.columns)) for i in range(len(titles))]
    found = []
    for line in every:
        aligned = [text.ljust(width[i]) if i < 2 else text.rjust(width[i]) for i, text in enumerate(line.columns)]
        found.append("  ".join([*aligned, line.remark]).rstrip())
    return found


def _show_table(shown: Table, out: TextIO) -> None:
    from rich import table as rich
    from rich.console import Console

    console = Console(file=out)
    console.print(shown.title, highlight=False, markup=False)
    table = rich.Table(*shown.columns, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    cell = ""
    remarks = []
    for line in shown.lines:
        if line.columns[0]:
            cell = line.columns[0]
            table.add_section()
        if line.remark:  # a sentence would widen a column beyond the screen
            remarks.append(f"{cell} {line.columns[1]}: {line.remark}")
        table.add_row(*line.columns, style="bold" if line.columns[1] == "ours" else None)
    console.print(table)
    for remark in remarks:
        console.print(remark, highlight=False, markup=False)
