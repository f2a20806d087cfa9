"""Make a calibration from keys, values and gradients that were collected while a model read text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvloom.codecs.calibration import Calibration
from kvloom.codecs.key_basis import key_basis
from kvloom.codecs.kvquant import middle_and_reach, normalise_values
from kvloom.codecs.levels import matched_levels, weighted_levels
from kvloom.codecs.moments import Moments
from kvloom.codecs.numbers import finite
from kvloom.core.errors import CodecError

PERCENTILES = (0.005, 0.995)
LEVEL_BITS = (4, 3, 2)
VALUE_BLOCK = 32  # tokens over which the values' outliers are chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSample:
    """One layer's vectors of T tokens, of any float dtype; H KV heads, Hq query heads.

    Leave out each text's first tokens: attention sinks have keys unlike all others. ``keys`` are after
    RoPE, ``raw_keys`` before it (needed by kvquant). The gradients are of the loss with respect to
    ``raw_keys`` and ``values``, of the same shape; their squares are the Fisher weights of kvquant's
    levels, and without them all elements weigh the same. ``query_weights`` are those of ``key_basis``:
    without them all queries weigh the same, and without queries all directions of keys do.
    """

    keys: torch.Tensor  # [T, H, d]
    values: torch.Tensor  # [T, H, d]
    raw_keys: torch.Tensor | None = None  # [T, H, d]
    queries: torch.Tensor | None = None  # [T, Hq, d], after RoPE
    query_weights: torch.Tensor | None = None  # [T, Hq]
    raw_key_gradients: torch.Tensor | None = None  # [T, H, d]
    value_gradients: torch.Tensor | None = None  # [T, H, d]


def calibrate(
    samples: Mapping[int, LayerSample],
    *,
    moments: Mapping[int, Moments] | None = None,
    weights_digest: str,
    about: Mapping[str, str] | None = None,
) -> Calibration:
    """Statistics of ``samples``, one entry per model layer.

    ``moments`` are sums over more tokens than can be kept; where a layer has them, means, variances
    and bases come from them and its sample, if any, is asked for kvquant's ranges and levels only.

    Raises:
        CodecError: a layer has no tokens, or values that are not finite.
    """
    summed = dict(moments or {})
    found: dict[int, dict[str, torch.Tensor]] = {}
    for layer, sample in samples.items():
        if sample.keys.shape[0] < 2 or sample.keys.shape[:2] != sample.values.shape[:2]:
            raise CodecError(
                f"layer {layer}: keys {tuple(sample.keys.shape)} and values {tuple(sample.values.shape)} must be of "
                "the same tokens, at least 2"
            )
        for name in ("keys", "values", "queries"):
            vectors = getattr(sample, name)
            if vectors is not None and not bool(torch.isfinite(vectors).all()):
                raise CodecError(f"layer {layer}: {name} that are not finite; the model cannot be calibrated")
        found[layer] = {}
        if sample.raw_keys is not None:
            found[layer] |= _key_levels(sample.raw_keys, sample.raw_key_gradients)
            found[layer] |= _value_levels(sample.values, sample.value_gradients)
        if layer not in summed:
            heads, dim = sample.keys.shape[1:]
            summed[layer] = Moments(heads, dim, sample.values.shape[2])
            summed[layer].add(sample.keys, sample.values, sample.queries, sample.query_weights)
    for layer, sums in summed.items():
        if not sums.finite():
            raise CodecError(f"layer {layer}: vectors that are not finite; the model cannot be calibrated")
        found[layer] = _moment_statistics(sums) | found.get(layer, {})
    tensors = {f"{kind}.{layer}": tensor.float() for layer, kinds in found.items() for kind, tensor in kinds.items()}
    return Calibration(tensors, weights_digest=weights_digest, about=about)


def _moment_statistics(sums: Moments) -> dict[str, torch.Tensor]:
    found = {
        "key_mean": sums.key_mean,
        "value_mean": sums.value_mean,
        "key_square": sums.key_covariance.diagonal(dim1=1, dim2=2).clamp_min(0.0),
        "value_square": sums.value_variance,
    }
    if sums.query_square is not None:
        found["query_square"] = sums.query_square
    basis, found["key_importance"] = key_basis(sums.key_covariance, sums.query_products)
    return found | {"key_basis": basis.half()}  # rounded, as files keep it


def _key_levels(raw_keys: torch.Tensor, gradients: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """kvquant's ranges of the channels, and levels pooled over heads and channels."""
    keys = finite(raw_keys)
    low, high = _percentiles(keys)
    middle, reach = middle_and_reach(low, high)
    y = (keys - middle) / reach
    weights = torch.ones_like(y) if gradients is None else gradients.float().square()
    return {"raw_key_low": low, "raw_key_high": high, **_levels("key", y, weights, y.abs() <= 1.0)}


def _value_levels(values: torch.Tensor, gradients: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """kvquant's levels of values, normalised as the codec does."""
    tokens = max(1, values.shape[0] // VALUE_BLOCK) * VALUE_BLOCK
    blocks, weights = (
        rows[:tokens].reshape(-1, min(VALUE_BLOCK, rows.shape[0]), *rows.shape[1:]).transpose(1, 2)
        for rows in (finite(values), torch.ones_like(values) if gradients is None else gradients.float().square())
    )
    found = normalise_values(blocks)
    inlier = torch.ones(*blocks.shape[:2], blocks.shape[2] * blocks.shape[3], dtype=torch.bool)
    inlier = inlier.scatter(-1, found.places, torch.zeros_like(found.places, dtype=torch.bool)).reshape(blocks.shape)
    return _levels("value", found.y, weights, inlier)


def _levels(kind: str, y: torch.Tensor, weights: torch.Tensor, inlier: torch.Tensor) -> dict[str, torch.Tensor]:
    """[2, 2^bits] for each number of bits: to choose codes by, to decode with (stretched at 2 bits)."""
    if not bool(inlier.any()):  # a handful of tokens, each one an extreme
        inlier = torch.ones_like(inlier)
    values, weight = y[inlier].clamp(-1.0, 1.0), weights[inlier]
    found = {}
    for bits in LEVEL_BITS:
        levels = weighted_levels(values, weight, 1 << bits)
        found[f"{kind}_levels{bits}"] = torch.stack([levels, matched_levels(values, levels) if bits == 2 else levels])
    return found


def _percentiles(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each head's channels over float32 [T, H, d], interpolated."""
    ordered = keys.sort(dim=0).values
    found = []
    for share in PERCENTILES:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        found.append(ordered[below] + (ordered[above] - ordered[below]) * (place - below))
    return found[0], found[1]
