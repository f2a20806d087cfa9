"""Constrained output through llguidance: which tokens a grammar allows next.

A grammar from a request is bounded three times: by the size of its text, by a trial in a child
process (`grammar_probe`), and by llguidance's own limits on every later step. A state that runs into
such a limit allows nothing any more, so its row fails in the sampler and no other row notices.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import torch
from torch import Tensor

from kvloom.core.errors import RequestError
from kvloom.core.request import Grammar
from kvloom.engine.grammar_probe import GrammarProbe

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 4096
_REMEMBERED_VERDICTS = 128
_MAX_MESSAGE = 600
# JSON allows endless white space between tokens, and a small model may write nothing else until its
# tokens are used up. A schema's own "x-guidance" wins over this.
_JSON_DEFAULTS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
# llguidance's defaults but for the row, which an object of 500 optional properties would overrun.
_LIMITS = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # about 1 KiB each
    "max_grammar_size": 500_000,
}


class GrammarState:
    """How far one sequence has come in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, bitmask_row: Tensor) -> None:
        """Write the allowed tokens into ``bitmask_row``.

        End tokens are allowed exactly where the grammar may stop, and alone once it is finished.
        After an error nothing is allowed.

        Args:
            bitmask_row: [ceil(V / 32)] int32, contiguous, on the CPU.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bitmask_row.data_ptr(), bitmask_row.numel() * 4)
        # llguidance answers a failed state with the end token; that would pass for a finished output.
        if self._matcher.is_error():
            bitmask_row.zero_()

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False if the grammar does not allow it, after which the state is in error."""
        return bool(self._matcher.consume_token(token_id))

    @property
    def is_finished(self) -> bool:
        """Nothing but an end token can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the state allows nothing any more: a token it refused, or a limit of the parser."""
        return _shorten(self._matcher.get_error()) if self._matcher.is_error() else None

    def fork(self) -> GrammarState:
        """A copy for another sequence of the request that goes on from here; a limit hit by one ends both."""
        return GrammarState(self._matcher.deep_copy())


class GrammarCompiler:
    """Turns request grammars into states over one tokenizer. Thread-safe.

    Verdicts on grammars are remembered, compiled ones are not: llguidance's copies share a lexer, and
    one that runs into a limit would spoil every later request with the same grammar.

    Args:
        tokenizer: a fast Hugging Face tokenizer. Reading it takes a second or more.
        vocab_size: width of the logits; ids that the tokenizer does not have are never allowed.
        eos_token_ids: tokens that may end the output; the tokenizer's own if empty.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        ends = list(eos_token_ids) or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
        if not ends:
            raise RequestError(
                "this model has no end token, which constrained output needs; leave response_format out",
                param="response_format",
            )
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        self._probe = GrammarProbe(_LIMITS)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarState:
        """The state before the first token of the output.

        Raises:
            RequestError: invalid, too large or too costly; ``param`` is ``response_format``.
        """
        text = to_llguidance(grammar)
        trouble = self._verdict(grammar, text)
        if trouble is None:
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
            if not matcher.is_error():
                return GrammarState(matcher)
            trouble = matcher.get_error()
        raise _refusal(grammar, _shorten(trouble))

    def _verdict(self, grammar: Grammar, text: str) -> str | None:
        """Why the probe refuses a grammar, or None."""
        with self._lock:
            if grammar in self._verdicts:
                self._verdicts.move_to_end(grammar)
                return self._verdicts[grammar]
        try:
            trouble = self._probe.check(text)
        except TimeoutError as error:  # not the grammar's fault, so nothing to remember
            raise _refusal(grammar, str(error)) from error
        with self._lock:
            self._verdicts[grammar] = trouble
            if len(self._verdicts) > _REMEMBERED_VERDICTS:
                self._verdicts.popitem(last=False)
        return trouble

    def close(self) -> None:
        """End the child process that checks grammars."""
        self._probe.close()


def fill_bitmask(states: Sequence[GrammarState | None], vocab_size: int) -> Tensor | None:
    """One step's mask: [N, ceil(V / 32)] int32, all ones in rows without a grammar; None if no row has one."""
    if all(state is None for state in states):
        return None
    bitmask = torch.full((len(states), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for row, state in zip(bitmask, states, strict=True):
        if state is not None:
            state.fill(row)
    return bitmask


def to_llguidance(grammar: Grammar) -> str:
    """A grammar in llguidance's own form.

    Raises:
        RequestError: the text is too large or visibly not what ``kind`` says.
    """
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise _refusal(grammar, f"character {error.start} is half a surrogate pair; send valid Unicode") from error
    if size > MAX_GRAMMAR_BYTES:
        raise _refusal(grammar, f"it has {size} bytes, the limit is {MAX_GRAMMAR_BYTES}; simplify it")
    matcher = llguidance.LLMatcher
    if grammar.kind == "json_object":
        return str(matcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_DEFAULTS))
    if grammar.kind == "json_schema":
        if not isinstance(_json(grammar), dict | bool):
            raise _refusal(grammar, "a JSON schema is an object")
        return str(matcher.grammar_from_json_schema(grammar.text, defaults=_JSON_DEFAULTS))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(grammar.text))
    return str(matcher.grammar_from_lark(_choice_lark(grammar)))


def _choice_lark(grammar: Grammar) -> str:
    choices = _json(grammar)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise _refusal(grammar, "it must be a list of strings, at least one, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise _refusal(grammar, f"it has {len(choices)} choices, the limit is {MAX_CHOICES}")
    # A terminal (capital letters), so that the lexer runs all choices at once.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)


def _json(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except ValueError as error:
        raise _refusal(grammar, f"it is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _refusal(grammar, "it is nested too deeply; flatten it") from error


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    kind = grammar.kind.replace("_", " ")
    return RequestError(f"the {kind} constraint is refused: {reason}", param="response_format", code="invalid_grammar")


def _shorten(message: str) -> str:
    """llguidance appends its whole state to some messages."""
    message = message.split("\n<state>")[0].strip()
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " …"
