"""The bound's arithmetic, against figures worked out by hand."""

from __future__ import annotations

import pytest

from bench.bound import Layers, Machine, Model, bound, decode_cost, prefill_cost, split

# 2 layers with 4 query heads and 1 KV head of 8 channels: 2 · 16 values kept, 2 · 2 · 4 · 16 operations per pair.
FULL = Layers(elements=32, operations=256)
WINDOWED = Layers(elements=32, operations=256, window=10)


def test_a_decode_step_reads_every_cached_token_of_every_sequence() -> None:
    cost = decode_cost(Model(body=1000, head=100, layers=(FULL,)), sequences=3, context=50, shared=0, element_bytes=2)
    assert cost.weight_bytes == 2200
    assert cost.cache_bytes == 3 * 50 * 64
    assert cost.operations == 2 * 1100 * 3 + 3 * 50 * 256


def test_a_shared_prefix_is_read_once_but_attended_to_by_all() -> None:
    model = Model(body=0, head=0, layers=(FULL,))
    cost = decode_cost(model, sequences=4, context=50, shared=40, element_bytes=1)
    assert cost.cache_bytes == (40 + 4 * 10) * 32
    assert cost.operations == 4 * 50 * 256


@pytest.mark.parametrize(("shared", "tokens"), [(0, 4 * 10), (40, 4 * 10), (45, 5 + 4 * 5), (49, 9 + 4 * 1)])
def test_a_window_sees_only_its_part_of_the_prefix(shared: int, tokens: int) -> None:
    model = Model(body=0, head=0, layers=(WINDOWED,))
    cost = decode_cost(model, sequences=4, context=50, shared=shared, element_bytes=1)
    assert cost.cache_bytes == tokens * 32
    assert cost.operations == 4 * 10 * 256


@pytest.mark.parametrize("layers", [FULL, WINDOWED])
def test_prefill_counts_each_visible_pair(layers: Layers) -> None:
    pairs = sum(min(position + 1, layers.window or 50) for position in range(50))
    cost = prefill_cost(Model(body=1000, head=100, layers=(layers,)), sequences=2, context=50, element_bytes=2)
    # Only the last token of a prompt needs the head.
    assert cost.operations == 2 * (2 * 1000 * 50 + 2 * 100 + pairs * 256)
    assert cost.cache_bytes == 2 * 50 * 64


def test_the_bound_is_the_slower_of_reading_and_computing() -> None:
    cost = decode_cost(Model(body=900, head=100, layers=(FULL,)), sequences=1, context=1, shared=0, element_bytes=1)
    assert bound(cost, Machine(bandwidth=2032, peak=1e9)) == pytest.approx(1.0)
    assert bound(cost, Machine(bandwidth=1e9, peak=2256)) == pytest.approx(1.0)


def test_the_split_adds_up() -> None:
    cost = decode_cost(Model(body=900, head=100, layers=(FULL,)), sequences=1, context=100, shared=0, element_bytes=1)
    parts = split(cost, Machine(bandwidth=1e6, peak=1e9), 0.010)
    assert parts["weights_ms"] == pytest.approx(2.0)
    assert parts["cache_ms"] == pytest.approx(3.2)
    assert sum(parts.values()) == pytest.approx(10.0)
