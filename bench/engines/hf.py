"""transformers as a worker: sdpa attention, a DynamicCache, one forward pass and an argmax per step.

In the fastest dtype that the CPU has matrix instructions for.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from bench.cells import Cell, make_prompts
from bench.protocol import serve
from kvloom.models.loader import auto_dtype

CHUNK = 512  # tokens of a sequence per prefill pass
PASS_TOKENS = 4096  # of all sequences, which bounds activations


class Transformers:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(options["threads"])
        dtype = auto_dtype("bfloat16", torch.device("cpu"))
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            options["directory"], dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        # The keyword was renamed in 5.24.
        parameters = inspect.signature(self.model.forward).parameters
        self.keyword = "cache" if "cache" in parameters else "past_key_values"
        self.steps: int = options["steps"]
        self.vocab_size: int = options["vocab_size"]
        return {
            "version": transformers.__version__,
            "dtype": dtype,
            "cache_element_bytes": getattr(torch, dtype).itemsize,
        }

    def prepare(self, cell: Cell) -> None:
        self.cell = cell
        self.cache: Any = None
        if cell.phase == "decode":
            prompts = torch.tensor(make_prompts(cell, self.vocab_size, 0))
            prefix = None
            if cell.shared:
                prefix = DynamicCache(config=self.model.config)
                self._prefill(prefix, prompts[:1, : cell.shared])
                prefix.batch_repeat_interleave(cell.sequences)  # it knows no sharing: each has its copy
            self.cache = prefix or DynamicCache(config=self.model.config)
            self.first = self._prefill(self.cache, prompts[:, cell.shared :])
        self.round(-1)

    def round(self, number: int) -> dict[str, Any]:
        if self.cell.phase == "prefill":
            prompts = torch.tensor(make_prompts(self.cell, self.vocab_size, number + 1))
            start = time.perf_counter()
            self._prefill(DynamicCache(config=self.model.config), prompts)
            return {"seconds": time.perf_counter() - start, "units": prompts.numel()}
        surplus = self.cache.get_seq_length() - self.cell.context
        if surplus > 0:
            self.cache.crop(-surplus)
        tokens, times = self.first, []
        for _ in range(self.steps):
            start = time.perf_counter()
            tokens = self._pass(self.cache, tokens)
            times.append(time.perf_counter() - start)
        if self.cache.get_seq_length() != self.cell.context + self.steps:
            raise RuntimeError(f"the cache holds {self.cache.get_seq_length()} tokens")
        return {"seconds": sum(times), "units": len(times), "step_ms": [round(t * 1e3, 3) for t in times]}

    def release(self) -> None:
        self.cache = None

    def _prefill(self, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
        size = max(1, min(CHUNK, PASS_TOKENS // len(ids)))
        for low in range(0, ids.shape[1], size):
            tokens = self._pass(cache, ids[:, low : low + size])
        return tokens

    @torch.inference_mode()
    def _pass(self, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.keyword: cache})
        tokens: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return tokens


if __name__ == "__main__":
    serve(Transformers())
