"""Several engines, loaded side by side, of which one at a time computes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.protocol import Worker, WorkerError
from bench.variants import engine_of

MODULES = {"transformers": "hf", "offline": "ours"}
Rounds = list[dict[str, Any]]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Engines:
    """The workers, and why some are not there."""

    def __init__(self, threads: int, timeout: float, logs: Path) -> None:
        self.threads = threads
        self.timeout = timeout
        self.logs = logs
        self.info: dict[str, dict[str, Any]] = {}
        self.idle_share = 0.0  # the most that engines took together while it was another's turn
        self._workers: dict[str, Worker] = {}

    def start(self, name: str, python: str | None, options: dict[str, Any]) -> None:
        """Start and load an engine with the Python of its environment; a failure is its ``not_run``."""
        log(f"loading {name}")
        engine = engine_of(name)
        try:
            if python is None:
                raise WorkerError(f"give the Python of its environment with --{engine}-python")
            worker = self._workers[name] = Worker(
                name,
                [python, "-m", f"bench.engines.{MODULES.get(engine, engine)}"],
                threads=self.threads,
                log=self.logs / f"{name}.log",
                timeout=self.timeout,
            )
            self.info[name] = worker.ask("load", options=options)
        except WorkerError as error:
            log(f"{name} is not run: {error}")
            self.info[name] = {"not_run": str(error)}
            self.stop(name)

    def stop(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.close()

    def stop_all(self) -> None:
        for name in list(self._workers):
            self.stop(name)

    def ask(self, name: str, do: str, **arguments: Any) -> Any:
        """Give one engine its turn, watching that the others rest meanwhile."""
        others = [worker for other, worker in self._workers.items() if other != name]
        before = [worker.cpu_seconds() for worker in others]
        start = time.monotonic()
        result = self._workers[name].ask(do, **arguments)
        elapsed = time.monotonic() - start
        if do == "round" and elapsed > 1.0:  # processor time is counted in hundredths
            taken = sum(worker.cpu_seconds() - was for worker, was in zip(others, before, strict=True))
            self.idle_share = max(self.idle_share, taken / elapsed)
        return result

    def run_cell(self, cell: Cell, names: Sequence[str], rounds: int) -> dict[str, Rounds | str]:
        """Rounds of each engine in turn, or the reason for there being none."""
        found: dict[str, Rounds | str] = {}
        ready: list[str] = []
        for name in names:
            if "not_run" in self.info[name]:
                found[name] = self.info[name]["not_run"]
                continue
            found[name] = []
            self._attempt(name, ready, found, "prepare", cell=vars(cell))
        for number in range(rounds):
            turn = ready[number % len(ready) :] + ready[: number % len(ready)] if ready else []
            for name in turn:  # whoever came first comes last, so that none is always behind the same other
                self._attempt(name, ready, found, "round", number=number)
        for name in list(ready):
            self._attempt(name, ready, found, "release")
        return found

    def _attempt(self, name: str, ready: list[str], found: dict[str, Rounds | str], do: str, **arguments: Any) -> None:
        try:
            result = self.ask(name, do, **arguments)
        except WorkerError as error:
            log(f"  {name}: {error}")
            found[name] = str(error)
            if name in ready:
                ready.remove(name)
            if not self._workers[name].alive:
                self.info[name]["not_run"] = str(error)
                self.stop(name)
            return
        rounds = found[name]
        if do == "prepare":
            ready.append(name)
        elif do == "round" and isinstance(rounds, list):
            rounds.append(result)
            each = result["seconds"] / result["units"]
            log(f"  round {arguments['number'] + 1}: {name:16} {each * 1e3:.2f} ms each of {result['units']}")
