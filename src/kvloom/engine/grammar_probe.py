"""A child process that compiles untrusted grammars first, so that only harmless ones reach the server.

llguidance bounds its parser, but a grammar can still recurse until the stack overflows (a chain of
2,000 JSON schema references ends the process) or compute for many seconds (``multipleOf: 999983``
takes 15). Neither can be caught in the process it happens in. The child compiles on a small stack,
under limits of processor time and memory, and takes a few steps; if it dies, the grammar is refused
and the next one gets a new child.

Run as a script the module is the child: it reads one JSON document per line and answers each with
one. It imports nothing but the standard library and llguidance, so it starts in about 0.2 s.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

CPU_SECONDS = 2
MEMORY_BYTES = 2 << 30
STACK_BYTES = 2 << 20  # a quarter of what threads get by default on Linux, where the server compiles
WALL_SECONDS = 30.0
_STEPS = 12


class GrammarProbe:
    """The parent's side: starts the child when first needed and again after it died. Thread-safe."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> str | None:
        """Why a grammar (llguidance's own form) is refused, or None.

        Raises:
            TimeoutError: other grammars keep the child busy.
        """
        if not self._lock.acquire(timeout=WALL_SECONDS):
            raise TimeoutError(f"other grammars have kept the checker busy for {WALL_SECONDS:.0f} s; try again later")
        try:
            return self._check(grammar)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _check(self, grammar: str) -> str | None:
        child = self._start()
        assert child.stdin is not None
        request = json.dumps({"grammar": grammar, "limits": self._limits}).encode() + b"\n"
        try:
            child.stdin.write(request)
            child.stdin.flush()
        except BrokenPipeError:
            return self._obituary()
        answer = self._read_line(child)
        if answer is None:
            return self._obituary()
        error: str = json.loads(answer)["error"]
        return error or None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._stop()
            self._child = subprocess.Popen(
                [sys.executable, "-I", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # closing flushes what the dead child never read

    def _read_line(self, child: subprocess.Popen[bytes]) -> bytes | None:
        """One line, or None when the child died or took too long (it is ended then)."""
        assert child.stdout is not None
        line = b""
        deadline = time.monotonic() + WALL_SECONDS
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                child.kill()
                return None
            piece = os.read(child.stdout.fileno(), 65536)
            if not piece:
                return None
            line += piece
        return line

    def _obituary(self) -> str:
        assert self._child is not None
        status = self._child.wait()
        self._stop()
        if status == -signal.SIGXCPU:
            return f"it takes more than {CPU_SECONDS} s to compile; simplify it"
        if status in (-signal.SIGSEGV, -signal.SIGBUS):
            return "its rules or references are nested too deeply; flatten it"
        if status == -signal.SIGABRT:
            return f"compiling it takes more than {MEMORY_BYTES >> 30} GiB of memory; simplify it"
        if status == -signal.SIGKILL:
            return f"compiling it did not end within {WALL_SECONDS:.0f} s; simplify it"
        return f"the process that checks it ended with status {status}; simplify it"


class _ByteTokenizer:
    """256 bytes and an end token: what a grammar costs hardly depends on the tokenizer."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"</s>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _try(grammar: str, limits: Mapping[str, int], tokenizer: Any) -> str:
    """Compile and take a few steps; the error, or an empty string."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**limits))
    draw = random.Random(0)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(257) if mask >> token & 1]
        if not matcher.is_error():
            matcher.consume_token(draw.choice(allowed))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _serve() -> None:
    import resource

    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokenizer()))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, hard))
        answers: list[str] = []

        def work(request: Any = request, answers: list[str] = answers) -> None:
            try:
                answers.append(_try(request["grammar"], request["limits"], tokenizer))
            except Exception as error:  # a panic in Rust arrives as an exception; it is the grammar's fault
                answers.append(f"{type(error).__name__}: {error}")

        threading.stack_size(STACK_BYTES)
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        sys.stdout.write(json.dumps({"error": answers[0] if answers else "the compiler failed without a message"}))
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
