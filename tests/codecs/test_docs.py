"""The examples of docs/codecs.md, run."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"


def test_examples() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 8
    assert results.failed == 0
