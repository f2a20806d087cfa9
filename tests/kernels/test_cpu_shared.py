"""Sequences that share blocks: their keys are read once for all, and no bit of a result shows it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import _cpu
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import EVERY_KEY, BlockFormat, KeyRange, QueryBatch

from .test_cpu_attend import DTYPES, compare
from .test_latent import make_format as make_latent_format
from .test_latent import make_queries, scale_of
from .world import World, batch_of, make_format, make_world, random_queries

RANGES = (EVERY_KEY, KeyRange(first_block=1, min_lag=1), KeyRange(max_lag=1), KeyRange(end_block=9, min_lag=2))
Tree = Sequence[tuple[int, int, int]]  # per sequence: whose blocks it begins with, how many tokens of them, tokens


def share(world: World, tree: Tree) -> World:
    """Make the sequences of ``world`` begin with whole blocks of an earlier one's."""
    for sequence, (parent, common, _) in enumerate(tree):
        if parent < sequence:
            blocks = min(common, world.lengths[parent], world.lengths[sequence]) // world.fmt.block_size
            world.tables[sequence, :blocks] = world.tables[parent, :blocks]
    return world


def make_tree(backend: CpuBackend, fmt: BlockFormat, tree: Tree) -> World:
    return share(make_world(backend, fmt, [length for _, _, length in tree]), tree)


def last_tokens(tree: Tree, counts: Sequence[int]) -> QueryBatch:
    counts = [min(count, length) for count, (_, _, length) in zip(counts, tree, strict=True)]
    return batch_of(counts, [length - count for count, (_, _, length) in zip(counts, tree, strict=True)])


def assert_alone_is_equal(
    backend: CpuBackend, world: World, batch: QueryBatch, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], **options
) -> None:
    """Bit by bit, with outputs of either kind and log-sum-exp."""

    def attend(batch: QueryBatch, tables: torch.Tensor, rows: slice, want_lse: bool):
        arguments = (world.arena, world.fmt, world.layer_offset, tables, batch)
        if isinstance(q, tuple):
            scale = scale_of(world.fmt)
            return backend.attend_latent(q[0][rows], q[1][rows], *arguments, scale=scale, want_lse=want_lse, **options)
        return backend.attend(q[rows], *arguments, scale=0.125, want_lse=want_lse, **options)

    start, first = batch.query_start_host.tolist(), batch.first_position_host.tolist()
    for want_lse in (False, True):
        out, lse = attend(batch, world.tables, slice(None), want_lse)
        for sequence in range(batch.num_sequences):
            rows = slice(start[sequence], start[sequence + 1])
            alone, alone_lse = attend(
                batch_of([rows.stop - rows.start], first[sequence : sequence + 1]),
                world.tables[sequence : sequence + 1],
                rows,
                want_lse,
            )
            assert torch.equal(out[rows], alone)
            if lse is not None:
                assert torch.equal(lse[rows], alone_lse)


def keys_read(
    backend: CpuBackend, world: World, batch: QueryBatch, query_heads: int, window: int = -1, latent: bool = False
) -> int:
    """Per KV head."""
    _, native = backend._lookup(world.fmt, query_heads)
    assert native is not None
    batch_native = backend._batch(world.arena, world.tables, batch)
    read = _cpu.keys_read(native, batch_native, query_heads, latent, window)
    assert read % world.fmt.num_heads == 0
    return read // world.fmt.num_heads


