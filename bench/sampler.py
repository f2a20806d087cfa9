"""Milliseconds per sampling step: ``python bench/sampler.py [--rows 64] [--vocab 49152] [--shape peaked] [--json]``.

Logits are bfloat16 of one of three shapes: ``peaked`` falls with the token's rank as a language
model's do (the best 256 tokens hold 96 %), ``wide`` is normal of deviation 2.5, ``flat`` is equal up
to noise (the worst case for top_p: every row is sorted whole). ``cpu`` is processor time, which other
programs on the machine disturb less; with ``--threads 1`` it is the work itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from kvloom.core.request import SamplingParams
from kvloom.engine.sampler import SamplingBatch, SamplingRow, sample

CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
    "all": SamplingParams(
        temperature=0.8,
        top_k=200,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias={5: 1.0},
        logprobs=5,
    ),
}


def measure(params: SamplingParams, logits: torch.Tensor, history: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of building the batch and of sampling."""
    count, vocab_size = logits.shape
    numbers = np.random.default_rng(0)
    prompt = numbers.integers(0, vocab_size, history)
    output = numbers.integers(0, vocab_size, history // 4)
    rows = [
        SamplingRow(params=params, seed=i, step=len(output), prompt_token_ids=prompt, output_token_ids=output)
        for i in range(count)
    ]
    build, draw, work = [], [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        batch = SamplingBatch.build(rows, vocab_size)
        middle, before = time.perf_counter(), time.process_time()
        sample(logits, batch).token_ids.tolist()
        build.append(middle - start)
        draw.append(time.perf_counter() - middle)
        work.append(time.process_time() - before)
    return {
        "build_ms": statistics.median(build[1:]) * 1e3,
        "sample_ms": statistics.median(draw[1:]) * 1e3,
        "sample_min_ms": min(draw[1:]) * 1e3,
        "cpu_min_ms": min(work[1:]) * 1e3,
    }


def make_logits(rows: int, vocab_size: int, shape: str) -> torch.Tensor:
    """[rows, vocab_size] bfloat16."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, vocab_size, generator=generator)
    if shape == "peaked":
        rank = torch.rand(rows, vocab_size, generator=generator).argsort(-1) + 1
        return (20 - 1.6 * rank.log() + 0.75 * noise).to(torch.bfloat16)
    return (noise * {"wide": 2.5, "flat": 0.01}[shape]).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 262144])
    parser.add_argument("--history", type=int, default=1024, help="prompt tokens per row, for penalties")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", choices=["peaked", "wide", "flat"], default="peaked")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = []
    for vocab_size in arguments.vocab:
        logits = make_logits(arguments.rows, vocab_size, arguments.shape)
        for name, params in CASES.items():
            found = measure(params, logits, arguments.history, arguments.repeats)
            results.append({"rows": arguments.rows, "vocab": vocab_size, "case": name, **found})
            if not arguments.json:
                print(
                    f"{arguments.rows:4d} x {vocab_size:6d}  {name:12s} build {found['build_ms']:7.2f} ms"
                    f"   sample {found['sample_ms']:8.2f} ms"
                    f" (best {found['sample_min_ms']:.2f}, cpu {found['cpu_min_ms']:.2f})"
                )
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "shape": arguments.shape, "results": results}))


if __name__ == "__main__":
    main()
