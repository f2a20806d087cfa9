"""Worker processes that take one JSON line per request and give one back.

Each engine lives in a process of its own, so that several stay loaded, in environments of their own, while one at a
time computes. Standard library only: workers import this file in other engines' environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from bench.cells import Cell

ROOT = Path(__file__).parent.parent


class Engine(Protocol):
    """What a worker serves. Whatever these raise is told to the parent as the reason."""

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model. Returns at least ``version``, ``dtype`` and ``cache_element_bytes``."""
        ...

    def prepare(self, cell: Cell) -> None:
        """Get ready for rounds of ``cell``, warmed up; raises where the engine cannot run it."""
        ...

    def round(self, number: int) -> dict[str, Any]:
        """One round: ``seconds`` and ``units`` (steps of decode, tokens of other phases), and what else is known."""
        ...

    def release(self) -> None:
        """Forget the cell."""
        ...


def answer(engine: Engine, requests: TextIO, answers: TextIO) -> None:
    """Serve requests until their end."""
    for line in requests:
        message = json.loads(line)
        try:
            reply = {"ok": True, "result": _call(engine, message)}
        except Exception as error:  # every failure of an engine is a result of the benchmark
            traceback.print_exc(file=sys.stderr)
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _call(engine: Engine, message: Mapping[str, Any]) -> Any:
    match message["do"]:
        case "load":
            return engine.load(message["options"])
        case "prepare":
            return engine.prepare(Cell(**message["cell"]))
        case "round":
            return engine.round(message["number"])
        case "release":
            return engine.release()
        case other:
            raise ValueError(f"unknown request {other!r}")


def serve(engine: Engine) -> None:
    """Serve on the process's own stdin and stdout. What libraries print goes to stderr instead."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        answer(engine, sys.stdin, answers)


class WorkerError(Exception):
    """An engine refused, failed, hung or died; the message is the reason in one line."""


class Worker:
    """The parent's end of a worker. A failed request leaves it usable unless the process is gone."""

    def __init__(self, name: str, command: Sequence[str], *, threads: int, log: Path, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        try:
            with log.open("wb") as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd=ROOT,
                    env=environment,
                    start_new_session=True,  # so that what it starts ends with it
                )
        except OSError as error:
            raise WorkerError(f"cannot start {command[0]}: {error.strerror}") from error

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request and wait for its result.

        Raises:
            WorkerError: the engine says why not, or the worker died or hung.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(self._epitaph()) from error
        reply = json.loads(self._read_line(time.monotonic() + self.timeout))
        if not reply["ok"]:
            raise WorkerError(" ".join(str(reply["error"]).split())[:300])
        return reply["result"]

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerError(f"no answer within {self.timeout:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise WorkerError(self._epitaph())
            received += piece
        return received

    def _epitaph(self) -> str:
        status = self._process.wait()
        died = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        said = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended {died}" + (f"; it last said: {said[-1][:200]}" if said else "")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        """Processor time of the worker and all that it started, so far."""
        return tree_cpu_seconds(self._process.pid)

    def close(self) -> None:
        """End the worker and what it started."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def tree_cpu_seconds(pid: int) -> float:
    """Processor time of a process and its living descendants (Linux; 0 where there is no /proc)."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # ended meanwhile
            continue
        fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
        number = int(stat.parent.name)
        parents[number] = int(fields[1])
        # Its own, and that of children that ended and were waited for.
        ticks[number] = sum(map(int, fields[11:15]))
    members = {pid}
    while more := {child for child, parent in parents.items() if parent in members} - members:
        members |= more
    return sum(ticks.get(member, 0) for member in members) / os.sysconf("SC_CLK_TCK")
