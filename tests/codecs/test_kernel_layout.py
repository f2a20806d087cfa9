"""Codes in the kernels' order decode to the same values."""

from __future__ import annotations

import pytest
import torch

from kvloom.codecs.base import BlockCodec
from kvloom.codecs.kernel_layout import for_kernels
from tests.codecs.world import ALL, LAYER, codec_of, rows_of


@pytest.mark.parametrize("dim,size", [(64, 32), (128, 16), (96, 32), (256, 64)])
@pytest.mark.parametrize("name", ALL)
def test_same_values_in_another_order(name: str, dim: int, size: int) -> None:
    codec = codec_of(name, dim, size)
    assert isinstance(codec, BlockCodec)
    layout = for_kernels(codec)
    if layout is None:
        pytest.skip(f"{name} at {dim} channels is not read by native kernels")
    rows = rows_of(3, dim, size)
    data = layout.encode(rows, layer=LAYER)
    assert data.shape[-1] == codec.num_bytes
    plain = codec.decode(codec.encode(rows, layer=LAYER), layer=LAYER)
    assert torch.equal(layout.decode(data, layer=LAYER), plain)


def test_what_native_kernels_read() -> None:
    """Guards the skips above."""
    read = {name for name in ALL if for_kernels(codec_of(name, 64, 32)) is not None}  # type: ignore[arg-type]
    assert read >= {
        "int8",
        "int4",
        "q8_0",
        "q4_0",
        "turboquant4",
        "turboquant3",
        "turboquant2",
        "loom4",
        "loom3",
        "loom2",
    }
    assert read >= {"kivi2.key", "kivi2.value", "kivi4.key", "kivi4.value"}
    assert read >= {"kvarn4.key", "kvarn4.value", "kvarn2.value"}
    assert read >= {"fp8", "fp8_e5m2"}
    assert not read & {"kvquant4.key", "turboquant2.5"}
