"""Concurrent streaming requests against an OpenAI-compatible server, from a process of its own.

Reads one JSON document on stdin (``url``, ``prompts`` of token ids, ``max_tokens``), sends all prompts at once, and
prints one with ``seconds``, ``tokens``, ``first_token_s`` (median) and ``cpu_seconds``, what the client itself took.
Written on asyncio's streams because the client shares its cores with the server: it reads bytes and parses the last
event only.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any
from urllib.parse import urlsplit

DONE = b"data: [DONE]"


async def stream(host: str, port: int, prompt: list[int], max_tokens: int) -> tuple[int, float]:
    """Tokens of one answer, and seconds until its first event."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    pieces: list[bytes] = []
    first = None
    while piece := await reader.read(1 << 16):
        if first is None and b"data: " in piece:
            first = time.perf_counter() - start
        pieces.append(piece)
    writer.close()
    return tokens_of(b"".join(pieces)), first or 0.0


def tokens_of(answer: bytes) -> int:
    """The completion tokens that a stream's last event before the end tells of.

    Raises:
        RuntimeError: the answer is an error, or ended early.
    """
    events, done, _ = answer.rpartition(DONE)
    if not answer.startswith(b"HTTP/1.1 200") or not done:
        raise RuntimeError(f"the server answered {answer[:300]!r}")
    # A chunk's size may stand between two events, never within one: each is sent in one piece.
    last = events[events.rindex(b"data: ") + len(b"data: ") :]
    usage = json.JSONDecoder().raw_decode(last.decode())[0]["usage"]
    return int(usage["completion_tokens"])


async def run(order: dict[str, Any]) -> dict[str, float]:
    address = urlsplit(order["url"])
    assert address.hostname is not None and address.port is not None
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(stream(address.hostname, address.port, prompt, order["max_tokens"]) for prompt in order["prompts"])
    )
    return {
        "seconds": time.perf_counter() - start,
        "tokens": sum(tokens for tokens, _ in answers),
        "first_token_s": statistics.median(first for _, first in answers),
    }


def main() -> None:
    order = json.load(sys.stdin)
    before = time.process_time()
    result = asyncio.run(run(order))
    print(json.dumps({**result, "cpu_seconds": time.process_time() - before}))


if __name__ == "__main__":
    main()
