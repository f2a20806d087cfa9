"""The worked numbers of docs/sizing.md, run."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"


def test_worked_numbers() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 30
    assert results.failed == 0


def test_crossing_of_weights() -> None:
    from kvloom.planner.plan import answer
    from kvloom.planner.question import Question

    found = answer(Question(model="llama-3.1-8b")).document["cache_outweighs_weights"]
    assert found["context_at_batch_1"] == 122_533
