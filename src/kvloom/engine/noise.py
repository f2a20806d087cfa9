"""How far rounding alone moves logits on this machine: measured at load, through the real path.

The same tokens are computed whole, in chunks, token by token, and beside other sequences. Without
``--deterministic`` the results differ by rounding, and greedy output may differ from an exact run's
only where the two best logits are closer than that. In deterministic mode they must be equal bit by
bit, or the engine does not start.
"""

from __future__ import annotations

import numpy as np
import torch

from kvloom.cache.manager import CacheManager
from kvloom.core.errors import ConfigError
from kvloom.core.request import SamplingParams
from kvloom.core.sequence import Sequence
from kvloom.engine.runner import ModelRunner
from kvloom.engine.scheduler import Chunk

PROBE_TOKENS = 96
PROBE_ROWS = 6
OTHER_SEQUENCES = 5
# Two logits move, each by up to the largest difference seen; a probe sees only a part of what a
# long run will, so the bound doubles it.
SAFETY = 4.0


def measure_noise(
    runner: ModelRunner, manager: CacheManager, *, vocab_size: int, max_tokens: int, deterministic: bool
) -> float:
    """A gap between two logits below which rounding may change their order.

    Raises:
        ConfigError: deterministic mode was asked for, and equal rows gave unequal results.
    """
    # Long enough that the last queries read encoded blocks, where there are any.
    encoded = max((item.sinks + (item.recents or 0) + 3 for item in manager.plan.storage if item.encoded), default=0)
    wanted = max(PROBE_TOKENS, encoded * manager.block_size)
    length = min(wanted, max_tokens - 1, max(2, max_tokens // 2))
    rows = min(PROBE_ROWS, length - 1)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, size=length, dtype=np.int32)
    whole = _compute(runner, manager, tokens, [length], rows, others=[])
    half = length // 2
    schedules = [
        [half, length - half],
        [length - rows] + [1] * rows,
        [length],
    ]
    others = [generator.integers(0, vocab_size, size=1 + 7 * i, dtype=np.int32) for i in range(OTHER_SEQUENCES)]
    others = [other[: max(1, (max_tokens - length) // OTHER_SEQUENCES)] for other in others]
    worst = 0.0
    for index, schedule in enumerate(schedules):
        again = _compute(runner, manager, tokens, schedule, rows, others=others if index else [])
        if deterministic and not torch.equal(again, whole):
            raise ConfigError(
                "--deterministic was asked for, but on this machine the same token gave different logits when it was "
                f"computed in another batch (largest difference {(again - whole).abs().max().item():.3g}); "
                "start without --deterministic, or use another dtype or device"
            )
        worst = max(worst, (again - whole).abs().max().item())
    return SAFETY * worst


def _compute(
    runner: ModelRunner,
    manager: CacheManager,
    tokens: np.ndarray,
    schedule: list[int],
    rows: int,
    others: list[np.ndarray],
) -> torch.Tensor:
    """Logits [rows, vocab] float32 of the last ``rows`` tokens, computed in the chunks of ``schedule``."""
    sequence = _sequence(manager, tokens)
    companions = [_sequence(manager, other) for other in others]
    found: list[torch.Tensor] = []
    start = 0
    for step, count in enumerate(schedule):
        chunks = [Chunk(sequence, start, count)]
        fits = manager.reserve(sequence.cache, start + count)
        assert fits, "the empty cache holds one sequence of max_model_len, and the probe is shorter"
        if step == len(schedule) - 1:
            # Each takes a block of its own; a cache for little more than one sequence has no room for all.
            beside = [c for c in companions if manager.reserve(c.cache, c.num_tokens)]
            chunks = [*(Chunk(c, 0, c.num_tokens) for c in beside), *chunks]
        offset = sum(chunk.count for chunk in chunks[:-1])
        first_wanted = max(start, len(tokens) - rows)
        wanted = np.arange(first_wanted, start + count, dtype=np.int64) - start + offset
        if len(wanted):
            found.append(runner.forward(chunks, wanted).values.float().cpu())
        else:
            runner.forward(chunks, np.array([offset + count - 1], dtype=np.int64))
        start += count
        manager.mark_computed(sequence.cache, start)
    for done in (sequence, *companions):
        manager.release(done.cache)
    return torch.cat(found)


def _sequence(manager: CacheManager, tokens: np.ndarray) -> Sequence:
    sequence = Sequence(
        request_id="noise probe",
        index=0,
        prompt=tokens,
        params=SamplingParams(),
        priority=0,
        order=0,
        salt=b"",
        seed=0,
        arrival_time=0.0,
        max_len=len(tokens),
    )
    sequence.cache = manager.open(b"noise probe")
    return sequence
