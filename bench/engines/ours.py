"""kvloom's engine as a worker: steps are timed as ``Engine.step`` runs them, scheduling and sampling included."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import kvloom
from bench.cells import Cell, make_prompts
from bench.protocol import serve
from kvloom.core.config import engine_config
from kvloom.core.messages import EngineRequest
from kvloom.core.request import SamplingParams
from kvloom.engine.engine import Engine


class Ours:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        settings = {
            "model": options["model"],
            "max_model_len": options["max_model_len"],
            "max_sequences": options["max_sequences"],
            "kv_cache_memory": str(options["cache_bytes"]),
            "num_threads": options["threads"],
        }
        self.engine = Engine(engine_config(("--set", options["settings"]), ("the benchmark", settings)))
        self.steps: int = options["steps"]
        self.answer_tokens: int = options["answer_tokens"]
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
            # The prompts stay in the prefix cache, so that a round begins with computing their last block only.
            self._generate(self.prompts, 1)
        self.round(-1)

    def round(self, number: int) -> dict[str, Any]:
        if self.cell.phase == "decode":
            return self._decode()
        prompts = self._prompts(number + 1)  # never seen before, so nothing of them is cached
        wanted = 1 if self.cell.phase == "prefill" else self.answer_tokens
        seconds = self._generate(prompts, wanted)
        tokens = sum(map(len, prompts)) if self.cell.phase == "prefill" else wanted * len(prompts)
        return {"seconds": seconds, "units": tokens}

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

    def _decode(self) -> dict[str, Any]:
        # Early ones decode a little while the last prompts' ends are computed; nobody may be through before the last.
        slack = len(self.prompts)
        names = self._add(self.prompts, min(self.steps + 1 + slack, self.engine.max_model_len - self.cell.context))
        try:
            started: set[str] = set()
            while len(started) < len(names):
                started.update(self._step())
            times: list[float] = []
            for _ in range(self.steps):
                start = time.perf_counter()
                tokens = self._step()
                times.append(time.perf_counter() - start)
                if tokens.total() != len(names):
                    raise RuntimeError(f"a step gave {tokens.total()} tokens to {len(names)} sequences")
        finally:
            for name in names:
                self.engine.abort(name)
        return {"seconds": sum(times), "units": len(times), "step_ms": [round(t * 1e3, 3) for t in times]}


if __name__ == "__main__":
    serve(Ours())
