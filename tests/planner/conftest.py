"""Traces and models made on the spot, so that the tests run from a clone alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small Llama config.json; fields of None are left out."""

    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
            "max_position_embeddings": 4096,
        }
        values.update(changes)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
        return path

    return write


@pytest.fixture
def mooncake_trace(tmp_path: Path) -> Path:
    """Three requests: the second shares two of its three blocks with the first, the third none."""
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 100, "hash_ids": [0, 1, 2]},
        {"timestamp": 60_000, "input_length": 1300, "output_length": 100, "hash_ids": [0, 1, 3]},
        {"timestamp": 120_000, "input_length": 500, "output_length": 50, "hash_ids": [9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the header of a GGUF file and zeros for its tensors."""

    def write(pairs: dict[str, Any], tensors: dict[str, tuple[int, ...]], *, data: int = 0) -> Path:
        body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
        for key, value in pairs.items():
            body += _text(key)
            if isinstance(value, str):
                body += struct.pack("<I", 8) + _text(value)
            elif isinstance(value, list):
                body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(item) for item in value)
            else:
                body += struct.pack("<II", 4, value)
        for name, shape in tensors.items():
            body += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
            body += struct.pack("<IQ", 0, 0)
        body += bytes(-len(body) % 32) + bytes(data)
        path = tmp_path / "model.gguf"
        path.write_bytes(body)
        return path

    return write
