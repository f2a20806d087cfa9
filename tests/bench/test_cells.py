"""Cells as they are written on the command line, and their prompts."""

from __future__ import annotations

import pytest

from bench.cells import SETS, Cell, make_prompts, parse_cells


def test_cells_are_read_and_named_alike() -> None:
    cells = parse_cells("8x512,decode:32x1024/960,prefill:8x512,served:32x128")
    assert [cell.name for cell in cells] == ["decode:8x512", "decode:32x1024/960", "prefill:8x512", "served:32x128"]
    assert cells[1] == Cell(phase="decode", sequences=32, context=1024, shared=960)
    assert parse_cells(",".join(cell.name for cell in cells)) == cells


def test_sets_hold_valid_cells_and_each_once() -> None:
    for name in SETS:
        assert parse_cells(name)
    everything = parse_cells("all,table")
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("text", ["8", "8x", "0x5", "8x1", "other:8x512", "8x512/512", "prefill:8x512/96", "tabel"])
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_cells(text)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    cell = Cell(phase="decode", sequences=3, context=40, shared=30)
    prompts = make_prompts(cell, 1000, seed=1)
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 3
    assert prompts == make_prompts(cell, 1000, seed=1)
    assert prompts != make_prompts(cell, 1000, seed=2)


def test_a_cell_is_cut_to_the_models_limit() -> None:
    cell = Cell(phase="decode", sequences=1, context=8192)
    assert cell.within(8192, 66).context == 8126
    assert cell.within(16384, 66) == cell
