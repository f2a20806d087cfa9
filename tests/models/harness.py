"""A model on a paged cache without an engine, and its comparison with transformers' eager attention.

``PagedRunner`` steps arbitrary schedules of chunks: block tables with shuffled offsets, window spans
freed (and poisoned) as they pass, prefixes shared. ``check_parity`` runs the schedules that every
family must pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvloom.attention.batch import KVBatch
from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.attention.scratch import scratch_store
from kvloom.core.errors import KvloomError
from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import BACKENDS, KernelBackend, QueryBatch, choose_backend

TOLERANCE = 1e-4  # max |difference| over max |logit|, float32: what issue 2 promises
ABSENT = -1


@dataclass
class PagedSequence:
    """Tokens computed so far, and per group the arena offset of each block."""

    length: int = 0
    tables: list[list[int]] = field(default_factory=list)


class PagedRunner:
    """Steps sequences through ``model``, whose attention is kvloom's, on an arena of its own."""

    def __init__(
        self,
        model: Any,
        layout: KVLayout,
        *,
        backend: KernelBackend | str = "reference",
        block_size: int = 16,
        max_tokens: int = 512,
        seed: int = 0,
    ) -> None:
        parameter = next(model.parameters())
        if isinstance(backend, str):
            backend = choose_backend(backend, parameter.device, deterministic=False, num_threads=1)
        self.model = model
        self.layout = layout
        self.block_size = block_size
        blocks = -(-max_tokens // block_size)
        self.store, self._free = scratch_store(
            layout,
            backend,
            num_spans=[blocks] * len(layout.groups),
            block_size=block_size,
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self._random = random.Random(seed)
        for offsets in self._free:
            self._random.shuffle(offsets)
        self._shared: dict[int, int] = {}  # offset -> further owners
        self.sequences: dict[Any, PagedSequence] = {}

    @torch.inference_mode()
    def step(self, chunks: Mapping[Any, Sequence[int]], *, last_only: bool = False) -> dict[Any, torch.Tensor]:
        """Compute each named sequence's next tokens.

        Returns:
            Logits [len(chunk), vocab] of every one of them; with ``last_only`` [1, vocab].
        """
        device = self.store.arena.device
        batch = [self.sequences.setdefault(name, self._new()) for name in chunks]
        for sequence, chunk in zip(batch, chunks.values(), strict=True):
            self._make_room(sequence, len(chunk))
        width = max(len(sequence.tables[0]) for sequence in batch)
        tables = tuple(
            torch.tensor(
                [sequence.tables[group] + [ABSENT] * (width - len(sequence.tables[group])) for sequence in batch],
                dtype=torch.int64,
                device=device,
            )
            for group in range(len(self.layout.groups))
        )
        counts = [len(chunk) for chunk in chunks.values()]
        queries = QueryBatch.build(counts, [sequence.length for sequence in batch], device)
        ids = torch.tensor([token for chunk in chunks.values() for token in chunk], device=device)
        ends = torch.tensor(counts, device=device).cumsum(0) - 1
        logits = self.model(
            input_ids=ids.unsqueeze(0),
            position_ids=queries.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=ends if last_only else torch.arange(len(ids), device=device),
            kv=KVBatch(store=self.store, queries=queries, tables=tables),
        ).logits[0]
        for sequence, count in zip(batch, counts, strict=True):
            sequence.length += count
        return dict(zip(chunks, logits.split([1] * len(counts) if last_only else counts), strict=True))

    def share(self, source: Any, target: Any, num_blocks: int) -> None:
        """Start ``target`` with the first ``num_blocks`` full blocks of ``source``: a prefix hit."""
        tables = [table[:num_blocks] for table in self.sequences[source].tables]
        assert num_blocks * self.block_size <= self.sequences[source].length
        for table in tables:
            for offset in table:
                self._shared[offset] = self._shared.get(offset, 0) + (offset != ABSENT)
        self.sequences[target] = PagedSequence(length=num_blocks * self.block_size, tables=[list(t) for t in tables])

    def drop(self, name: Any) -> None:
        """Give a sequence's blocks back, as preemption does."""
        for group, table in enumerate(self.sequences.pop(name).tables):
            for offset in table:
                self._release(group, offset)

    def held(self, name: Any) -> list[int]:
        """Blocks that a sequence holds, per group."""
        return [sum(offset != ABSENT for offset in table) for table in self.sequences[name].tables]

    def _new(self) -> PagedSequence:
        return PagedSequence(tables=[[] for _ in self.layout.groups])

    def _make_room(self, sequence: PagedSequence, count: int) -> None:
        for group, table in enumerate(sequence.tables):
            window = self.layout.groups[group].window
            if window is not None:
                # The chunk's first query still sees the block that holds its oldest key; older ones have passed.
                for block in range(max(0, sequence.length - window + 1) // self.block_size):
                    if table[block] != ABSENT:
                        self._release(group, table[block])
                        table[block] = ABSENT
            while len(table) * self.block_size < sequence.length + count:
                table.append(self._free[group].pop())

    def _release(self, group: int, offset: int) -> None:
        if offset == ABSENT:
            return
        if self._shared.get(offset):
            self._shared[offset] -= 1
            return
        span = self.store.formats[group].layer_bytes * self.layout.groups[group].num_layers
        self.store.arena[offset : offset + span] = 0xFF  # NaN in every float type
        self._free[group].insert(self._random.randrange(len(self._free[group]) + 1), offset)


def backends() -> list[Any]:
    """pytest parameters: every kernel backend of the table, skipped visibly where it is not built."""
    return [pytest.param(name, id=name) for name in BACKENDS]


def backend_or_skip(name: str, device: str = "cpu") -> KernelBackend:
    try:
        return choose_backend(name, torch.device(device), deterministic=False, num_threads=1)
    except (ImportError, KvloomError) as error:
        pytest.skip(f"kernels {name!r} are not available here: {error}")


def paged(model: Any) -> Any:
    """Give a model made by hand our attention, as the loader does."""
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def eager_logits(eager: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, vocab] by transformers' eager attention, one sequence at a time."""
    logits: torch.Tensor = eager(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """max |difference| over max |logit|; infinite where anything is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max())


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(x) for x in torch.randint(0, vocab_size, (count,), generator=generator)]


Schedule = list[dict[str, int]]  # steps; each says how many tokens of which sequence


def schedules(longest_window: int) -> dict[str, tuple[dict[str, int], Schedule]]:
    """Name -> (tokens of each sequence, steps). Lengths reach well past ``longest_window``."""
    long = 3 * longest_window + 37
    ragged = {"a": 1, "b": 18, "c": long, "d": 33}
    decode = {"a": 20 + longest_window, "b": 60 + longest_window}
    pieces = _pieces(long, [7, 16, 1, 13, 32])
    return {
        "ragged batch": (ragged, [ragged]),
        "one by one": ({"a": long}, [{"a": 1}] * long),
        "chunked prefill": ({"a": long}, [{"a": piece} for piece in pieces]),
        "decode in company": (
            decode,
            [{"a": 4, "b": 44}, *[{"a": 1, "b": 1}] * (16 + longest_window)],
        ),
        "chunks beside decode": (
            {"a": long, "b": len(pieces) + 5},
            [{"b": 5}, *[{"a": piece, "b": 1} for piece in pieces]],
        ),
    }


def _pieces(total: int, sizes: Sequence[int]) -> list[int]:
    pieces: list[int] = []
    while sum(pieces) < total:
        pieces.append(min(sizes[len(pieces) % len(sizes)], total - sum(pieces)))
    return pieces


def parity_cases(layout: KVLayout) -> Iterator[tuple[str, dict[str, int], Schedule]]:
    longest = max([group.window for group in layout.groups if group.window is not None], default=0)
    for name, (lengths, steps) in schedules(longest).items():
        yield name, lengths, steps


def check_parity(
    model: Any,
    eager: Any,
    layout: KVLayout,
    *,
    backend: KernelBackend | str = "reference",
    block_size: int = 16,
    tolerance: float = TOLERANCE,
) -> float:
    """Run every schedule, a prefix hit and a preemption; the largest difference found.

    Raises:
        AssertionError: a schedule's logits differ from eager's by more than ``tolerance``.
    """
    vocab_size = model.config.get_text_config().vocab_size
    worst = 0.0
    for name, lengths, steps in parity_cases(layout):
        runner = PagedRunner(model, layout, backend=backend, block_size=block_size, max_tokens=2048)
        ids = {key: random_ids(count, vocab_size, seed) for seed, (key, count) in enumerate(lengths.items())}
        expected = {key: eager_logits(eager, tokens) for key, tokens in ids.items()}
        worst = max(worst, run_schedule(runner, ids, expected, steps, tolerance, name))
    return max(worst, check_reuse(model, eager, layout, backend, block_size, tolerance))


def run_schedule(
    runner: PagedRunner,
    ids: Mapping[str, Sequence[int]],
    expected: Mapping[str, torch.Tensor],
    steps: Schedule,
    tolerance: float,
    name: str,
) -> float:
    worst = 0.0
    for number, step in enumerate(steps):
        starts = {key: runner.sequences[key].length if key in runner.sequences else 0 for key in step}
        chunks = {key: ids[key][starts[key] : starts[key] + count] for key, count in step.items()}
        for key, logits in runner.step(chunks).items():
            wanted = expected[key][starts[key] : starts[key] + len(logits)]
            found = difference(logits, wanted)
            assert found <= tolerance, f"{name}: step {number}, sequence {key}: {found:.2e} > {tolerance:.0e}"
            worst = max(worst, found)
    return worst


def check_reuse(
    model: Any, eager: Any, layout: KVLayout, backend: KernelBackend | str, block_size: int, tolerance: float
) -> float:
    """A prefix hit that both owners continue differently, then a preemption and replay."""
    vocab_size = model.config.get_text_config().vocab_size
    longest = max([group.window for group in layout.groups if group.window is not None], default=0)
    prefix = random_ids(2 * block_size, vocab_size, 7)
    ids = {
        "first": prefix + random_ids(longest + 20, vocab_size, 8),
        "second": prefix + random_ids(longest + 30, vocab_size, 9),
    }
    expected = {key: eager_logits(eager, tokens) for key, tokens in ids.items()}
    runner = PagedRunner(model, layout, backend=backend, block_size=block_size, max_tokens=2048)
    first = run_schedule(runner, ids, expected, [{"first": len(prefix)}], tolerance, "prefix hit")
    runner.share("first", "second", 2)
    rest = {key: len(tokens) - len(prefix) for key, tokens in ids.items()}
    together = [{"first": 1, "second": 1}] * 9 + [{key: count - 9 for key, count in rest.items()}]
    second = run_schedule(runner, ids, expected, together, tolerance, "after a prefix hit")
    runner.drop("first")
    replay = [{"first": len(ids["first"])}]
    return max(first, second, run_schedule(runner, ids, expected, replay, tolerance, "replay after preemption"))
