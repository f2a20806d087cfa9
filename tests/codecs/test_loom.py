"""loom's keys: calibrated coordinates, unequal widths, and what queries are read with."""

from __future__ import annotations

import functools

import pytest
import torch

from kvloom.codecs import make_codec
from kvloom.codecs.calibrate import LayerSample, calibrate
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.key_basis import SHRINK, key_basis
from kvloom.codecs.loom import LoomKeys
from kvloom.codecs.segments import TRIES, SegmentCodes, cut
from kvloom.codecs.turn import times
from kvloom.core.errors import CodecError

from .world import HEADS, LAYER, calibration, codec_of, gaussian

NAMES = ("loom4", "loom3", "loom2")
TOKENS = 4096


@functools.cache
def uneven() -> tuple[torch.Tensor, torch.Tensor, Calibration]:
    """Keys [T, H, 64] and queries [T, 2H, 64] that lie in few directions, as models' do, and a calibration of them."""
    sizes = torch.logspace(1, -1, 64)
    mix = torch.linalg.qr(gaussian(2, HEADS, 64, 64, seed=21))[0]
    keys = torch.einsum("thc,hdc->thd", gaussian(TOKENS, HEADS, 64, seed=22) * sizes, mix[0]) + 5.0
    queries = torch.einsum("thgc,hdc->thgd", gaussian(TOKENS, HEADS, 2, 64, seed=23) * sizes, mix[1])
    queries = queries.flatten(1, 2)
    sample = LayerSample(keys=keys, values=gaussian(TOKENS, HEADS, 64, seed=24), queries=queries)
    return keys, queries, calibrate({LAYER: sample}, weights_digest="")


def loom(name: str, dim: int = 64, size: int = 32, made: Calibration | None = None) -> LoomKeys:
    codec = make_codec(name, "k", dim, size, made or calibration(dim))
    assert isinstance(codec, LoomKeys)
    return codec


def blocks(keys: torch.Tensor) -> torch.Tensor:
    """[N, H, 32, 64] of [T, H, 64]."""
    return keys.unflatten(0, (-1, 32)).transpose(1, 2)


