"""Many decoding rows go through the layers a thread each: the same bits as by one thread, and the same errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.engine.engine import Engine
from tests.engine.test_codecs import codec_engine
from tests.engine.tiny import VOCAB, ask, prompt_of, run

ROWS = 40  # 8 times the square of two threads and more


def engine_of(threads: int, codec: str, model_type: str) -> Engine:
    return codec_engine(
        codec, model_type, kernels="cpu", num_threads=threads, max_sequences=64, block_size=32, recent_tokens=32,
        sink_tokens=0, kv_cache_memory="64MiB", max_batch_tokens=256,
    )  # fmt: skip


def all_logits(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[torch.Tensor]:
    """The logits of every pass."""
    found: list[torch.Tensor] = []
    forward = engine.runner.forward

    def watch(*args: Any) -> Any:
        logits = forward(*args)
        values = logits.values.clone()
        found.append(values)
        if logits.best is not None:
            places, best = logits.best
            assert torch.equal(places, values.argmax(-1)) and torch.equal(best, values.amax(-1))
        return logits

    engine.runner.forward = watch  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts):
        ask(engine, f"{index:03}", prompt, max_tokens=max_tokens)
    run(engine)
    return found


@pytest.mark.parametrize(
    ("model_type", "codec", "lengths"),
    [
        ("llama", "raw", [20] * ROWS),
        ("llama", "raw", [20 + 3 * (i % 7) for i in range(ROWS)]),
        ("gemma3_text", "raw", [20 + i for i in range(ROWS)]),
        ("llama", "int8", [20 + 5 * (i % 9) for i in range(ROWS)]),  # blocks are encoded on the way
        ("llama", "turboquant4", [60] * ROWS),
    ],
)
def test_bits_are_those_of_one_thread(model_type: str, codec: str, lengths: list[int]) -> None:
    shared = prompt_of(0, 40)
    prompts = [(shared if i % 2 else []) + prompt_of(i + 1, length) for i, length in enumerate(lengths)]
    alone, together = engine_of(1, codec, model_type), engine_of(2, codec, model_type)
    expected, found = (all_logits(engine, prompts, 44) for engine in (alone, together))
    assert alone.loaded.model.passes_by_rows == 0
    assert together.loaded.model.passes_by_rows >= 30
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_few_rows_and_uneven_ones_are_shared_product_by_product() -> None:
    # Whoever took the long one in the middle would have far more to do.
    uneven = [prompt_of(i, 400 if i == 16 else 5) for i in range(33)]
    for prompts in ([prompt_of(i, 20) for i in range(31)], uneven):
        engine = engine_of(2, "raw", "llama")
        all_logits(engine, prompts, 8)
        assert engine.loaded.model.passes_by_rows == 0


def test_an_error_in_one_thread_is_everybodys() -> None:
    engine = engine_of(2, "raw", "llama")
    for index in range(ROWS):
        ask(engine, f"{index:03}", prompt_of(index, 6), max_tokens=20)
    while engine.loaded.model.passes_by_rows == 0:
        engine.step()
    last = engine.scheduler.running[-1]
    last.tokens[last.num_tokens - 1] = VOCAB
    outputs = engine.step()
    assert len(outputs) == ROWS
    assert all(f"token id {VOCAB} is outside the vocabulary" in (output.error or "") for output in outputs)
    ask(engine, "again", prompt_of(1, 20))
    assert not any(output.error for outputs in run(engine).values() for output in outputs)
