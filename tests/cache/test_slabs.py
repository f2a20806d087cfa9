"""The slab allocator: formats share one budget, counts always balance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.cache.slabs import SlabAllocator
from kvloom.core.errors import ConfigError


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 10**6)), max_size=120),
)
def test_any_sequence_of_operations_balances(
    runs: list[int], num_slabs: int, operations: list[tuple[bool, int, int]]
) -> None:
    allocator = SlabAllocator(runs, slab_bytes=64, num_slabs=num_slabs)
    held: dict[int, int] = {}
    for take, pick, which in operations:
        format = pick % len(runs)
        if take:
            offset = allocator.allocate(format)
            if offset is None:
                # Refusal is honest only if no slab is free and every own slab is full.
                assert allocator.free_slabs == 0 and allocator.free_runs(format) == 0
                continue
            assert 0 <= offset <= num_slabs * 64 - runs[format]
            for other, other_format in held.items():
                assert offset + runs[format] <= other or other + runs[other_format] <= offset
            held[offset] = format
        elif held:
            offset = list(held)[which % len(held)]
            del held[offset]
            allocator.free(offset)
        allocator.check()
    for offset in held:
        allocator.free(offset)
    assert allocator.free_slabs == num_slabs


def test_fullest_slab_is_filled_first_so_that_others_drain() -> None:
    allocator = SlabAllocator([16], slab_bytes=64, num_slabs=3)
    offsets = [allocator.allocate(0) for _ in range(12)]
    assert None not in offsets
    for offset in offsets[:3] + offsets[4:5]:  # slab 0 keeps one run, slab 1 keeps three
        assert offset is not None
        allocator.free(offset)
    again = allocator.allocate(0)
    assert again is not None and allocator.slab_of(again) == 1


def test_an_emptied_slab_serves_another_format() -> None:
    allocator = SlabAllocator([64, 16], slab_bytes=64, num_slabs=1)
    first = allocator.allocate(1)
    assert first is not None and allocator.allocate(0) is None
    allocator.free(first)
    assert allocator.allocate(0) == 0


def test_the_reserve_is_kept_from_ordinary_allocation() -> None:
    allocator = SlabAllocator([64], slab_bytes=64, num_slabs=3, reserve_slabs=1)
    assert allocator.allocate(0) is not None and allocator.allocate(0) is not None
    assert allocator.allocate(0) is None
    assert allocator.allocate(0, from_reserve=True) is not None


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit a slab"):
        SlabAllocator([65], slab_bytes=64, num_slabs=1)
    with pytest.raises(ConfigError, match="reserve of 2"):
        SlabAllocator([64], slab_bytes=64, num_slabs=1, reserve_slabs=2)
