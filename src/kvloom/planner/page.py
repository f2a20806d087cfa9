"""The answer as one HTML page with inline charts: opens offline, loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from kvloom.core.sizes import format_bytes
from kvloom.planner.accounting import Accounting
from kvloom.planner.charts import Dot, Line, bytes_label, line_chart, scatter, stacked_bars
from kvloom.planner.plan import Answer
from kvloom.planner.sections import Section, sections

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; }
th { color: #555; border-bottom: 1px solid #ddd; } tr:nth-child(even) td { background: #f7f7f7; }
pre { background: #f5f5f5; padding: 10px; overflow-x: auto; font-size: 12.5px; white-space: pre-wrap; }
p.line { margin: 2px 0; color: #444; } .warnings p.line { color: #9a4a00; }
svg { max-width: 100%; height: auto; margin: 10px 0; border: 1px solid #eee; }
"""


def charts(answer: Answer) -> list[str]:
    """Every chart that the answer has material for, as SVG."""
    document = answer.document
    drawn = [_memory_against_context(answer)]
    if document["choices"]:
        drawn.append(_pareto(document))
    if document.get("replay"):
        drawn += [_usage(document["replay"]), _allocators(document["replay"]["allocators"])]
    return [chart for chart in drawn if chart]


def _memory_against_context(answer: Answer) -> str:
    document = answer.document
    tokens = document["tokens"]
    highest = max(tokens, min(document["architecture"]["max_positions"] or 131072, 2**20), 4096)
    contexts = [128]
    while contexts[-1] * 1.19 < highest:
        contexts.append(int(contexts[-1] * 1.19) + 1)
    contexts = sorted({*contexts, highest})
    lines = [_curve(accounting, contexts, document["batch"]) for accounting in answer.accountings.values()]
    for choice in answer.choices[:3]:
        if choice.pipeline.form.lossless or choice.pipeline.keep is not None:
            continue
        accounting = type(answer.accountings["kvloom"])(answer.architecture, choice.pipeline.form)
        curve = _curve(accounting, contexts, document["batch"])
        lines.append(Line(name=f"{choice.pipeline.name} (kvloom)", points=curve.points))
    marks = []
    if document["weights_bytes"]:
        marks.append((f"weights {format_bytes(document['weights_bytes'])}", float(document["weights_bytes"])))
    batch = document["batch"]
    return line_chart(
        f"Cache bytes of {batch} sequence{'s' if batch != 1 else ''} against context",
        lines,
        x_title="context, tokens (logarithmic)",
        y_title="bytes (logarithmic)",
        log=True,
        y_label=bytes_label,
        marks=marks,
    )


def _curve(accounting: Accounting, contexts: list[int], batch: int) -> Line:
    return Line(
        name=accounting.name,
        points=tuple((float(n), float(accounting.total(n, batch))) for n in contexts),
    )


def _pareto(document: Mapping[str, Any]) -> str:
    first_of: dict[str, Mapping[str, Any]] = {}
    for choice in document["choices"]:
        if choice["quality"]["kl_mean"] is not None:
            first_of.setdefault(choice["name"].split("+")[0], choice)  # with and without tiers: one dot
    measured = list(first_of.values())
    fastest = max((choice["tokens_per_second"] or 0.0 for choice in measured), default=0.0)
    dots = [
        Dot(
            name=choice["name"].split("+")[0],
            x=float(choice["bytes_per_sequence"]),
            y=float(choice["quality"]["kl_mean"]),
            weight=(choice["tokens_per_second"] or 0.0) / fastest if fastest else 0.3,
            strong=choice["pareto"],
            hint=f"{choice['name']}: {format_bytes(choice['bytes_per_sequence'])}, "
            f"KL {choice['quality']['kl_mean']:.3g}, "
            + (f"{choice['tokens_per_second']:,.0f} tokens/s" if choice["tokens_per_second"] else "speed unknown"),
        )
        for choice in measured
    ]
    model = next((c["quality"]["model"] for c in measured if c["quality"]["model"]), "")
    return scatter(
        "Bytes, quality and speed (filled: no other is better in all three; larger: faster)",
        dots,
        x_title="bytes of one sequence (logarithmic)",
        y_title=f"KL, nats a token ({model.split('/')[-1]})",
        y_label=lambda value: f"{value:g}",
    )


def _usage(report: Mapping[str, Any]) -> str:
    points = report["usage"]
    if not points:
        return ""
    minutes = [point["time_s"] / 60 for point in points]
    lines = [
        Line(
            name="held by running requests",
            points=tuple(zip(minutes, (p["pinned_bytes"] for p in points), strict=True)),
        ),
    ]
    if report["capacity_bytes"] is not None:
        lines.append(
            Line(
                name="reusable blocks included",
                points=tuple(zip(minutes, (p["held_bytes"] for p in points), strict=True)),
            )
        )
    return line_chart(
        f"Cache use over time: {report['trace']}",
        lines,
        x_title="minutes",
        y_title="bytes",
        log=False,
        y_label=bytes_label,
        x_label=lambda value: f"{value:g}",
    )


def _allocators(report: Mapping[str, Any]) -> str:
    results = report["results"]
    if not results:
        return ""
    parts = [
        (label, [result[key] for result in results])
        for label, key in (
            ("tokens", "stored"),
            ("reserved for later", "reserved"),
            ("never used", "internal"),
            ("rounding", "rounding"),
            ("free", "free"),
        )
    ]
    names = [f"{result['name']}" for result in results]
    return stacked_bars("What memory holds while requests wait", names, parts)


def render(answer: Answer) -> str:
    """The whole page."""
    document = answer.document
    body = [f"<h1>kvloom plan: {escape(str(document['model']))}</h1>"]
    body += charts(answer)
    body += [_section(part) for part in sections(document)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvloom plan: {escape(str(document['model']))}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(part: Section) -> str:
    pieces = [f'<section class="{part.title.split()[0].lower()}"><h2>{escape(part.title)}</h2>']
    if part.rows:
        pieces.append('<div class="scroll"><table>')
        if any(part.columns):
            pieces.append("<tr>" + "".join(f"<th>{escape(column)}</th>" for column in part.columns) + "</tr>")
        pieces += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows]
        pieces.append("</table></div>")
    if part.title == "Hand over":
        pieces.append("<pre>" + escape("\n".join(part.lines)) + "</pre>")
    else:
        pieces += [f'<p class="line">{escape(line)}</p>' for line in part.lines]
    return "\n".join([*pieces, "</section>"])
