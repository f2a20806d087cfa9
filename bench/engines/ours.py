"""kvloom's engine as a worker: steps are timed as ``Engine.step`` runs them, scheduling and sampling included."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

import kvloom
from bench.budget import cache_budget, group_size
from bench.cells import Cell, make_prompts
from bench.protocol import serve
from bench.usage import Usage
from kvloom.core.config import EngineConfig, engine_config
from kvloom.core.messages import EngineRequest
from kvloom.core.request import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.runner import StepLogits
from kvloom.engine.scheduler import Chunk
from kvloom.models.loader import LoadedModel, load_model


class Ours:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        settings = {
            "model": options["model"],
            "max_model_len": options["max_model_len"],
            "max_sequences": options["max_sequences"],
            "num_threads": options["threads"],
        }
        loads: list[tuple[int, int]] | None = options.get("loads")
        if loads is None:  # as the server beside it is told
            settings["kv_cache_memory"] = str(options["cache_bytes"])
        config = engine_config(("--set", options["settings"]), ("the benchmark", settings))
        if loads is None or config.kv_cache_memory != "auto":
            self.engine = Engine(config)
        else:
            self.engine = build_fitted(config, loads)
        self.usage = Usage(self.engine)
        self.steps: int = options["steps"]
        self.answer_tokens: int = options["answer_tokens"]
        self.computes_prompts: bool = not options.get("zero_prompts")
        self._names = itertools.count()
        info = self.engine.info
        return {
            "version": kvloom.__version__,
            "dtype": info.dtype,
            "cache_element_bytes": info.actual_bytes_per_token / options["elements"],
            "engine": asdict(info),
        }

    def prepare(self, cell: Cell) -> None:
        self.cell = cell
        self.prompts = self._prompts(0)
        if cell.phase == "decode":
            with contextlib.ExitStack() as stack:
                if not self.computes_prompts:
                    stack.enter_context(zero_forward(self.engine))
                self._cache_prompts()
        self.round(-1)

    def round(self, number: int) -> dict[str, Any]:
        decode = self.cell.phase == "decode"
        prompts = self.prompts if decode else self._prompts(number + 1)  # never seen before, so none is cached
        self.usage.begin()
        result = self._decode(prompts) if decode else self._complete(prompts)
        return {**result, "memory": self.usage.memory()}

    def release(self) -> None:
        self.engine.manager.drop_cached()

    def _prompts(self, seed: int) -> list[list[int]]:
        return make_prompts(self.cell, self.engine.loaded.vocab_size, seed)

    def _add(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        names = [f"bench-{next(self._names)}" for _ in prompts]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True):
            request = EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params)
            self.engine.add(self.engine.prepare(request))
        return names

    def _step(self) -> Counter[str]:
        """One step; the number of new tokens of each request."""
        found: Counter[str] = Counter()
        for output in self.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            found[output.request_id] += len(output.token_ids)
        return found

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        start = time.perf_counter()
        self._add(prompts, max_tokens)
        while self.engine.has_work:
            self._step()
        return time.perf_counter() - start

    def _cache_prompts(self) -> None:
        """Put the prompts into the prefix cache, so that a round begins with computing their last block only.

        Encoded blocks leave raw copies there, for which the arena has no room: those before are looked up along with
        each group of new ones, which keeps them in use more lately than the copies.
        """
        count = len(self.prompts)
        size = count if self.engine.encoding is None else group_size(count)
        for end in range(size, count + size, size):
            self._generate(self.prompts[:end], 1)

    def _complete(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prompts and their answers (prefill: one token), from nothing cached."""
        prefill = self.cell.phase == "prefill"
        wanted = 1 if prefill else self.answer_tokens
        self.usage.take_parts()
        seconds = self._generate(prompts, wanted)
        tokens = sum(map(len, prompts)) if prefill else wanted * len(prompts)
        return {"seconds": seconds, "units": tokens, "parts_s": self.usage.take_parts()}

    def _decode(self, prompts: list[list[int]]) -> dict[str, Any]:
        # Early ones decode a little while the last prompts' ends are computed; nobody may be through before the last.
        slack = len(prompts)
        names = self._add(prompts, min(self.steps + 1 + slack, self.engine.max_model_len - self.cell.context))
        try:
            started: set[str] = set()
            while len(started) < len(names):
                started.update(self._step())
            self.usage.note_held()
            self.usage.take_parts()
            times: list[float] = []
            for _ in range(self.steps):
                start = time.perf_counter()
                tokens = self._step()
                times.append(time.perf_counter() - start)
                if tokens.total() != len(names):
                    raise RuntimeError(f"a step gave {tokens.total()} tokens to {len(names)} sequences")
            parts = self.usage.take_parts()
        finally:
            for name in names:
                self.engine.abort(name)
        return {
            "seconds": sum(times),
            "units": len(times),
            "step_ms": [round(t * 1e3, 3) for t in times],
            "parts_s": parts,
        }


@contextlib.contextmanager
def zero_forward(engine: Engine) -> Iterator[None]:
    """Passes compute nothing meanwhile: blocks get their places and hold zeros, which take as long to read."""
    engine.store.arena.zero_()  # what earlier cells left could be no numbers in another format
    runner, vocab_size = engine.runner, engine.loaded.vocab_size

    def forward(chunks: Sequence[Chunk], rows: np.ndarray) -> StepLogits:
        return StepLogits(torch.zeros(len(rows), vocab_size))

    forward_before = runner.forward
    setattr(runner, "forward", forward)  # noqa: B010  (an assignment is what type checkers refuse)
    try:
        yield
    finally:
        setattr(runner, "forward", forward_before)  # noqa: B010


def build_fitted(config: EngineConfig, loads: Sequence[tuple[int, int]]) -> Engine:
    """An engine whose arena holds each of ``loads`` in the format that ``config`` keeps."""
    loaded = load_model(config)
    while True:
        dtype = dtype_of(loaded)
        budget = cache_budget(config, loaded.layout, dtype, loads)
        engine = Engine(replace(config, kv_cache_memory=str(budget)), loaded)
        if engine.info.dtype == dtype:
            return engine
        # It found no native step and went on in a wider dtype, which needs a larger arena.
        loaded = engine.loaded
        del engine
        gc.collect()


def dtype_of(loaded: LoadedModel) -> str:
    return str(next(loaded.model.parameters()).dtype).removeprefix("torch.")


if __name__ == "__main__":
    serve(Ours())
