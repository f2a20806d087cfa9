"""TurboQuant (arXiv 2504.19874), its MSE variant: rotation, Lloyd-Max codes, one float16 scale per token.

See ``unit_codes`` for the formula. The rotation is a signed Hadamard transform in place of the
paper's dense random one, as in the engines that ship it; the codebook is exact for the sphere.

Fields: codes [block_size, dim · bits / 8] (see ``packing``; ``codes.0`` and at 3 bits ``codes.1``),
``scale`` float16 [block_size].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec, require_multiple_of_8
from kvloom.codecs.layout import Field
from kvloom.codecs.packing import code_fields, pack, unpack
from kvloom.codecs.unit_codes import UnitCodes

BITS = {f"{family}{bits}": bits for family in ("turboquant", "loom") for bits in (4, 3, 2)}  # loom: its values


class TurboQuant(BlockCodec):
    """See the module."""

    native_method = "unit"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.bits = BITS[spec.name]
        self.unit = UnitCodes(spec.dim, self.bits)
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits, spec.block_size, spec.dim),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
            ],
            rotation=self.unit.rotation,
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        codes, scale = self.unit.encode(x)
        return {**pack("codes", codes, self.bits), "scale": scale}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        return self.unit.decode(unpack("codes", fields, self.bits), fields["scale"])


make = TurboQuant
