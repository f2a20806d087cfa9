"""KIVI (arXiv 2402.02750): keys per channel over the block, values per token over 32 channels.

Uniform codes between minimum and maximum; the block is the paper's group along tokens, so an
engine with blocks of 32 has its G = 32. Keys have outlier channels, hence groups along tokens; a
key's block can only be encoded whole.

Key fields: codes [block_size, dim · bits / 8] (see ``packing``), ``scale`` and ``minimum`` float16
[dim]. Value fields: the same codes, ``scale`` and ``minimum`` float16 [block_size, ⌈dim / 32⌉].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.affine import affine_decode, affine_encode
from kvloom.codecs.base import BlockCodec, CodecSpec, require_multiple_of_8
from kvloom.codecs.layout import Field
from kvloom.codecs.packing import code_fields, pack, unpack

GROUP = 32
BITS = {"kivi4.key": 4, "kivi2.key": 2, "kivi4.value": 4, "kivi2.value": 2}


class KiviKey(BlockCodec):
    """One group per channel and block."""

    token_local = False
    native_method = "affine"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.bits = BITS[spec.name]
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits, spec.block_size, spec.dim),
                Field(name="scale", dtype=torch.float16, shape=(spec.dim,)),
                Field(name="minimum", dtype=torch.float16, shape=(spec.dim,)),
            ],
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        found = affine_encode(x, self.bits, dim=-2)
        return {
            **pack("codes", found.codes, self.bits),
            "scale": found.scale.squeeze(-2),
            "minimum": found.minimum.squeeze(-2),
        }

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = unpack("codes", fields, self.bits)
        return affine_decode(codes, fields["scale"].unsqueeze(-2), fields["minimum"].unsqueeze(-2))


class KiviValue(BlockCodec):
    """One group per token and 32 channels; the last group is shorter where dim is no multiple of 32."""

    native_method = "affine"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.bits = BITS[spec.name]
        groups = -(-spec.dim // GROUP)
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits, spec.block_size, spec.dim),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size, groups)),
                Field(name="minimum", dtype=torch.float16, shape=(spec.block_size, groups)),
            ],
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        found = [affine_encode(group, self.bits, dim=-1) for group in torch.split(x, GROUP, dim=-1)]
        return {
            **pack("codes", torch.cat([group.codes for group in found], dim=-1), self.bits),
            "scale": torch.cat([group.scale for group in found], dim=-1),
            "minimum": torch.cat([group.minimum for group in found], dim=-1),
        }

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = unpack("codes", fields, self.bits)
        scale, minimum = (
            fields[name].repeat_interleave(GROUP, dim=-1)[..., : self.dim] for name in ("scale", "minimum")
        )
        return affine_decode(codes, scale, minimum)


def make(spec: CodecSpec) -> BlockCodec:
    return KiviKey(spec) if spec.name.endswith(".key") else KiviValue(spec)
