"""KVarN: a block is normalised in both directions before it is rounded.

After a signed Hadamard rotation the block's tokens and channels are divided in turn by their
standard deviations, four times each, so that neither a loud token nor a loud channel sets the range
of the others. What is left is rounded uniformly, keys per channel and values per token:

    key:    x ≈ Rᵀ ((code · channel_scale + channel_minimum) · token_scale)
    value:  x ≈ Rᵀ ((code · token_scale + token_minimum) · channel_scale)

Key fields: codes [B, d · bits / 8] (see ``packing``), ``channel_scale`` and ``channel_minimum`` float16
[d], ``token_scale`` float16 [B]. Value fields: codes, ``token_scale`` and ``token_minimum`` float16
[B], ``channel_scale`` float16 [d]. Source: vLLM's kvarn files (there the tile is 64 or 128 tokens).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.affine import affine_decode, affine_encode
from kvloom.codecs.base import BlockCodec, CodecSpec, require_multiple_of_8
from kvloom.codecs.hadamard import Rotation
from kvloom.codecs.layout import Field
from kvloom.codecs.numbers import HALF_MIN, positive_scale, square_root, tree_sum
from kvloom.codecs.packing import code_fields, pack, unpack

SWEEPS = 4  # over tokens and channels each


class KVarN(BlockCodec):
    """``along`` is the axis that one scale and minimum cover: tokens (-2) for keys, channels (-1) for values."""

    token_local = False
    native_method = "kvarn"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.bits = int(spec.name[len("kvarn")])
        self.along = -2 if spec.name.endswith(".key") else -1
        tokens, channels = ("token", spec.block_size), ("channel", spec.dim)
        (self.coded, coded_size), (self.other, other_size) = (
            (channels, tokens) if self.along == -2 else (tokens, channels)
        )
        self.turn = Rotation(spec.dim)
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits, spec.block_size, spec.dim),
                Field(name=f"{self.coded}_scale", dtype=torch.float16, shape=(coded_size,)),
                Field(name=f"{self.coded}_minimum", dtype=torch.float16, shape=(coded_size,)),
                Field(name=f"{self.other}_scale", dtype=torch.float16, shape=(other_size,)),
            ],
            rotation=self.turn,
        )

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        x = self.turn.forward(x)
        across = -3 - self.along  # the other axis
        other = positive_scale(balance(x, across))
        found = affine_encode(x / other.to(torch.float32), self.bits, dim=self.along)
        return {
            **pack("codes", found.codes, self.bits),
            f"{self.coded}_scale": found.scale.squeeze(self.along),
            f"{self.coded}_minimum": found.minimum.squeeze(self.along),
            f"{self.other}_scale": other.squeeze(across),
        }

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        scale, minimum = (fields[f"{self.coded}_{name}"].unsqueeze(self.along) for name in ("scale", "minimum"))
        other = fields[f"{self.other}_scale"].to(torch.float32).unsqueeze(-3 - self.along)
        return self.turn.inverse(affine_decode(unpack("codes", fields, self.bits), scale, minimum) * other)


def balance(x: torch.Tensor, across: int) -> torch.Tensor:
    """The scales, over axis ``across`` (kept with length 1), that level float32 [..., tokens, channels].

    Both axes are divided by their deviations in turn; only one axis' scales are returned, since the
    other's are absorbed by the codes' own.
    """
    scales = torch.ones_like(x.narrow(across, 0, 1))
    level = x
    for _ in range(SWEEPS):
        level = level / _deviation(level, -3 - across)
        deviation = _deviation(level, across)
        level = level / deviation
        scales = scales * deviation
    return scales


def _deviation(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Standard deviation along ``axis`` (kept with length 1), and 1 where there is none."""
    rows = x if axis == -1 else x.transpose(-1, -2)
    centred = rows - (tree_sum(rows) / rows.shape[-1]).unsqueeze(-1)
    deviation = square_root(tree_sum(centred * centred) / rows.shape[-1]).unsqueeze(-1)
    deviation = torch.where(deviation > HALF_MIN, deviation, torch.ones_like(deviation))
    return deviation if axis == -1 else deviation.transpose(-1, -2)


make = KVarN
