"""llama.cpp's q8_0 and q4_0: groups of 32 channels with one float16 scale, after a Hadamard rotation.

Codes and scales are ggml's to the bit (``quantize_row_q8_0_ref``, ``quantize_row_q4_0_ref``)::

    q8_0:  d = max|x| / 127        code = round(x · 1/d), halves away from zero
    q4_0:  d = extreme / -8        code = min(15, ⌊x · 1/d + 8.5⌋)      extreme: the x of largest |x|

but they lie apart (scales after all codes, nibbles as in ``packing``), where ggml interleaves them.
The rotation is the one that llama.cpp applies to quantised caches since PR 21038: Hadamard, no signs.
A width that is no multiple of 32 is padded with zeros to whole groups, as ggml's sizes count.

Fields: ``codes`` int8 [block_size, groups * 32], or ``codes.0`` [block_size, groups * 16];
``scale`` float16 [block_size, groups].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from kvloom.codecs.base import BlockCodec, CodecSpec
from kvloom.codecs.hadamard import Rotation
from kvloom.codecs.layout import Field
from kvloom.codecs.numbers import half_nearest
from kvloom.codecs.packing import code_fields, pack, unpack

GROUP = 32


class Ggml(BlockCodec):
    """Padding, rotation and grouping; see the module."""

    def __init__(self, spec: CodecSpec, codes: list[Field]) -> None:
        self.turn = Rotation(spec.dim, signed=False)
        self.groups = padded_width(spec.dim) // GROUP
        scale = Field(name="scale", dtype=torch.float16, shape=(spec.block_size, self.groups))
        super().__init__(spec, [*codes, scale], rotation=self.turn)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated, zero-padded rows as [..., groups, 32]."""
        y = pad(self.turn.forward(x), (0, self.groups * GROUP - self.dim))
        return y.reshape(*y.shape[:-1], self.groups, GROUP)

    def rows(self, groups: torch.Tensor) -> torch.Tensor:
        """The inverse of ``grouped``."""
        return self.turn.inverse(groups.reshape(*groups.shape[:-2], self.groups * GROUP)[..., : self.dim])


class Q8_0(Ggml):
    """See the module."""

    native_method = "q8_0"

    def __init__(self, spec: CodecSpec) -> None:
        shape = (spec.block_size, padded_width(spec.dim))
        super().__init__(spec, [Field(name="codes", dtype=torch.int8, shape=shape)])

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        codes, scale = q8_0_quantize(self.grouped(x))
        return {"codes": codes.reshape(*codes.shape[:-2], self.groups * GROUP), "scale": scale}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = fields["codes"].reshape(*fields["scale"].shape, GROUP).to(torch.float32)
        return self.rows(codes * fields["scale"].to(torch.float32).unsqueeze(-1))


class Q4_0(Ggml):
    """See the module."""

    native_method = "q4_0"

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec, code_fields("codes", 4, spec.block_size, padded_width(spec.dim)))

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        codes, scale = q4_0_quantize(self.grouped(x))
        return {**pack("codes", codes.reshape(*codes.shape[:-2], self.groups * GROUP), 4), "scale": scale}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = unpack("codes", fields, 4).reshape(*fields["scale"].shape, GROUP).to(torch.float32)
        return self.rows((codes - 8.0) * fields["scale"].to(torch.float32).unsqueeze(-1))


def padded_width(dim: int) -> int:
    """``dim`` rounded up to whole groups."""
    return -(-dim // GROUP) * GROUP


def q8_0_quantize(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [..., 32] and float16 scales [...] of float32 [..., 32]."""
    d = groups.abs().amax(dim=-1) / 127.0
    steps = groups * _inverse(d).unsqueeze(-1)
    codes = torch.copysign(torch.floor(steps.abs() + 0.5), steps).clamp(-127.0, 127.0)
    return codes.to(torch.int8), half_nearest(d)


def q4_0_quantize(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [..., 32] of 0 … 15 and float16 scales [...] of float32 [..., 32]."""
    where = groups.abs().argmax(dim=-1, keepdim=True)  # the first of equals, as ggml
    d = torch.gather(groups, -1, where).squeeze(-1) / -8.0
    steps = torch.trunc(groups * _inverse(d).unsqueeze(-1) + 8.5)
    return steps.clamp(0.0, 15.0).to(torch.uint8), half_nearest(d)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    """1 / d, and 0 where d is 0 or so small that 1 / d is infinite."""
    inverse = 1.0 / d
    return torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))


def make(spec: CodecSpec) -> Ggml:
    return Q8_0(spec) if spec.name == "q8_0" else Q4_0(spec)
