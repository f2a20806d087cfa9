"""A model directory, checked before transformers sees it: configuration, shards, their heads and lengths.

transformers re-initialises what it cannot find with random values and a warning; here a missing,
truncated or contradictory file is an error that names it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.core.errors import CorruptModelError, ModelError, UnsupportedModelError

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
_LENGTH_BYTES = 8  # a safetensors file starts with its head's length
_MAX_HEAD_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete model directory. ``shards`` maps each safetensors file to its parsed head."""

    directory: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    shards: Mapping[Path, Mapping[str, Any]]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    def stored_dtype(self) -> str:
        """The dtype that holds most of the weights: bfloat16, float16 or float32.

        Raises:
            UnsupportedModelError: most of them are quantised or of another type.
        """
        counts: dict[str, int] = {}
        for head in self.shards.values():
            for entry in head.values():
                start, end = entry["data_offsets"]
                counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + end - start
        most = max(counts, key=lambda name: counts[name])
        if most not in _DTYPES:
            raise UnsupportedModelError(
                f"the weights in {self.directory} are stored as {most}; served are {', '.join(_DTYPES)}; "
                "use an unquantised version of the model"
            )
        return _DTYPES[most]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Check that ``directory`` holds a complete model.

    Raises:
        ModelError: the directory does not exist.
        CorruptModelError: a file is missing, unreadable, truncated or contradicts another.
        UnsupportedModelError: quantised weights, or weights only as pickle.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; give a directory that holds config.json and *.safetensors")
    config = read_json(directory / "config.json")
    if config is None:
        raise CorruptModelError(f"{directory} has no config.json; download the whole model directory again")
    if not isinstance(config.get("model_type"), str):
        raise CorruptModelError(
            f"{directory / 'config.json'} names no model_type; use the config.json that came with the weights"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{directory} holds weights quantised by {method!r}; served are bfloat16, float16 and float32 weights"
        )
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        raise CorruptModelError(
            f"{directory} has no tokenizer (none of {', '.join(_VOCABULARIES)}); copy the tokenizer files next to "
            "config.json"
        )
    return Checkpoint(
        directory=directory,
        config=config,
        generation_config=read_json(directory / "generation_config.json") or {},
        shards={path: read_safetensors_head(path) for path in _shard_paths(directory)},
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``; None where the file does not exist.

    Raises:
        CorruptModelError: unreadable, not JSON, or not an object.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptModelError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path} holds a JSON {type(value).__name__}, not an object; download it again")
    return value


def _shard_paths(directory: Path) -> list[Path]:
    index = read_json(directory / INDEX)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptModelError(f"{directory / INDEX} has no weight_map; download it again")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CorruptModelError(
                f"{directory} lacks {len(missing)} of the {len(names)} weight files that {INDEX} names: "
                f"{', '.join(missing[:4])}; download them again"
            )
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others:
        raise CorruptModelError(
            f"{directory} has {others[0]} but neither model.safetensors nor {INDEX}; download the missing file"
        )
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has its weights only as {pickles[0]}, a pickle, which can run code when it is loaded; "
            "convert the model to safetensors"
        )
    raise CorruptModelError(f"{directory} has no weights (model.safetensors); download the whole model directory again")


def read_safetensors_head(path: Path) -> dict[str, Any]:
    """The tensors that ``path`` declares: name to dtype, shape and data_offsets.

    Raises:
        CorruptModelError: the head is unreadable, or the file is not as long as it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else size
        if length > min(size - _LENGTH_BYTES, _MAX_HEAD_BYTES):
            raise CorruptModelError(
                f"{path} is truncated or not a safetensors file: its head should take {length} bytes, the file has "
                f"{size}; download it again"
            )
        try:
            head = json.loads(file.read(length))
            head.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in head.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModelError(f"{path} has an unreadable head ({error}); download it again") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise CorruptModelError(f"{path} is {size} bytes long but its head describes {expected}; download it again")
    if not head:
        raise CorruptModelError(f"{path} holds no tensor; download it again")
    return dict(head)
