"""loom: TurboQuant's codes on keys whose calibrated mean has been taken off.

Adding a constant vector to all keys of a head adds the same number to all logits of a query, which
softmax ignores. So the mean key over text, known from calibration, need not be coded at all: what
remains is smaller (the mean holds about half of a key's energy in SmolLM2) and so is the error,
which is proportional to it. It costs no bytes per token. Values are coded as TurboQuant does.

Bytes and fields are TurboQuant's. ``decode`` adds the mean back, so that decoded keys mix with raw
ones; a kernel may instead read the codes as they are and add scale · q·mean to the run's
log-sum-exp (``removed_mean``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec, require_calibration, require_multiple_of_8
from kvloom.codecs.layout import Field
from kvloom.codecs.packing import code_fields, pack, unpack
from kvloom.codecs.unit_codes import UnitCodes

BITS = {"loom4": 4, "loom3": 3, "loom2": 2}


class Loom(BlockCodec):
    """See the module."""

    uses_calibration = True
    native_method = "unit"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.bits = BITS[spec.name]
        self.calibration = require_calibration(spec, "the mean key of each head") if spec.plane != "v" else None
        self.unit = UnitCodes(spec.dim, self.bits)
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits, spec.block_size, spec.dim),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
            ],
            rotation=self.unit.rotation,
        )

    def removed_mean(self, layer: int) -> torch.Tensor | None:
        if self.calibration is None:
            return None
        return self.calibration.get("key_mean", layer, (None, self.dim))

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        mean = self._mean(layer, x)
        codes, scale = self.unit.encode(x if mean is None else x - mean)
        return {**pack("codes", codes, self.bits), "scale": scale}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        x = self.unit.decode(unpack("codes", fields, self.bits), fields["scale"])
        mean = self._mean(layer, x)
        return x if mean is None else x + mean

    def _mean(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        """[heads, 1, dim] on x's device, for rows [N, heads, block_size, dim]."""
        if self.calibration is None:
            return None
        mean = self.calibration.get("key_mean", layer, (x.shape[1], self.dim))
        return mean.to(x.device).unsqueeze(1)


make = Loom
