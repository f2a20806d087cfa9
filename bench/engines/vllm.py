"""vLLM's CPU build as a worker, run by the Python of its own environment.

A decode round is the time of ``steps`` + 1 new tokens less the time of one, with the prompts in its prefix cache.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from typing import Any

from bench.cells import Cell, make_prompts
from bench.protocol import serve

GIB = 2**30


class VLLM:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(options["cache_bytes"] / GIB))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options["processors"]))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, whose processor time is watched
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        torch: Any = importlib.import_module("torch")
        # Without matrix instructions for it, bf16 products run element by element.
        fast = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
        dtype = options["vllm_dtype"] or fast
        vllm: Any = importlib.import_module("vllm")  # reads the environment when it is imported
        self.vllm = vllm
        self.llm = vllm.LLM(
            model=options["directory"],
            dtype=dtype,
            enable_prefix_caching=True,
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_sequences"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self.steps: int = options["steps"]
        self.vocab_size: int = options["vocab_size"]
        return {"version": vllm.__version__, "dtype": dtype, "cache_element_bytes": 4 if dtype == "float32" else 2}

    def prepare(self, cell: Cell) -> None:
        self.cell = cell
        self.prompts = make_prompts(cell, self.vocab_size, 0)
        if cell.phase == "decode":
            self._generate(self.prompts, 1)
        self.round(-1)

    def round(self, number: int) -> dict[str, Any]:
        if self.cell.phase == "prefill":
            prompts = make_prompts(self.cell, self.vocab_size, number + 1)  # nothing of them is cached
            return {"seconds": self._generate(prompts, 1), "units": sum(map(len, prompts))}
        one = self._generate(self.prompts, 1)
        return {"seconds": self._generate(self.prompts, self.steps + 1) - one, "units": self.steps}

    def release(self) -> None:
        self.llm.reset_prefix_cache()

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        params = self.vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        if any(len(output.outputs[0].token_ids) != new_tokens for output in outputs):
            raise RuntimeError(f"an answer is not {new_tokens} tokens long")
        return seconds


if __name__ == "__main__":
    serve(VLLM())
