"""KVQuant (arXiv 2401.18079): non-uniform levels, keys before RoPE, 1 % of the elements kept apart.

Keys are taken back to before RoPE, where channels have steady ranges: each channel is mapped to
-1 … 1 by its calibrated 0.5 and 99.5 percentiles. A value's token is mapped by its own smallest and
largest element, outliers left out. The codes name levels learnt for the layer with Fisher weights.

The ⌈B·d / 100⌉ elements of a block furthest out are also stored exactly (float16), ascending by their
place t·d + c. (The paper's sparse rows have varying length; a block's bytes must not.) At 2 bits
decoded levels are stretched to the mean and deviation of the originals (Q-Norm), in calibration.

Fields: codes [B, d · bits / 8] (see ``packing``), ``outlier`` float16 [n], ``place`` uint16 [n];
values also ``low`` and ``high`` float16 [B].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec, require_calibration, require_multiple_of_8
from kvloom.codecs.layout import Field
from kvloom.codecs.levels import nearest
from kvloom.codecs.numbers import HALF_MIN, half_down, half_nearest, half_up, square_root, tree_sum
from kvloom.codecs.packing import code_fields, pack, unpack
from kvloom.core.errors import CodecError

OUTLIERS_PER = 100  # one element in so many is stored exactly
MOST_PLACES = 1 << 16


class KVQuant(BlockCodec):
    """Levels, codes and outliers; the subclasses know what maps rows to -1 … 1."""

    token_local = False
    uses_calibration = True

    def __init__(self, spec: CodecSpec, side: list[Field]) -> None:
        require_multiple_of_8(spec)
        self.bits = int(spec.name[len("kvquant")])
        self.calibration = require_calibration(spec, "ranges of key channels, and levels")
        self.elements = spec.block_size * spec.dim
        if self.elements > MOST_PLACES:
            raise CodecError(
                f"codec {spec.name} addresses outliers with 16 bits, {MOST_PLACES} elements of a block, but blocks of "
                f"{spec.block_size} tokens × {spec.dim} channels have {self.elements}; use smaller blocks, or int4"
            )
        self.outliers = num_outliers(self.elements)
        super().__init__(
            spec,
            [
                *code_fields("codes", self.bits, spec.block_size, spec.dim),
                Field(name="outlier", dtype=torch.float16, shape=(self.outliers,)),
                Field(name="place", dtype=torch.uint16, shape=(self.outliers,)),
                *side,
            ],
        )

    def _levels(self, kind: str, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The levels to code by, and those to decode with."""
        both = self.calibration.get(f"{kind}_levels{self.bits}", layer, (2, 1 << self.bits)).to(device)
        return both[0], both[1]

    def _store(
        self, x: torch.Tensor, y: torch.Tensor, places: torch.Tensor, levels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        flat = x.reshape(*x.shape[:2], self.elements)
        return {
            **pack("codes", nearest(y, levels).to(torch.uint8), self.bits),
            "outlier": half_nearest(torch.gather(flat, -1, places)),
            "place": places.to(torch.uint16),
        }

    def _restore(self, x: torch.Tensor, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        places = fields["place"].to(torch.int64).clamp(max=self.elements - 1)  # damaged bytes name no other block
        flat = x.reshape(*x.shape[:2], self.elements)
        return flat.scatter(-1, places, fields["outlier"].to(torch.float32)).reshape(x.shape)


class KVQuantKey(KVQuant):
    """Channels mapped by calibrated percentiles, before RoPE."""

    uses_rope = True

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec, [])
        if spec.rope is None:
            raise CodecError(
                f"codec {spec.name} stores keys without rotary positions and needs the model's RoPE table "
                "(RopeTable; RopeTable.identity for a model without one)"
            )
        self.rope = spec.rope

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        x = self.rope.unrotate(x, self._positions(first_position))
        middle, reach = self._range(layer, x)
        y = (x - middle) / reach
        choose_by, _ = self._levels("key", layer, x.device)
        return self._store(x, y, furthest(y, self.outliers), choose_by)

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = unpack("codes", fields, self.bits)
        _, decode_with = self._levels("key", layer, codes.device)
        y = decode_with[codes.to(torch.int64)]
        middle, reach = self._range(layer, y)
        return self.rope.rotate(self._restore(y * reach + middle, fields), self._positions(first_position))

    def _range(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (x.shape[1], self.dim)
        low = self.calibration.get("raw_key_low", layer, shape).to(x.device).unsqueeze(1)
        high = self.calibration.get("raw_key_high", layer, shape).to(x.device).unsqueeze(1)
        return middle_and_reach(low, high)

    def _positions(self, first_position: torch.Tensor | None) -> torch.Tensor:
        assert first_position is not None
        return first_position.unsqueeze(1) + torch.arange(self.block_size, device=first_position.device)


class KVQuantValue(KVQuant):
    """Tokens mapped by their own extremes, outliers left out."""

    def __init__(self, spec: CodecSpec) -> None:
        side = [Field(name=name, dtype=torch.float16, shape=(spec.block_size,)) for name in ("low", "high")]
        super().__init__(spec, side)

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        found = normalise_values(x)
        choose_by, _ = self._levels("value", layer, x.device)
        return {**self._store(x, found.y, found.places, choose_by), "low": found.low, "high": found.high}

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        codes = unpack("codes", fields, self.bits)
        _, decode_with = self._levels("value", layer, codes.device)
        low, high = (fields[name].to(torch.float32).unsqueeze(-1) for name in ("low", "high"))
        middle, reach = middle_and_reach(low, high)
        return self._restore(decode_with[codes.to(torch.int64)] * reach + middle, fields)


@dataclass(frozen=True, slots=True)
class NormalisedValues:
    """``y`` like the rows; ``places`` int64 [N, H, n] of outliers, ascending; ``low``, ``high`` float16 [N, H, B]."""

    y: torch.Tensor
    places: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def normalise_values(x: torch.Tensor) -> NormalisedValues:
    """Map each token of float32 [N, H, B, d] to -1 … 1 by its extremes, the block's outliers left out.

    Outliers are the elements furthest from their token's mean, in its standard deviations.
    """
    dim = x.shape[-1]
    centred = x - (tree_sum(x) / dim).unsqueeze(-1)
    deviation = square_root(tree_sum(centred * centred) / dim).clamp_min(HALF_MIN).unsqueeze(-1)
    places = furthest(centred / deviation, num_outliers(x.shape[-2] * dim))
    inlier = torch.ones(*x.shape[:2], x.shape[-2] * dim, dtype=torch.bool, device=x.device)
    inlier = inlier.scatter(-1, places, torch.zeros_like(places, dtype=torch.bool)).reshape(x.shape)
    infinity = torch.full_like(x, float("inf"))
    low = half_down(torch.where(inlier, x, infinity).amin(dim=-1))
    high = half_up(torch.where(inlier, x, -infinity).amax(dim=-1))
    middle, reach = middle_and_reach(low.to(torch.float32).unsqueeze(-1), high.to(torch.float32).unsqueeze(-1))
    return NormalisedValues((x - middle) / reach, places, low, high)


def middle_and_reach(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre and half width of an interval; the width is never 0."""
    return (high + low) * 0.5, ((high - low) * 0.5).clamp_min(HALF_MIN)


def num_outliers(elements: int) -> int:
    """How many elements of a block are stored exactly."""
    return -(-elements // OUTLIERS_PER)


def furthest(y: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [N, H, count]: places of the largest |y| of each block, ascending; of equals the first."""
    flat = y.abs().reshape(*y.shape[:2], y.shape[2] * y.shape[3])
    order = torch.argsort(flat, dim=-1, descending=True, stable=True)[..., :count]
    return torch.sort(order, dim=-1).values


def make(spec: CodecSpec) -> KVQuant:
    return KVQuantKey(spec) if spec.name.endswith(".key") else KVQuantValue(spec)
