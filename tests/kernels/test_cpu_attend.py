"""The native kernels against the reference, which reads the same stored bytes.

Tolerances. Both compute in fp32 on equal inputs, so fp32, and bf16 and fp16 storage where the
variant widens them, agree to 1e-5 relative: a few hundred additions of rounding 6e-8, in another
order. The avx512bf16 variant multiplies bf16 pairs when queries are bf16 too: queries and keys are
exact, weights are rounded to bf16, each by at most 2^-9 of itself, and the sum that normalises them
is of the rounded ones; the weighted mean of values then moves by at most 2 * 2^-9 * max |v|.
Outputs in bf16 or fp16 may round to neighbours: one unit in the last place, 2^-7 and 2^-10.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import EVERY_KEY, KeyRange, PlaneFormat, merge_partials
from kvloom.kernels.reference import ReferenceBackend

from .world import CPU, assert_close, batch_of, make_format, make_world, random_queries

REFERENCE = ReferenceBackend()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OUTPUT_ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
MIX = ([70, 1, 1, 17, 40, 0, 33], [0, 299, 0, 33, 511, 5, 255])  # prefill, decode, chunks; tokens and first positions


def tolerance(backend: CpuBackend, stored: torch.dtype, queries: torch.dtype) -> float:
    pairs = backend.variant == "avx512bf16" and stored == queries == torch.bfloat16
    return 2 * 2.0**-9 if pairs else 1e-5


def compare(backend, world, batch, q, **options) -> None:
    """Output, and output with log-sum-exp, equal the reference's; nothing fell back."""
    before = dict(backend.fallbacks)
    stored = world.fmt.planes[0].dtype
    allowed = tolerance(backend, stored, q.dtype)
    arguments = (q, world.arena, *world.where, batch)
    expected, expected_lse = REFERENCE.attend(*arguments, want_lse=True, **options)
    found, lse = backend.attend(*arguments, want_lse=True, **options)
    assert_close(found, expected, allowed)
    keyless = torch.isneginf(expected_lse)
    assert torch.equal(torch.isneginf(lse), keyless)
    assert_close(lse[~keyless], expected_lse[~keyless], 1e-5 if allowed < 1e-4 else 2.0**-9)
    out, nothing = backend.attend(*arguments, **options)
    assert nothing is None
    assert_close(out, expected.to(q.dtype), allowed + OUTPUT_ROUNDING[q.dtype])
    assert dict(backend.fallbacks) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_dims_and_groups(backend: CpuBackend, dtype: torch.dtype, dim: int) -> None:
    """Every head dim with MHA, GQA and MQA, over a mix of prefill, chunks and decode."""
    lengths = [first + count for count, first in zip(*MIX, strict=True)]
    batch = batch_of(*MIX)
    for (kv_heads, groups), block_size in zip([(3, 1), (2, 3), (1, 4), (1, 9)], [16, 32, 64, 32], strict=True):
        fmt = make_format(backend, dtype, heads=kv_heads, k_dim=dim, block_size=block_size)
        world = make_world(backend, fmt, lengths)
        compare(backend, world, batch, random_queries(batch, kv_heads * groups, dim, dtype), scale=dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_block_sizes_and_options(backend: CpuBackend, dtype: torch.dtype, block_size: int) -> None:
    """Windows, softcap, sinks and key ranges at every block size."""
    lengths = [first + count for count, first in zip(*MIX, strict=True)]
    batch = batch_of(*MIX)
    fmt = make_format(backend, dtype, heads=2, k_dim=48, v_dim=40, block_size=block_size)
    world = make_world(backend, fmt, lengths)
    q = random_queries(batch, 6, 48, dtype) * 2
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(2))
    ranges = [EVERY_KEY, KeyRange(first_block=1, min_lag=1), KeyRange(max_lag=1), KeyRange(end_block=2, min_lag=2)]
    options = list(itertools.product(ranges, (None, 1, 37, 300), (None, 15.0)))
    for keys, window, softcap in options[block_size.bit_length() % 3 :: 3]:  # all are seen over the block sizes
        compare(backend, world, batch, q, scale=0.2, window=window, softcap=softcap, keys=keys)
    for window in (None, 37):  # a query without keys is not defined with sinks: all have some here
        compare(backend, world, batch, q, scale=0.2, window=window, sinks=sinks)
        compare(backend, world, batch, q, scale=0.2, window=window, sinks=sinks.to(torch.bfloat16), softcap=15.0)