TREES: dict[str, Tree] = {
    # One prefix that ends inside a chunk, or at a chunk's end.
    "one": [(0, 0, 500), *[(0, 448, 449 + 7 * i) for i in range(25)]],
    "chunks": [(0, 0, 600), *[(0, 512, 513 + 31 * i) for i in range(5)]],
    # Two families among sequences that share nothing, out of order.
    "families": [(0, 0, 400), (1, 0, 410), (0, 384, 399), (3, 0, 30), (1, 288, 500), (0, 64, 700), (1, 288, 289)],
    # Prefixes of prefixes, and a sequence that is another's prefix as a whole.
    "nested": [
        (0, 0, 900), (0, 96, 300), (1, 288, 800), (0, 832, 850),
        (1, 160, 420), (3, 832, 880), (2, 768, 769), (0, 96, 97),
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TREES)
def test_trees(backend: CpuBackend, dtype: torch.dtype, name: str) -> None:
    tree = TREES[name]
    fmt = make_format(backend, dtype, heads=2, k_dim=64, v_dim=72)
    world = make_tree(backend, fmt, tree)
    for counts in ([1] * len(tree), [(1, 3, 9, 0, 40)[i % 5] for i in range(len(tree))]):
        batch = last_tokens(tree, counts)
        q = random_queries(batch, 6, 64, dtype)
        compare(backend, world, batch, q, scale=0.125)
        assert_alone_is_equal(backend, world, batch, q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Windows, key ranges, softcap and sinks; windows begin inside what is shared."""
    tree = [*TREES["one"][:6], *((parent + 6, common, length) for parent, common, length in TREES["nested"])]
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(2))
    for block_size in (8, 32, 128):
        fmt = make_format(backend, dtype, heads=2, k_dim=48, v_dim=40, block_size=block_size)
        world = make_tree(backend, fmt, tree)
        batch = last_tokens(tree, [(1, 1, 4)[i % 3] for i in range(len(tree))])
        q = random_queries(batch, 6, 48, dtype) * 2
        for keys, window in itertools.product(RANGES, (None, 100, 300)):
            extra = {"softcap": 15.0, "sinks": sinks} if window != 100 else {}
            assert_alone_is_equal(backend, world, batch, q, keys=keys, window=window, **extra)
        compare(backend, world, batch, q, scale=0.125, window=300, softcap=15.0, sinks=sinks)


def test_passed_windows(backend: CpuBackend) -> None:
    """Sequences that have let go of different numbers of blocks still share those they both need."""
    window, size = 200, 32
    tree: Tree = [(0, 0, 700), *[(0, 640, 641 + 11 * i) for i in range(6)]]
    fmt = make_format(backend, torch.bfloat16, heads=1, k_dim=64)
    world = make_tree(backend, fmt, tree)
    batch = last_tokens(tree, [1] * len(tree))
    q = random_queries(batch, 3, 64, torch.bfloat16)
    for sequence, (_, _, length) in enumerate(tree):
        world.tables[sequence, : (length - window) // size] = -1
    compare(backend, world, batch, q, scale=0.125, window=window)
    assert_alone_is_equal(backend, world, batch, q, window=window)
    own = sum(length - 640 for _, _, length in tree)
    longest = 640 - (min(length for _, _, length in tree) - window)
    assert keys_read(backend, world, batch, 3, window) == own + longest


def test_each_shared_block_is_read_once(backend: CpuBackend) -> None:
    """As often as tiles are needed for the rows, that is."""
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=16)
    for sequences, heads, tiles in ((2, 2, 1), (10, 6, 1), (20, 6, 1), (32, 6, 2), (61, 2, 2)):
        tree = [(0, 0, 700)] + [(0, 672, 673 + i) for i in range(sequences - 1)]
        world = make_tree(backend, fmt, tree)
        batch = last_tokens(tree, [1] * sequences)
        own = sum(length - 672 for _, _, length in tree)
        assert keys_read(backend, world, batch, heads) == own + tiles * 672

    world = make_tree(backend, fmt, TREES["nested"])
    batch = last_tokens(TREES["nested"], [1] * 8)
    blocks = {
        int(entry) for row, length in zip(world.tables, world.lengths, strict=True) for entry in row[: -(-length // 32)]
    }
    unfilled = sum(-length % 32 for length in world.lengths)
    assert keys_read(backend, world, batch, 2) == 32 * len(blocks) - unfilled


def test_nothing_shared_is_read_per_sequence(backend: CpuBackend) -> None:
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=16)
    lengths = [700, 30, 512, 1]
    world = make_world(backend, fmt, lengths)
    assert keys_read(backend, world, batch_of([1] * 4, [n - 1 for n in lengths]), 6) == sum(lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents(backend: CpuBackend, dtype: torch.dtype) -> None:
    for dims, heads, block_size in (((264, 24), 16, 32), ((32, 16), 5, 16), ((64, 8), 100, 64)):
        fmt = make_latent_format(backend, dtype, dims, block_size=block_size)
        for name in ("one", "nested"):
            tree = TREES[name][:9]
            world = make_tree(backend, fmt, tree)
            batch = last_tokens(tree, [(1, 2, 1)[i % 3] for i in range(len(tree))])
            q = make_queries(batch, heads, fmt, dtype)
            for keys in (RANGES[0], RANGES[1]):
                assert_alone_is_equal(backend, world, batch, q, keys=keys)
    world = make_tree(backend, fmt, TREES["chunks"])
    batch = last_tokens(TREES["chunks"], [1] * 6)
    read = keys_read(backend, world, batch, 16, latent=True)
    assert read == 512 + sum(length - 512 for _, _, length in TREES["chunks"])


def test_threads_and_pools_change_nothing(backend: CpuBackend) -> None:
    tree = TREES["nested"] + [(8, 0, 3000)]
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=64)
    world = make_tree(backend, fmt, tree)
    batch = last_tokens(tree, [1] * len(tree))
    q = random_queries(batch, 6, 64, torch.bfloat16)
    expected, _ = backend.attend(q, world.arena, *world.where, batch, scale=0.125)
    for threads, pool in ((1, None), (3, 0), (5, 0)):
        other = CpuBackend(isa=backend.variant, num_threads=threads, gomp_parallel=pool)
        for _ in range(3):
            assert torch.equal(other.attend(q, world.arena, *world.where, batch, scale=0.125)[0], expected)


def test_a_table_that_has_changed_is_planned_anew(backend: CpuBackend) -> None:
    """Plans are kept, for the layers of a step; the tensors they were made from may change in place."""
    tree = TREES["families"]
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=64)
    world = make_world(backend, fmt, [length for _, _, length in tree])
    batch = last_tokens(tree, [1] * len(tree))
    q = random_queries(batch, 6, 64, torch.bfloat16)
    compare(backend, world, batch, q, scale=0.125)
    before = world.tables.clone()
    share(world, tree)
    assert not torch.equal(world.tables, before)
    compare(backend, world, batch, q, scale=0.125)
    for window in (None, 60, 300, 60, None):
        compare(backend, world, batch, q, scale=0.125, window=window)
        out, _ = backend.attend(q, world.arena, fmt, 0, world.tables, batch, scale=0.125, window=window)
        assert out.isnan().all()  # another layer's, never written: it holds NaN
    world.tables[2, 0] = -1
    with pytest.raises(ValueError, match="block 0 of sequence 2"):
        backend.attend(q, world.arena, *world.where, batch, scale=0.125)
    world.tables[2, 0] = world.arena.numel() - fmt.layer_bytes
    with pytest.raises(ValueError, match="arena"):
        backend.attend(q, world.arena, *world.where, batch, scale=0.125)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree(backend: CpuBackend, data: st.DataObject) -> None:
    """Random trees, whose sequences share blocks of each other in the middle of what they share."""
    tree: list[tuple[int, int, int]] = []
    for sequence in range(data.draw(st.integers(2, 14))):
        parent = data.draw(st.integers(0, sequence))
        tree.append((parent, data.draw(st.integers(0, 700)), data.draw(st.integers(1, 800))))
    dtype = data.draw(st.sampled_from(DTYPES))
    kv_heads, groups = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (1, 25)]))
    k_dim, v_dim = data.draw(st.sampled_from([(64, 64), (32, 104), (72, 24)]))
    fmt = make_format(
        backend, dtype, heads=kv_heads, k_dim=k_dim, v_dim=v_dim,
        block_size=data.draw(st.sampled_from([8, 16, 32, 128, 256])),
    )  # fmt: skip
    world = make_tree(backend, fmt, tree)
    batch = last_tokens(tree, [data.draw(st.sampled_from([1, 1, 1, 2, 5, 0, 30])) for _ in tree])
    q = random_queries(batch, kv_heads * groups, k_dim, dtype)
    window = data.draw(st.none() | st.integers(1, 400))
    keys = data.draw(st.sampled_from(RANGES))
    compare(backend, world, batch, q, scale=k_dim**-0.5, window=window, keys=keys)
    assert_alone_is_equal(backend, world, batch, q, window=window, keys=keys)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tables_that_are_no_tree(backend: CpuBackend, data: st.DataObject) -> None:
    """Blocks in common anywhere, not only at the beginning: results are still each sequence's own."""
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=2, max_size=8))
    fmt = make_format(backend, torch.bfloat16, heads=1, k_dim=32, block_size=data.draw(st.sampled_from([16, 64])))
    world = make_world(backend, fmt, [512] * len(lengths))
    blocks = 512 // fmt.block_size
    for sequence in range(len(lengths)):
        for block in range(blocks):
            owner = data.draw(st.integers(0, sequence))
            world.tables[sequence, block] = world.tables[owner, data.draw(st.sampled_from([block, block, 0]))]
    batch = batch_of([1] * len(lengths), [length - 1 for length in lengths])
    q = random_queries(batch, 3, 32, torch.bfloat16)
    compare(backend, world, batch, q, scale=0.125)
    assert_alone_is_equal(backend, world, batch, q)
