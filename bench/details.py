"""Further tables of a report: what steps are made of, measured from within, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("linear", "attention", "encode", "rest", "outside")
MEBIBYTE = 2**20
Figures = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One engine in one cell: its columns (fewer where it did not run) and a remark."""

    columns: list[str]
    remark: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    lines: list[Line]


def details(cells: Iterable[dict[str, Any]]) -> list[Table]:
    """Those tables for which there are figures."""
    cells = list(cells)
    tables = [
        Table(
            "Inside: ms of the mean decode step, or of the whole prefill; attention against the raw cache's, without "
            "and with encoding",
            ("cell", "engine", "median step", "mean step", *PARTS, "att/raw", "+enc/raw"),
            _lines(cells, "parts_ms", _parts),
        ),
        Table(
            "Memory, MiB: of the arena in use by sequences, at most and after the prompts; resident in the process",
            ("cell", "engine", "arena", "in use", "prompts", "rss before", "rss peak", "read from"),
            _lines(cells, "memory", _memory),
        ),
    ]
    return [table for table in tables if table.lines]


def _lines(cells: Iterable[dict[str, Any]], key: str, columns: Callable[[Figures], list[str]]) -> list[Line]:
    """One line for each engine that has figures under ``key``; a cell's name stands at its first."""
    found = []
    for cell in cells:
        title = cell["name"]
        for name, figures in cell["engines"].items():
            if key in figures:
                found.append(Line([title, name, *columns(figures)]))
                title = ""
    return found


def _parts(figures: Figures) -> list[str]:
    step, parts = figures.get("step_ms", {}), figures["parts_ms"]
    columns = [_number(step.get(kind)) for kind in ("median", "mean")]
    columns += [_number(parts.get(part)) for part in PARTS]
    return columns + [_number(figures.get(key), 2) for key in ("attention_vs_raw", "with_encoding_vs_raw")]


def _memory(figures: Figures) -> list[str]:
    memory = figures["memory"]
    keys = ("arena_bytes", "used_peak_bytes", "held_bytes", "rss_before_bytes", "rss_peak_bytes")
    found = [memory.get(key) for key in keys]
    return [*(_number(None if value is None else value / MEBIBYTE) for value in found), memory.get("rss_by", "")]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
