"""A native step reads encoded caches: the same logits as transformers' code over the same bytes."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_codecs import all_logits, codec_engine
from tests.engine.tiny import prompt_of

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


def test_what_is_not_read_natively_runs_through_transformers() -> None:
    engine = codec_engine("turboquant3", kernels="cpu", block_size=8)
    assert engine.info.step.startswith("transformers (plane k under codec turboquant3")
