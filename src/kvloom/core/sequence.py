"""A sequence: one line of tokens that the engine continues. State and counts, no policy."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from kvloom.core.request import SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One of a request's ``n`` sequences.

    ``num_tokens`` is the logical length (positions, stopping, API); ``num_computed`` of them have
    their keys and values in the cache. ``cache`` is the manager's record while the sequence runs.
    ``order`` ranks equal priorities by arrival.
    """

    __slots__ = (
        "arrival_time",
        "cache",
        "cached_tokens",
        "computed_tokens",
        "first_scheduled",
        "grammar",
        "index",
        "miss_reason",
        "num_preemptions",
        "num_prompt",
        "num_tokens",
        "order",
        "params",
        "priority",
        "prompt_logprobs",
        "recovered_tokens",
        "request_id",
        "salt",
        "seed",
        "siblings",
        "status",
        "stop_token_id",
        "tokens",
    )

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt: np.ndarray,
        params: SamplingParams,
        priority: int,
        order: int,
        salt: bytes,
        seed: int,
        arrival_time: float,
        max_len: int,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.params = params
        self.priority = priority
        self.order = order
        self.salt = salt
        self.seed = seed
        self.arrival_time = arrival_time
        self.tokens = np.empty(max_len, dtype=np.int32)  # a bound known at admission: never grown
        self.tokens[: len(prompt)] = prompt
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt)
        self.status = SequenceStatus.WAITING
        self.cache: Any = None
        self.grammar: Any = None
        self.siblings = params.n - 1 if index == 0 else 0  # still to be forked off this one
        self.stop_token_id: int | None = None
        self.prompt_logprobs: list[Any] = []
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.recovered_tokens = 0
        self.miss_reason: str | None = None  # why its prefix hit was no longer
        self.num_preemptions = 0
        self.first_scheduled: float | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Scheduling order: smaller runs first."""
        return (self.priority, self.order, self.index)

    @property
    def num_computed(self) -> int:
        return 0 if self.cache is None else int(self.cache.num_computed)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def max_len(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [num_tokens], prompt and output."""
        return self.tokens[: self.num_tokens]

    def append(self, token_id: int) -> None:
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
