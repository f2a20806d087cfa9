"""Text to token ids and back, without holding up the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

# Below this, tokenising takes about as long as a visit to another thread.
INLINE_CHARS = 2048


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as text (invalid UTF-8 replaced) and as the bytes it stands for."""

    text: str
    data: bytes


class Tokenization:
    """The engine's tokenizer, used through its immutable half.

    The wrapper's ``__call__`` sets truncation on the shared Rust object, which fails while another
    thread reads it ("Already borrowed"). ``encode_batch`` leaves it alone and, unlike ``encode``,
    releases the interpreter lock while it works.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._byte_level = "ByteLevel" in str(self._backend.decoder)
        self._added = {int(index): token.content for index, token in tokenizer.added_tokens_decoder.items()}
        self._texts: dict[int, TokenText] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvloom-tokenize")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """``work()``: here when its input is small, else in the tokenising thread."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        def work() -> list[int]:
            encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return list(encoding.ids)

        return await self.run(len(text), work)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        def work() -> str:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

        return await self.run(len(token_ids), work)

    def token(self, token_id: int) -> TokenText:
        """One token by itself, as logprobs show it."""
        known = self._texts.get(token_id)
        if known is None:
            data = self._token_bytes(token_id)
            known = self._texts[token_id] = TokenText(data.decode("utf-8", "replace"), data)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        name = self._backend.id_to_token(token_id)
        if name is None:  # the embedding has more rows than the vocabulary has tokens
            return b""
        if self._byte_level:
            return b"".join(_BYTES.get(char, char.encode()) for char in name)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
        if byte:
            return bytes([int(byte.group(1), 16)])
        return str(name).replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others come from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = {char: bytes([byte]) for char, byte in _byte_level_alphabet().items()}
