"""The sampler against a slow oracle in plain numpy, against statistics, and against its own batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvloom.core.errors import EngineError
from kvloom.core.request import SamplingParams
from kvloom.engine import draw, truncation
from kvloom.engine.sampler import FAILED_TOKEN, SamplingBatch, SamplingRow, sample

NOTHING = np.zeros(0, dtype=np.int64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(*, seed: int = 0, step: int = 0, prompt: Any = NOTHING, output: Any = NOTHING, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        seed=seed,
        step=step,
        prompt_token_ids=np.asarray(prompt, dtype=np.int64),
        output_token_ids=np.asarray(output, dtype=np.int64),
    )


def tokens(
    logits: torch.Tensor, rows: list[SamplingRow], bitmask: torch.Tensor | None = None, **build: Any
) -> list[int]:
    output = sample(logits, SamplingBatch.build(rows, logits.shape[-1], **build), bitmask)
    assert output.errors() == {}
    return output.token_ids.tolist()


def bitmask_of(allowed: list[list[int] | None], vocab_size: int) -> torch.Tensor:
    """One row per entry; None is unconstrained."""
    mask = np.zeros((len(allowed), -(-vocab_size // 32)), dtype=np.uint32)
    for i, ids in enumerate(allowed):
        if ids is None:
            mask[i] = 0xFFFFFFFF
        for token in ids or ():
            mask[i, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(mask.view(np.int32))


# --- An oracle that follows the definitions one token at a time -------------------------------------


def oracle_probabilities(logits: np.ndarray, r: SamplingRow, allowed: list[int] | None = None) -> np.ndarray:
    """The distribution a row is drawn from, in float64, by the definitions."""
    p = r.params
    x = logits.astype(np.float64).copy()
    for token, value in p.logit_bias.items():
        x[token] += value
    output = r.output_token_ids.tolist()
    for token in set(output) | set(r.prompt_token_ids.tolist()):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if allowed is not None:
        x[[t for t in range(len(x)) if t not in allowed]] = -np.inf
    if p.temperature == 0:
        return np.eye(len(x))[int(x.argmax())]
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    z = np.exp((x - x.max()) / p.temperature)
    z[z < p.min_p * z.max()] = 0
    if p.top_k:
        z[order[p.top_k :]] = 0
    if p.top_p < 1:
        total, reached = z.sum(), 0.0
        for place, token in enumerate(order):
            reached += z[token]
            if reached >= p.top_p * total:
                z[order[place + 1 :]] = 0
                break
    return z / z.sum()


def observed(logits: np.ndarray, r: SamplingRow, draws: int, bitmask: torch.Tensor | None = None) -> np.ndarray:
    """Counts of tokens over ``draws`` seeds."""
    rows = [
        SamplingRow(
            params=r.params,
            seed=seed * 1_000_003,
            step=r.step,
            prompt_token_ids=r.prompt_token_ids,
            output_token_ids=r.output_token_ids,
        )
        for seed in range(draws)
    ]
    batch = torch.from_numpy(logits).expand(draws, -1)
    mask = None if bitmask is None else bitmask.expand(draws, -1)
    return np.bincount(tokens(batch, rows, mask), minlength=len(logits))


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Upper tail of Pearson's statistic (Wilson-Hilferty), bins below 5 expected pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    small = expected < 5
    observed_bins = np.append(counts[~small], counts[small].sum())
    expected_bins = np.append(expected[~small], expected[small].sum())
    keep = expected_bins > 0
    observed_bins, expected_bins = observed_bins[keep], expected_bins[keep]
    freedom = len(expected_bins) - 1
    if freedom == 0:
        return 1.0
    statistic = float(((observed_bins - expected_bins) ** 2 / expected_bins).sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -0.4, "top_p": 0.95},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0}, "top_k": 20},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("vocab_size", [61, 1000])
def test_drawn_tokens_follow_the_distribution(name: str, vocab_size: int) -> None:
    logits = np.random.default_rng(1).normal(size=vocab_size).astype(np.float32) * 2
    r = row(prompt=[1, 2, 2, 9], output=[2, 7, 7, 7], step=4, **DISTRIBUTIONS[name])
    counts = observed(logits, r, 8000)
    assert chi_square_p(counts, oracle_probabilities(logits, r)) > 1e-4


def test_chi_square_would_notice_a_wrong_temperature() -> None:
    logits = np.random.default_rng(1).normal(size=100).astype(np.float32) * 2
    counts = observed(logits, row(temperature=1.1), 8000)
    assert chi_square_p(counts, oracle_probabilities(logits, row(temperature=1.0))) < 1e-4


def test_successive_steps_of_one_seed_are_independent() -> None:
    """Pairs of neighbouring steps fill the unit square evenly, as do pairs of neighbouring seeds."""
    steps = torch.arange(40_000)
    for a, b in (
        (draw.uniform(torch.full_like(steps, 12), steps), draw.uniform(torch.full_like(steps, 12), steps + 1)),
        (draw.uniform(steps, torch.zeros_like(steps)), draw.uniform(steps + 1, torch.zeros_like(steps))),
        # splitmix64 alone would give these two seeds one stream, shifted by a step
        (
            draw.uniform(torch.full_like(steps, 5), steps),
            draw.uniform(torch.full_like(steps, 5) - 7046029254386353131, steps),
        ),
    ):
        cells = (a * 10).long() * 10 + (b * 10).long()
        assert chi_square_p(np.bincount(cells.numpy(), minlength=100), np.full(100, 0.01)) > 1e-4


def test_uniform_equals_splitmix64_in_plain_integers() -> None:
    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 987654321):
        for step in (0, 1, 77, 10**6):
            expected = mix((mix((seed + gamma) % 2**64) + (step + 1) * gamma) % 2**64) >> 11
            assert draw.uniform(torch.tensor([seed]), torch.tensor([step])).item() == expected * 2.0**-53


def test_sequence_seeds_differ_and_keep_the_first() -> None:
    for seed in (0, 5, -(2**63), 2**63 - 1):
        seeds = [draw.sequence_seed(seed, i) for i in range(64)]
        assert seeds[0] == seed and len(set(seeds)) == 64
        assert all(-(2**63) <= s < 2**63 for s in seeds)
    # Siblings draw independently: pairs fill the unit square evenly.
    first = torch.arange(10_000)
    second = torch.tensor([draw.sequence_seed(int(s), 1) for s in first])
    cells = (draw.uniform(first, first * 0) * 10).long() * 10 + (draw.uniform(second, first * 0) * 10).long()
    assert chi_square_p(np.bincount(cells.numpy(), minlength=100), np.full(100, 0.01)) > 1e-4


# --- A row does not see its neighbours --------------------------------------------------------------

_POOL: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1e9, "top_p": 0.99},
    {"temperature": 2.0, "top_k": 50},
    {"temperature": 1.5, "top_k": 5000},
    {"min_p": 0.05},
    {"temperature": 5.0, "top_k": 400, "top_p": 0.8, "min_p": 1e-4},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 4},
    {"presence_penalty": 1.0, "temperature": 0.0, "logprobs": 0},
    {"logit_bias": {0: 3.0, 17: -5.0}, "min_tokens": 9, "top_p": 0.5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [777, 49152, 50001])
def test_a_row_alone_equals_the_row_in_any_batch(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    count = 33
    logits = (torch.randn(count, vocab_size, generator=generator) * 3).to(dtype)
    numbers = np.random.default_rng(3)
    rows = [
        row(
            seed=int(numbers.integers(-(2**63), 2**63)),
            step=i,
            prompt=numbers.integers(0, vocab_size, 40),
            output=numbers.integers(0, vocab_size, i),
            **_POOL[i % len(_POOL)],
        )
        for i in range(count)
    ]
    build = {"eos_token_ids": (1, 2)}
    alone = [sample(logits[i : i + 1], SamplingBatch.build([r], vocab_size, **build)) for i, r in enumerate(rows)]
    for size in (2, 5, 16, 33):
        order = numbers.permutation(count)[:size]
        together = sample(logits[order], SamplingBatch.build([rows[i] for i in order], vocab_size, **build))
        for place, i in enumerate(order):
            assert together.token_ids[place] == alone[i].token_ids[0], (size, rows[i])
            assert together.logprobs()[place] == alone[i].logprobs()[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_count_does_not_matter(threads: int) -> None:
    logits = torch.randn(6, 49152, generator=torch.Generator().manual_seed(0)) * 3
    rows = [row(seed=i, top_p=0.999 if i % 2 else 1.0, temperature=2.0) for i in range(6)]
    expected = tokens(logits, rows)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert tokens(logits, rows) == expected
    finally:
        torch.set_num_threads(before)


# --- Exact cuts, ties, extremes ---------------------------------------------------------------------


def check_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """The cut keeps what the definitions keep, and both ways to draw from it agree."""
    vocab_size = len(logits)
    x = torch.from_numpy(logits)[None]
    scale = draw.Scale(
        maximum=x.amax(-1, keepdim=True),
        inverse_temperature=torch.tensor([[1 / temperature]]),
        min_p=torch.tensor([[min_p]]),
        shift=draw.weight_shift(vocab_size),
    )
    limit = min(top_k, vocab_size) or vocab_size
    w = scale.weights(x)
    k, p = torch.tensor([limit]), torch.tensor([top_p], dtype=torch.float64)
    cut = truncation.find_cut(x, scale, k, p, w.sum(-1), vocab_size)
    assert cut.settled.all()
    order = sorted(range(vocab_size), key=lambda t: (-logits[t], t))
    w[0, order[int(cut.keep) :]] = 0
    expected = oracle_probabilities(logits, row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    got = w[0].double().numpy()
    got /= got.sum()
    # The share sits on a rounding edge where p * total is (nearly) a prefix sum: one token more or less is right.
    # Tokens below 2**-40 are left out: weights are integers and have a smallest step.
    kept, right = int((got > 2.0**-40).sum()), int((expected > 2.0**-40).sum())
    assert abs(kept - right) <= (top_p < 1)
    if kept == right:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-9)
    u = torch.tensor([0.0, 0.2, 0.5, 0.99, 1 - 2**-53], dtype=torch.float64)
    many = x.expand(len(u), -1).contiguous()
    scales = scale[torch.zeros(len(u), dtype=torch.int64)]
    limits, shares = [limit] * len(u), [top_p] * len(u)
    listed = truncation.draw_truncated(many, scales, limits, shares, u)
    assert torch.equal(listed, draw.inverse_cdf(w.expand(len(u), -1), u))
    assert torch.equal(listed, truncation.draw_masked(many, scales, limits, shares, u))


@settings(max_examples=150, deadline=None)
@given(
    vocab_size=st.integers(1, 700),
    levels=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.05, 0.8, 1.0, 4.0, 1e9]),
    top_k=st.sampled_from([0, 1, 2, 5, 250, 256, 257, 600, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_kept_tokens_equal_the_oracle_under_ties(
    vocab_size: int, levels: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Few distinct logits, so that cuts fall among equals."""
    assume(temperature < 1e9 or min_p < 1.0)  # 1 - 1e-9 is 1 in float32
    logits = np.random.default_rng(seed).integers(0, levels, vocab_size).astype(np.float32) / 4
    check_kept(logits, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("top_k", [0, truncation.WINDOW, truncation.MAX_WINDOW, truncation.MAX_WINDOW + 1])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_kept_tokens_equal_the_oracle_beyond_the_window(top_k: int, top_p: float, spread: float) -> None:
    logits = np.random.default_rng(5).normal(size=20_000).astype(np.float32) * spread
    check_kept(logits, 1.0, top_k, top_p, 0.0)


def test_top_k_larger_than_the_vocabulary_and_of_one() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = [row(seed=i) for i in range(4)]
    wide = [row(seed=i, top_k=10**9) for i in range(4)]
    assert tokens(logits, plain) == tokens(logits, wide)
    ones = [row(seed=i, top_k=1, temperature=1.7) for i in range(4)]
    assert tokens(logits, ones) == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_extreme_temperatures(top_p: float) -> None:
    vocab_size = 2000
    logits = torch.randn(200, vocab_size, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, 1000:] = -torch.inf
    for temperature in (1e9, 1e30, 1.7e308):
        drawn = tokens(logits, [row(seed=i, temperature=temperature, top_p=top_p) for i in range(200)])
        assert all(0 <= t < 1000 for t in drawn)
        assert len(set(drawn)) > 120  # spread over the whole allowed vocabulary
    for temperature in (1e-9, 5e-324, 0.0):
        drawn = tokens(logits, [row(seed=i, temperature=temperature, top_p=top_p) for i in range(200)])
        assert drawn == logits.argmax(-1).tolist()
    # Just above the greedy line, with huge logits: no overflow on the way.
    huge = torch.zeros(1, 50)
    huge[0, 7], huge[0, 9] = 3e38, -3e38
    assert tokens(huge, [row(temperature=1.1e-5, top_p=top_p)]) == [7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_damaged_row_fails_alone(temperature: float, dtype: torch.dtype) -> None:
    vocab_size = 49152
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = [row(seed=i, temperature=temperature, top_p=0.9, logprobs=2) for i in range(6)]
    healthy = sample(logits, SamplingBatch.build(rows, vocab_size))
    logits[1, 40_000] = torch.nan
    logits[3] = -torch.inf
    logits[4, 5] = torch.inf
    logits[5, ::2] = -torch.inf
    output = sample(logits, SamplingBatch.build(rows, vocab_size))
    errors = output.errors()
    assert sorted(errors) == [1, 3, 4]
    assert all(isinstance(e, EngineError) for e in errors.values())
    assert "NaN" in str(errors[1]) and "no token is allowed" in str(errors[3])
    assert output.token_ids[[1, 3, 4]].tolist() == [FAILED_TOKEN] * 3
    assert output.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    assert output.token_ids[5] % 2 == 1
    assert [entry is None for entry in output.logprobs()] == [False, True, False, True, True, False]


def test_a_vocabulary_of_one_token() -> None:
    assert tokens(torch.zeros(2, 1), [row(), row(temperature=0)]) == [0, 0]


# --- Penalties, bias, masks -------------------------------------------------------------------------


def test_penalties_steer_greedy() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, 1.4]])
    assert tokens(logits, [row(temperature=0, repetition_penalty=2.0, prompt=[0])]) == [1]
    assert tokens(logits, [row(temperature=0, presence_penalty=0.8, prompt=[0])]) == [0]  # the prompt does not count
    assert tokens(logits, [row(temperature=0, presence_penalty=0.8, output=[0, 0])]) == [1]
    assert tokens(logits, [row(temperature=0, frequency_penalty=0.3, output=[0])]) == [0]
    assert tokens(logits, [row(temperature=0, frequency_penalty=0.3, output=[0, 0])]) == [1]
    assert tokens(logits, [row(temperature=0, repetition_penalty=0.1, prompt=[3])]) == [3]
    assert tokens(logits, [row(temperature=0, logit_bias={2: 50.0})]) == [2]


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
def test_extreme_repetition_penalties_fail_nothing(penalty: float) -> None:
    logits = torch.tensor([[20.0, -20.0, 0.0, 1.0]])
    for temperature in (0.0, 1.0):
        drawn = tokens(logits, [row(temperature=temperature, repetition_penalty=penalty, output=[0, 1])])
        assert drawn[0] in ([0] if penalty < 1 else [2, 3])


