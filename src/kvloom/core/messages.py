"""Plain messages between an API (HTTP server, ``LLM``) and the engine.

They hold numbers, strings, bytes and tuples only, so that API and engine may become two processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvloom.core.request import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One request for the engine: ``params.n`` sequences over one prompt of token ids.

    A lower ``priority`` runs first; equal ones run in order of arrival. ``salt`` separates tenants
    in the prefix cache. ``arrival_time`` is in seconds of ``time.monotonic()``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: bytes = b""
    arrival_time: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probability of one chosen token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceUsage:
    """What the cache did for a sequence, in tokens.

    ``cached_tokens``: prompt tokens taken from the prefix cache when the sequence was first
    admitted. ``computed_tokens``: tokens that ran through the model, recomputation included.
    ``stored_tokens``: tokens whose keys and values the sequence holds. ``recovered_tokens``: tokens
    found in the cache again after a preemption. ``num_preemptions``: times it gave its memory up.
    ``approximations``: what was asked for that makes the cache inexact, in words; empty: nothing.
    """

    cached_tokens: int = 0
    computed_tokens: int = 0
    stored_tokens: int = 0
    recovered_tokens: int = 0
    num_preemptions: int = 0
    approximations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOutput:
    """What one sequence produced in one step.

    ``index`` counts the request's ``n`` sequences. ``token_ids`` are new tokens; a stop token that
    ended the sequence is among them and named by ``stop_token_id``. ``prompt_logprobs`` come once,
    with the first output; its first entry is None (nothing precedes the first token). ``error`` is
    set when ``finish_reason`` is "error".
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    usage: SequenceUsage = field(default_factory=SequenceUsage)
    queue_seconds: float = 0.0
