"""Where a model's configuration comes from: preset, file, directory, GGUF header, Python package, hub."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvloom.core.errors import ConfigError, CorruptModelError
from kvloom.planner.gguf_header import read_header, to_config
from kvloom.planner.presets import find_preset, nearest_presets, preset_names

HUB_TIMEOUT_S = 5.0
PACKAGE = "package:"
GGUF_ORIGIN = "GGUF data section"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A configuration and what came with it.

    ``weight_bytes`` is the stored size of the weights, read from headers; None when not at hand.
    ``parameters`` is a weight count from a header. ``hub_name`` is the hub id, where there is one.
    """

    name: str
    origin: str
    config: Mapping[str, Any]
    weight_bytes: int | None = None
    weight_origin: str = ""
    parameters: int | None = None
    hub_name: str | None = None
    notes: tuple[str, ...] = field(default=())


def find_model(text: str) -> ModelSource:
    """The configuration that ``text`` names.

    A path that exists wins, then presets (also by hub id), then the hub.

    Raises:
        ConfigError: nothing of that name; the message names the nearest presets.
        CorruptModelError: found, but unreadable.
    """
    if not text.strip():
        raise ConfigError("MODEL is empty; give a preset, a hub id, a directory or a file")
    if text.startswith(PACKAGE):
        return _from_package(text.removeprefix(PACKAGE))
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_gguf(path) if path.suffix == ".gguf" else _from_file(path)
    preset = find_preset(text)
    if preset is not None:
        return ModelSource(
            name=text,
            origin=f"preset {preset.name}",
            config=preset.config,
            hub_name=text if "/" in text else preset.hub_ids[0],
            notes=(f"configuration from kvloom's preset {preset.name!r}, not downloaded",),
        )
    if path.suffix in (".json", ".gguf") or text.startswith((".", "/", "~")) or text.count("/") != 1:
        near = nearest_presets(text)
        hint = f"did you mean {', '.join(near)}?" if near else f"presets: {', '.join(preset_names())}"
        raise ConfigError(f"there is no file, directory or preset {text!r}; {hint}")
    return _from_hub(text)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptModelError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CorruptModelError(f"{path} holds a {type(data).__name__}; a config.json holds an object")
    return data


def _from_file(path: Path) -> ModelSource:
    data = _read_json(path)
    name = str(data.get("_name_or_path") or path.parent.name or path.name)
    size, origin = safetensors_bytes(path.parent) if path.name == "config.json" else (None, "")
    return ModelSource(name=name, origin=str(path), config=data, weight_bytes=size, weight_origin=origin)


def _from_directory(path: Path) -> ModelSource:
    config = path / "config.json"
    if config.is_file():
        source = _from_file(config)
        return ModelSource(
            name=path.resolve().name,
            origin=str(config),
            config=source.config,
            weight_bytes=source.weight_bytes,
            weight_origin=source.weight_origin,
        )
    found = sorted(path.glob("*.gguf"))
    if found:
        return _from_gguf(found[0])
    raise ConfigError(f"directory {path} has no config.json and no .gguf file; give the model's own directory")


def _from_gguf(path: Path) -> ModelSource:
    metadata, size = read_header(path)
    config = to_config(metadata, origin=str(path))
    parameters = metadata.get("kvloom.parameters")
    return ModelSource(
        name=str(metadata.get("general.name") or path.stem),
        origin=str(path),
        config=config,
        weight_bytes=size,
        weight_origin=GGUF_ORIGIN if size else "",
        parameters=int(parameters) if parameters else None,
    )


def _from_package(name: str) -> ModelSource:
    """A GGUF file that an installed Python package ships, whole or in parts; the package is not imported."""
    module, _, wanted = name.partition("/")
    module = module.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"Python package {module!r} is not installed; install it, or give a file or a preset")
    home = Path(next(iter(spec.submodule_search_locations)))
    whole = [file for file in sorted(home.rglob("*.gguf")) if not wanted or file.name == wanted]
    if len(whole) > 1:
        names = ", ".join(f"{PACKAGE}{module}/{file.name}" for file in whole)
        raise ConfigError(f"Python package {module!r} ships {len(whole)} GGUF files; name one: {names}")
    if whole:
        return _from_gguf(whole[0])
    # some packages are too large for one upload: NAME_part1, NAME_part2 … each with a piece
    parts = sorted(home.parent.glob(f"{module}*/**/*.gguf.part*"), key=lambda file: file.name)
    if not parts:
        raise ConfigError(f"Python package {module!r} ships no GGUF file; give a file or a preset")
    source = _from_gguf(parts[0])
    if source.weight_bytes is None:
        return source
    return replace(source, weight_bytes=source.weight_bytes + sum(file.stat().st_size for file in parts[1:]))


def _from_hub(text: str) -> ModelSource:
    near = nearest_presets(text)
    hint = f" Nearest presets: {', '.join(near)}." if near else ""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ConfigError(f"{text!r} is no file and no preset, and huggingface_hub is not installed.{hint}") from error
    try:
        config = Path(hf_hub_download(text, "config.json", etag_timeout=HUB_TIMEOUT_S))
    except Exception as error:  # the hub client raises dozens of unrelated types; all mean: not available
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{text!r} is no file and no preset, and the hub did not deliver its config.json: {reason}.{hint} "
            "Offline, give the path of a config.json"
        ) from error
    weights, origin = _hub_weights(text, hf_hub_download)
    return ModelSource(
        name=text,
        hub_name=text,
        origin=f"hub {text}",
        config=_read_json(config),
        weight_bytes=weights,
        weight_origin=origin,
    )


def _hub_weights(text: str, download: Any) -> tuple[int | None, str]:
    """Stored bytes from the hub's index of shards; None when there is no such index."""
    try:
        index = _read_json(Path(download(text, "model.safetensors.index.json", etag_timeout=HUB_TIMEOUT_S)))
    except Exception:  # a single-file checkpoint has no index: the weights are then computed
        return None, ""
    size = (index.get("metadata") or {}).get("total_size")
    return (int(size), "safetensors index") if isinstance(size, int | float) else (None, "")


def safetensors_bytes(folder: Path) -> tuple[int | None, str]:
    """Tensor bytes of the safetensors files in ``folder``, from their headers alone.

    Raises:
        CorruptModelError: a header is cut off.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            size = (_read_json(index).get("metadata") or {}).get("total_size")
            if isinstance(size, int | float):
                return int(size), "safetensors index"
        return None, ""
    total = 0
    for file in files:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > 2**28:
                    raise ValueError(f"header of {length} bytes")
                header = json.loads(stream.read(length))
        except (OSError, struct.error, ValueError) as error:
            raise CorruptModelError(f"{file}: the safetensors header is unreadable ({error})") from error
        total += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        )
    return total, "safetensors headers"
