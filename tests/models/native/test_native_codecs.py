"""A native step reads encoded caches: the same logits as transformers' code over the same bytes."""

from __future__ import annotations

import pytest
import torch

from kvloom.core.errors import ConfigError
from tests.engine.test_codecs import all_logits, codec_engine
from tests.engine.tiny import ask, prompt_of, run, save_calibration, tokens

NATIVE = [
    "int8",
    "int4",
    "fp8",
    "q8_0",
    "kivi2",
    "kvarn-k4v2",
    "turboquant4",
    "turboquant3",
    "k=int8,v=kivi2",
    "k=raw,v=int4",
]


@pytest.mark.parametrize("codec", NATIVE)
def test_logits_equal_those_of_transformers_code(codec: str) -> None:
    prompt = prompt_of(3, 230)
    native = codec_engine(codec, kernels="cpu", block_size=32, recent_tokens=32, sink_tokens=16)
    plain = codec_engine(codec, kernels="reference", block_size=32, recent_tokens=32, sink_tokens=16)
    assert native.info.step == "native", native.info.step
    got, expected = all_logits(native, prompt, 64), all_logits(plain, prompt, 64)
    # Weights and queries are rounded to 15 bits; a code differs where two levels are nearly as close.
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-2
    assert float((got - expected).abs().mean() / expected.abs().mean()) < 2e-3
    assert not native.store.backend.fallbacks


@pytest.mark.parametrize("codec", ["int8", "kivi2", "turboquant3"])
def test_bits_do_not_depend_on_chunks(codec: str) -> None:
    prompt = prompt_of(4, 230)
    engine = codec_engine(codec, kernels="cpu", block_size=32, recent_tokens=32, sink_tokens=16, max_batch_tokens=256)
    whole = all_logits(engine, prompt, 256)
    for chunk in (32, 96):
        assert torch.equal(all_logits(engine, prompt, chunk), whole)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the tiny Llama, in a file."""
    path = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    save_calibration(path)
    return str(path)


DECODED = ["kvquant3", "turboquant3.5", "turboquant3-prod", "k=kvquant2,v=raw", "k=turboquant2-prod,v=kivi2"]


@pytest.mark.parametrize("step", ["native", "transformers"])
@pytest.mark.parametrize("codec", DECODED)
def test_what_has_no_native_reading_is_decoded_first_and_counted(codec: str, step: str, calibration: str) -> None:
    prompt = prompt_of(5, 230)
    shape = {"block_size": 32, "recent_tokens": 32, "sink_tokens": 16, "calibration": calibration}
    native = codec_engine(codec, kernels="cpu", step=step, **shape)
    plain = codec_engine(codec, kernels="reference", **shape)
    if step == "native":
        assert native.info.step.startswith("native (slow: PyTorch decodes in every step, plane k under codec")
    for chunk in (64, 37):
        got, expected = all_logits(native, prompt, chunk), all_logits(plain, prompt, chunk)
        # The cache is float32 and so is what is decoded: the same numbers are attended, but for values that rounding
        # puts on the other side of a code's edge.
        difference = (got - expected).abs() / expected.abs().max()
        assert float(difference.median()) < 1e-5 and float(difference.max()) < 5e-3
    kinds = {kind.split(":")[0] for kind in native.snapshot().fallbacks}
    assert kinds == {"decode", "encode"}


def test_a_block_too_short_for_a_kernel_is_decoded_first() -> None:
    native, plain = (
        codec_engine("turboquant3", kernels=kernels, block_size=8, recent_tokens=16) for kernels in ("cpu", "reference")
    )
    got, expected = (all_logits(engine, prompt_of(6, 150), 40) for engine in (native, plain))
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4
    assert "native (slow: PyTorch decodes in every step, plane k under codec turboquant3" in native.info.step


@pytest.mark.parametrize("codec", ["kvquant3", "turboquant2-prod"])
def test_decoded_blocks_of_a_mixed_batch(codec: str, calibration: str) -> None:
    """Shared prefixes, forks, unlike lengths, a second turn: the answers of each alone, and of a cold cache."""
    shape = {"block_size": 16, "recent_tokens": 16, "sink_tokens": 16, "calibration": calibration}
    shared = prompt_of(0, 70)
    prompts = [shared + prompt_of(i, 3 + 20 * i) for i in range(1, 5)] + [prompt_of(9, 5)]
    together = codec_engine(codec, kernels="cpu", kv_cache_memory="64MiB", **shape)
    for index, prompt in enumerate(prompts):
        ask(together, f"{index}", prompt, max_tokens=30, n=2 if index == 1 else 1)
    first = {key: tokens(outputs) for key, outputs in run(together).items()}
    turns = [prompt + list(first[f"{index}", 0]) + prompt_of(20, 7) for index, prompt in enumerate(prompts)]
    for index, prompt in enumerate(turns):
        ask(together, f"again {index}", prompt, max_tokens=10)
    second = run(together)
    assert any(output.usage.cached_tokens > 70 for outputs in second.values() for output in outputs)
    for index, (prompt, turn) in enumerate(zip(prompts, turns, strict=True)):
        alone = codec_engine(codec, kernels="cpu", kv_cache_memory="64MiB", prefix_cache=False, **shape)
        ask(alone, "x", prompt, max_tokens=30)
        expected = tokens(run(alone)["x", 0])
        assert all(answer == expected for (name, _), answer in first.items() if name == f"{index}")
        ask(alone, "y", turn, max_tokens=10)
        assert tokens(run(alone)["y", 0]) == tokens(second[f"again {index}", 0])


def test_nothing_is_counted_before_there_is_something_to_decode() -> None:
    engine = codec_engine(
        "turboquant3-prod", kernels="cpu", block_size=16, recent_tokens=64, max_sequences=64, num_threads=2
    )
    for index in range(34):
        ask(engine, f"{index}", prompt_of(index, 8), max_tokens=20)
    run(engine)
    assert not engine.snapshot().fallbacks
    assert engine.loaded.model.passes_by_rows > 0


def test_an_engine_counts_its_own() -> None:
    first = codec_engine("raw", kernels="cpu", block_size=16)
    second = codec_engine("turboquant3-prod", kernels="cpu", block_size=16, loaded=first.loaded)
    ask(second, "x", prompt_of(0, 120))
    run(second)
    assert not first.snapshot().fallbacks
    assert {kind.split(":")[0] for kind in second.snapshot().fallbacks} == {"decode", "encode"}


def test_other_layers_than_a_shared_native_model_has_are_refused() -> None:
    first = codec_engine("raw", kernels="cpu", block_size=16)
    with pytest.raises(ConfigError, match="made for other layer groups"):
        codec_engine("int8", kernels="cpu", block_size=16, protect_layers="0", loaded=first.loaded)
