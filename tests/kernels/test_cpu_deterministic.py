"""A query row's bits depend on its query, position and keys, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.cpu import CpuBackend

from .world import World, batch_of, make_format, make_world, random_queries

LENGTH = 700
WINDOWS = (None, 100)


def attend(backend: CpuBackend, world: World, q: torch.Tensor, sequence: int, first: int, window: int | None):
    """Rows of one sequence from position ``first``, alone in the call."""
    tables = world.tables[sequence : sequence + 1]
    out, _ = backend.attend(
        q, world.arena, world.fmt, world.layer_offset, tables, batch_of([len(q)], [first]), scale=0.125, window=window
    )
    return out


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def case(request: pytest.FixtureRequest, backend: CpuBackend):
    fmt = make_format(backend, request.param, heads=2, k_dim=64, v_dim=72)
    world = make_world(backend, fmt, [LENGTH, 300, 1025])
    q = random_queries(batch_of([LENGTH], [0]), 6, 64, request.param)
    return world, q


@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_and_single_tokens_equal_the_whole(backend: CpuBackend, case, window: int | None) -> None:
    world, q = case
    whole = attend(backend, world, q, 0, 0, window)
    for chunk in (1, 7, 64, 333):
        step = chunk if chunk > 1 else 1
        starts = range(0, LENGTH, step) if chunk > 1 else [*range(0, 70), *range(250, 262), *range(500, LENGTH, 13)]
        for start in starts:
            rows = q[start : start + step]
            assert torch.equal(attend(backend, world, rows, 0, start, window), whole[start : start + len(rows)])


@pytest.mark.parametrize("window", WINDOWS)
def test_neighbours_in_the_batch_change_nothing(backend: CpuBackend, case, window: int | None) -> None:
    world, q = case
    whole = attend(backend, world, q, 0, 0, window)
    others = random_queries(batch_of([60], [0]), 6, 64, q.dtype, seed=9)
    for start, count in ((0, LENGTH), (650, 50), (699, 1), (255, 3)):
        batch = batch_of([count, 59, 1], [start, 240, 1024])
        packed = torch.cat([q[start : start + count], others])
        out, _ = backend.attend(packed, world.arena, *world.where, batch, scale=0.125, window=window)
        assert torch.equal(out[:count], whole[start : start + count])


def test_threads_and_pools_change_nothing(backend: CpuBackend, case) -> None:
    world, q = case
    whole = attend(backend, world, q, 0, 0, None)
    for threads, pool in ((1, None), (3, 0), (5, 0)):
        other = CpuBackend(isa=backend.variant, num_threads=threads, gomp_parallel=pool)
        assert torch.equal(attend(other, world, q, 0, 0, None), whole)
        assert torch.equal(attend(other, world, q[-1:], 0, LENGTH - 1, None), whole[-1:])


def test_partials_are_deterministic_too(backend: CpuBackend, case) -> None:
    world, q = case
    arguments = (world.arena, world.fmt, world.layer_offset, world.tables[:1])
    out, lse = backend.attend(q, *arguments, batch_of([LENGTH], [0]), scale=0.125, want_lse=True)
    for start in (0, 31, 256, 600, 699):
        some, some_lse = backend.attend(
            q[start : start + 1], *arguments, batch_of([1], [start]), scale=0.125, want_lse=True
        )
        assert torch.equal(some[0], out[start]) and torch.equal(some_lse[0], lse[start])
