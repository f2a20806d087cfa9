"""One set of settings from flags, ``KVLOOM_*`` variables, a YAML file and defaults, in that order.

All settings have one flat namespace: the fields of ``EngineConfig``, ``ServerConfig`` and
``PipelineConfig``. In a file the pipeline's stand under ``pipeline:``, as the design writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.core.config import (
    EngineConfig,
    PipelineConfig,
    build_dataclass,
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
VARIABLES_ONLY = frozenset({"debug", "config"})


def _names(cls: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


ENGINE = _names(EngineConfig) - {"pipeline"}
SERVER = _names(ServerConfig)
PIPELINE = _names(PipelineConfig) - {"name"}
KNOWN = ENGINE | SERVER | PIPELINE | {"pipeline"}


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
    layers = [("the command line", flags), ("the environment", _without_variables_only(variables))]
    if path is not None:
        layers.append((str(path), _flat(read_yaml(path), str(path))))
    merged = merge_settings(dict.fromkeys(KNOWN), *((source, _lists(values, source)) for source, values in layers))
    source = "the settings (flags, KVLOOM_* variables, file)"
    pipeline = {key: merged[key] for key in PIPELINE & set(merged)}
    if "pipeline" in merged:
        pipeline["name"] = merged["pipeline"]
    engine = {key: merged[key] for key in ENGINE & set(merged)}
    engine["pipeline"] = build_dataclass(PipelineConfig, pipeline, source)
    return Settings(
        engine=build_dataclass(EngineConfig, engine, source),
        server=_server_config({key: merged[key] for key in SERVER & set(merged)}, source),
    )


def _without_variables_only(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key not in VARIABLES_ONLY}


def _flat(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A file's mapping with the pipeline's settings lifted to the top."""
    flat = dict(data)
    pipeline = flat.pop("pipeline", None)
    if isinstance(pipeline, Mapping):
        known = dict.fromkeys(PIPELINE | {"name"})
        inner = merge_settings(known, (f"{source}, pipeline", pipeline))
        if "name" in inner:
            flat["pipeline"] = inner.pop("name")
        flat.update(inner)
    elif pipeline is not None:
        flat["pipeline"] = pipeline
    return flat


def _lists(values: Mapping[str, Any], source: str) -> dict[str, Any]:
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


def _server_config(values: dict[str, Any], source: str) -> ServerConfig:
    if isinstance(values.get("max_body_bytes"), str):
        values["max_body_bytes"] = parse_bytes(values["max_body_bytes"])
    lists = {name: values.pop(name) for name in LISTS.values() if name in values}
    plain: ServerConfig = build_dataclass(ServerConfig, values, source)
    return dataclasses.replace(plain, **lists)
