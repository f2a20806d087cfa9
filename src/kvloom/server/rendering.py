"""Answers in OpenAI's shapes, whole and in chunks. Plain dictionaries, one function per shape."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloom import __version__
from kvloom.core.messages import TokenLogprob
from kvloom.core.request import SamplingParams
from kvloom.engine.text import TextStream
from kvloom.server.generation import Choice, Delta, Generation
from kvloom.server.tokenization import Tokenization

Json = dict[str, Any]
Row = tuple[int, TokenLogprob | None, int]  # token id, its score, where its text begins
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def usage(generation: Generation) -> Json:
    """Tokens of the request so far.

    A prompt counts once however many answers it gets, and so do its cached tokens (``n`` answers
    share them); ``kvloom`` adds up what the cache did for every sequence, and names what made it inexact.
    """
    prompt = sum(len(request.prompt_token_ids) for request in generation.requests)
    completion = sum(choice.num_tokens for choice in generation.choices)
    per_sequence = [choice.usage for choice in generation.choices]
    firsts: dict[str, int] = {}
    for choice in generation.choices:
        firsts.setdefault(choice.request.request_id, choice.usage.cached_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(firsts.values())},
        "kvloom": {
            "cached_tokens": sum(one.cached_tokens for one in per_sequence),
            "computed_tokens": sum(one.computed_tokens for one in per_sequence),
            "stored_tokens": sum(one.stored_tokens for one in per_sequence),
            "recovered_tokens": sum(one.recovered_tokens for one in per_sequence),
            "preemptions": sum(one.num_preemptions for one in per_sequence),
            "approximations": sorted({text for one in per_sequence for text in one.approximations}),
        },
    }


def _number(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


@dataclass(slots=True)
class Renderer:
    """What chat and plain completions share: the head of every document, and the tokenizer."""

    id: str
    model: str
    tokenization: Tokenization
    logprobs: bool
    prompt_logprobs: bool = False
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"kvloom-{__version__}",
        }

    def _prompt_logprobs(self, generation: Generation, choice: Choice) -> list[Json | None] | None:
        """vLLM's shape: per prompt token None or ``{token id: {logprob, decoded_token}}``."""
        given = generation.prompt_logprobs.get(choice.request.request_id)
        if given is None or not self.prompt_logprobs:
            return None
        return [None if one is None else self._by_id(one) for one in given]

    def _add_token_ids(self, document: Json, delta: Delta) -> None:
        """vLLM's ``return_token_ids``: the exact tokens, which text alone does not give back."""
        if self.token_ids:
            document["token_ids"] = delta.token_ids

    def _by_id(self, one: TokenLogprob) -> Json:
        pairs = dict([(one.token_id, one.logprob), *one.top])
        return {
            str(token_id): {"logprob": _number(logprob), "decoded_token": self.tokenization.token(token_id).text}
            for token_id, logprob in pairs.items()
        }


@dataclass(slots=True)
class ChatRenderer(Renderer):
    """``chat.completion`` and its chunks."""

    _begun: set[int] = field(default_factory=set)

    def whole(self, generation: Generation) -> Json:
        choices = []
        for choice in generation.choices:
            delta = choice.take()
            document = {
                "index": choice.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            prompt_logprobs = self._prompt_logprobs(generation, choice)
            if prompt_logprobs is not None:
                document["prompt_logprobs"] = prompt_logprobs
            self._add_token_ids(document, delta)
            choices.append(document)
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(generation)}

    def chunks(self, generation: Generation, choice: Choice, delta: Delta) -> list[Json]:
        """The chunks for one delta; a choice's first is preceded by the one that names the role."""
        documents = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            first = self._chunk(choice, {"role": "assistant", "content": ""})
            prompt_logprobs = self._prompt_logprobs(generation, choice)
            if prompt_logprobs is not None:
                first["choices"][0]["prompt_logprobs"] = prompt_logprobs
            documents.append(first)
        content = {"content": delta.text} if delta.text else {}
        documents.append(self._chunk(choice, content, delta))
        return documents

    def _chunk(self, choice: Choice, content: Json, delta: Delta | None = None) -> Json:
        document: Json = {
            "index": choice.index,
            "delta": content,
            "logprobs": None if delta is None else self._logprobs(delta),
            "finish_reason": None if delta is None else delta.finish_reason,
        }
        if document["finish_reason"] is not None and delta is not None:
            document["stop_reason"] = delta.stop_reason
        if delta is not None:
            self._add_token_ids(document, delta)
        return {**self._head("chat.completion.chunk"), "choices": [document]}

    def usage_chunk(self, generation: Generation) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(generation)}

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self.logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(one.token_id, one.logprob),
                    "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in one.top],
                }
                for one in delta.logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        token = self.tokenization.token(token_id)
        return {"token": token.text, "logprob": _number(logprob), "bytes": list(token.data)}


@dataclass(slots=True)
class CompletionRenderer(Renderer):
    """``text_completion`` and its chunks. ``echo`` holds each prompt's text, by engine request."""

    echo: dict[str, str] | None = None
    _begun: set[int] = field(default_factory=set)

    def whole(self, generation: Generation) -> Json:
        choices = [self._choice(generation, choice, choice.take()) for choice in generation.choices]
        return {**self._head("text_completion"), "choices": choices, "usage": usage(generation)}

    def chunks(self, generation: Generation, choice: Choice, delta: Delta) -> list[Json]:
        return [{**self._head("text_completion"), "choices": [self._choice(generation, choice, delta)]}]

    def usage_chunk(self, generation: Generation) -> Json:
        return {**self._head("text_completion"), "choices": [], "usage": usage(generation)}

    def _choice(self, generation: Generation, choice: Choice, delta: Delta) -> Json:
        begins = choice.index not in self._begun
        self._begun.add(choice.index)
        echoed = self.echo[choice.request.request_id] if self.echo is not None else ""
        document: Json = {
            "index": choice.index,
            "text": echoed + delta.text if begins else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.logprobs:
            rows: list[Row] = [
                (one.token_id, one, len(echoed) + offset)
                for one, offset in zip(delta.logprobs, delta.offsets, strict=True)
            ]
            if begins and self.echo is not None:
                rows = [*self._prompt_rows(generation, choice), *rows]
            document["logprobs"] = self._logprobs(rows)
        self._add_token_ids(document, delta)
        prompt_logprobs = self._prompt_logprobs(generation, choice) if begins else None
        if prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs
        return document

    def _prompt_rows(self, generation: Generation, choice: Choice) -> list[Row]:
        request = choice.request
        stream = TextStream(self.tokenization.tokenizer, SamplingParams(logprobs=0), ())
        stream.push(request.prompt_token_ids)
        scored = generation.prompt_logprobs[request.request_id]
        return list(zip(request.prompt_token_ids, scored, stream.text_offsets, strict=True))

    def _logprobs(self, rows: Sequence[Row]) -> Json:
        return {
            "tokens": [self.tokenization.token(token_id).text for token_id, _, _ in rows],
            "token_logprobs": [None if one is None else _number(one.logprob) for _, one, _ in rows],
            "top_logprobs": [None if one is None else self._top(one) for _, one, _ in rows],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _top(self, one: TokenLogprob) -> Json:
        """The best tokens and the chosen one. Two tokens of one text (broken UTF-8) keep the better."""
        best: Json = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            best.setdefault(self.tokenization.token(token_id).text, _number(logprob))
        return best
