"""4-bit integers between each token's minimum and maximum, after a signed Hadamard rotation.

As vLLM's int4_per_token_head, but with the minimum in float16 where that stores an integer zero
point: x ≈ Rᵀ (code * scale + minimum).

Fields: ``codes.0`` [block_size, dim / 2] (see ``packing``), ``scale`` and ``minimum`` float16
[block_size].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.affine import affine_decode, affine_encode
from kvloom.codecs.base import BlockCodec, CodecSpec, require_multiple_of_8
from kvloom.codecs.hadamard import Rotation
from kvloom.codecs.layout import Field
from kvloom.codecs.packing import code_fields, pack, unpack

BITS = 4


class Int4(BlockCodec):
    """See the module."""

    native_method = "affine"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.turn = Rotation(spec.dim)
        super().__init__(
            spec,
            [
                *code_fields("codes", BITS, spec.block_size, spec.dim),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
                Field(name="minimum", dtype=torch.float16, shape=(spec.block_size,)),
            ],
            rotation=self.turn,
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        found = affine_encode(self.turn.forward(x), BITS, dim=-1)
        return {
            **pack("codes", found.codes, BITS),
            "scale": found.scale.squeeze(-1),
            "minimum": found.minimum.squeeze(-1),
        }

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = unpack("codes", fields, BITS)
        return self.turn.inverse(affine_decode(codes, fields["scale"].unsqueeze(-1), fields["minimum"].unsqueeze(-1)))


make = Int4
