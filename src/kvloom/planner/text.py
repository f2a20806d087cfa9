"""Sections on a terminal (rich) or in a pipe (plain aligned text)."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.planner.sections import Section


def plain(parts: Sequence[Section]) -> str:
    """Aligned columns, no colour, no box drawing."""
    blocks: list[str] = []
    for part in parts:
        lines = [part.title]
        if part.rows:
            table = [part.columns, *part.rows] if any(part.columns) else list(part.rows)
            widths = [max(len(row[column]) for row in table) for column in range(len(part.columns))]
            lines += [
                "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                for row in table
            ]
        lines += [f"  {line}" for line in part.lines]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def show(parts: Sequence[Section]) -> None:
    """Print to the terminal with rich tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for part in parts:
        console.print(f"[bold]{escape(part.title)}[/bold]")
        if part.rows:
            table = Table(show_header=any(part.columns), box=None, pad_edge=False, padding=(0, 2))
            for column in part.columns:
                table.add_column(escape(column), overflow="fold")
            for row in part.rows:
                table.add_row(*(escape(cell) for cell in row))
            console.print(table)
        for line in part.lines:
            style = "yellow" if part.title == "Warnings" else "dim"
            console.print(f"  {escape(line)}", style=style, highlight=False, soft_wrap=part.title == "Hand over")
        console.print()
