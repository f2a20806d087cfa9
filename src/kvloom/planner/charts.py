"""Charts as plain SVG text: no plotting library, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 44, 56
COLOURS = ("#3565a9", "#c2571a", "#2f8f5b", "#8a4bab", "#a3323a", "#6b7a1f")
BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A named series of (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A labelled point; ``weight`` 0 to 1 sets its size, ``strong`` draws it filled."""

    name: str
    x: float
    y: float
    weight: float
    strong: bool
    hint: str


def bytes_label(value: float) -> str:
    """A short byte size for an axis."""
    for size, unit in BINARY:
        if value >= size:
            return f"{value / size:g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value:g} B"


def count_label(value: float) -> str:
    """A short count for an axis: 4096 as 4K (binary), 1000 as 1,000."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


class _Scale:
    """Maps values to pixels, logarithmically where asked."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        self.log = log
        self.low, self.high = (log10(low), log10(high)) if log else (low, high)
        if self.high <= self.low:
            self.high = self.low + 1
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        at = log10(value) if self.log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.end - self.start)


def _frame(title: str, x_title: str, y_title: str) -> list[str]:
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text x="{middle_x}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text x="16" y="{middle_y}" text-anchor="middle" transform="rotate(-90 16 {middle_y})">'
        f"{escape(y_title)}</text>",
    ]


