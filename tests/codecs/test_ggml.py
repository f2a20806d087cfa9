"""q8_0 and q4_0 against the gguf package's own quantiser, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from kvloom.codecs.ggml import GROUP, q4_0_quantize, q8_0_quantize

from .world import gaussian


def groups() -> torch.Tensor:
    x = gaussian(500, GROUP, seed=21)
    x[0] = 0.0
    x[1] = 1e-30
    x[2] = torch.arange(GROUP) - 16.0
    x[3, 5], x[3, 9] = 4.0, -4.0  # two extremes
    return x


def test_q8_0() -> None:
    x = groups()
    packed = quants.quantize(x.numpy(), GGMLQuantizationType.Q8_0).reshape(len(x), 34)
    codes, scale = q8_0_quantize(x)
    assert np.array_equal(packed[:, :2].copy().view(np.float16)[:, 0], scale.numpy())
    assert np.array_equal(packed[:, 2:].view(np.int8), codes.numpy())


def test_q4_0() -> None:
    x = groups()
    packed = quants.quantize(x.numpy(), GGMLQuantizationType.Q4_0).reshape(len(x), 18)
    codes, scale = q4_0_quantize(x)
    assert np.array_equal(packed[:, :2].copy().view(np.float16)[:, 0], scale.numpy())
    nibbles = np.concatenate([packed[:, 2:] & 15, packed[:, 2:] >> 4], axis=1)
    assert np.array_equal(nibbles, codes.numpy())


@pytest.mark.parametrize("quantize", [q8_0_quantize, q4_0_quantize])
def test_a_scale_too_small_for_float16_is_zero(quantize: object) -> None:
    _, scale = quantize(torch.full((GROUP,), 1e-12))  # type: ignore[operator]
    assert float(scale) == 0.0
