"""TurboQuant's inner-product variant: one bit fewer for the codes, one bit for the sign of what they miss.

With x̂ the decoding at b − 1 bits and r = x − x̂, the signs z = sign(R′ r) under a second rotation
give an unbiased estimate of r's inner products (QJL, arXiv 2406.03482):

    x ≈ x̂ + residual · R′ᵀ z        residual = ‖r‖ · √(π / 2d)

Here R′ is orthogonal, which has less variance than the paper's Gaussian matrix. It is offered to
compare with, not to use: unbiased as it is, its logits vary about twice as much as those of the
same bits spent on codes, and softmax suffers from variance, not from a bias common to all keys.

Fields: codes [B, d · (bits − 1) / 8], ``signs`` [B, d / 8] (see ``packing``; 1 is positive), ``scale`` and
``residual`` float16 [B].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec, require_multiple_of_8
from kvloom.codecs.hadamard import Rotation
from kvloom.codecs.layout import Field
from kvloom.codecs.numbers import half_nearest, square_root, tree_sum
from kvloom.codecs.packing import code_fields, pack, unpack
from kvloom.codecs.unit_codes import UnitCodes


class TurboQuantProd(BlockCodec):
    """See the module; ``bits`` counts the sign."""

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.bits = int(spec.name[len("turboquant")])
        self.unit = UnitCodes(spec.dim, self.bits - 1)
        self.second = Rotation(spec.dim, stream=2)
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits - 1, spec.block_size, spec.dim),
                *code_fields("signs", 1, spec.block_size, spec.dim),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
                Field(name="residual", dtype=torch.float16, shape=(spec.block_size,)),
            ],
            rotation=self.unit.rotation,
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        codes, scale = self.unit.encode(x)
        missed = x - self.unit.decode(codes, scale)
        signs = (self.second.forward(missed) >= 0).to(torch.uint8)
        residual = square_root(tree_sum(missed * missed)) * math.sqrt(math.pi / (2 * self.dim))
        return {
            **pack("codes", codes, self.bits - 1),
            **pack("signs", signs, 1),
            "scale": scale,
            "residual": half_nearest(residual),
        }

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        x = self.unit.decode(unpack("codes", fields, self.bits - 1), fields["scale"])
        signs = unpack("signs", fields, 1).to(torch.float32) * 2.0 - 1.0
        return x + self.second.inverse(signs) * fields["residual"].to(torch.float32).unsqueeze(-1)


make = TurboQuantProd