def logit_error(name: str) -> float:
    """Mean square of what a query's logits miss beside the same for all keys, relative to their variance."""
    keys, queries, made = uneven()
    codec = make_codec(name, "k", 64, 32, made)
    rows = blocks(keys)
    error = codec.decode(codec.encode(rows, layer=LAYER), layer=LAYER) - rows
    asked = queries.unflatten(1, (HEADS, 2))[:64]
    missed = torch.einsum("thgc,nhbc->thgnb", asked, error)
    exact = torch.einsum("thgc,nhbc->thgnb", asked, rows - keys.mean(dim=0).unsqueeze(1))
    return float(missed.square().mean() / exact.square().mean())


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_logits_err_far_less_than_with_a_fixed_rotation(bits: int) -> None:
    assert logit_error(f"loom{bits}") < 0.25 * logit_error(f"turboquant{bits}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [64, 96])
def test_queries_can_be_turned_instead_of_keys(name: str, dim: int) -> None:
    codec = loom(name, dim)
    data = codec.encode(gaussian(3, HEADS, 32, dim, seed=5), layer=LAYER)
    query = gaussian(HEADS, dim, seed=6)
    mean = codec.removed_mean(LAYER)
    assert mean is not None
    turned = torch.einsum("hc,hci->hi", query, codec.query_turns(LAYER))
    y = codec.codes.decode(codec.layout.split(data))
    found = torch.einsum("hi,nhbi->nhb", turned, y) + (query * mean).sum(dim=-1, keepdim=True)
    plain = torch.einsum("hc,nhbc->nhb", query, codec.decode(data, layer=LAYER))
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dim", [64, 128, 256, 80, 96])
def test_segments_fill_the_row_at_the_mean_width(dim: int) -> None:
    for quarters in ((4, 4, 4, 4), (4, 4, 2, 2), (4, 2, 1, 1)):
        segments = cut(dim, quarters)
        assert [one.start for one in segments] == [0, *(one.stop for one in segments[:-1])]
        assert segments[-1].stop == dim and len(segments) <= 3
        assert 4 * sum(one.bits * one.size for one in segments) == sum(quarters) * dim
        assert all(one.size % 16 == 0 for one in segments)
        assert len({one.codes for one in segments}) == len(segments)


def test_the_best_of_the_tried_scales_is_kept() -> None:
    codes = SegmentCodes(cut(64, (4, 4, 2, 2)), 64)
    y, weights = gaussian(50, 64, seed=7) * codes.units, torch.tensor([1.0, 0.25])
    weight = weights.repeat_interleave(32)
    fields = codes.encode(y, weights)
    error = (weight * (codes.decode(fields) - y).square()).sum(dim=-1)
    first = (y / codes.units).square().mean(dim=-1, keepdim=True).sqrt()
    for factor in TRIES:
        parts = (y / (first * factor)).split(32, dim=-1)
        levels = torch.cat(
            [book.decode(book.nearest(part.contiguous())) for book, part in zip(codes.books, parts, strict=True)], -1
        )
        scale = (weight * y * levels).sum(-1, keepdim=True) / (weight * levels * levels).sum(-1, keepdim=True)
        assert bool((error <= 1.01 * (weight * (scale * levels - y).square()).sum(dim=-1)).all())


def test_a_basis_makes_keys_uncorrelated_and_errors_alike() -> None:
    root = gaussian(2, 3, 16, 16, seed=8).double()
    covariance, weight = (x @ x.mT for x in root)
    basis, importance = key_basis(covariance, weight)
    torch.testing.assert_close(basis @ covariance @ basis.mT, torch.diag_embed(importance), atol=1e-6, rtol=1e-6)
    back = torch.linalg.inv(basis)
    mean = weight.diagonal(dim1=1, dim2=2).mean(dim=-1)[:, None, None]
    shrunk = (1 - SHRINK) * weight + SHRINK * mean * torch.eye(16, dtype=torch.float64)
    cost = back.mT @ shrunk @ back
    torch.testing.assert_close(cost, cost[:, :1, :1] * torch.eye(16, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    assert bool((importance.diff(dim=-1) <= 0).all())
    torch.testing.assert_close(importance.sum(dim=-1), covariance.diagonal(dim1=1, dim2=2).sum(dim=-1))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_keys_of_any_size_are_coded_alike(size: float) -> None:
    keys = gaussian(512, HEADS, 64, seed=9) * size
    made = calibrate({LAYER: LayerSample(keys=keys, values=keys)}, weights_digest="")
    codec = loom("loom4", made=made)
    rows = blocks(keys)
    error = (codec.decode(codec.encode(rows, layer=LAYER), layer=LAYER) - rows).square().mean() / rows.square().mean()
    assert float(error) < (0.02 if size >= 1e-3 else 1.0)


def test_constant_keys_are_kept() -> None:
    """Nothing varies: there is no direction to prefer."""
    keys = gaussian(1, HEADS, 64, seed=10).expand(64, HEADS, 64)
    made = calibrate({LAYER: LayerSample(keys=keys, values=keys, queries=keys)}, weights_digest="")
    rows = blocks(keys)
    codec = loom("loom3", made=made)
    assert torch.allclose(codec.decode(codec.encode(rows, layer=LAYER), layer=LAYER), rows, atol=1e-5)


def test_sums_run_over_channels_in_order() -> None:
    x, matrix = gaussian(1, 1, 1, 3, seed=11), gaussian(1, 3, 3, seed=12)
    for row in range(3):
        terms = x[0, 0, 0] * matrix[0, row]
        assert times(x, matrix)[0, 0, 0, row] == (terms[0] + terms[1]) + terms[2]


def test_a_calibration_without_bases_is_refused() -> None:
    tensors = {name: x for name, x in calibration(64).tensors.items() if not name.startswith("key_basis")}
    with pytest.raises(CodecError, match="again with kvloom calibrate"):
        make_codec("loom3", "k", 64, 32, Calibration(tensors, weights_digest=""))


def test_values_need_no_calibration() -> None:
    assert make_codec("loom3", "v", 64, 32).identity == make_codec("loom3", "v", 64, 32, calibration(64)).identity
    assert codec_of("loom3", 64, 32).identity != codec_of("loom3", 128, 16).identity