@pytest.mark.parametrize("queries", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_query_and_storage_types_mix(backend: CpuBackend, stored: torch.dtype, queries: torch.dtype) -> None:
    fmt = make_format(backend, stored, heads=2, k_dim=64, block_size=16)
    world = make_world(backend, fmt, [77, 20], dtype=queries)
    batch = batch_of([20, 1], [57, 19])
    compare(backend, world, batch, random_queries(batch, 4, 64, queries), scale=0.125)


def test_strided_queries(backend: CpuBackend) -> None:
    """Views of a fused projection are read in place; others are copied."""
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=64)
    world = make_world(backend, fmt, [60])
    batch = batch_of([9], [51])
    fused = random_queries(batch, 8, 64, torch.bfloat16)
    compare(backend, world, batch, fused[:, 2:6], scale=0.1)
    head_first = fused[:, :4].transpose(0, 1).contiguous().transpose(0, 1)
    compare(backend, world, batch, head_first, scale=0.1)
    dim_first = fused[:, :4].transpose(1, 2).contiguous().transpose(1, 2)
    compare(backend, world, batch, dim_first, scale=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_absent_blocks_behind_the_window_are_never_read(backend: CpuBackend, dtype: torch.dtype) -> None:
    for window, length, count in itertools.product((1, 16, 50), (300, 513), (1, 7, 40)):
        fmt = make_format(backend, dtype, heads=1, k_dim=32, block_size=16)
        world = make_world(backend, fmt, [length])
        world.forget_before(0, length - count - window + 1)
        batch = batch_of([count], [length - count])
        q = random_queries(batch, 4, 32, dtype)
        expected, _ = REFERENCE.attend(q, world.arena, *world.where, batch, scale=0.2, window=window, want_lse=True)
        found, _ = backend.attend(q, world.arena, *world.where, batch, scale=0.2, window=window, want_lse=True)
        assert_close(found, expected, tolerance(backend, dtype, dtype))


def test_a_needed_block_that_is_absent_is_an_error(backend: CpuBackend) -> None:
    fmt = make_format(backend, torch.float32, heads=1, k_dim=32, block_size=16)
    world = make_world(backend, fmt, [64])
    batch = batch_of([1], [63])
    q = random_queries(batch, 1, 32, torch.float32)
    world.forget_before(0, 16)
    with pytest.raises(ValueError, match="block 0 of sequence 0"):
        backend.attend(q, world.arena, *world.where, batch, scale=1.0)
    with pytest.raises(ValueError, match="block 4 of sequence 0"):  # negative entry
        backend.attend(q, world.arena, *world.where, batch_of([1], [70]), scale=1.0, keys=KeyRange(first_block=4))
    with pytest.raises(ValueError, match="block 6 of sequence 0"):  # beyond the table
        backend.attend(q, world.arena, *world.where, batch_of([1], [100]), scale=1.0, keys=KeyRange(first_block=6))
    world.tables[0, 1] = world.arena.numel()  # beyond the arena
    with pytest.raises(ValueError, match="block 1 of sequence 0"):
        backend.attend(q, world.arena, *world.where, batch, scale=1.0, keys=KeyRange(first_block=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_not_yet_written_never_reach_a_result(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Odd ends leave a token's pair partner unwritten; it holds NaN here."""
    fmt = make_format(backend, dtype, heads=1, k_dim=32, block_size=8)
    for length in range(1, 20):
        world = make_world(backend, fmt, [length])
        batch = batch_of([1], [length - 1])
        compare(backend, world, batch, random_queries(batch, 2, 32, dtype), scale=0.2)


def test_queries_without_keys(backend: CpuBackend) -> None:
    fmt = make_format(backend, torch.bfloat16, heads=1, k_dim=32, block_size=16)
    world = make_world(backend, fmt, [40])
    batch = batch_of([40], [0])
    q = random_queries(batch, 2, 32, torch.bfloat16)
    out, lse = backend.attend(q, world.arena, *world.where, batch, scale=0.2, keys=KeyRange(min_lag=2), want_lse=True)
    assert torch.isneginf(lse[:32]).all() and (out[:32] == 0).all()
    assert torch.isfinite(lse[32:]).all()
    out, lse = backend.attend(q, world.arena, *world.where, batch, scale=0.2, keys=KeyRange(min_lag=9), want_lse=True)
    assert torch.isneginf(lse).all() and (out == 0).all()
    nobody = batch_of([], [])
    out, _ = backend.attend(q[:0], world.arena, *world.where[:2], world.tables[:0], nobody, scale=0.2)
    assert out.shape == (0, 2, 32)


def test_extreme_logits(backend: CpuBackend) -> None:
    """Logits from -1000 to 1000: weights underflow to zero, nothing overflows."""
    fmt = make_format(backend, torch.float32, heads=1, k_dim=32)
    world = make_world(backend, fmt, [300])
    batch = batch_of([300], [0])
    q = random_queries(batch, 3, 32, torch.float32)
    for softcap in (None, 30.0):
        arguments = (q, world.arena, *world.where, batch)
        expected, _ = REFERENCE.attend(*arguments, scale=60.0, softcap=softcap, want_lse=True)
        found, _ = backend.attend(*arguments, scale=60.0, softcap=softcap, want_lse=True)
        assert_close(found, expected, 1e-3)  # a logit of 1000 is exact to 6e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partials_over_key_ranges_merge_to_the_whole(backend: CpuBackend, dtype: torch.dtype) -> None:
    fmt = make_format(backend, dtype, heads=2, k_dim=64, block_size=16)
    world = make_world(backend, fmt, [600, 90])
    batch = batch_of([100, 1], [500, 89])
    q = random_queries(batch, 6, 64, dtype)
    sinks = torch.linspace(-1, 3, 6)
    arguments = (q, world.arena, *world.where, batch)
    sink_blocks, recent = 2, 3
    ranges = [
        KeyRange(end_block=sink_blocks, min_lag=recent + 1),
        KeyRange(first_block=sink_blocks, min_lag=recent + 1),
        KeyRange(max_lag=recent),
    ]
    parts = [backend.attend(*arguments, scale=0.125, keys=keys, want_lse=True) for keys in ranges]
    whole, _ = backend.attend(*arguments, scale=0.125, sinks=sinks)
    merged = merge_partials(parts, sinks, q.dtype)
    assert_close(merged, whole, tolerance(backend, dtype, dtype) + OUTPUT_ROUNDING[dtype])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ragged_batches(backend: CpuBackend, data: st.DataObject) -> None:
    sequences = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 700)), min_size=1, max_size=6))
    dtype = data.draw(st.sampled_from(DTYPES))
    block_size = data.draw(st.sampled_from([8, 16, 32, 64, 128, 256]))
    kv_heads, groups = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 7), (3, 3), (1, 80)]))
    k_dim, v_dim = data.draw(st.sampled_from([(64, 64), (32, 104), (72, 24), (16, 256)]))
    window = data.draw(st.none() | st.integers(1, 400))
    keys = data.draw(
        st.builds(
            KeyRange,
            first_block=st.integers(0, 3),
            end_block=st.none() | st.integers(1, 40),
            min_lag=st.integers(0, 2),
            max_lag=st.none() | st.integers(2, 6),
        )
    )
    lengths, firsts = [count for count, _ in sequences], [first for _, first in sequences]
    fmt = make_format(backend, dtype, heads=kv_heads, k_dim=k_dim, v_dim=v_dim, block_size=block_size)
    world = make_world(backend, fmt, [sum(pair) for pair in sequences])
    batch = batch_of(lengths, firsts)
    q = random_queries(batch, kv_heads * groups, k_dim, dtype)
    compare(backend, world, batch, q, scale=k_dim**-0.5, window=window, keys=keys)


def test_plane_format_is_understood_alike() -> None:
    """The reference gathers from the native layout what was written."""
    backend = CpuBackend()
    for dtype in DTYPES:
        fmt = make_format(backend, dtype, heads=2, k_dim=40, v_dim=24, block_size=8)
        assert isinstance(fmt.planes[0], PlaneFormat)
        world = make_world(backend, fmt, [21, 8])
        for sequence in range(2):
            k, v = REFERENCE.gather(
                world.arena, fmt, world.layer_offset, world.tables[sequence], 0, world.lengths[sequence]
            )
            assert torch.equal(k, world.k[world.rows(sequence)])
            assert torch.equal(v, world.v[world.rows(sequence)])
    assert CPU.type == "cpu"
