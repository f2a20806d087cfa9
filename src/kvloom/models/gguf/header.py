"""The head of a GGUF file: metadata and where each tensor lies, checked against the file's length.

Own code instead of ``gguf.GGUFReader``, which turns every metadata value into a numpy array (25 s
for a vocabulary of 262,144) and reads past the end of a truncated file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvloom.core.errors import CorruptModelError, UnsupportedModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file. ``shape`` is in torch's order (rows first)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFHeader:
    """A GGUF file's metadata and tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> GGUFHeader:
    """Parse the head of ``path``.

    Raises:
        CorruptModelError: not a GGUF file, or shorter than its head promises.
        UnsupportedModelError: a version or tensor type that is not read.
    """
    size = path.stat().st_size
    if size < 24:
        raise CorruptModelError(f"{path} is {size} bytes long, too short for a GGUF file; download it again")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    if bytes(data[:4]) != MAGIC:
        raise CorruptModelError(f"{path} does not start with {MAGIC!r}; it is not a GGUF file")
    cursor = _Cursor(path, memoryview(data.data), 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path} is a GGUF file of version {version}; versions 2 and 3 are read")
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.scalar("I"))
    entries = [cursor.tensor() for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        num_bytes = _tensor_bytes(path, name, shape, kind)
        end = start + offset + num_bytes
        if end > size:
            raise CorruptModelError(
                f"{path} is truncated: tensor {name!r} ends at byte {end}, the file at {size}; download it again"
            )
        tensors[name] = GGUFTensor(
            name=name, shape=shape, kind=kind, offset=start + offset, num_bytes=num_bytes
        )  # fmt: skip
    return GGUFHeader(path=path, metadata=metadata, tensors=tensors)


def _tensor_bytes(path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise CorruptModelError(
            f"{path}: tensor {name!r} has shape {shape}, whose rows do not hold whole blocks of {block} values "
            f"({kind.name}); download the file again"
        )
    return math.prod(shape) // int(block) * int(block_bytes)


class _Cursor:
    """Reads little-endian values one after the other; running off the end means a truncated file."""

    def __init__(self, path: Path, data: memoryview, at: int) -> None:
        self.path = path
        self.data = data
        self.at = at

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self.data) - self.at:
            raise CorruptModelError(
                f"{self.path} is truncated: its head continues to byte {self.at + num_bytes}, "
                f"the file ends at {len(self.data)}; download it again"
            )
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        return bytes(self.take(self.scalar("Q"))).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                return np.frombuffer(self.take(count * struct.calcsize("<" + code)), dtype="<" + code).tolist()
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise CorruptModelError(f"{self.path} has a metadata value of unknown type {kind}; download it again")
        return self.scalar(_SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise CorruptModelError(f"{self.path}: tensor {name!r} has {num_dimensions} dimensions; download it again")
        shape = tuple(reversed([self.scalar("Q") for _ in range(num_dimensions)]))
        number = self.scalar("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is of GGML type {number}, which the installed gguf package does not "
                "know; upgrade it (pip install -U gguf) or use another quantisation of the model"
            ) from None
        return name, shape, kind, self.scalar("Q")
