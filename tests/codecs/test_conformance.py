"""What holds for every codec in the table; a new line there is tested without being named here."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from kvloom.codecs import CODECS, make_codec
from kvloom.core.codec_sizes import CODEC_CHOICES, PLANNED_BLOCK_BYTES, RAW_DTYPES, block_bytes
from kvloom.core.errors import CodecError, ConfigError
from kvloom.core.sizes import BLOCK_SIZES, CODEC_BLOCK_BYTES
from kvloom.kernels.reference import count_non_finite

from .world import ALL, HEADS, LAYER, SHAPES, calibration, codec_of, plane_of, positions_of, rope_table, rows_of

# The share of the rows' energy that a round trip of Gaussian rows may lose, by bits a code.
LARGEST_ERROR = {8: 0.004, 4: 0.02, 3: 0.08, 2: 0.3, 1: 0.6}


def round_trip(name: str, rows: torch.Tensor) -> torch.Tensor:
    count, _, block_size, dim = rows.shape
    codec = codec_of(name, dim, block_size)
    where = positions_of(count, block_size)
    data = codec.encode(rows, layer=LAYER, first_position=where)
    return codec.decode(data, layer=LAYER, first_position=where)


def test_every_lossy_format_has_a_codec() -> None:
    raw = {"raw", *RAW_DTYPES}
    assert set(CODECS) == {*PLANNED_BLOCK_BYTES, *CODEC_BLOCK_BYTES} - raw
    named = {plane for choice in CODEC_CHOICES.values() for plane in (choice.key, choice.value)}
    assert named - raw <= set(CODECS)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_bytes_are_what_the_planner_counts(name: str, dim: int) -> None:
    side = calibration(dim)
    for block_size in BLOCK_SIZES:
        codec = make_codec(name, plane_of(name), dim, block_size, side, rope_table(dim))
        assert codec.num_bytes == block_bytes(name, dim, block_size) == codec.layout.num_bytes
        end = 0
        for field in codec.layout.fields:
            assert field.offset == end and field.offset % field.dtype.itemsize == 0
            end += field.num_bytes
            if codec.token_local:
                assert field.shape[0] == block_size
        assert end == codec.num_bytes


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(name: str, shape: tuple[int, int]) -> None:
    dim, block_size = shape
    rows = rows_of(3, dim, block_size)
    back = round_trip(name, rows)
    assert back.dtype == torch.float32 and back.shape == rows.shape
    planes = [field for field in codec_of(name, dim, block_size).layout.fields if "codes" in field.name]
    held = sum(field.num_bytes * 8 for field in planes) / (dim * block_size)
    bits = int(min(held, 8))
    error = float((back - rows).square().mean() / rows.square().mean())
    assert error < LARGEST_ERROR[bits]


@pytest.mark.parametrize("name", ALL)
def test_a_block_alone_has_the_bytes_it_has_in_a_batch(name: str) -> None:
    dim, block_size = 64, 32
    codec = codec_of(name, dim, block_size)
    rows = rows_of(7, dim, block_size)
    where = positions_of(7, block_size)
    together = codec.encode(rows, layer=LAYER, first_position=where)
    decoded = codec.decode(together, layer=LAYER, first_position=where)
    for index in range(7):
        one = slice(index, index + 1)
        alone = codec.encode(rows[one].clone(), layer=LAYER, first_position=where[one])
        assert torch.equal(alone, together[one])
        assert torch.equal(codec.decode(alone, layer=LAYER, first_position=where[one]), decoded[one])


@pytest.mark.parametrize("name", ALL)
def test_strides_do_not_matter(name: str) -> None:
    """Rows that lie [N, block_size, heads, dim] in memory, as the engine's do, give the same bytes."""
    codec = codec_of(name, 64, 32)
    rows = rows_of(4, 64, 32)
    strided = rows.transpose(1, 2).contiguous().transpose(1, 2)
    where = positions_of(4, 32)
    same = codec.encode(rows, layer=LAYER, first_position=where)
    assert torch.equal(codec.encode(strided, layer=LAYER, first_position=where), same)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_rows_are_read_as_their_values(name: str) -> None:
    codec = codec_of(name, 64, 32)
    where = positions_of(2, 32)
    for dtype in (torch.bfloat16, torch.float16):
        rows = rows_of(2, 64, 32).to(dtype)
        exact = codec.encode(rows.float(), layer=LAYER, first_position=where)
        assert torch.equal(codec.encode(rows, layer=LAYER, first_position=where), exact)


@pytest.mark.parametrize("name", ALL)
def test_no_blocks(name: str) -> None:
    codec = codec_of(name, 64, 32)
    none = torch.zeros(0, dtype=torch.int64)
    data = codec.encode(torch.zeros(0, HEADS, 32, 64), layer=LAYER, first_position=none)
    assert data.shape == (0, HEADS, codec.num_bytes) and data.dtype == torch.uint8
    assert codec.decode(data, layer=LAYER, first_position=none).shape == (0, HEADS, 32, 64)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-42, -1e-30, 2.0**-24, 60000.0, -65504.0, 1e30, -3.4e38])
