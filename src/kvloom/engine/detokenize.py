"""From token ids to text, one token at a time, never half a character.

The pieces joined (with `finish`) equal ``tokenizer.decode`` of all tokens without space clean-up,
decoded as the continuation of the prompt: a decoder that drops the text's first space does so only
where no prompt precedes.

Two kinds of decoder cover nearly all language models and are followed exactly, at a cost per token
that does not grow: byte-level (GPT-2, Llama 3, Qwen, SmolLM) and byte-fallback (SentencePiece:
Llama 2, Gemma, Mistral). Others are decoded in a window that slides along with the text.

``tokenizers.decoders.DecodeStream`` is not used: it holds text back without bound while the output
ends in U+FFFD, and raises where a later byte spoils a run of byte tokens that it has put out already.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

_CONTEXT_TOKENS = 8  # of the prompt, for decoders whose text depends on what comes before
_MAX_WINDOW = 16  # tokens that may wait for a character to become whole
_REPLACEMENT = "�"


class Detokenizer(Protocol):
    """Text of one sequence of tokens.

    ``lead``: how much of what `push` returned last belongs to earlier tokens.
    """

    lead: int

    def push(self, token_id: int) -> str:
        """The text that became final with this token; often its own, sometimes none."""
        ...

    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD."""
        ...


@dataclass(slots=True)
class _Vocabulary:
    """What the detokenizers of one tokenizer share."""

    backend: Any  # tokenizers.Tokenizer
    special: frozenset[int]
    decoders: list[dict[str, Any]]
    bytes_of: dict[int, bytes] = field(default_factory=dict)

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """None for a token that ``decode`` leaves out; ids beyond the vocabulary are such."""
        if token_id < 0 or (skip_special_tokens and token_id in self.special):
            return None
        token: str | None = self.backend.id_to_token(token_id)
        return token


@lru_cache(maxsize=8)  # listing a large tokenizer's special tokens takes tens of milliseconds
def _vocabulary(tokenizer: Any) -> _Vocabulary:
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    decoder: dict[str, Any] = {"type": "None"}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    return _Vocabulary(
        backend=backend,
        special=frozenset(token_id for token_id, token in added.items() if token.special),
        decoders=decoder["decoders"] if decoder["type"] == "Sequence" else [decoder],
    )


def detokenizer(tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    """The right detokenizer for a fast Hugging Face tokenizer, at the end of a prompt."""
    vocabulary = _vocabulary(tokenizer)
    kinds = [decoder["type"] for decoder in vocabulary.decoders]
    if kinds == ["ByteLevel"]:
        return _ByteLevel(vocabulary, skip_special_tokens)
    context = [
        token_id
        for token_id in map(int, prompt_token_ids[-_CONTEXT_TOKENS:])
        if vocabulary.token(token_id, skip_special_tokens) is not None
    ]
    rules = _fallback_rules(vocabulary.decoders)
    if rules is not None:
        replaced, (strip_content, strip_count) = rules
        return _ByteFallback(vocabulary, skip_special_tokens, replaced, strip_content, 0 if context else strip_count)
    return _Window(vocabulary, skip_special_tokens, context)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTES = _byte_alphabet()


class _ByteLevel:
    """Every token is bytes; only an unfinished UTF-8 sequence (three bytes at most) waits."""

    lead = 0

    def __init__(self, vocabulary: _Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = self._vocabulary.bytes_of.get(token_id)
        if data is None or (self._skip and token_id in self._vocabulary.special):
            token = self._vocabulary.token(token_id, self._skip)
            if token is None:
                return ""
            values = [_BYTES.get(character) for character in token]
            # An added token may hold characters outside the alphabet; it then stands for itself.
            data = token.encode() if None in values else bytes(value for value in values if value is not None)
            self._vocabulary.bytes_of[token_id] = data
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _fallback_rules(decoders: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], tuple[str, int]] | None:
    """Read ``[Replace…, ByteFallback, Fuse, Strip]``: replacements, and what the text's start loses; or None."""
    kinds = [decoder["type"] for decoder in decoders]
    if "ByteFallback" not in kinds:
        return None
    position = kinds.index("ByteFallback")
    before, after = decoders[:position], decoders[position + 1 :]
    if any(d["type"] != "Replace" or "String" not in d["pattern"] for d in before):
        return None
    strip = ("", 0)
    if [d["type"] for d in after] == ["Fuse", "Strip"] and after[1]["stop"] == 0:
        strip = (after[1]["content"], after[1]["start"])
    elif [d["type"] for d in after] not in ([], ["Fuse"]):
        return None
    return [(d["pattern"]["String"], d["content"]) for d in before], strip


class _ByteFallback:
    """Tokens are text, except ``<0xE4>`` and the like, which are bytes.

    A run of byte tokens is characters only if the whole run is valid UTF-8; otherwise each byte is a
    U+FFFD, also those that looked complete. So a run waits for its end.
    """

    def __init__(
        self,
        vocabulary: _Vocabulary,
        skip_special_tokens: bool,
        replaced: list[tuple[str, str]],
        strip_content: str,
        strip_count: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._replaced = replaced
        self._run = bytearray()
        self.lead = 0
        self._strip_content = strip_content
        self._strip_left = strip_count

    def push(self, token_id: int) -> str:
        self.lead = 0
        token = self._vocabulary.token(token_id, self._skip)
        if token is None:
            return ""
        for old, new in self._replaced:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                self._run.append(int(token[3:5], 16))
                return ""
            except ValueError:
                pass  # it only looked like a byte
        run = self._strip(self._end_run())
        self.lead = len(run)
        return run + self._strip(token)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_content:
                self._strip_left = 0
                break
            text, self._strip_left = text[1:], self._strip_left - 1
        return text


class _Window:
    """Any decoder whose text for a token depends on its neighbours only."""

    lead = 0

    def __init__(self, vocabulary: _Vocabulary, skip_special_tokens: bool, context: list[int]) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        while context and self._decode(context).endswith(_REPLACEMENT):
            context = context[:-1]
        self._tokens = context
        self._known = self._decode(context)  # text of the tokens that is out already
        self._num_known = len(context)

    def push(self, token_id: int) -> str:
        if self._vocabulary.token(token_id, self._skip) is None:
            return ""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        waiting = len(self._tokens) - self._num_known
        if text.endswith(_REPLACEMENT) and waiting < _MAX_WINDOW:
            return ""
        return self._put_out(text)

    def finish(self) -> str:
        return self._put_out(self._decode(self._tokens)) if len(self._tokens) > self._num_known else ""

    def _put_out(self, text: str) -> str:
        new = text[len(self._known) :]
        # The tokens just put out become the context of the next, unless they have no text to be one.
        context = self._tokens[self._num_known :]
        known = self._decode(context)
        if known:
            self._tokens, self._known = context, known
        else:
            self._known = text
        self._num_known = len(self._tokens)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._vocabulary.backend.decode(token_ids, skip_special_tokens=self._skip))
