"""Parity: a model's logits through our attention, compared with those of transformers' eager attention.

A *case* is a few sequences of random tokens and what happens to them: steps of chunks, a shared
prefix, a preemption. The same cases check every family in the tests and a user's own model in
``kvloom models check``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.core.layout import KVLayout
from kvloom.models.paged import PagedRunner

TOLERANCE = 1e-4  # max |difference| over max |logit|, float32


@dataclass(frozen=True, slots=True)
class Share:
    """``target`` starts with ``source``'s first ``num_blocks`` blocks: a prefix hit."""

    source: str
    target: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Drop:
    """``name`` loses its blocks: a preemption. Its next step starts at token 0."""

    name: str


Step = Mapping[str, int]  # how many tokens of which sequence


@dataclass(frozen=True, slots=True)
class Case:
    """Token ids of each sequence, and what is done with them in order."""

    name: str
    ids: Mapping[str, Sequence[int]]
    actions: Sequence[Step | Share | Drop]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a case found: the largest relative difference, where, and how many logit rows were compared."""

    name: str
    error: float
    where: str
    num_rows: int
    num_tokens: int


# eager(ids, positions) -> logits [len(positions), vocab] of one sequence, computed in one pass.
Eager = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


def longest_window(layout: KVLayout) -> int:
    """Tokens of the longest window; 0 without one."""
    return max([group.window for group in layout.groups if group.window is not None], default=0)


def quick_cases(window: int, block_size: int, vocab_size: int) -> list[Case]:
    """Every way of batching, once, with sequences that just pass ``window``; few tokens."""
    long = window + 37
    before = max(4, window - 8)
    return [
        _case("ragged batch", {"a": 1, "b": 18, "c": long, "d": 33}, vocab_size),
        _case(
            "chunked prefill", {"a": long}, vocab_size, [{"a": piece} for piece in _pieces(long, [7, 16, 1, 13, 32])]
        ),
        _case(
            "decode in company",
            {"a": before + 20, "b": before + 50},
            vocab_size,
            [{"a": before, "b": before + 30}, *[{"a": 1, "b": 1}] * 20],
        ),
        reuse_case(window, block_size, vocab_size),
    ]


def thorough_cases(window: int, block_size: int, vocab_size: int) -> list[Case]:
    """Longer: every token on its own, and every window passed again and again."""
    long = 3 * window + 37
    pieces = _pieces(long, [7, 16, 1, 13, 32])
    return [
        _case("ragged batch", {"a": 1, "b": 18, "c": long, "d": 33}, vocab_size),
        _case("one by one", {"a": long}, vocab_size, [{"a": 1}] * long),
        _case("chunked prefill", {"a": long}, vocab_size, [{"a": piece} for piece in pieces]),
        _case(
            "decode in company",
            {"a": 20 + window, "b": 60 + window},
            vocab_size,
            [{"a": 4, "b": 44}, *[{"a": 1, "b": 1}] * (16 + window)],
        ),
        _case(
            "chunks beside decode",
            {"a": long, "b": len(pieces) + 5},
            vocab_size,
            [{"b": 5}, *[{"a": piece, "b": 1} for piece in pieces]],
        ),
        reuse_case(window, block_size, vocab_size),
    ]


def reuse_case(window: int, block_size: int, vocab_size: int) -> Case:
    """A prefix hit that both owners continue differently, then a preemption and replay."""
    prefix = random_ids(2 * block_size, vocab_size, 7)
    ids = {
        "first": prefix + random_ids(window + 20, vocab_size, 8),
        "second": prefix + random_ids(window + 30, vocab_size, 9),
    }
    together: list[Step] = [{"first": 1, "second": 1}] * 9
    rest = {name: len(tokens) - len(prefix) - 9 for name, tokens in ids.items()}
    actions: list[Step | Share | Drop] = [
        {"first": len(prefix)},
        Share("first", "second", 2),
        *together,
        rest,
        Drop("first"),
        {"first": len(ids["first"])},
    ]
    return Case("prefix hit and preemption", ids, actions)


def run_case(runner: PagedRunner, case: Case, eager: Eager, *, rows: int | None = None) -> Check:
    """Run ``case`` and compare the logits of each chunk's last ``rows`` tokens (None: of all) with eager's."""
    lengths = {name: 0 for name in case.ids}
    wanted: dict[str, set[int]] = {name: set() for name in case.ids}
    starts: list[dict[str, int]] = []  # per step
    for action in case.actions:
        if isinstance(action, Share):
            lengths[action.target] = action.num_blocks * runner.block_size
        elif isinstance(action, Drop):
            lengths[action.name] = 0
        else:
            starts.append({name: lengths[name] for name in action})
            for name, count in action.items():
                end = lengths[name] + count
                wanted[name].update(range(end - (count if rows is None else min(rows, count)), end))
                lengths[name] = end
    positions = {name: sorted(found) for name, found in wanted.items()}
    expected = {name: eager(case.ids[name], positions[name]) for name in case.ids if positions[name]}

    worst, where, compared, computed, number = 0.0, "", 0, 0, 0
    for action in case.actions:
        if isinstance(action, Share):
            runner.share(action.source, action.target, action.num_blocks)
            continue
        if isinstance(action, Drop):
            runner.drop(action.name)
            continue
        first = starts[number]
        chunks = {name: case.ids[name][first[name] : first[name] + count] for name, count in action.items()}
        for name, logits in runner.step(chunks, rows=rows).items():
            end = first[name] + len(chunks[name])
            at = positions[name].index(end - len(logits))
            found = difference(logits, expected[name][at : at + len(logits)])
            if found > worst or not where:
                worst, where = found, f"step {number}, sequence {name}, tokens {end - len(logits)} to {end - 1}"
            compared += len(logits)
            computed += len(chunks[name])
        number += 1
    return Check(name=case.name, error=worst, where=where, num_rows=compared, num_tokens=computed)


def tokens_of(case: Case, block_size: int) -> int:
    """Tokens that a runner must hold for ``case``, each sequence's last block in full."""
    return sum(-(-len(ids) // block_size) * block_size for ids in case.ids.values())


def eager_of(model: Any) -> Eager:
    """transformers' eager attention on ``model``, which must be switched to it."""

    @torch.inference_mode()
    def eager(ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        device = next(model.parameters()).device
        keep = torch.tensor(list(positions), device=device)
        logits: torch.Tensor = model(
            input_ids=torch.tensor([list(ids)], device=device), use_cache=False, logits_to_keep=keep
        ).logits[0]
        return logits

    return eager


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """max |difference| over max |logit|; infinite where anything is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max())


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """``count`` token ids, equal for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [int(x) for x in torch.randint(0, vocab_size, (count,), generator=generator)]


def _case(name: str, lengths: Mapping[str, int], vocab_size: int, steps: Sequence[Step] | None = None) -> Case:
    ids = {key: random_ids(count, vocab_size, seed) for seed, (key, count) in enumerate(lengths.items())}
    return Case(name, ids, [lengths] if steps is None else steps)


def _pieces(total: int, sizes: Sequence[int]) -> list[int]:
    pieces: list[int] = []
    while sum(pieces) < total:
        pieces.append(min(sizes[len(pieces) % len(sizes)], total - sum(pieces)))
    return pieces