def test_constant_rows_of_any_size_stay_near(name: str, value: float) -> None:
    rows = torch.full((1, HEADS, 32, 64), value)
    back = round_trip(name, rows)
    assert bool(torch.isfinite(back).all())
    stored = min(max(value, -65504.0), 65504.0)
    removed = codec_of(name, 64, 32).removed_mean(LAYER)  # type: ignore[attr-defined]
    size = max(abs(stored), 0.0 if removed is None else float(removed.abs().max()))
    if not name.startswith("kvquant"):  # its ranges come from calibration, far from these rows
        assert float((back - stored).square().mean().sqrt()) <= 0.8 * size + 2.0**-20


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_element_counts_as_zero(name: str, bad: float) -> None:
    codec = codec_of(name, 64, 32)
    where = positions_of(2, 32)
    rows = rows_of(2, 64, 32)
    rows[0, 1, 5, 17] = bad
    rows[1, 0, 31, :] = bad
    assert count_non_finite(rows) == 65
    mended = torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows))
    data = codec.encode(rows, layer=LAYER, first_position=where)
    assert torch.equal(data, codec.encode(mended, layer=LAYER, first_position=where))
    assert bool(torch.isfinite(codec.decode(data, layer=LAYER, first_position=where)).all())


@pytest.mark.parametrize("name", ALL)
def test_any_bytes_decode(name: str) -> None:
    """Damaged bytes may give odd numbers, never an exception or a crash."""
    codec = codec_of(name, 64, 32)
    noise = torch.randint(0, 256, (2, HEADS, codec.num_bytes), generator=torch.Generator().manual_seed(1))
    back = codec.decode(noise.to(torch.uint8), layer=LAYER, first_position=positions_of(2, 32))
    assert back.shape == (2, HEADS, 32, 64)


@pytest.mark.parametrize("name", [name for name in ALL if codec_of(name, 64, 32).token_local])
def test_tokens_move_as_bytes(name: str) -> None:
    """Reversing a block's tokens field by field equals encoding them in reverse."""
    codec = codec_of(name, 64, 32)
    rows = rows_of(1, 64, 32)
    data = codec.encode(rows, layer=LAYER)
    fields = codec.layout.split(data)
    moved = codec.layout.join({key: field.flip(2) for key, field in fields.items()})
    assert torch.equal(moved, codec.encode(rows.flip(2), layer=LAYER))


SCRIPT = """
import hashlib, torch
torch.set_num_threads({threads})
from tests.codecs.world import ALL, LAYER, codec_of, positions_of, rows_of
seen = hashlib.sha256()
for name in ALL:
    codec = codec_of(name, 64, 32)
    seen.update(codec.identity.encode())
    seen.update(codec.encode(rows_of(3, 64, 32), layer=LAYER, first_position=positions_of(3, 32)).numpy().tobytes())
print(seen.hexdigest())
"""


def test_every_process_writes_the_same_bytes() -> None:
    here = hashlib.sha256()
    for name in ALL:
        codec = codec_of(name, 64, 32)
        here.update(codec.identity.encode())
        data = codec.encode(rows_of(3, 64, 32), layer=LAYER, first_position=positions_of(3, 32))
        here.update(data.numpy().tobytes())
    for threads in (1, 2):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(threads=threads)], capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == here.hexdigest()


@pytest.mark.parametrize("name", ALL)
def test_wrong_shapes_are_refused(name: str) -> None:
    codec = codec_of(name, 64, 32)
    with pytest.raises(CodecError, match="encodes full blocks"):
        codec.encode(torch.zeros(1, HEADS, 31, 64), layer=LAYER)
    with pytest.raises(CodecError, match="decodes uint8"):
        codec.decode(torch.zeros(1, HEADS, codec.num_bytes + 1, dtype=torch.uint8), layer=LAYER)


@pytest.mark.parametrize("name", ALL)
def test_a_width_that_does_not_fit_is_refused_with_a_remedy(name: str) -> None:
    try:
        codec = make_codec(name, plane_of(name), 20, 32, calibration(20), rope_table(20))
    except CodecError as error:
        assert "20" in str(error) and "int8" in str(error)
    else:
        assert codec.num_bytes == block_bytes(name, 20, 32)


def test_wrong_requests() -> None:
    with pytest.raises(CodecError, match="no codec for the plane format 'int5'"):
        make_codec("int5", "k", 64, 32)
    with pytest.raises(CodecError, match="no plane 'q'"):
        make_codec("int8", "q", 64, 32)
    with pytest.raises(CodecError, match="not made for the plane 'v'"):
        make_codec("kivi4.key", "v", 64, 32)
    with pytest.raises(CodecError, match="must be positive"):
        make_codec("int8", "k", 0, 32)
    with pytest.raises(ConfigError, match="block_size is 24"):
        make_codec("int8", "k", 64, 24)
    with pytest.raises(CodecError, match="needs a calibration file"):
        make_codec("loom4", "k", 64, 32)


def test_calibrated_codecs_are_told_apart() -> None:
    assert codec_of("loom4", 64, 32).identity != codec_of("turboquant4", 64, 32).identity
    assert codec_of("loom4", 64, 32).identity != codec_of("loom4", 128, 16).identity
