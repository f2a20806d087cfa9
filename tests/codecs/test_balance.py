"""What KVarN's normalisation and the split channels are for."""

from __future__ import annotations

import torch

from kvloom.codecs import make_codec
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.kvarn import balance
from kvloom.codecs.turboquant_split import TurboQuantSplit

from .world import HEADS, LAYER, calibration, codec_of, gaussian


def error(name: str, rows: torch.Tensor) -> torch.Tensor:
    """[block_size] mean squared error of each token."""
    codec = codec_of(name, 64, 32)
    back = codec.decode(codec.encode(rows, layer=LAYER), layer=LAYER)
    return (back - rows).square().mean(dim=(0, 1, 3))


def test_balanced_tokens_are_equally_loud() -> None:
    x = gaussian(1, 1, 32, 64) * torch.linspace(0.1, 10, 32).unsqueeze(1)
    loudness = (x / balance(x, -1)).std(dim=-1, correction=0)
    assert float(loudness.max() / loudness.min()) < 1.2


def test_a_loud_token_does_not_drown_the_others() -> None:
    rows = gaussian(1, HEADS, 32, 64, seed=41)
    loud = rows.clone()
    loud[:, :, 7] *= 100.0
    quiet_before, quiet_after = error("kvarn4.key", rows)[8:].mean(), error("kvarn4.key", loud)[8:].mean()
    assert float(quiet_after) < 1.3 * float(quiet_before)
    assert float(error("kivi4.key", loud)[8:].mean()) > 20 * float(quiet_after)


def test_wide_channels_are_those_with_most_energy() -> None:
    codec = make_codec("turboquant2.5", "k", 64, 32, calibration(64))
    assert isinstance(codec, TurboQuantSplit)
    order = codec.channel_order(LAYER, HEADS)
    assert torch.equal(order.sort(dim=-1).values, torch.arange(64).expand(HEADS, 64))
    square = torch.ones(HEADS, 64)
    square[:, [3, 50]] = 9.0
    tensors = {f"key_square.{LAYER}": square, f"key_mean.{LAYER}": torch.zeros(HEADS, 64)}
    codec.calibration = Calibration(tensors, weights_digest="")
    first = codec.channel_order(LAYER, HEADS)[:, :16]
    assert bool((first == 3).any(dim=1).all()) and bool((first == 50).any(dim=1).all())
