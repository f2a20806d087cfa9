"""Statistics that a calibration holds, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvloom.codecs.calibrate import LayerSample, calibrate
from kvloom.codecs.moments import Moments
from kvloom.core.errors import CodecError

from .world import gaussian


def test_means_and_variances() -> None:
    keys = gaussian(300, 2, 16, seed=1) * 2.0 + 3.0
    values = gaussian(300, 2, 16, seed=2)
    queries = gaussian(300, 6, 16, seed=3)
    made = calibrate({0: LayerSample(keys=keys, values=values, queries=queries)}, weights_digest="w")
    assert torch.allclose(made.get("key_mean", 0, (2, 16)), keys.mean(dim=0), atol=1e-5)
    assert torch.allclose(made.get("value_square", 0, (2, 16)), values.var(dim=0, correction=0), atol=1e-5)
    grouped = queries.reshape(300, 2, 3, 16).square().mean(dim=(0, 2))
    assert torch.allclose(made.get("query_square", 0, (2, 16)), grouped, atol=1e-5)
    with pytest.raises(CodecError, match="no raw_key_low of layer 0"):
        made.get("raw_key_low", 0, (2, 16))


def test_a_key_basis_follows_the_queries_that_weigh() -> None:
    keys = gaussian(500, 1, 8, seed=6)
    queries = torch.zeros(500, 2, 8)
    queries[:250, :, 3] = 1.0
    queries[250:, :, 5] = 1.0
    weights = torch.ones(500, 2)
    for silent, asked in ((slice(0, 250), 5), (slice(250, 500), 3)):
        weights[silent] = 0.0
        sample = LayerSample(keys=keys, values=keys, queries=queries, query_weights=weights)
        made = calibrate({0: sample}, weights_digest="w")
        basis = made.get("key_basis", 0, (1, 8, 8))
        assert int(basis[0, 0].abs().argmax()) == asked
        assert torch.equal(basis, basis.half().float())
        weights[silent] = 1.0
    unheard = LayerSample(keys=keys, values=keys, queries=queries, query_weights=torch.zeros(500, 2))
    even = LayerSample(keys=keys, values=keys, queries=queries)
    first, second = (calibrate({0: one}, weights_digest="w") for one in (unheard, even))
    assert first.digest == second.digest


def test_moments_of_windows_are_those_of_all_their_tokens() -> None:
    keys, values = gaussian(300, 2, 16, seed=7) + 9.0, gaussian(300, 2, 8, seed=8)
    queries, weights = gaussian(300, 4, 16, seed=9), gaussian(300, 4, seed=10).abs()
    sums = Moments(2, 16, 8)
    for rows in (slice(0, 100), slice(100, 300)):
        sums.add(keys[rows], values[rows], queries[rows], weights[rows])
    sample = LayerSample(keys=keys, values=values, queries=queries, query_weights=weights)
    found, whole = (
        calibrate({}, moments={0: sums}, weights_digest="w"),
        calibrate({0: sample}, weights_digest="w"),
    )
    assert found.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, atol=2e-3, rtol=2e-3)


def test_moments_go_before_the_sample_that_has_levels() -> None:
    rows = gaussian(40, 1, 8, seed=11)
    sums = Moments(1, 8, 8)
    sums.add(rows + 5.0, rows)
    made = calibrate({0: LayerSample(keys=rows, values=rows, raw_keys=rows)}, moments={0: sums}, weights_digest="w")
    assert torch.allclose(made.get("key_mean", 0, (1, 8)), rows.mean(dim=0) + 5.0, atol=1e-5)
    assert made.get("key_levels3", 0, (2, 8)).isfinite().all()
    sums.add(rows / 0.0, rows)
    with pytest.raises(CodecError, match="not finite"):
        calibrate({}, moments={0: sums}, weights_digest="w")


def test_percentiles_leave_one_percent_outside() -> None:
    raw = gaussian(2000, 1, 8, seed=4)
    made = calibrate({5: LayerSample(keys=raw, values=raw, raw_keys=raw)}, weights_digest="w")
    low, high = made.get("raw_key_low", 5, (1, 8)), made.get("raw_key_high", 5, (1, 8))
    outside = ((raw < low) | (raw > high)).float().mean(dim=0)
    assert torch.allclose(outside, torch.full((1, 8), 0.01), atol=0.001)


def test_gradients_weigh_levels() -> None:
    """Where only large elements matter, levels move outwards."""
    raw = gaussian(2000, 1, 8, seed=5)
    plain = calibrate({0: LayerSample(keys=raw, values=raw, raw_keys=raw)}, weights_digest="w")
    loud = LayerSample(keys=raw, values=raw, raw_keys=raw, raw_key_gradients=raw.abs() ** 3, value_gradients=raw)
    weighted = calibrate({0: loud}, weights_digest="w")
    for kind in ("key_levels3", "value_levels3"):
        even, moved = plain.get(kind, 0, (2, 8))[0], weighted.get(kind, 0, (2, 8))[0]
        assert float(moved[4]) > float(even[4]) and float(moved[3]) < float(even[3])


@pytest.mark.parametrize("tokens", [2, 20, 33])
def test_few_tokens(tokens: int) -> None:
    rows = gaussian(tokens, 2, 16)
    made = calibrate({0: LayerSample(keys=rows, values=rows, raw_keys=rows)}, weights_digest="w")
    assert bool(torch.isfinite(made.get("value_levels2", 0, (2, 4))).all())


def test_what_is_refused() -> None:
    rows = gaussian(4, 2, 16)
    with pytest.raises(CodecError, match="must be of the same tokens"):
        calibrate({0: LayerSample(keys=rows, values=rows[:3])}, weights_digest="w")
    with pytest.raises(CodecError, match="must be of the same tokens"):
        calibrate({0: LayerSample(keys=rows[:1], values=rows[:1])}, weights_digest="w")
    with pytest.raises(CodecError, match="not finite"):
        calibrate({0: LayerSample(keys=rows / 0.0, values=rows)}, weights_digest="w")
