"""One set of settings from flags, ``KVLOOM_*`` variables, a YAML file and defaults, in that order.

The engine's and the server's settings share one flat namespace; in a file the pipeline's stand
under ``pipeline:``, as the design writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.core.config import (
    EngineConfig,
    build_dataclass,
    engine_config,
    flat_settings,
    from_environment,
    merge_settings,
    read_yaml,
)
from kvloom.core.errors import ConfigError
from kvloom.core.sizes import parse_bytes
from kvloom.server.config import ServerConfig

# A variable holds one value or several with commas; a flag may be repeated; a file has a list.
LISTS: Mapping[str, str] = {
    "api_key": "api_keys",
    "served_model_name": "served_model_names",
    "cors_origin": "cors_origins",
}
VARIABLES_ONLY = frozenset({"debug", "config", "cpu_isa"})  # the last is read by kernels/cpu.py
SERVER = frozenset(field.name for field in dataclasses.fields(ServerConfig))
KNOWN = frozenset(flat_settings()) | SERVER

Layer = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    engine: EngineConfig
    server: ServerConfig


def resolve_settings(
    flags: Mapping[str, Any], *, environment: Mapping[str, str], config: Path | None = None
) -> Settings:
    """Merge every source and build the configurations; a flag that is None was not given.

    Raises:
        ConfigError: an unknown key, a value that does not convert, or one outside its limits.
    """
    variables = from_environment(environment, dict.fromkeys(KNOWN | set(LISTS) | VARIABLES_ONLY))
    path = config or (Path(variables["config"]) if variables.get("config") else None)
    layers: list[Layer] = [
        ("the command line", flags),
        ("the environment", {key: value for key, value in variables.items() if key not in VARIABLES_ONLY}),
    ]
    if path is not None:
        layers.append((str(path), read_yaml(path)))
    layers = [(source, _with_lists(values, source)) for source, values in layers]
    merge_settings(dict.fromkeys(KNOWN), *layers)  # refuses what neither part knows, with the nearest name of both
    return Settings(
        engine=engine_config(*(_part(layer, KNOWN - SERVER) for layer in layers)),
        server=_server_config(*(_part(layer, SERVER) for layer in layers)),
    )


def _part(layer: Layer, keys: frozenset[str]) -> Layer:
    source, values = layer
    return source, {key: value for key, value in values.items() if key in keys}


def _with_lists(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values with the settings that hold several made tuples under their plural names."""
    ready: dict[str, Any] = {}
    for key, value in values.items():
        name = LISTS.get(key, key)
        if name in LISTS.values() and value is not None:
            items = value.split(",") if isinstance(value, str) else value
            if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
                raise ConfigError(f"{key} in {source} must be a text or a list of texts")
            value = tuple(items) or None
        ready[name] = value
    return ready


def _server_config(*layers: Layer) -> ServerConfig:
    values = merge_settings(dict.fromkeys(SERVER), *layers)
    if isinstance(values.get("max_body_bytes"), str):
        values["max_body_bytes"] = parse_bytes(values["max_body_bytes"])
    lists = {name: values.pop(name) for name in LISTS.values() if name in values}
    plain: ServerConfig = build_dataclass(ServerConfig, values, ", ".join(source for source, _ in layers))
    return dataclasses.replace(plain, **lists)