def test_unknown_token_ids_in_bias_and_history_are_ignored() -> None:
    r = row(temperature=0, logit_bias={-1: 9.0, 99: 9.0}, repetition_penalty=2.0, prompt=[-1, 99, 4], output=[50])
    assert tokens(torch.tensor([[1.0, 3.0, 2.0]]), [r]) == [1]


def test_logits_are_left_alone() -> None:
    logits = torch.randn(3, 500)
    before = logits.clone()
    rows = [row(repetition_penalty=2.0, output=[3], top_p=0.5), row(temperature=0, logit_bias={1: 5.0}), row(top_k=3)]
    tokens(logits, rows, bitmask_of([[1, 2], None, None], 500))
    assert torch.equal(logits, before)


def test_grammar_bitmask_binds_every_kind_of_row() -> None:
    vocab_size = 1001  # not a multiple of 32
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    allowed = [[5, 1000], None, [0, 31, 32, 64], [1000], None]
    rows = [row(), row(), row(temperature=0), row(top_p=0.2), row(temperature=0)]
    free = tokens(logits, rows)
    bound = tokens(logits, rows, bitmask_of(allowed, vocab_size))
    for token, unbound, ids in zip(bound, free, allowed, strict=True):
        assert token in ids if ids is not None else token == unbound
    r = row(temperature=2.0)
    mask = bitmask_of([[3, 4, 5, 6]], vocab_size)
    counts = observed(logits[0].numpy(), r, 4000, mask)
    assert chi_square_p(counts, oracle_probabilities(logits[0].numpy(), r, allowed=[3, 4, 5, 6])) > 1e-4


