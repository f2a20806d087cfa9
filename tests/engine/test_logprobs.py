"""Log-probabilities against float64 softmax."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.core.request import SamplingParams
from kvloom.engine.logprobs import prompt_logprobs, token_logprobs, top_tokens
from kvloom.engine.sampler import SamplingBatch, SamplingRow, sample

NOTHING = np.zeros(0, dtype=np.int64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 700, 5003])
def test_values_equal_a_float64_softmax(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    expected = logits.double().log_softmax(-1)
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0])
    for row, entry in enumerate(token_logprobs(logits, tokens, [0, 1, 5, 20])):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        count = min([0, 1, 5, 20][row], vocab_size)
        assert len(entry.top) == count
        values = logits[row].tolist()
        order = sorted(range(vocab_size), key=lambda t: (-values[t], t))[:count]
        assert [token for token, _ in entry.top] == order
        for token, value in entry.top:
            assert value == pytest.approx(expected[row, token].item(), abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 70))
def test_ties_go_to_the_lower_id(values: list[int], count: int) -> None:
    ids, found = top_tokens(torch.tensor([values], dtype=torch.float32), count)
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))[:count]
    assert ids[0].tolist() == order
    assert found[0].tolist() == [values[t] for t in order]


def test_extreme_and_masked_logits() -> None:
    logits = torch.tensor([[1e38, -1e38, 0.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    first, second = token_logprobs(logits, torch.tensor([0, 3]), [4, 2])
    assert first.logprob == 0.0
    assert first.top[-1] == (3, -float("inf"))
    assert second.logprob == pytest.approx(-np.log(4))
    assert [token for token, _ in second.top] == [0, 1]


def test_sampler_reports_raw_logprobs_whatever_was_done_to_the_logits() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(
        temperature=3.0, top_k=3, logit_bias={5: 80.0}, presence_penalty=1.0, repetition_penalty=1.5, logprobs=4
    )
    history = np.array([1, 2, 3])
    row = SamplingRow(params=params, seed=1, step=3, prompt_token_ids=history, output_token_ids=history)
    output = sample(logits, SamplingBatch.build([row], 300))
    entry = output.logprobs()[0]
    assert entry is not None and entry.token_id == output.token_ids[0] == 5
    assert entry.logprob == pytest.approx(logits.double().log_softmax(-1)[0, 5].item(), abs=1e-6)
    assert entry.top[0][0] == int(logits.argmax())


def test_a_greedy_token_is_the_best_of_its_logprobs_under_ties() -> None:
    logits = torch.randint(0, 3, (20, 500), generator=torch.Generator().manual_seed(0)).bfloat16()
    row = SamplingRow(
        params=SamplingParams(temperature=0, logprobs=2),
        seed=0,
        step=0,
        prompt_token_ids=NOTHING,
        output_token_ids=NOTHING,
    )
    output = sample(logits, SamplingBatch.build([row] * 20, 500))
    for entry in output.logprobs():
        assert entry is not None and entry.top[0][0] == entry.token_id


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    logits = torch.randn(50, 30_000, generator=torch.Generator().manual_seed(2))
    following = list(range(100, 150))
    everything = prompt_logprobs(logits, following, 3)
    chunks = [
        entry
        for start in range(0, 50, 7)
        for entry in prompt_logprobs(logits[start : start + 7], following[start : start + 7], 3)
    ]
    assert chunks == everything
    expected = logits.double().log_softmax(-1)
    assert [e.logprob for e in everything] == pytest.approx(
        [expected[i, t].item() for i, t in enumerate(following)], abs=1e-5
    )
    assert prompt_logprobs(logits[:0], [], 3) == []
    assert all(entry.top == () for entry in prompt_logprobs(logits, following, 0))
