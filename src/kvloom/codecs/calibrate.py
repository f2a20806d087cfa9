"""Make a calibration from keys, values and gradients that were collected while a model read text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvloom.codecs.calibration import Calibration
from kvloom.core.errors import CodecError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSample:
    """One layer's vectors of T tokens, of any float dtype; H KV heads, Hq query heads.

    Leave out each text's first tokens: attention sinks have keys unlike all others. ``keys`` are after
    RoPE, ``raw_keys`` before it (needed by kvquant). The gradients are of the loss with respect to
    ``raw_keys`` and ``values``, of the same shape; their squares are the Fisher weights of kvquant's
    levels, and without them all elements weigh the same.
    """

    keys: torch.Tensor  # [T, H, d]
    values: torch.Tensor  # [T, H, d]
    raw_keys: torch.Tensor | None = None  # [T, H, d]
    queries: torch.Tensor | None = None  # [T, Hq, d], after RoPE
    raw_key_gradients: torch.Tensor | None = None  # [T, H, d]
    value_gradients: torch.Tensor | None = None  # [T, H, d]


def calibrate(
    samples: Mapping[int, LayerSample], *, weights_digest: str, about: Mapping[str, str] | None = None
) -> Calibration:
    """Statistics of ``samples``, one entry per model layer.

    Raises:
        CodecError: a layer has no tokens, or values that are not finite.
    """
    tensors: dict[str, torch.Tensor] = {}
    for layer, sample in samples.items():
        if sample.keys.shape[0] < 2 or sample.keys.shape[:2] != sample.values.shape[:2]:
            raise CodecError(
                f"layer {layer}: keys {tuple(sample.keys.shape)} and values {tuple(sample.values.shape)} must be of "
                "the same tokens, at least 2"
            )
        for kind, tensor in _layer_statistics(sample).items():
            tensors[f"{kind}.{layer}"] = tensor
    return Calibration(tensors, weights_digest=weights_digest, about=about)


def _layer_statistics(sample: LayerSample) -> dict[str, torch.Tensor]:
    keys, values = sample.keys.double(), sample.values.double()
    found = {
        "key_mean": keys.mean(dim=0),
        "value_mean": values.mean(dim=0),
        "key_square": keys.var(dim=0, correction=0),
        "value_square": values.var(dim=0, correction=0),
    }
    if sample.queries is not None:
        tokens, heads, dim = keys.shape
        grouped = sample.queries.double().reshape(tokens, heads, -1, dim)
        found["query_square"] = grouped.square().mean(dim=(0, 2))
    return {kind: tensor.float() for kind, tensor in found.items()}
