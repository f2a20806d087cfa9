"""Codecs through the engine's own path: against a simulation, cold against warm, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.request import SamplingParams
from kvloom.core.sequence import Sequence
from kvloom.engine.engine import Engine
from kvloom.engine.scheduler import Chunk
from tests.engine.simulation import NAME, Rule, simulate
from tests.engine.tiny import load_tiny, make_model, prompt_of

CODECS = ["int8", "int4", "kivi2", "turboquant3", "k=int8,v=kivi2", "kvarn-k4v2", "k=raw,v=int4", "fp8"]


def codec_engine(
    codec: str,
    model_type: str = "llama",
    *,
    block_size: int = 8,
    sink_tokens: int | None = 8,
    recent_tokens: int | None = 16,
    protect_layers: str = "",
    prefix_cache: bool = True,
    loaded: Any = None,
    **settings: Any,
) -> Engine:
    settings.setdefault("kernels", "reference")
    settings.setdefault("kv_cache_memory", "16MiB")
    settings.setdefault("max_batch_tokens", 64)
    settings.setdefault("debug_poison", True)
    pipeline = PipelineConfig(
        block_size=block_size,
        codec=codec,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        protect_layers=protect_layers,
        prefix_cache=prefix_cache,
    )
    return Engine(EngineConfig(pipeline=pipeline, **settings), loaded or load_tiny(model_type))


def all_logits(engine: Engine, prompt: list[int], chunk: int) -> torch.Tensor:
    """[len(prompt), vocab] float32: every token's logits, computed in chunks through manager and runner."""
    sequence = Sequence(
        request_id="x", index=0, prompt=np.array(prompt, dtype=np.int32), params=SamplingParams(), priority=0,
        order=0, salt=b"", seed=0, arrival_time=0.0, max_len=len(prompt),
    )  # fmt: skip
    sequence.cache = engine.manager.open(b"")
    found = []
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        assert engine.manager.reserve(sequence.cache, end)
        found.append(engine.runner.forward([Chunk(sequence, start, end - start)], np.arange(end - start)).float())
        engine.manager.commit(sequence.cache, sequence.token_ids, end)
        engine.manager.check()
    engine.manager.release(sequence.cache)
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("chunk", [150, 40, 1])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_logits_equal_a_simulation(model_type: str, codec: str, chunk: int, kernels: str) -> None:
    if chunk == 1 and (codec not in ("int8", "kivi2") or kernels == "cpu"):
        pytest.skip("token by token is slow; two codecs show it")
    prompt = prompt_of(11, 150 if chunk != 1 else 60)
    engine = codec_engine(codec, model_type, kernels=kernels, max_batch_tokens=256, protect_layers="0")
    simulate(Rule(codec=codec, block_size=8, sinks=1, recents=2, protect=(0,)))
    model = make_model(model_type, NAME)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    found = all_logits(engine, prompt, chunk)
    difference = (found - expected).abs().amax(dim=-1)
    assert difference.max() < 1e-4 * max(1.0, float(expected.abs().max()))