def test_an_empty_grammar_mask_fails_the_row() -> None:
    output = sample(torch.zeros(2, 40), SamplingBatch.build([row(), row()], 40), bitmask_of([[], None], 40))
    assert list(output.errors()) == [0]


def test_min_tokens_forbids_the_end_until_reached() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 7], logits[0, 8], logits[0, 9] = 30.0, 29.0, 28.0
    for greedy in (0.0, 1.0):
        common = {"temperature": greedy, "min_tokens": 3, "stop_token_ids": (8,)}
        assert tokens(logits, [row(step=2, **common)], eos_token_ids=[7]) == [9]
        assert tokens(logits, [row(step=3, temperature=0, min_tokens=3)], eos_token_ids=[7]) == [7]
        # With ignore_eos the end token does not end anything, so it stays allowed.
        assert tokens(logits, [row(step=2, ignore_eos=True, temperature=0, min_tokens=3)], eos_token_ids=[7]) == [7]
        # A finished grammar allows nothing else: it wins.
        assert tokens(logits, [row(step=2, **common)], bitmask_of([[7]], 50), eos_token_ids=[7]) == [7]
        assert tokens(logits, [row(step=2, **common)], bitmask_of([[7, 20]], 50), eos_token_ids=[7]) == [20]


# --- Misuse -----------------------------------------------------------------------------------------


def test_contradicting_shapes_are_named() -> None:
    batch = SamplingBatch.build([row()], 40)
    with pytest.raises(EngineError, match=r"\(2, 40\).*\(1, 40\)"):
        sample(torch.zeros(2, 40), batch)
    with pytest.raises(EngineError, match="bitmask"):
        sample(torch.zeros(1, 40), batch, torch.zeros(1, 1, dtype=torch.int32))


def test_an_empty_batch() -> None:
    output = sample(torch.zeros(0, 40), SamplingBatch.build([], 40))
    assert output.token_ids.tolist() == [] and output.errors() == {} and output.logprobs() == []
