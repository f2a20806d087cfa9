"""Where the fields of an encoded block lie, so that kernels, tests and docs read the same bytes.

A block of one plane of one (layer, head) is a run of bytes: its fields one after another, each a
C-contiguous array. Multi-byte elements are little-endian. Every field that belongs to tokens has
the token as its first axis, so a codec whose fields are all of that kind (``token_local``) can move
a token by copying one row of each field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One array of an encoded block.

    ``offset`` is in bytes from the plane's start. ``bits`` is 0 for plain elements; otherwise the
    elements are bytes that hold ``8 / bits`` packed codes each (see ``packing``).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    bits: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """The fields of a block in memory order, and its length in bytes."""

    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def build(cls, fields: Sequence[Field]) -> BlockLayout:
        """Lay ``fields`` out one after another; their offsets are filled in."""
        placed = []
        offset = 0
        for field in fields:
            assert offset % field.dtype.itemsize == 0, f"field {field.name} would not be aligned"
            placed.append(Field(name=field.name, dtype=field.dtype, shape=field.shape, offset=offset, bits=field.bits))
            offset += field.num_bytes
        return cls(fields=tuple(placed), num_bytes=offset)

    def field(self, name: str) -> Field:
        """The field called ``name``; KeyError if there is none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def join(self, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """uint8 [N, H, num_bytes] from every field's array [N, H, *shape]."""
        assert set(arrays) == {field.name for field in self.fields}
        parts = []
        for field in self.fields:
            array = arrays[field.name]
            assert array.dtype == field.dtype and tuple(array.shape[2:]) == field.shape, field.name
            flat = array.reshape(*array.shape[:2], math.prod(field.shape)).contiguous()
            parts.append(flat.view(torch.uint8))
        return torch.cat(parts, dim=-1)

    def split(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each field's array [N, H, *shape] from uint8 [N, H, num_bytes]."""
        arrays = {}
        for field in self.fields:
            flat = data[..., field.offset : field.offset + field.num_bytes].contiguous()
            arrays[field.name] = flat.view(field.dtype).reshape(*data.shape[:2], *field.shape)
        return arrays
