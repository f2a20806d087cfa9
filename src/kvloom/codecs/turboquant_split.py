"""TurboQuant at 3.5 and 2.5 bits: a quarter of the channels, those with most energy, gets one bit more.

Two independent instances (own rotation, codebook and scale) on two sets of channels, as in the
paper's experiments: for 128 channels 32 at b + 1 bits and 96 at b, which with both scales makes
b + 1/2. Which channels are wide is calibrated per layer and head. ``wide`` is 8 · ⌊d / 32⌋.

Fields: ``wide`` codes [B, wide · (bits + 1) / 8] and ``codes`` [B, (d − wide) · bits / 8] (see ``packing``),
``wide_scale`` and ``scale`` float16 [B]. The channels of each set are in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec, require_calibration, require_multiple_of_8
from kvloom.codecs.layout import Field
from kvloom.codecs.packing import code_fields, pack, unpack
from kvloom.codecs.unit_codes import UnitCodes
from kvloom.core.errors import CodecError

BITS = {"turboquant3.5": 3, "turboquant2.5": 2}


class TurboQuantSplit(BlockCodec):
    """See the module."""

    uses_calibration = True

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.wide = 8 * (spec.dim // 32)
        if self.wide == 0:
            raise CodecError(
                f"codec {spec.name} needs a head dimension of at least 32, the plane {spec.plane!r} has {spec.dim}; "
                "use int8, or turboquant4"
            )
        self.calibration = require_calibration(spec, "the energy of each channel")
        self.bits = BITS[spec.name]
        self.wide_unit = UnitCodes(self.wide, self.bits + 1, stream=1)
        self.unit = UnitCodes(spec.dim - self.wide, self.bits)
        super().__init__(
            spec,
            [
                *code_fields("wide", self.bits + 1, spec.block_size, self.wide),
                *code_fields("codes", self.bits, spec.block_size, spec.dim - self.wide),
                Field(name="wide_scale", dtype=torch.float16, shape=(spec.block_size,)),
                Field(name="scale", dtype=torch.float16, shape=(spec.block_size,)),
            ],
        )

    def channel_order(self, layer: int, heads: int) -> torch.Tensor:
        """int64 [heads, d]: the wide channels, then the others, each ascending."""
        kind = "value" if self.plane == "v" else "key"
        shape = (heads, self.dim)
        mean = self.calibration.get(f"{kind}_mean", layer, shape)
        energy = self.calibration.get(f"{kind}_square", layer, shape) + mean * mean
        ranked = torch.argsort(energy, dim=-1, descending=True, stable=True)
        wide, narrow = ranked[:, : self.wide], ranked[:, self.wide :]
        return torch.cat([wide.sort(dim=-1).values, narrow.sort(dim=-1).values], dim=-1)

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        order = self.channel_order(layer, x.shape[1]).to(x.device)
        x = torch.gather(x, -1, order[:, None, :].expand(x.shape))
        wide, wide_scale = self.wide_unit.encode(x[..., : self.wide])
        codes, scale = self.unit.encode(x[..., self.wide :])
        return {
            **pack("wide", wide, self.bits + 1),
            **pack("codes", codes, self.bits),
            "wide_scale": wide_scale,
            "scale": scale,
        }

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        wide = self.wide_unit.decode(unpack("wide", fields, self.bits + 1), fields["wide_scale"])
        rest = self.unit.decode(unpack("codes", fields, self.bits), fields["scale"])
        x = torch.cat([wide, rest], dim=-1)
        back = torch.argsort(self.channel_order(layer, x.shape[1]).to(x.device), dim=-1)
        return torch.gather(x, -1, back[:, None, :].expand(x.shape))


make = TurboQuantSplit
