"""The text of one sequence as its tokens come: whole characters, stop strings, offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvloom.core.request import SamplingParams
from kvloom.engine.detokenize import detokenizer
from kvloom.engine.stops import stop_automaton


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became final.

    ``stopped`` is the stop string that ended the output, and ``num_tokens_used`` how many of the
    pushed tokens belong to the output: all of them, or up to the one that completed the stop string.
    """

    text: str
    stopped: str | None = None
    num_tokens_used: int = 0


class TextStream:
    """Text of one sequence.

    The deltas joined equal ``tokenizer.decode`` of the tokens used (see `detokenize`), cut where the
    first stop string begins (or ends, with ``include_stop_str_in_output``). The stop string that is
    complete first counts; of several that end together, the longest. Text that may turn out to
    begin a stop string is held back. Stop strings completed before ``min_tokens`` tokens are text.

    Attributes:
        text_offsets: per token used, where its text begins in the output's text; kept only when
            ``params.logprobs`` is set. Tokens that share a character, or a run of byte tokens, share
            the offset of its first.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.text_offsets: list[int] = []
        self._detokenizer = detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        self._automaton = stop_automaton(params.stop) if params.stop else None
        self._state = 0
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._keep_offsets = params.logprobs is not None
        self._num_tokens = 0
        self._num_characters = 0  # decoded, held back or not
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens; after a stop string none is used any more."""
        parts: list[str] = []
        used = 0
        for token_id in token_ids:
            if self._stopped is not None:
                break
            used += 1
            self._num_tokens += 1
            piece = self._detokenizer.push(token_id)
            if self._keep_offsets:
                self.text_offsets.append(self._num_characters + self._detokenizer.lead)
            if piece:
                parts.append(self._scan(piece))
        return TextDelta("".join(parts), self._stopped, used)

    def finish(self) -> TextDelta:
        """End the text and flush what was held back; may still find a stop string in it."""
        if self._stopped is not None:
            return TextDelta("", self._stopped)
        text = self._scan(self._detokenizer.finish())
        if self._stopped is None:
            text, self._held = text + self._held, ""
        return TextDelta(text, self._stopped)

    def _scan(self, piece: str) -> str:
        """Look for stop strings in more text; what is final of it and of the text held back."""
        self._num_characters += len(piece)
        if self._automaton is None:
            return piece
        automaton, state = self._automaton, self._state
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = automaton.step(state, character)
            found = automaton.found[state]
            if found is not None and self._num_tokens >= self._min_tokens:
                self._stopped, self._held = found, ""
                return text[:end] if self._include_stop else text[: end - len(found)]
        self._state = state
        final = len(text) - automaton.depth[state]
        self._held = text[final:]
        return text[:final]
