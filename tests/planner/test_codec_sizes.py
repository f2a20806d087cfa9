"""Byte specifications of codecs, and their names."""

from __future__ import annotations

import pytest

from kvloom.core.codec_sizes import (
    CODEC_CHOICES,
    PLANNED_BLOCK_BYTES,
    RAW_DTYPES,
    bits_per_value,
    block_bytes,
    is_served,
    parse_codec,
)
from kvloom.core.errors import ConfigError
from kvloom.core.sizes import CODEC_BLOCK_BYTES


@pytest.mark.parametrize(
    ("codec", "dim", "block", "bits"),
    [
        ("int8", 64, 32, 8.25),
        ("int8", 128, 32, 8.125),
        ("fp8", 64, 32, 8.25),
        ("int4", 64, 32, 4.5),
        ("int4", 128, 32, 4.25),
        ("turboquant4", 64, 32, 4.25),
        ("turboquant3", 64, 32, 3.25),
        ("turboquant2", 64, 32, 2.25),
        ("loom3", 64, 32, 3.25),
        ("turboquant2.5", 128, 32, 2.5),
        ("turboquant3.5", 128, 32, 3.5),
        ("kivi4.key", 64, 32, 5.0),
        ("kivi2.key", 64, 64, 2.5),
        ("kvarn4.key", 128, 128, 4.375),
        ("kvarn4.key", 64, 64, 4.75),
        ("kvarn4.value", 64, 64, 4.75),
    ],
)
def test_bits_with_side_data(codec: str, dim: int, block: int, bits: float) -> None:
    """The bits of the published formats (quantization.md, sections 1 and the measured table)."""
    assert bits_per_value(codec, dim, block) == bits


def test_kvquant_keeps_one_percent_outliers() -> None:
    """b + 0.32 and small change: 4 bytes for every hundredth value, rounded up per block."""
    assert bits_per_value("kvquant3.key", 100, 100) == pytest.approx(3.36)  # rows padded to whole bytes: 38 for 37.5
    assert block_bytes("kvquant4.key", 128, 32) == 128 * 32 // 2 + 4 * 41


@pytest.mark.parametrize("codec", sorted({*PLANNED_BLOCK_BYTES, *CODEC_BLOCK_BYTES} - {*RAW_DTYPES}))
def test_bytes_grow_with_tokens_and_width(codec: str) -> None:
    for dim in (64, 80, 96, 128, 256):
        sizes = [block_bytes(codec, dim, block) for block in (8, 16, 32, 64, 128, 256)]
        assert sizes == sorted(sizes)
        assert block_bytes(codec, dim, 32) < block_bytes("bfloat16", dim, 32)


def test_every_choice_names_known_plane_formats() -> None:
    for choice in CODEC_CHOICES.values():
        for plane in (choice.key, choice.value):
            assert plane == "raw" or plane in PLANNED_BLOCK_BYTES or plane in CODEC_BLOCK_BYTES
    assert is_served("bfloat16")


def test_codecs_that_the_engine_has_keep_its_sizes() -> None:
    for codec, rule in CODEC_BLOCK_BYTES.items():
        assert block_bytes(codec, 64, 32) == rule(64, 32)


def test_pairs() -> None:
    pair = parse_codec("k=int8,v=int4")
    assert (pair.key, pair.value) == ("int8", "int4")
    assert (pair.sink_tokens, pair.recent_tokens) == (16, 64)
    assert parse_codec("v=int4, k=int8").key == "int8"
    assert parse_codec("k=int8,v=int8").name == "int8"
    assert parse_codec("kvarn-k4v2").value == "kvarn2.value"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int88", "there is no codec 'int88'; did you mean 'int8'?"),
        ("trubo4", "there is no codec 'trubo4'"),
        ("k=int8", "names no codec for v"),
        ("k=int8,v=intt4", "did you mean 'int4'?"),
        ("k=int8,k=int4", "write one name, or a pair"),
        ("", "there is no codec ''"),
    ],
)
def test_wrong_names(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_codec(text)
    assert message in str(caught.value)
