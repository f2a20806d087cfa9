"""Teacher forcing: every token's logits for a given text, computed in chunks through the engine's own path.

For measuring an engine that serves nobody at the moment.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvloom.core.errors import CapacityError
from kvloom.core.request import SamplingParams
from kvloom.core.sequence import Sequence
from kvloom.engine.engine import Engine
from kvloom.engine.scheduler import Chunk


def teacher_forced(
    engine: Engine, token_ids: np.ndarray, chunk: int, *, first_wanted: int = 0
) -> Iterator[torch.Tensor]:
    """Logits [n, vocab] float32 of ``token_ids`` (int32 [T]), ``chunk`` tokens at a time, in order.

    Chunks before position ``first_wanted`` give none, and the one that holds it gives them from there on.

    Raises:
        CapacityError: the cache is too small for the text.
    """
    sequence = Sequence(
        request_id="teacher forcing", index=0, prompt=token_ids, params=SamplingParams(), priority=0, order=0, salt=b"",
        seed=0, arrival_time=0.0, max_len=len(token_ids),
    )  # fmt: skip
    manager = engine.manager
    sequence.cache = manager.open(b"teacher forcing")
    try:
        for start in range(0, len(token_ids), chunk):
            end = min(start + chunk, len(token_ids))
            if not manager.reserve(sequence.cache, end):
                raise CapacityError(f"the cache is too small for {end} tokens; give more --kv-cache-memory")
            wanted = np.arange(max(0, min(first_wanted, end - 1) - start), end - start)  # a pass gives one at least
            logits = engine.runner.forward([Chunk(sequence, start, end - start)], wanted).values
            if end > first_wanted:
                yield logits.float()
            manager.commit(sequence.cache, sequence.token_ids, end)
    finally:
        manager.release(sequence.cache)
