"""Configurations of well-known models, shipped with kvloom: sized without network or files."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A published configuration. ``parameters`` is the published weight count, where known."""

    name: str
    hub_ids: tuple[str, ...]
    config: dict[str, Any]
    parameters: int | None


def _folder() -> Any:
    return files("kvloom.planner").joinpath("data").joinpath("presets")


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(entry.name[: -len(".json")] for entry in _folder().iterdir() if entry.name.endswith(".json"))


def load_preset(name: str) -> Preset:
    """The preset called ``name`` exactly."""
    data = json.loads(_folder().joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return Preset(
        name=data["name"], hub_ids=tuple(data["hub_ids"]), config=data["config"], parameters=data["parameters"]
    )


@lru_cache(maxsize=1)
def _by_hub_id() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in preset_names():
        for hub_id in load_preset(name).hub_ids:
            found[hub_id.lower()] = name
            found.setdefault(hub_id.lower().split("/")[1], name)
    return found


def find_preset(text: str) -> Preset | None:
    """The preset that ``text`` names: its own name, a hub id, or a hub id without its owner."""
    wanted = text.lower()
    if wanted in preset_names():
        return load_preset(wanted)
    name = _by_hub_id().get(wanted)
    return load_preset(name) if name is not None else None


def nearest_presets(text: str) -> list[str]:
    """Up to three preset names that look like ``text``."""
    return difflib.get_close_matches(text.lower().split("/")[-1], preset_names(), n=3, cutoff=0.5)
