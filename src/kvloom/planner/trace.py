"""Request traces: Mooncake and Bailian JSONL, Azure CSV. Times become seconds, block sizes are known.

=========  ===========================================  ============  ==========
format     fields                                       time unit     hash block
=========  ===========================================  ============  ==========
mooncake   timestamp, input_length, output_length,      milliseconds  512 tokens
           hash_ids
bailian    chat_id, parent_chat_id, timestamp,          seconds       16 tokens
           input_length, output_length, hash_ids
azure      TIMESTAMP, ContextTokens, GeneratedTokens    date          none
=========  ===========================================  ============  ==========

The block size is not written in the files; it belongs to the format.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvloom.core.errors import ConfigError

FORMATS: Mapping[str, tuple[float, int | None]] = {
    "mooncake": (1e-3, 512),
    "bailian": (1.0, 16),
    "azure": (1.0, None),
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: arrival in seconds from the trace's start, lengths, hashes of its prompt's blocks."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A trace in arrival order. ``block_tokens`` is the hash block, None without hashes."""

    name: str
    kind: str
    block_tokens: int | None
    requests: tuple[TraceRequest, ...]


def read_trace(path: Path, kind: str | None = None) -> Trace:
    """Read a trace; ``kind`` None recognises the format from the file.

    Raises:
        ConfigError: missing, empty, of unknown format, or with a bad line (which is named).
    """
    if kind is not None and kind not in FORMATS:
        raise ConfigError(f"--trace-format is {kind!r}; it must be one of {', '.join(FORMATS)}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read trace {path}: {error}") from error
    if not any(line.strip() for line in lines):
        raise ConfigError(f"trace {path} is empty")
    kind = kind or _recognise(path, lines)
    scale, block = FORMATS[kind]
    requests = list(_azure(path, lines) if kind == "azure" else _jsonl(path, lines, scale))
    if not requests:
        raise ConfigError(f"trace {path} holds no request")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    return Trace(
        name=path.name,
        kind=kind,
        block_tokens=block,
        requests=tuple(
            TraceRequest(r.arrival_s - start, r.input_tokens, r.output_tokens, r.hash_ids) for r in requests
        ),
    )


def _recognise(path: Path, lines: Sequence[str]) -> str:
    first = next(line for line in lines if line.strip())
    if "ContextTokens" in first:
        return "azure"
    try:
        fields = json.loads(first)
    except json.JSONDecodeError:
        fields = None
    if isinstance(fields, dict) and "input_length" in fields:
        return "bailian" if "chat_id" in fields else "mooncake"
    raise ConfigError(
        f"trace {path} is of no known format; its first line is {first[:80]!r}. Known: Mooncake JSONL, Bailian JSONL, "
        "Azure CSV; name one with --trace-format"
    )


def _jsonl(path: Path, lines: Sequence[str], scale: float) -> Iterable[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            hashes = row.get("hash_ids")
            request = TraceRequest(
                float(row["timestamp"]) * scale,
                int(row["input_length"]),
                int(row["output_length"]),
                None if hashes is None else tuple(int(value) for value in hashes),
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"trace {path}, line {number}: {type(error).__name__}: {error}") from error
        _check(path, number, request)
        yield request


def _azure(path: Path, lines: Sequence[str]) -> Iterable[TraceRequest]:
    reader = csv.DictReader(lines)
    for number, row in enumerate(reader, start=2):
        try:
            request = TraceRequest(
                _seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]), None
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"trace {path}, line {number}: {type(error).__name__}: {error}") from error
        _check(path, number, request)
        yield request


def _seconds(text: str) -> float:
    """Azure writes seven digits of a second, one more than datetime reads."""
    try:
        return float(text)
    except ValueError:
        head, _, fraction = text.strip().partition(".")
        digits = "".join(sign for sign in fraction if sign.isdigit())
        return datetime.fromisoformat(head).timestamp() + (float("0." + digits) if digits else 0.0)


def _check(path: Path, number: int, request: TraceRequest) -> None:
    if request.input_tokens < 1 or request.output_tokens < 0:
        raise ConfigError(
            f"trace {path}, line {number}: {request.input_tokens} input and {request.output_tokens} output tokens; a "
            "request has at least one token in and none below zero out"
        )


def unlimited_hit_rate(trace: Trace) -> float | None:
    """Share of prompt tokens whose whole prefix stood in an earlier prompt; None without hashes.

    Token-weighted: a matched last block counts the tokens it holds.
    """
    if trace.block_tokens is None:
        return None
    seen: set[int] = set()
    hits = total = 0
    for request in trace.requests:
        hashes = request.hash_ids or ()
        total += request.input_tokens
        matched = 0
        for value in hashes:
            if value not in seen:
                break
            matched += 1
        hits += min(matched * trace.block_tokens, request.input_tokens)
        seen.update(hashes)
    return hits / total if total else None
