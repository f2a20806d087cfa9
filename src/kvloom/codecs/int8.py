"""8-bit integers with one float16 scale per token: scale = max|x| / 127, code = round(x / scale).

Fields: ``codes`` int8 [block_size, dim], ``scale`` float16 [block_size]. The codes lie in
-127 … 127.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec
from kvloom.codecs.layout import Field
from kvloom.codecs.numbers import positive_scale


class Int8(BlockCodec):
    """See the module."""

    native_method = "absmax"

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(
            spec,
            [
                Field(name="codes", dtype=torch.int8, shape=(spec.block_size, spec.dim)),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
            ],
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        scale = positive_scale(x.abs().amax(dim=-1) / 127.0)
        steps = x / scale.to(torch.float32).unsqueeze(-1)
        return {"codes": torch.round(steps).clamp(-127.0, 127.0).to(torch.int8), "scale": scale}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        return fields["codes"].to(torch.float32) * fields["scale"].to(torch.float32).unsqueeze(-1)


make = Int8
