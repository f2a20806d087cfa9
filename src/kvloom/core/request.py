"""What a caller asks for: sampling parameters, output constraints, and the engine's request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvloom.core.errors import RequestError

MAX_N = 64
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings together
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """A constraint on the output.

    ``text`` holds the JSON schema, the regular expression, the Lark grammar, or a JSON list of
    strings for ``choice``; it is empty for ``json_object``.
    """

    kind: GrammarKind
    text: str = ""


def _finite(value: float, low: float, high: float, param: str) -> None:
    # NaN fails every comparison, so the test is written to be false for it.
    if not (low <= value <= high):
        raise RequestError(f"{param} is {value}; it must be between {low:g} and {high:g}", param=param)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 is off. ``max_tokens`` None means as far as the model's
    context goes. ``logprobs`` k returns the chosen token's log-probability and the k best (0: only
    the chosen one). ``seed`` makes sampling repeatable whatever else is in the batch.

    Raises:
        RequestError: a value is outside its range; ``param`` names it.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise RequestError(f"n is {self.n}; it must be between 1 and {MAX_N}", param="n")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1", param="max_tokens")
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must not be negative", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower min_tokens",
                param="min_tokens",
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(
                f"temperature is {self.temperature}; it must be a finite number of at least 0", param="temperature"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1", param="top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be at least 0 (0 switches it off)", param="top_k")
        _finite(self.min_p, 0.0, 1.0, "min_p")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above 0",
                param="repetition_penalty",
            )
        _finite(self.presence_penalty, -2.0, 2.0, "presence_penalty")
        _finite(self.frequency_penalty, -2.0, 2.0, "frequency_penalty")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for value in self.logit_bias.values():
            _finite(value, -100.0, 100.0, "logit_bias")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}; it must fit into 64 bits", param="seed")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        characters = sum(len(text) for text in self.stop)
        if characters > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop holds {characters} characters; at most {MAX_STOP_CHARACTERS} are allowed", param="stop"
            )
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string; leave it out", param="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise RequestError(f"{name} is {value}; it must be between 0 and {MAX_LOGPROBS}", param=name)