def _ticks_x(scale: _Scale, ticks: Sequence[float], label: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in ticks:
        x = scale(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(label(tick))}</text>')
    return parts


def _ticks_y(scale: _Scale, ticks: Sequence[float], label: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in ticks:
        y = scale(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label(tick))}</text>')
    return parts


def _powers(low: float, high: float, base: int, most: int) -> list[float]:
    """Powers of ``base`` within [low, high], thinned to at most ``most``."""
    values: list[float] = []
    value = 1.0
    while value < low:
        value *= base
    while value <= high * 1.0001:
        values.append(value)
        value *= base
    step = max(1, ceil(len(values) / most))
    return values[::step]


def _linear(high: float, most: int = 5) -> list[float]:
    """Round steps from zero to ``high``."""
    if high <= 0:
        return [0.0]
    raw = high / most
    magnitude = 10.0 ** floor(log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    return [step * index for index in range(int(high / step) + 1)]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    log: bool,
    y_label: Callable[[float], str],
    x_label: Callable[[float], str] = count_label,
    marks: Sequence[tuple[str, float]] = (),
) -> str:
    """Lines over a common axis; ``marks`` are horizontal dashed lines with a name."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if y > 0] + [value for _, value in marks]
    if not xs or not ys:
        return ""
    low_y = min(ys) * 0.8 if log else 0.0
    x_scale = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log)
    y_scale = _Scale(low_y, max(ys) * (1.5 if log else 1.3), HEIGHT - BOTTOM, TOP, log=log)
    parts = _frame(title, x_title, y_title)
    if log:
        parts += _ticks_x(x_scale, _powers(min(xs), max(xs), 2, 9), x_label)
        parts += _ticks_y(y_scale, _powers(low_y, max(ys) * 1.5, 4, 9), y_label)
    else:
        parts += _ticks_x(x_scale, _linear(max(xs)), x_label)
        parts += _ticks_y(y_scale, _byte_steps(max(ys)), y_label)
    for name, value in marks:
        y = y_scale(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" stroke-dasharray="5 4"/>'
            f'<text x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end" fill="#666">{escape(name)}</text>'
        )
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x_scale(x):.1f},{y_scale(max(y, low_y)):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<rect x="{LEFT + 12}" y="{TOP + 8 + 18 * index}" width="18" height="3" fill="{colour}"/>'
            f'<text x="{LEFT + 36}" y="{TOP + 14 + 18 * index}">{escape(line.name)}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _byte_steps(high: float) -> list[float]:
    """Round steps in the binary unit that suits ``high``."""
    size = next((size for size, _ in BINARY if high >= size), 1)
    return [step * size for step in _linear(high / size)]


def scatter(title: str, dots: Sequence[Dot], *, x_title: str, y_title: str, y_label: Callable[[float], str]) -> str:
    """Bytes (x, logarithmic) against loss (y, logarithmic); zero loss sits on the base line."""
    if not dots:
        return ""
    positive = [dot.y for dot in dots if dot.y > 0]
    floor_y = min(positive) / 3 if positive else 1e-4
    x_low, x_high = min(dot.x for dot in dots) * 0.85, max(dot.x for dot in dots) * 1.3
    x_scale = _Scale(x_low, x_high, LEFT, WIDTH - RIGHT, log=True)
    y_high = max([*positive, floor_y * 10]) * 2
    y_scale = _Scale(floor_y, y_high, HEIGHT - BOTTOM, TOP, log=True)
    parts = _frame(title, x_title, y_title)
    parts += _ticks_x(x_scale, _binary_steps(x_low, x_high), bytes_label)
    ticks = [tick for tick in _powers_of_ten(floor_y, y_high) if y_scale(tick) < HEIGHT - BOTTOM - 14]
    parts += _ticks_y(y_scale, ticks, y_label)
    parts.append(f'<text x="{LEFT - 8}" y="{HEIGHT - BOTTOM + 4}" text-anchor="end">exact</text>')
    placed: list[tuple[float, float]] = []
    labels: list[str] = []
    for dot in sorted(dots, key=lambda item: not item.strong):
        x, y = x_scale(dot.x), y_scale(max(dot.y, floor_y))
        radius = 4 + 7 * dot.weight
        fill = COLOURS[0] if dot.strong else "#fff"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" fill-opacity="0.75" '
            f'stroke="{COLOURS[0]}"><title>{escape(dot.hint)}</title></circle>'
        )
        labels.append(_label(dot, x, y, radius, placed))
    parts += labels  # over all circles
    return "\n".join([*parts, "</svg>"])


def _label(dot: Dot, x: float, y: float, radius: float, placed: list[tuple[float, float]]) -> str:
    """A dot's name beside it, moved up or down until it covers no earlier name."""
    width = 6.4 * len(dot.name)
    left = x + radius + 3 + width > WIDTH - RIGHT
    at_x = x - radius - 3 - width if left else x + radius + 3
    offsets = [0.0, 12.0, -12.0, 24.0, -24.0, 36.0, -36.0]
    at_y = y + 4
    for offset in offsets:
        candidate = y + 4 + offset
        if TOP < candidate < HEIGHT - BOTTOM + 6 and not any(
            abs(at_x - other_x) < max(width, 60) and abs(candidate - other_y) < 11 for other_x, other_y in placed
        ):
            at_y = candidate
            break
    placed.append((at_x, at_y))
    leader = ""
    if abs(at_y - y - 4) > 1:
        leader = f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{at_x:.1f}" y2="{at_y - 4:.1f}" stroke="#bbb"/>'
    style = ' font-weight="600"' if dot.strong else ' fill="#666"'
    return (
        f'{leader}<text x="{at_x:.1f}" y="{at_y:.1f}" font-size="11" stroke="#fff" stroke-width="3" '
        f'paint-order="stroke"{style}>{escape(dot.name)}</text>'
    )


def _binary_steps(low: float, high: float) -> list[float]:
    """1, 1.5, 2, 3, 4, 6 … times powers of two within [low, high], at most nine."""
    values = [factor * 2.0**exponent for exponent in range(60) for factor in (1.0, 1.5)]
    inside = [value for value in values if low <= value <= high]
    if len(inside) > 9:
        inside = [value for value in inside if log10(value) / log10(2) % 1 < 1e-9]
    return inside[:: ceil(len(inside) / 9)] if inside else [low, high]


def _powers_of_ten(low: float, high: float) -> list[float]:
    return [10.0**exponent for exponent in range(ceil(log10(low)), floor(log10(high)) + 1)]


def stacked_bars(title: str, names: Sequence[str], parts_of: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Horizontal bars of shares (each 0 to 1): one bar per name, one colour per part."""
    parts = _frame(title, "share of memory, %", "")
    scale = _Scale(0, 1, LEFT + 60, WIDTH - RIGHT, log=False)
    for tick in range(0, 101, 20):
        x = scale(tick / 100)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 26}" y2="{HEIGHT - BOTTOM}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>')
    height = (HEIGHT - BOTTOM - TOP - 34) / max(1, len(names))
    for row, name in enumerate(names):
        y = TOP + 34 + row * height
        parts.append(f'<text x="{LEFT + 52}" y="{y + height / 2:.1f}" text-anchor="end">{escape(name)}</text>')
        at = 0.0
        for index, (label, shares) in enumerate(parts_of):
            share = max(0.0, min(1 - at, shares[row]))
            x, width = scale(at), scale(share) - scale(0)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height * 0.7:.1f}" '
                f'fill="{BAR_COLOURS[index]}"><title>{escape(f"{name}: {label} {100 * share:.1f} %")}</title></rect>'
            )
            at += share
    x = float(LEFT)
    for index, (label, _) in enumerate(parts_of):
        parts.append(f'<rect x="{x}" y="{TOP - 8}" width="12" height="12" fill="{BAR_COLOURS[index]}"/>')
        parts.append(f'<text x="{x + 17}" y="{TOP + 2}">{escape(label)}</text>')
        x += 34 + 7.2 * len(label)
    return "\n".join([*parts, "</svg>"])


BAR_COLOURS = ("#3565a9", "#e0a458", "#c2571a", "#8a4bab", "#dddddd")
