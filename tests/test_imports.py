"""The import directions that docs/architecture.md states, held against the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvloom"

MAY_IMPORT = {
    "core": set(),
    "kernels": {"core"},
    "codecs": {"core", "kernels"},
    "cache": {"core", "codecs"},
    "attention": {"core", "kernels", "codecs"},
    "models": {"core", "attention", "kernels", "codecs"},
    "engine": {"core", "cache", "models", "attention", "kernels"},
    "gate": {"core", "engine", "models"},
    "planner": {"core"},
    "server": {"core", "engine", "planner"},
}


def imports_of(path: Path) -> set[str]:
    """Folders of kvloom that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
            if node.module == "kvloom":
                names = [f"kvloom.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "kvloom" and len(parts) > 1:
                found.add(parts[1])
    return found


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_folders_import_only_what_they_may(folder: str) -> None:
    for path in sorted((SOURCE / folder).rglob("*.py")):
        beyond = (imports_of(path) & set(MAY_IMPORT)) - MAY_IMPORT[folder] - {folder}
        assert not beyond, f"{path.relative_to(SOURCE)} imports {', '.join(sorted(beyond))}"


def test_every_folder_is_named() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(MAY_IMPORT)


@pytest.mark.parametrize("folder", ["core", "planner"])
def test_planning_needs_no_torch(folder: str) -> None:
    for path in sorted((SOURCE / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "import torch" not in text and "from torch" not in text, path
