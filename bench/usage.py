"""What a round takes of our engine: arena bytes in use, resident memory, and seconds by part of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.resident import PeakResident
from kvloom.engine.engine import Engine
from kvloom.engine.runner import StepLogits
from kvloom.engine.scheduler import Chunk
from kvloom.models.native.model import NativeModel


class Usage:
    """Watches ``engine`` from within: a pass begins when all its spans are reserved, none is dropped and no sequence
    has ended, which is when most is in use.
    """

    def __init__(self, engine: Engine) -> None:
        self._manager = engine.manager
        self._model = engine.loaded.model
        self._forward = engine.runner.forward
        engine.runner.forward = self._watch  # type: ignore[method-assign]
        self._arena_bytes = engine.info.actual_arena_bytes
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._peak = 0
        self._held: int | None = None
        self._resident = PeakResident()

    def note_held(self) -> None:
        """All prompts of the round are computed, and all its sequences there."""
        self._held = self._used_bytes()

    def memory(self) -> dict[str, Any]:
        """Bytes since ``begin``: of the arena in all, in use at most and after the prompts, and resident."""
        found = {"arena_bytes": self._arena_bytes, "used_peak_bytes": self._peak}
        if self._held is not None:
            found["held_bytes"] = self._held
        return found | self._resident.figures()

    def take_parts(self) -> dict[str, float] | None:
        """Seconds by part of the native step since the last call; None where another step computes."""
        return self._model.take_times() if isinstance(self._model, NativeModel) else None

    def _watch(self, chunks: Sequence[Chunk], rows: np.ndarray) -> StepLogits:
        self._peak = max(self._peak, self._used_bytes())
        self._resident.look()
        return self._forward(chunks, rows)

    def _used_bytes(self) -> int:
        """Spans that live sequences refer to, shared ones once. Less work than a snapshot: it is within the step."""
        slabs, queue = self._manager.slabs, self._manager.queue
        return sum((count - queue.count(group)) * slabs.run_bytes[group] for group, count in enumerate(slabs.used_runs))
