"""loom: keys in calibrated coordinates, the important ones with more bits, and without their mean.

Adding a constant vector to all keys of a head adds the same number to all logits of a query, which
softmax ignores. So the mean key over text, known from calibration, need not be coded at all. What
remains is turned by a matrix of the head, of calibrated rows ordered by importance (``key_basis``), and
coded in segments of unequal widths (``segments``)::

    y = T (k − mean)        k̂ = T⁻¹ ŷ + mean        q·k̂ = (T⁻ᵀ q)·ŷ + q·mean     (T⁻¹ stretched: ``turn``)

T [d, d] is the basis with, within each segment, directions scaled by p^(−¼) and then mixed by a signed
Hadamard matrix, which makes the segment's coordinates alike and nearly normal. Of all scalings this one
makes the sum of the weighted errors least when all coordinates err alike: (Σ √p)² / n instead of Σ p.

A kernel need not turn keys back: it multiplies each query by ``query_turns`` once and adds
scale · q·mean to the run's log-sum-exp (``removed_mean``). Values are coded as TurboQuant does. Bytes
are TurboQuant's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvloom.codecs.base import BlockCodec, CodecSpec, require_calibration, require_multiple_of_8
from kvloom.codecs.segments import SegmentCodes, cut
from kvloom.codecs.turboquant import TurboQuant
from kvloom.codecs.turn import Turn, make_turn, times
from kvloom.core.errors import CodecError

QUARTERS = {"loom4": (4, 4, 4, 4), "loom3": (4, 4, 2, 2), "loom2": (4, 2, 1, 1)}  # of keys


class LoomKeys(BlockCodec):
    """See the module."""

    version = 2
    uses_calibration = True
    native_method = "segments"

    def __init__(self, spec: CodecSpec) -> None:
        require_multiple_of_8(spec)
        self.calibration = require_calibration(spec, "the mean key and the key basis of each head")
        if not any(name.startswith("key_basis.") for name in self.calibration.tensors):
            raise CodecError(
                f"codec {spec.name} needs the key basis of each head, and this calibration file has none (it was made "
                "by an earlier version); make it again with kvloom calibrate"
            )
        self.segments = cut(spec.dim, QUARTERS[spec.name])
        self.codes = SegmentCodes(self.segments, spec.dim)
        self._turns: dict[int, Turn] = {}
        super().__init__(spec, self.codes.fields(spec.block_size))

    def removed_mean(self, layer: int) -> torch.Tensor | None:
        return self.calibration.get("key_mean", layer, (None, self.dim))

    def query_turns(self, layer: int) -> torch.Tensor:
        """float32 [heads, dim, dim] M: with levels c, q·k̂ = scale · (q M)·c + q·mean."""
        return self._turn(layer).backward

    def forward_transform(self, layer: int) -> torch.Tensor:
        """float32 [heads, dim, dim] T: y[i] = Σ_c T[i, c] (k − mean)[c]."""
        return self._turn(layer).forward

    def error_weights(self, layer: int) -> torch.Tensor:
        """float32 [heads, segments]: what an error of a grid unit weighs."""
        return self._turn(layer).weights[:, 0]

    def _encode(self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        turn = self._turn(layer, x.shape[1]).to(x.device)
        return self.codes.encode(times(x - turn.mean, turn.forward), turn.weights)

    def _decode(self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None) -> torch.Tensor:
        y = self.codes.decode(fields)
        turn = self._turn(layer, y.shape[1]).to(y.device)
        return times(y, turn.backward) + turn.mean

    def _turn(self, layer: int, heads: int | None = None) -> Turn:
        """Of ``layer``, whose calibration must be for ``heads`` KV heads if that is given."""
        basis = self.calibration.get("key_basis", layer, (heads, self.dim, self.dim))
        if layer not in self._turns:
            self._turns[layer] = make_turn(
                mean=self.calibration.get("key_mean", layer, (basis.shape[0], self.dim)),
                basis=basis,
                importance=self.calibration.get("key_importance", layer, (basis.shape[0], self.dim)),
                codes=self.codes,
            )
        return self._turns[layer]


def make(spec: CodecSpec) -> BlockCodec:
    """The codec of keys (and latents), or of values."""
    return TurboQuant(spec) if spec.plane == "v" else LoomKeys(spec)
