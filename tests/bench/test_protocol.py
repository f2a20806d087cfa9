"""Workers: requests, failures, deaths and silence."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cells import Cell
from bench.protocol import Worker, WorkerError, answer, tree_cpu_seconds

Start = Callable[..., Worker]
CELL = vars(Cell(phase="decode", sequences=2, context=8))


class Echo:
    """An engine that does as the cell's numbers tell it."""

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        print("libraries print where they like")
        return options

    def prepare(self, cell: Cell) -> None:
        if cell.sequences == 13:
            raise ValueError("thirteen\nis too many")

    def round(self, number: int) -> dict[str, Any]:
        if number == 66:
            print("out of memory", file=sys.stderr)
            sys.stderr.flush()
            os._exit(9)
        if number == 99:
            time.sleep(60)
        return {"seconds": 1.0, "units": number}

    def release(self) -> None:
        pass


def test_answers_are_lines() -> None:
    requests = [{"do": "load", "options": {"a": 1}}, {"do": "round", "number": 3}, {"do": "dance"}]
    out = io.StringIO()
    answer(Echo(), io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), out)
    first, second, third = map(json.loads, out.getvalue().splitlines()[-3:])
    assert first == {"ok": True, "result": {"a": 1}}
    assert second["result"]["units"] == 3
    assert not third["ok"] and "dance" in third["error"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def begin(timeout: float = 60) -> Worker:
        code = "from tests.bench.test_protocol import Echo; from bench.protocol import serve; serve(Echo())"
        worker = Worker("echo", [sys.executable, "-c", code], threads=1, log=tmp_path / "echo.log", timeout=timeout)
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        worker.close()


def test_a_worker_answers_and_survives_a_refusal(start: Start) -> None:
    worker = start()
    assert worker.ask("load", options={"a": [1, 2]}) == {"a": [1, 2]}
    with pytest.raises(WorkerError, match="ValueError: thirteen is too many"):
        worker.ask("prepare", cell={**CELL, "sequences": 13})
    assert worker.alive
    worker.ask("prepare", cell=CELL)
    assert worker.ask("round", number=5) == {"seconds": 1.0, "units": 5}
    assert worker.cpu_seconds() > 0


def test_a_death_tells_its_last_words(start: Start) -> None:
    worker = start()
    with pytest.raises(WorkerError, match=r"ended with status 9; it last said: out of memory"):
        worker.ask("round", number=66)
    assert not worker.alive
    with pytest.raises(WorkerError, match="ended"):
        worker.ask("round", number=1)


def test_silence_ends_a_worker(start: Start) -> None:
    worker = start()
    worker.ask("load", options={})
    worker.timeout = 0.5
    with pytest.raises(WorkerError, match="no answer within"):
        worker.ask("round", number=99)
    assert not worker.alive


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cannot start"):
        Worker("none", [str(tmp_path / "none")], threads=1, log=tmp_path / "log", timeout=1)


def test_processor_time_is_counted_for_this_process() -> None:
    assert tree_cpu_seconds(os.getpid()) > 0
