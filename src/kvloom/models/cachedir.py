"""Where kvloom keeps what it computes from model files: converted models and digests."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvloom.core.errors import ModelError


def cache_directory(setting: str | None) -> Path:
    """``setting``, else ``KVLOOM_CACHE_DIR``, else ``kvloom`` in the user's cache directory."""
    chosen = setting or os.environ.get("KVLOOM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvloom"


def make_directory(path: Path) -> Path:
    """``path``, created with its parents.

    Raises:
        ModelError: it cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot create {path} for converted models ({error.strerror or error}); choose another place with "
            "--cache-dir or KVLOOM_CACHE_DIR"
        ) from error
    return path


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a small JSON file at once, so that no reader sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(temporary, path)


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty where there is none or it is unreadable: it is only a cache."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
