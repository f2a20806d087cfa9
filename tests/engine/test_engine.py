"""The engine on tiny models: transformers' eager attention and a cache-off run are the oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.core.errors import CapacityError, ContextLengthError, QueueFullError, RequestError
from tests.engine.tiny import (
    ask,
    assert_greedy,
    eager_greedy,
    make_engine,
    make_model,
    minimum_memory,
    prompt_of,
    run,
    tokens,
)

MODELS = ["llama", "gemma3_text"]
KERNELS = ["reference", "cpu"]


@pytest.fixture(scope="module", params=MODELS)
def model_type(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def eager(model_type: str) -> Any:
    return make_model(model_type, "eager")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_ragged_batch_equals_transformers(model_type: str, eager: Any, kernels: str, block_size: int) -> None:
    engine = make_engine(model_type, kernels=kernels, block_size=block_size)
    prompts = {f"r{i}": prompt_of(i, length) for i, length in enumerate((1, 15, 16, 17, 70, 130))}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, max_tokens=20)
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert len(tokens(outputs[name, 0])) == 20
        assert_greedy(eager, prompt, tokens(outputs[name, 0]))
        assert outputs[name, 0][-1].finish_reason == "length"


@pytest.mark.parametrize("kernels", KERNELS)
def test_prefix_hits_preemption_and_forks_change_nothing(model_type: str, eager: Any, kernels: str) -> None:
    # Memory for one sequence of full length only, so that sequences preempt each other.
    settings: dict[str, Any] = {"kernels": kernels, "max_model_len": 256, "max_sequences": 8, "max_batch_tokens": 32}
    engine = make_engine(model_type, kv_cache_memory=minimum_memory(model_type, **settings), **settings)
    shared = prompt_of(1, 48)
    prompts = {f"r{i}": shared + prompt_of(10 + i, 20 + i) for i in range(1, 7)}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, max_tokens=150, n=2 if name == "r3" else 1)
    outputs = run(engine)
    snapshot = engine.snapshot()
    assert snapshot.prefix_hit_tokens > 0
    assert snapshot.preemptions > 0
    for name, prompt in prompts.items():
        assert len(tokens(outputs[name, 0])) == 150
        assert_greedy(eager, prompt, tokens(outputs[name, 0]))
    assert tokens(outputs["r3", 1]) == tokens(outputs["r3", 0])
    assert snapshot.cache.used_bytes == 0 and snapshot.running == snapshot.waiting == 0


def test_a_fully_cached_prompt_computes_its_last_token(model_type: str) -> None:
    engine = make_engine(model_type)
    prompt = prompt_of(2, 64)
    ask(engine, "cold", prompt)
    cold = run(engine)["cold", 0]
    ask(engine, "warm", prompt)
    warm = run(engine)["warm", 0]
    assert tokens(warm) == tokens(cold)
    assert cold[-1].usage.cached_tokens == 0
    assert warm[-1].usage.cached_tokens == 48  # three of four blocks: the last token's block is computed


def test_tenants_do_not_share(model_type: str) -> None:
    engine = make_engine(model_type)
    prompt = prompt_of(3, 64)
    ask(engine, "a", prompt, salt=b"tenant a")
    run(engine)
    ask(engine, "b", prompt, salt=b"tenant b")
    assert run(engine)["b", 0][-1].usage.cached_tokens == 0


def test_without_prefix_cache_nothing_is_kept(model_type: str) -> None:
    engine = make_engine(model_type, prefix_cache=False)
    for name in ("a", "b"):
        ask(engine, name, prompt_of(3, 64))
        assert run(engine)[name, 0][-1].usage.cached_tokens == 0
    state = engine.snapshot().cache
    assert state.used_bytes == state.cached_bytes == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_deterministic_logits_are_equal_bit_by_bit(model_type: str, kernels: str) -> None:
    """Alone, in a batch, chunked, after a hit, after preemption: the very same log-probabilities."""
    prompt = prompt_of(4, 100)

    def logprobs(engine: Any, name: str) -> list[float]:
        return [entry.logprob for output in run(engine)[name, 0] for entry in output.logprobs or ()]

    alone = make_engine(model_type, kernels=kernels, deterministic=True, prefix_cache=False, max_batch_tokens=256)
    ask(alone, "x", prompt, max_tokens=24, logprobs=0)
    expected = logprobs(alone, "x")
    assert len(expected) == 24
    busy = make_engine(model_type, kernels=kernels, deterministic=True, max_batch_tokens=48)
    for i in range(4):
        ask(busy, f"other{i}", prompt[: 20 * i] + prompt_of(20 + i, 9 + i), max_tokens=30)
    ask(busy, "x", prompt, max_tokens=24, logprobs=0)
    assert logprobs(busy, "x") == expected
    ask(busy, "warm", prompt, max_tokens=24, logprobs=0)
    assert logprobs(busy, "warm") == expected
    assert busy.rounding_noise == 0.0


def test_prompt_logprobs_are_computed_even_when_cached(model_type: str, eager: Any) -> None:
    engine = make_engine(model_type, max_batch_tokens=32)
    prompt = prompt_of(5, 75)
    ask(engine, "fill", prompt)
    run(engine)
    ask(engine, "x", prompt, prompt_logprobs=2, logprobs=3)
    outputs = run(engine)["x", 0]
    found = outputs[0].prompt_logprobs
    assert found is not None and len(found) == 75 and found[0] is None
    assert outputs[-1].usage.cached_tokens == 0
    reference = torch.log_softmax(eager(input_ids=torch.tensor([prompt])).logits[0].double(), dim=-1)
    for position in range(1, 75):
        entry = found[position]
        assert entry is not None and entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(reference[position - 1, prompt[position]]), abs=1e-3)
        assert len(entry.top) == 2 and entry.top[0][0] == int(reference[position - 1].argmax())
    assert outputs[0].logprobs is not None and len(outputs[0].logprobs[0].top) == 3
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_seeded_sampling_does_not_depend_on_neighbours(model_type: str) -> None:
    prompt = prompt_of(6, 40)
    alone = make_engine(model_type)
    ask(alone, "x", prompt, max_tokens=30, temperature=1.0, seed=7, n=2)
    expected = run(alone)
    busy = make_engine(model_type)
    for i in range(5):
        ask(busy, f"other{i}", prompt_of(30 + i, 5 + 9 * i), max_tokens=30, temperature=1.3, seed=i)
    ask(busy, "x", prompt, max_tokens=30, temperature=1.0, seed=7, n=2)
    found = run(busy)
    for index in range(2):
        assert tokens(found["x", index]) == tokens(expected["x", index])
    assert tokens(found["x", 0]) != tokens(found["x", 1])


def test_cancelling_at_any_moment_frees_everything(model_type: str) -> None:
    for steps in range(0, 12, 2):
        engine = make_engine(model_type, max_batch_tokens=32)
        for i in range(4):
            ask(engine, f"r{i}", prompt_of(i, 30 + 20 * i), max_tokens=10, n=1 + i % 2)
        for _ in range(steps):
            engine.step()
        for i in range(4):
            ended = engine.abort(f"r{i}")
            assert all(output.finish_reason == "abort" for output in ended)
            engine.manager.check()
        assert not engine.has_work
        assert engine.snapshot().cache.used_bytes == 0
        assert engine.abort("r0") == []


def test_stop_tokens_and_lengths(model_type: str, eager: Any) -> None:
    prompt = prompt_of(8, 20)
    expected = eager_greedy(eager, prompt, 10)
    stop = expected[4]
    first = expected.index(stop)
    engine = make_engine(model_type, eos=(stop,))
    ask(engine, "eos", prompt, max_tokens=10)
    ask(engine, "ignored", prompt, max_tokens=10, ignore_eos=True)
    ask(engine, "stopped", prompt, max_tokens=10, ignore_eos=True, stop_token_ids=(expected[2],))
    outputs = run(engine)
    assert tokens(outputs["eos", 0]) == expected[: first + 1]
    assert outputs["eos", 0][-1].finish_reason == "stop" and outputs["eos", 0][-1].stop_token_id == stop
    assert tokens(outputs["ignored", 0]) == expected
    assert tokens(outputs["stopped", 0]) == expected[: expected.index(expected[2]) + 1]


def test_bad_requests_are_refused_and_named(model_type: str) -> None:
    engine = make_engine(model_type, max_model_len=64, max_waiting=2)
    with pytest.raises(RequestError, match="empty"):
        ask(engine, "x", [])
    with pytest.raises(RequestError, match="token id 97 is outside"):
        ask(engine, "x", [1, 97])
    with pytest.raises(RequestError, match="token id -1 is outside"):
        ask(engine, "x", [-1, 4])
    with pytest.raises(ContextLengthError, match="at most 63"):
        ask(engine, "x", [1] * 64)
    with pytest.raises(ContextLengthError, match="at most 4"):
        ask(engine, "x", [1] * 60, max_tokens=5)
    with pytest.raises(RequestError, match="logit_bias"):
        ask(engine, "x", [1], logit_bias={500: 1.0})
    ask(engine, "x", [1])
    with pytest.raises(RequestError, match="in use"):
        ask(engine, "x", [1])
    ask(engine, "y", [1])
    with pytest.raises(QueueFullError, match="limit is 2"):
        ask(engine, "z", [1])
    run(engine)
    assert engine.snapshot().cache.used_bytes == 0


def test_too_little_memory_is_refused_with_the_size_that_would_do(model_type: str) -> None:
    needed = minimum_memory(model_type)
    with pytest.raises(CapacityError, match=f"needs .*{needed} bytes"):
        make_engine(model_type, kv_cache_memory=str(int(needed) - 1))
    engine = make_engine(model_type, kv_cache_memory=needed)
    assert engine.info.sequences_at_max_len >= 1
    ask(engine, "x", prompt_of(0, 500), max_tokens=12)
    assert len(tokens(run(engine)["x", 0])) == 12


def test_prediction_and_allocation_agree_to_the_byte(model_type: str) -> None:
    info = make_engine(model_type).info
    assert info.predicted_bytes_per_token == info.actual_bytes_per_token
    assert info.predicted_arena_bytes == info.actual_arena_bytes == info.num_slabs * info.slab_bytes


def test_a_failing_step_ends_its_requests_and_not_the_engine(model_type: str, monkeypatch: Any) -> None:
    engine = make_engine(model_type)
    ask(engine, "x", prompt_of(0, 20), n=3)
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda *_: 1 / 0)
    ended = engine.step()
    assert sorted(output.index for output in ended) == [0, 1, 2]
    assert all(output.finish_reason == "error" and "failed on this request" in (output.error or "") for output in ended)
    monkeypatch.setattr(engine.runner, "forward", forward)
    ask(engine, "y", prompt_of(0, 20))
    assert len(tokens(run(engine)["y", 0])) == 8
    assert engine.snapshot().errors == {"ZeroDivisionError": 1}
    assert engine.snapshot().cache.used_bytes == 0


def test_a_step_that_fails_after_the_fork_ends_the_siblings_too(monkeypatch: Any) -> None:
    for place in ("sample", "_append"):
        engine = make_engine("llama", max_sequences=2)  # the third sibling finds no place and waits
        ask(engine, "x", prompt_of(0, 20), n=3, max_tokens=1, temperature=1.0)
        ask(engine, "y", prompt_of(1, 20), max_tokens=1)
        with monkeypatch.context() as patch:
            if place == "sample":
                patch.setattr("kvloom.engine.engine.sample", lambda *_: 1 / 0)
            else:  # some have ended by then, and nobody heard of it

                def append(s: Any, *rest: Any, inner: Any = engine._append) -> Any:
                    return 1 / 0 if s.index == 2 else inner(s, *rest)

                patch.setattr(engine, "_append", append)
            ended = engine.step()
        assert sorted((o.request_id, o.index) for o in ended) == [("x", 0), ("x", 1), ("x", 2), ("y", 0)]
        assert all(output.finish_reason == "error" for output in ended)
        assert not engine.has_work and engine.snapshot().cache.used_bytes == 0
        ask(engine, "x", prompt_of(0, 20))
        assert len(tokens(run(engine)["x", 0])) == 8


def test_siblings_that_wait_do_not_fill_the_queue() -> None:
    engine = make_engine("llama", max_sequences=2, max_waiting=4)
    ask(engine, "x", prompt_of(0, 20), n=8)
    engine.step()
    assert engine.num_waiting == 6
    for i in range(4):
        ask(engine, f"y{i}", prompt_of(i, 20))
    with pytest.raises(QueueFullError):
        ask(engine, "z", prompt_of(0, 20))
    assert len(run(engine)) == 12
