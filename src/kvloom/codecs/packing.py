"""Codes of 1 to 8 bits, packed in planes so that SIMD unpacks them with shifts and masks alone.

A code is cut into parts of 4, 2 and 1 bits, from the low end; each part is a plane of its own
(3 = 2 + 1). Within a plane of width w a row of n codes takes n * w / 8 bytes, and byte i holds the
codes i, i + s, i + 2 s … with the stride s = n * w / 8, lowest bits first::

    n = 64, w = 4:  byte i = code[i] | code[i + 32] << 4                       s = 32
    n = 64, w = 2:  byte i = code[i] | code[i + 16] << 2 | … | code[i + 48] << 6   s = 16

So one load and one mask give s consecutive codes. The idea of bit planes is exllamav3's.
"""

from __future__ import annotations

import torch

from kvloom.codecs.layout import Field


def plane_widths(bits: int) -> tuple[int, ...]:
    """Widths of the planes that ``bits``-bit codes are cut into, low bits first; ``bits`` is 1 to 8."""
    assert 1 <= bits <= 8
    if bits == 8:
        return (8,)
    return tuple(width for width in (4, 2, 1) if bits & width)


def code_fields(name: str, bits: int, rows: int, count: int) -> list[Field]:
    """The fields that hold ``rows`` rows of ``count`` codes: ``name.0`` for the low plane, and so on.

    ``count`` must be a multiple of 8.
    """
    assert count % 8 == 0
    return [
        Field(name=f"{name}.{index}", dtype=torch.uint8, shape=(rows, count * width // 8), bits=width)
        for index, width in enumerate(plane_widths(bits))
    ]


def pack(name: str, codes: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """The planes of uint8 codes [..., n] below 2^bits, named as ``code_fields`` names them."""
    planes = {}
    shift = 0
    for index, width in enumerate(plane_widths(bits)):
        part = (codes >> shift) & ((1 << width) - 1)
        planes[f"{name}.{index}"] = _pack_plane(part, width)
        shift += width
    return planes


def unpack(name: str, planes: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """uint8 codes [..., n] from the planes that ``pack`` made."""
    codes: torch.Tensor | None = None
    shift = 0
    for index, width in enumerate(plane_widths(bits)):
        part = _unpack_plane(planes[f"{name}.{index}"], width) << shift
        codes = part if codes is None else codes | part
        shift += width
    assert codes is not None
    return codes


def _pack_plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    per_byte = 8 // width
    slots = codes.reshape(*codes.shape[:-1], per_byte, codes.shape[-1] // per_byte)
    packed = slots[..., 0, :].clone()
    for slot in range(1, per_byte):
        packed |= slots[..., slot, :] << (slot * width)
    return packed


def _unpack_plane(packed: torch.Tensor, width: int) -> torch.Tensor:
    mask = (1 << width) - 1
    return torch.cat([(packed >> (slot * width)) & mask for slot in range(8 // width)], dim=-1)
