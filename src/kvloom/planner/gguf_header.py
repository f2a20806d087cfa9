"""The header of a GGUF file: metadata and tensor sizes, read without the tensors.

Read by hand rather than through the ``gguf`` package's reader: that one maps the file and parses
every tokenizer array (seconds for a 262k vocabulary); this one skips them.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvloom.core.errors import CorruptModelError
from kvloom.planner.errors import UnknownError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_ARRAY_KEPT = 4096

# GGUF architecture -> Hugging Face model_type that our readers know.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "starcoder2": "starcoder2",
    "olmo2": "olmo2",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "granite": "granite",
}


def read_header(path: Path) -> tuple[dict[str, Any], int | None]:
    """(metadata, bytes of the tensor data; None for a file cut off after its header).

    Raises:
        CorruptModelError: not a GGUF file, or its header is cut off.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CorruptModelError(f"{path} is no GGUF file; its first four bytes are not 'GGUF'")
            version, tensors, pairs = struct.unpack("<IQQ", file.read(20))
            if version not in (2, 3):
                raise CorruptModelError(f"{path} is GGUF version {version}; versions 2 and 3 can be read")
            metadata = {}
            for _ in range(pairs):
                key = _string(file)
                value = _value(file, struct.unpack("<I", file.read(4))[0])
                metadata[key] = value
            elements = 0
            names: set[str] = set()
            for _ in range(tensors):
                names.add(_string(file))
                dims = struct.unpack("<I", file.read(4))[0]
                shape = struct.unpack(f"<{dims}Q", file.read(8 * dims))
                file.read(12)
                count = 1
                for size in shape:
                    count *= size
                elements += count
            alignment = int(metadata.get("general.alignment", 32))
            start = -(-file.tell() // alignment) * alignment
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise CorruptModelError(f"{path}: the GGUF header is cut off or unreadable ({error})") from error
    metadata["kvloom.parameters"] = elements
    metadata["kvloom.tied"] = "output.weight" not in names
    size = path.stat().st_size - start
    return metadata, size if size > 0 else None


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > 2**24:
        raise struct.error(f"a string of {length} bytes")
    return file.read(length).decode("utf-8")


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array that was not read: only its length is of interest (a vocabulary's size)."""

    length: int


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, length = struct.unpack("<IQ", file.read(12))
        if item == _STRING:
            for _ in range(length):
                (size,) = struct.unpack("<Q", file.read(8))
                file.seek(size, 1)
            return SkippedArray(length)
        if item not in _SCALARS:
            raise struct.error(f"an array of type {item}")
        width = struct.calcsize("<" + _SCALARS[item])
        if length > _LONGEST_ARRAY_KEPT:
            file.seek(width * length, 1)
            return SkippedArray(length)
        return list(struct.unpack(f"<{length}{_SCALARS[item]}", file.read(width * length)))
    if kind not in _SCALARS:
        raise struct.error(f"a value of type {kind}")
    code = "<" + _SCALARS[kind]
    return struct.unpack(code, file.read(struct.calcsize(code)))[0]


def to_config(metadata: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    """The fields of a ``config.json`` that size a model, from GGUF metadata.

    Raises:
        UnknownError: an architecture without a reader, or head counts that differ by layer.
    """
    name = metadata.get("general.architecture")
    model_type = _ARCHITECTURES.get(str(name))
    if model_type is None:
        raise UnknownError(
            f"{origin}: GGUF architecture {name!r} is unknown to this version of kvloom; its cache cannot be sized. "
            "Known: " + ", ".join(sorted(_ARCHITECTURES))
        )

    def get(key: str) -> Any:
        value = metadata.get(f"{name}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnknownError(f"{origin}: {key} differs by layer ({value}); this cannot be sized yet")
            return value[0]
        return value

    heads = get("attention.head_count")
    config: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv") or heads,
        "head_dim": get("attention.key_length"),
        "sliding_window": get("attention.sliding_window"),
        "max_position_embeddings": get("context_length"),
        "vocab_size": get("vocab_size") or _length(metadata.get("tokenizer.ggml.tokens")),
        "tie_word_embeddings": metadata.get("kvloom.tied"),
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
    }
    if model_type == "llama" and config["num_experts"]:
        config["model_type"] = "mixtral"
    if model_type == "deepseek_v2":
        rope = get("rope.dimension_count")
        key = get("attention.key_length_mla") or get("attention.key_length")
        config |= {
            "kv_lora_rank": get("attention.kv_lora_rank"),
            "q_lora_rank": get("attention.q_lora_rank"),
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": key - rope if key and rope else None,
            "v_head_dim": get("attention.value_length_mla") or get("attention.value_length"),
            "first_k_dense_replace": get("leading_dense_block_count"),
            "n_routed_experts": get("expert_count"),
            "n_shared_experts": get("expert_shared_count"),
        }
        config.pop("head_dim")
    # a window that the header does not state is off, whatever the architecture's default
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _length(value: Any) -> int | None:
    if isinstance(value, SkippedArray):
        return value.length
    return len(value) if isinstance(value, list) else None
