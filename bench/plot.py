"""Curves and bars of a result.

python -m bench.plot RESULT.json OUT.svg [OUT.png …]
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"ours": "kvloom", "transformers": "transformers", "vllm": "vLLM (CPU)", "llama": "llama.cpp"}
# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = {"ours": "#0072b2", "transformers": "#999999", "vllm": "#e69f00", "llama": "#009e73"}
PARTS = (("weights_ms", "weights", "#0072b2"), ("cache_ms", "cache", "#56b4e9"), ("rest_ms", "rest", "#dddddd"))
# What the native step tells of itself, and what of a step is outside it.
INSIDE = (
    ("linear", "#0072b2"), ("attention", "#d55e00"), ("encode", "#f0e442"), ("rest", "#999999"), ("outside", "#dddddd"),
)  # fmt: skip
VARIANT_COLOURS = (
    "#d55e00", "#cc79a7", "#56b4e9", "#882255", "#f0e442", "#332288", "#44aa99", "#aa4499", "#117733", "#661100",
)  # fmt: skip
Point = tuple[float, float, float, float, float]  # x, value, least, most, bound


def draw(document: dict[str, Any], paths: Sequence[Path]) -> None:
    """Write the plot in each path's format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#eeeeee",
        "axes.axisbelow": True,
        "legend.frameon": False,
        "svg.hashsalt": "kvloom",  # equal results give equal files
    }
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
        machine = document["machine"]
        figure.suptitle(
            f"{document['model']['name']}, {machine['processor']}, {machine['threads']} threads, "
            f"{machine['bandwidth_gb_s']:.0f} GB/s",
            fontsize=11,
        )
        cells = [cell for cell in document["cells"] if cell["phase"] == "decode" and not cell["shared"]]
        for axis, batch in ((axes[0, 0], 1), (axes[0, 1], 8)):
            chosen = [cell for cell in cells if cell["sequences"] == batch]
            title = f"One decode step, {batch} sequence{'s' if batch > 1 else ''}"
            curves(axis, chosen, "context", title, "context, tokens", "ms")
        chosen = [cell for cell in cells if cell["context"] == 512]
        curves(axes[1, 0], chosen, "sequences", "Decode, context 512", "sequences", "tokens per second")
        decode = [cell for cell in document["cells"] if cell["phase"] == "decode"]
        (inside if len(ours_in(decode)) > 1 else bars)(axes[1, 1], decode)
        for path in paths:
            plain = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, metadata=plain)
        pyplot.close(figure)


def curves(axis: Axes, cells: Sequence[dict[str, Any]], key: str, title: str, x_title: str, y_title: str) -> None:
    """Each engine's medians over ``key`` with bars from its fastest to its slowest round, and our bound."""
    value: Callable[[dict[str, Any], float], float] = (
        (lambda _, seconds: seconds * 1e3) if y_title == "ms" else (lambda cell, seconds: cell["sequences"] / seconds)
    )
    colours = colours_of(cells)
    for name, colour in colours.items():
        found = points(cells, name, key, value)
        if not found:
            continue
        xs, middle, least, most, limit = zip(*found, strict=True)
        below = [median - low for median, low in zip(middle, least, strict=True)]
        above = [high - median for median, high in zip(middle, most, strict=True)]
        strong = name == "ours"
        axis.errorbar(
            xs,
            middle,
            [below, above],
            marker="o",
            markersize=4,
            capsize=2,
            color=colour,
            label=label(name),
            linewidth=2 if strong else 1.4,
            zorder=3 if strong else 2,
        )
        if strong:
            axis.plot(xs, limit, color="#333333", linestyle="--", linewidth=1, label="physical bound (kvloom's cache)")
    axis.set(title=title, xlabel=x_title, ylabel=y_title, xscale="log", yscale="log")
    ticks = sorted({cell[key] for cell in cells})
    axis.set_xticks(ticks, [f"{tick}" for tick in ticks], minor=False)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axis.yaxis.set_major_locator(_steps())
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    else:
        axis.text(0.5, 0.5, "not measured in this run", ha="center", transform=axis.transAxes, color="#999999")


def label(name: str) -> str:
    """An engine's name for people: ``kvloom int8``."""
    engine, _, kept = name.partition("@")
    return f"{NAMES.get(engine, engine)} {kept}".rstrip()


def colours_of(cells: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A colour for each engine of ``cells``: plain ones have theirs, variants take turns."""
    names = dict.fromkeys(name for cell in cells for name in cell["engines"])
    variants = itertools.cycle(VARIANT_COLOURS)
    return {name: COLOURS[name] if name in COLOURS else next(variants) for name in names}


def ours_in(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Our engine and its variants, as far as their parts are known."""
    found = (name for cell in cells for name, figures in cell["engines"].items() if "parts_ms" in figures)
    return list(dict.fromkeys(name for name in found if name.partition("@")[0] == "ours"))


def _steps() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(base=10, subs=(1, 2, 5))


def points(
    cells: Sequence[dict[str, Any]], name: str, key: str, value: Callable[[dict[str, Any], float], float]
) -> list[Point]:
    """An engine's points of a curve, by ascending ``key``."""
    found: list[Point] = []
    for cell in sorted(cells, key=lambda cell: int(cell[key])):
        figures = cell["engines"].get(name, {})
        if "seconds" in figures:
            ends = sorted(value(cell, seconds) for seconds in figures["rounds"])
            found.append(
                (cell[key], value(cell, figures["seconds"]), ends[0], ends[-1], value(cell, figures["bound_s"]))
            )
    return found


def bars(axis: Axes, cells: Sequence[dict[str, Any]]) -> None:
    """What our steps are made of, as shares."""
    ordered = sorted(cells, key=lambda cell: (cell["sequences"], cell["context"]))
    found = [(cell["name"].partition(":")[2], cell["engines"].get("ours", {})) for cell in ordered]
    found = [(name, figures) for name, figures in found if "rest_ms" in figures]
    left = [0.0] * len(found)
    for key, label, colour in PARTS:
        shares = [figures[key] / figures["seconds"] / 10 for _, figures in found]
        axis.barh([name for name, _ in found], shares, left=left, color=colour, label=label)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=9 if len(found) <= 12 else 7)
    axis.grid(axis="y", visible=False)
    axis.set(title="What kvloom's decode step is made of", xlabel="% of its time", xlim=(0, 100))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=len(PARTS))


def inside(axis: Axes, cells: Sequence[dict[str, Any]]) -> None:
    """What the mean step of each variant of ours is made of, measured from within."""
    found = [
        (f"{cell['name'].partition(':')[2]} {name.partition('@')[2] or 'raw'}", cell["engines"][name]["parts_ms"])
        for cell in cells
        for name in ours_in([cell])
    ]
    left = [0.0] * len(found)
    for part, colour in INSIDE:
        widths = [parts.get(part, 0.0) for _, parts in found]
        axis.barh([name for name, _ in found], widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=9 if len(found) <= 12 else 7)
    axis.grid(axis="y", visible=False)
    axis.set(title="Inside kvloom's mean decode step", xlabel="ms")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=len(INSIDE))


def main() -> None:
    source, *targets = sys.argv[1:]
    draw(json.loads(Path(source).read_text(encoding="utf-8")), [Path(target) for target in targets])


if __name__ == "__main__":
    main()
