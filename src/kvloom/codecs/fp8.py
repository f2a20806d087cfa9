"""8-bit floating point (e4m3 or e5m2) with one float16 scale per token.

scale = max|x| / 448 (float16, rounded up), code = x / scale to nearest even. Both formats use 448,
e4m3's largest value; e5m2 then uses the middle of its wider range, where it loses nothing. A scale
per token costs 16/d bits and needs no calibration (engines use one per tensor or head).

Fields: ``codes`` float8 [block_size, dim], ``scale`` float16 [block_size].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec
from kvloom.codecs.layout import Field
from kvloom.codecs.numbers import positive_scale

LARGEST = 448.0
FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Fp8(BlockCodec):
    """See the module."""

    native_method = "small_float"

    def __init__(self, spec: CodecSpec) -> None:
        self.element = FORMATS[spec.name]
        super().__init__(
            spec,
            [
                Field(name="codes", dtype=self.element, shape=(spec.block_size, spec.dim)),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
            ],
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        scale = positive_scale(x.abs().amax(dim=-1) / LARGEST)
        codes = (x / scale.to(torch.float32).unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(self.element)
        return {"codes": codes, "scale": scale}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        return fields["codes"].to(torch.float32) * fields["scale"].to(torch.float32).unsqueeze(-1)


make = Fp8
