"""Hits, sizes and memory of groups whose blocks are encoded: what each situation should find, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.core.storage import Encoding
from tests.engine.world import World, next_token, plan_for

BLOCK = 8


def encoding(sinks: int, recents: int) -> Encoding:
    return Encoding(name="int8", key="int8", value="int8", sink_tokens=sinks, recent_tokens=recents)


def world_of(
    sinks: int, recents: int, *, windows: list[int | None] | None = None, num_slabs: int = 64, batch: int = 24
) -> World:
    plan = plan_for(
        windows or [None],
        block_size=BLOCK,
        num_slabs=num_slabs,
        max_model_len=256,
        max_batch_tokens=batch,
        encoding=encoding(sinks, recents),
    )
    return World(plan, max_batch_tokens=batch)


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 3, size=length).tolist()


PROTECTIONS = [(0, 0), (8, 0), (0, 16), (8, 16), (24, 9), (64, 8), (8, 80)]


@pytest.mark.parametrize(("sinks", "recents"), PROTECTIONS)
@pytest.mark.parametrize("length", [47, 48, 49, 100])
def test_an_equal_prompt_is_found_whole(sinks: int, recents: int, length: int) -> None:
    world = world_of(sinks, recents)
    world.add(prompt_of(0, length), 4)
    world.run()
    again = world.add(prompt_of(0, length), 4)
    world.run()
    assert again.cached_tokens == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(("sinks", "recents"), PROTECTIONS)
@pytest.mark.parametrize("answer", [1, 7, 8, 9, 17])
def test_the_next_turn_finds_prompt_and_answer(sinks: int, recents: int, answer: int) -> None:
    world = world_of(sinks, recents)
    tokens = prompt_of(1, 40)
    for turn in range(3):
        sequence = world.add(tokens, answer)
        world.run()
        # All but the last sampled token of the turn before was computed.
        expected = 0 if turn == 0 else (len(tokens) - 6 - 1) // BLOCK * BLOCK
        assert sequence.cached_tokens == expected, turn
        tokens = sequence.token_ids.tolist() + prompt_of(turn, 6)


def test_a_shared_beginning_is_found_as_far_as_raw_copies_reach() -> None:
    world = world_of(8, 16)
    head = prompt_of(2, 64)
    world.add(head + [0] * 30, 2)
    world.run()
    other = world.add(head + [1] * 30, 2)
    world.run()
    assert other.cached_tokens == 64
    # Raw copies of what has passed go first when memory is short; then only the last end is found.
    raw, end = 0, 2 + 1  # two recent blocks and a sink
    while world.manager.queue.count(raw) > end:
        victim = world.manager.queue.oldest(raw)
        assert victim is not None
        world.manager._evict(victim)
    third = world.add(head + [2] * 30, 2)
    world.run()
    assert third.cached_tokens == BLOCK  # the sink
    again = world.add(head + [1] * 30, 2)
    world.run()
    assert again.cached_tokens == 88


def test_sinks_are_the_last_raw_copies_to_go() -> None:
    world = world_of(16, 16)
    sequence = world.add(prompt_of(3, 80), 2)
    world.run()
    keys = world.manager.keys(world.manager.open(b""), sequence.token_ids, 2)
    order = [span.key for span in world.manager.queue.first(0, 100)]
    assert order[-2:] == [keys[1], keys[0]]


def test_every_block_is_in_one_format_after_each_step() -> None:
    world = world_of(8, 16)
    sequence = world.add(prompt_of(4, 60), 60)
    while world.scheduler.has_work:
        world.step()
        if sequence.cache is None:
            break
        n = sequence.num_computed
        encoded = max(0, (n - 1) // BLOCK - 2)
        held = [[span is not None for span in spans] for spans in sequence.cache.spans]
        blocks = -(-n // BLOCK)
        assert held[0] == [block < 1 or block >= encoded for block in range(blocks)]
        assert held[1] == [block >= 1 for block in range(encoded)]


def test_windows_stay_raw_beside_encoded_groups() -> None:
    world = world_of(8, 16, windows=[None, 16])
    assert [item.name for item in world.plan.storage] == ["full", "window16", "full.encoded"]
    world.add(prompt_of(5, 90), 9)
    world.run()
    again = world.add(prompt_of(5, 90), 9)
    world.run()
    assert again.cached_tokens == 88


def test_a_hit_shorter_than_the_window_of_raw_copies() -> None:
    world = world_of(8, 64)
    world.add(prompt_of(6, 33), 1)
    world.run()
    again = world.add(prompt_of(6, 33), 1)
    world.run()
    assert again.cached_tokens == 32
    assert world.manager.queue.count(1) == 0  # nothing was encoded


def test_one_sequence_of_the_longest_length_fits_the_memory_it_was_promised() -> None:
    """Prompt in chunks, then token by token, with nothing to spare and other formats' spans in the way."""
    for sinks, recents in PROTECTIONS:
        arguments = {"block_size": BLOCK, "max_model_len": 256, "max_batch_tokens": 24}
        plan = plan_for([None], num_slabs=0, encoding=encoding(sinks, recents), **arguments)  # type: ignore[arg-type]
        assert plan.arena_bytes == plan.needed_bytes(256)
        world = World(plan, max_batch_tokens=24)
        for seed, length in enumerate((10, 200, 3, 120)):
            sequence = world.add(prompt_of(seed, length), 256 - length)
            world.run()
            assert sequence.num_preemptions == 0


def test_forks_share_encoded_blocks() -> None:
    world = world_of(8, 16)
    world.add(prompt_of(7, 70), 12, n=3, name="x")
    for _ in range(6):
        world.step()
    spans = [sequence.cache.spans[1] for sequence in world.scheduler.running]
    assert len(spans) == 3 and spans[0][1] is spans[1][1] is spans[2][1] is not None
    world.run()
    first = next_token(np.array(prompt_of(7, 70), dtype=np.int32))
    assert {world.done["x", index][0] for index in range(3)} == {first}
    world.at_rest()
