"""The pins hold for every Python that pyproject.toml admits."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def pins(python: str) -> dict[str, str]:
    """What constraints.txt pins for a Python, by canonical name."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


def test_the_oldest_python_gets_no_pin_that_left_it_behind() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'requires-python = ">=([0-9.]+)"', text)
    assert match is not None
    oldest = pins(match.group(1))
    for distribution in importlib.metadata.distributions():
        needs = distribution.metadata["Requires-Python"]
        if oldest.get(canonicalize_name(distribution.metadata["Name"])) != distribution.version or needs is None:
            continue
        assert f"{match.group(1)}.0" in SpecifierSet(needs), f"{distribution.name} {distribution.version}: {needs}"


def test_both_pythons_have_the_same_pins_but_for_backports() -> None:
    assert set(pins("3.10")) - set(pins("3.11")) == {"exceptiongroup", "tomli"}
    assert set(pins("3.11")) <= set(pins("3.10"))
