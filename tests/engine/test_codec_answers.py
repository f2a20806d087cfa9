"""With codecs and ``--deterministic``: whatever traffic does to the cache, answers are those of a cold engine.

Random requests, siblings, further turns, aborts and memory pressure on a warm engine; the same tokens
and the very same log-probabilities as an engine with the prefix cache off that sees one request at a
time in other chunks.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.core import sizes
from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES
from kvloom.core.errors import CapacityError
from kvloom.engine.engine import Engine
from tests.engine.test_codecs import codec_engine
from tests.engine.tiny import ask, load_tiny, prompt_of, run, save_calibration

MOST_TOKENS = 10
SERVED = [name for name in CODEC_CHOICES if name != "raw" and name not in RAW_DTYPES]
Answer = list[tuple[int, float]]  # token and its log-probability


@cache
def loaded(model_type: str) -> Any:
    return load_tiny(model_type)


@cache
def calibration() -> str:
    """A file of the tiny Llama's, for codecs that learn."""
    path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    save_calibration(path)
    return str(path)


def make(model_type: str, codec: str, kernels: str, **more: Any) -> Engine:
    """Blocks of 8, or of 16 where native kernels read them; one sink block, two recent ones."""
    size = 8 if kernels == "reference" else 16
    return codec_engine(
        codec, model_type, kernels=kernels, loaded=loaded(model_type), deterministic=True, max_model_len=128,
        block_size=size, sink_tokens=size, recent_tokens=2 * size if size == 8 else size,
        calibration=calibration() if model_type == "llama" else None, **more,
    )  # fmt: skip


@cache
def cold_engine(model_type: str, codec: str, kernels: str) -> Engine:
    return make(model_type, codec, kernels, prefix_cache=False, max_batch_tokens=128)


@cache
def cold_answer(model_type: str, codec: str, kernels: str, prompt: tuple[int, ...], count: int) -> Answer:
    engine = cold_engine(model_type, codec, kernels)
    ask(engine, "x", list(prompt), max_tokens=count, logprobs=0)
    return answer_of(run(engine)["x", 0])


def answer_of(outputs: list[Any]) -> Answer:
    return [(entry.token_id, entry.logprob) for output in outputs for entry in output.logprobs or ()]


@cache
def least_memory(model_type: str, codec: str, kernels: str, max_batch_tokens: int) -> int:
    try:
        make(model_type, codec, kernels, kv_cache_memory="1kB", max_batch_tokens=max_batch_tokens)
    except CapacityError as error:
        return int(str(error).split("--kv-cache-memory ")[1].split()[0])
    raise AssertionError("1 kB was enough")


requests = st.tuples(st.integers(0, 1), st.integers(1, 90), st.integers(1, MOST_TOKENS), st.sampled_from([1, 1, 3]))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("turn"), st.tuples(st.integers(0, 9), st.integers(1, 20), st.integers(1, MOST_TOKENS))),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=12,
)


def live(engine: Engine, script: list[tuple[str, Any]], model_type: str, codec: str, kernels: str) -> None:
    asked: dict[str, tuple[list[int], int, int]] = {}
    found: dict[tuple[str, int], list[Any]] = {}
    aborted: set[str] = set()

    def step() -> None:
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).append(output)
        engine.manager.check()

    def add(prompt: list[int], count: int, n: int) -> None:
        name = f"r{len(asked)}"
        asked[name] = (prompt, count, n)
        ask(engine, name, prompt, max_tokens=count, logprobs=0, n=n)

    for name, argument in script:
        if name == "add":
            family, length, count, n = argument
            add(prompt_of(family, 90)[:length], count, n)
        elif name == "turn" and asked:
            which, extra, count = argument
            before = f"r{which % len(asked)}"
            while engine.holds(before):
                step()
            if before not in aborted:
                prompt, _, _ = asked[before]
                answer = [token for token, _ in answer_of(found[before, 0])]
                longer = prompt + answer + prompt_of(7, extra)
                if len(longer) + count <= 128:
                    add(longer, count, 1)
        elif name == "step":
            for _ in range(argument):
                if engine.has_work:
                    step()
        elif name == "abort" and asked:
            victim = f"r{argument % len(asked)}"
            if engine.holds(victim):
                aborted.add(victim)
                engine.abort(victim)
                engine.manager.check()
    while engine.has_work:
        step()
    for name, (prompt, count, n) in asked.items():
        for index in range(n):
            if name not in aborted:
                expected = cold_answer(model_type, codec, kernels, tuple(prompt), max(count, MOST_TOKENS))[:count]
                assert answer_of(found[name, index]) == expected, (name, index, len(prompt))
    state = engine.snapshot().cache
    assert state.used_bytes == 0 and state.token_bytes == 0


@pytest.mark.parametrize(
    ("model_type", "codec", "kernels", "examples"),
    [
        ("llama", "int8", "reference", 12),
        ("llama", "kivi2", "reference", 12),
        ("llama", "turboquant3", "reference", 5),
        ("gemma3_text", "k=int8,v=kivi2", "reference", 8),
        ("llama", "int8", "cpu", 20),
        ("llama", "turboquant3", "cpu", 20),
        ("gemma3_text", "kivi2", "cpu", 12),
        *(("llama", codec, "cpu", 3) for codec in SERVED if codec not in ("int8", "turboquant3")),
    ],
)
def test_warm_equals_cold_bit_by_bit(model_type: str, codec: str, kernels: str, examples: int) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(sizes, "MIN_SLAB_BYTES", 1)  # slabs as small as can be: memory runs short
    patch.setattr("kvloom.engine.engine.measure_noise", lambda *_, **__: 0.0)  # the traffic is a longer check

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.sampled_from([16, 24, 40]), st.sampled_from([1.0, 1.4, 4.0]), operations)
    def check(max_batch_tokens: int, memory: float, script: list[tuple[str, Any]]) -> None:
        budget = int(memory * least_memory(model_type, codec, kernels, max_batch_tokens))
        engine = make(
            model_type, codec, kernels, kv_cache_memory=str(budget), max_batch_tokens=max_batch_tokens, max_sequences=3
        )  # fmt: skip
        live(engine, script, model_type, codec, kernels)

    try:
        check()
    finally:
        patch.undo()


def test_pressure_hits_and_forks_all_happen() -> None:
    """The script that the random ones might miss: it must preempt, fork, hit and encode."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sizes, "MIN_SLAB_BYTES", 1)
    try:
        budget = least_memory("llama", "int8", "reference", 40)
        engine = make("llama", "int8", "reference", kv_cache_memory=str(budget), max_batch_tokens=40, max_sequences=3)
        script: list[tuple[str, Any]] = [
            ("add", (0, 20, 60, 1)),
            ("add", (1, 20, 60, 3)),
            ("step", 4),
            ("turn", (0, 9, 10)),
            ("turn", (1, 20, 9)),
        ]
        live(engine, script, "llama", "int8", "reference")
    finally:
        patch.undo()
    snapshot = engine.snapshot()
    assert snapshot.preemptions > 0 and snapshot.prefix_hit_tokens > 0 and snapshot.evicted_spans > 0
    assert engine.rounding_noise == 0.0
