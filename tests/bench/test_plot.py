"""The plot is drawn from whatever was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cells import parse_cells
from bench.plot import colours_of, draw, label, points

pytest.importorskip("matplotlib")


def measured(seconds: float) -> dict[str, Any]:
    rounds = [seconds * 0.9, seconds, seconds * 1.2]
    parts = {"weights_ms": 300 * seconds, "cache_ms": 200 * seconds, "rest_ms": 500 * seconds}
    return {"seconds": seconds, "rounds": rounds, "bound_s": seconds / 2, **parts}


def result(cells: str) -> dict[str, Any]:
    found = []
    for cell in parse_cells(cells):
        seconds = 0.01 + cell.sequences * (0.001 + cell.context * 2e-6)
        engines = {"ours": measured(seconds), "llama": measured(1.6 * seconds), "vllm": {"not_run": "why"}}
        found.append({"name": cell.name, **vars(cell), "engines": engines})
    machine = {"processor": "a processor", "threads": 2, "bandwidth_gb_s": 25.0}
    return {"machine": machine, "model": {"name": "a model"}, "cells": found}


@pytest.mark.parametrize("cells", ["all", "prefill:8x512", "8x512"])
def test_a_plot_is_drawn(tmp_path: Path, cells: str) -> None:
    paths = [tmp_path / "plot.svg", tmp_path / "plot.png"]
    draw(result(cells), paths)
    assert paths[0].read_text().rstrip().endswith("</svg>")
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_points_are_in_order_and_leave_out_who_did_not_run() -> None:
    cells = result("1x1024,1x256")["cells"]
    found = points(cells, "ours", "context", lambda _, seconds: seconds)
    assert [point[0] for point in found] == [256, 1024]
    _, value, least, most, limit = found[0]
    assert limit < least < value < most
    assert points(cells, "vllm", "context", lambda _, seconds: seconds) == []


def test_variants_are_drawn_with_names_and_colours_of_their_own(tmp_path: Path) -> None:
    document = result("8x4096,1x8192")
    for cell in document["cells"]:
        for number, name in enumerate(("ours", "ours@int8", "ours@turboquant4")):
            parts = {"linear": 5.0, "attention": 4.0 - number, "outside": 1.0}
            cell["engines"][name] = {**measured(0.1 - 0.01 * number), "parts_ms": parts}
    colours = colours_of(document["cells"])
    assert len(set(colours.values())) == len(colours) == 5
    path = tmp_path / "plot.svg"
    draw(document, [path])
    assert "kvloom turboquant4" in path.read_text()
    assert label("llama@q8_0") == "llama.cpp q8_0"
    assert label("ours") == "kvloom"
