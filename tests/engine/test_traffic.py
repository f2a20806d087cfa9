"""Random traffic through manager and scheduler: invariants, and outputs against the cache-off answer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.core.storage import Encoding
from kvloom.engine.scheduler import MAX_REMOVED
from tests.engine.world import World, expected_output, plan_for

LAYOUTS: list[tuple[list[int | None], list[int]]] = [
    ([None], [1]),
    ([None, 8], [1, 1]),
    ([None, 20, 20, 20], [1, 1, 1, 1]),
    ([12], [1]),
    ([9, 30], [1, 2]),
    ([None, None, 10], [1, 3, 2]),
]


def encoding(sinks: int, recents: int) -> Encoding:
    return Encoding(name="int8", key="int8", value="int8", sink_tokens=sinks, recent_tokens=recents)


ENCODINGS = [None, encoding(0, 0), encoding(0, 9), encoding(8, 16), encoding(20, 1), encoding(1, 0), encoding(200, 8)]

requests = st.tuples(
    st.integers(0, 2),  # which family of prompts: equal families share prefixes
    st.integers(1, 60),  # prompt length
    st.integers(1, 20),  # tokens to generate
    st.sampled_from([1, 1, 1, 3]),  # n
    st.sampled_from([0, 0, 0, -1, 1]),  # priority
    st.sampled_from([b"", b"", b"tenant"]),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 50)),
    ),
    min_size=1,
    max_size=40,
)


def prompt_of(family: int, length: int) -> list[int]:
    return [(i * (family + 1)) % 3 for i in range(length)]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(ENCODINGS),
    st.integers(1, 24),
    st.booleans(),
    st.integers(1, 4),
    operations,
)
def test_random_traffic_balances_and_answers_as_without_a_cache(
    layout: tuple[list[int | None], list[int]],
    encoding: Encoding | None,
    num_slabs: int,
    prefix_cache: bool,
    max_sequences: int,
    script: list[tuple[str, object]],
) -> None:
    windows, heads = layout
    plan = plan_for(
        windows,
        heads=heads,
        block_size=8,
        num_slabs=num_slabs,
        max_model_len=96,
        max_batch_tokens=16,
        encoding=encoding,
    )
    world = World(plan, prefix_cache=prefix_cache, max_sequences=max_sequences)
    asked: dict[str, tuple[list[int], int, int]] = {}
    aborted: set[tuple[str, int]] = set()
    for name, argument in script:
        if name == "add":
            family, length, count, n, priority, salt = argument  # type: ignore[misc]
            prompt = prompt_of(family, length)
            sequence = world.add(prompt, count, n=n, priority=priority, salt=salt)
            asked[sequence.request_id] = (prompt, count, n)
        elif name == "step":
            for _ in range(argument):  # type: ignore[call-overload]
                if world.scheduler.has_work:
                    world.step()
        elif world.live:
            victim = world.live[argument % len(world.live)]  # type: ignore[operator]
            aborted |= {(victim.request_id, victim.index)}
            if victim.siblings:
                aborted |= {(victim.request_id, index) for index in range(1, victim.params.n)}
            world.abort(victim)
            world.manager.check()
    world.run()
    for request_id, (prompt, count, n) in asked.items():
        for index in range(n):
            if (request_id, index) not in aborted:
                assert world.done[request_id, index] == expected_output(prompt, count)
    world.at_rest()


def test_equal_prompts_arriving_together_compute_the_shared_part_once() -> None:
    plan = plan_for([None], block_size=8, num_slabs=64, max_model_len=256, max_batch_tokens=32)
    world = World(plan, max_batch_tokens=32)
    prompt = prompt_of(0, 100)
    world.add(prompt, 1)
    world.add(prompt, 1)
    world.run()
    # The second computes only what lies after the last full block before its last token.
    assert world.computed == 100 + (100 - 96)
    assert world.scheduler.hit_tokens == 96


def test_two_equal_prompts_share_as_soon_as_the_first_has_filled_a_span() -> None:
    plan = plan_for([None], block_size=8, num_slabs=64, max_model_len=256, max_batch_tokens=24)
    world = World(plan, max_batch_tokens=24)
    first = world.add(prompt_of(0, 64), 9)
    second = world.add(prompt_of(0, 64), 9)
    world.step()
    world.step()
    assert (first.num_computed, second.num_computed) == (48, 0)  # the whole budget went to the first
    world.step()
    # Admitted on the six blocks that the first had filled; it waits for the two computed right now.
    assert (first.num_computed, second.num_computed) == (64, 48)
    world.step()
    assert second.cached_tokens == 56


def test_prefix_boundaries_around_a_block() -> None:
    for extra, expected in ((-1, 16), (0, 16), (1, 24)):
        plan = plan_for([None], block_size=8, num_slabs=64, max_model_len=256, max_batch_tokens=64)
        world = World(plan, max_batch_tokens=64)
        world.add(prompt_of(0, 60), 1)
        world.run()
        # A prompt of 3 blocks - 1, + 0, + 1 tokens: the last token is computed even if all is cached.
        sequence = world.add(prompt_of(0, 24 + extra), 1)
        world.run()
        assert sequence.cached_tokens == expected, extra


def test_a_window_group_serves_a_hit_only_with_its_last_window() -> None:
    plan = plan_for([None, 16], block_size=8, num_slabs=64, max_model_len=256, max_batch_tokens=64)
    world = World(plan, max_batch_tokens=64)
    world.add(prompt_of(0, 81), 1)
    world.run()
    sequence = world.add(prompt_of(0, 81), 1)
    world.run()
    assert sequence.cached_tokens == 80
    # Only the window's blocks were needed: positions 65 … 79 lie in blocks 8 and 9.
    assert world.manager.index.first_needed(1, 10) == 8


def test_no_hit_is_lost_at_moderate_fill_with_many_sessions() -> None:
    plan = plan_for([None], block_size=8, num_slabs=1, max_model_len=128, max_batch_tokens=64)
    sessions, length = 12, 60
    span = plan.spans[0].span_bytes
    # Memory for all sessions' spans and a third more.
    needed = sessions * -(-(length + 8) // 8) * span * 4 // 3
    plan = plan_for(
        [None], block_size=8, num_slabs=needed // plan.slab_bytes + 1, max_model_len=128, max_batch_tokens=64
    )
    world = World(plan, max_batch_tokens=64, max_sequences=4)
    prompts = [[(s * 31 + i * i) % 3 for i in range(length)] for s in range(sessions)]
    for _ in range(3):
        for s, prompt in enumerate(prompts):
            world.add(prompt, 2, salt=bytes([s]))
        world.run()
    assert world.scheduler.hit_tokens == 2 * sessions * 56


def test_preempted_sequences_find_their_own_spans_and_that_is_counted_apart() -> None:
    plan = plan_for([None], block_size=8, num_slabs=1, max_model_len=96, max_batch_tokens=32)
    plan = plan_for([None], block_size=8, num_slabs=plan.slabs_for(1, 96) + 1, max_model_len=96, max_batch_tokens=32)
    world = World(plan, max_batch_tokens=32, max_sequences=4)
    for s in range(4):
        world.add(prompt_of(s % 3, 20), 70, salt=bytes([s]))
    world.run()
    assert world.scheduler.num_preemptions > 0
    assert world.scheduler.hit_tokens == 0
    assert world.scheduler.recovered_tokens > 0
    world.at_rest()


def test_a_prefill_is_not_starved_by_decodes_at_the_smallest_budget() -> None:
    plan = plan_for([None], block_size=8, num_slabs=64, max_model_len=96, max_batch_tokens=8)
    world = World(plan, max_batch_tokens=8)
    world.add(prompt_of(0, 8), 60)
    for _ in range(3):
        world.step()
    late = world.add(prompt_of(1, 24), 9)
    for _ in range(5):
        world.step()
    assert late.num_computed >= 24
    world.run()


def test_truncation_undoes_what_was_reserved_but_not_committed() -> None:
    plan = plan_for([None, 16], block_size=8, num_slabs=64, max_model_len=96, max_batch_tokens=32)
    manager = World(plan).manager
    cache = manager.open(b"")
    assert manager.reserve(cache, 20)
    manager.commit(cache, np.arange(20, dtype=np.int32), 20)
    before = manager.snapshot()
    assert manager.reserve(cache, 60)
    manager.truncate(cache, 20)
    manager.check()
    assert manager.snapshot() == before


def test_a_higher_priority_displaces_a_lower_one() -> None:
    plan = plan_for([None], block_size=8, num_slabs=64, max_model_len=96, max_batch_tokens=32)
    world = World(plan, max_batch_tokens=32, max_sequences=1)
    slow = world.add(prompt_of(0, 20), 40, priority=1)
    for _ in range(5):
        world.step()
    urgent = world.add(prompt_of(1, 20), 5, priority=0)
    world.step()
    assert urgent.num_computed == 20 and slow.num_computed == 0
    world.run()
    assert len(world.done) == 2


def test_cancelled_requests_do_not_pile_up_behind_one_that_waits() -> None:
    plan = plan_for([None], block_size=8, num_slabs=64, max_model_len=96, max_batch_tokens=32)
    world = World(plan, max_batch_tokens=32, max_sequences=1)
    world.add(prompt_of(0, 20), 60)
    world.step()
    head = world.add(prompt_of(1, 20), 2)
    kept = [world.add(prompt_of(2, 9 + i), 2) for i in range(3)]
    for _ in range(5 * MAX_REMOVED):
        world.abort(world.add(prompt_of(1, 20), 2))
    queue = world.scheduler.waiting
    assert len(queue._heap) <= 4 + MAX_REMOVED + 1
    assert len(queue) == 4 and sorted(queue, key=lambda s: s.key) == [head, *kept]
    world.run()
    assert len(world.done) == 5
