"""Codecs through the engine's own path: against a simulation, cold against warm, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.errors import ConfigError
from kvloom.core.request import SamplingParams
from kvloom.core.sequence import Sequence
from kvloom.engine.engine import Engine
from kvloom.engine.scheduler import Chunk
from kvloom.server import banner
from tests.engine.simulation import NAME, Rule, simulate
from tests.engine.tiny import ask, load_tiny, make_model, prompt_of, run

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
    calibration: str | None = None,
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
        calibration=calibration,
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
        logits = engine.runner.forward([Chunk(sequence, start, end - start)], np.arange(end - start)).values
        found.append(logits.float())
        engine.manager.commit(sequence.cache, sequence.token_ids, end)
        engine.manager.check()
    engine.manager.release(sequence.cache)
    return torch.cat(found)


def check_against_simulation(
    model_type: str, codec: str, *, chunk: int, length: int, block_size: int, kernels: str, **settings: Any
) -> Engine:
    prompt = prompt_of(11, length)
    engine = codec_engine(
        codec, model_type, kernels=kernels, max_batch_tokens=512, protect_layers="0", block_size=block_size,
        sink_tokens=block_size, recent_tokens=2 * block_size, **settings,
    )  # fmt: skip
    simulate(Rule(codec=codec, block_size=block_size, sinks=1, recents=2, protect=(0,)))
    model = make_model(model_type, NAME)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    difference = (all_logits(engine, prompt, chunk) - expected).abs().amax(dim=-1)
    # A value that rounding puts on the other side of a code's edge moves a few logits by about 1e-4; that is rare.
    scale = max(1.0, float(expected.abs().max()))
    assert difference.median() < 1e-5 * scale and difference.max() < (1e-4 if kernels == "reference" else 1e-3) * scale
    return engine


@pytest.mark.parametrize("chunk", [150, 40, 1])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_logits_equal_a_simulation(model_type: str, codec: str, chunk: int) -> None:
    if chunk == 1 and codec not in ("int8", "kivi2"):
        pytest.skip("token by token is slow; two codecs show it")
    length = 60 if chunk == 1 else 150
    check_against_simulation(model_type, codec, chunk=chunk, length=length, block_size=8, kernels="reference")


@pytest.mark.parametrize("step", ["auto", "transformers"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_native_logits_equal_a_simulation(model_type: str, codec: str, step: str) -> None:
    engine = check_against_simulation(
        model_type, codec, chunk=96, length=290, block_size=32, kernels="cpu", step=step
    )  # fmt: skip
    if step == "auto" and model_type == "llama" and codec != "k=raw,v=int4":
        assert engine.info.step == "native"
    assert not engine.snapshot().fallbacks or codec == "k=raw,v=int4"


def test_sizes_are_exact_and_said() -> None:
    engine = codec_engine("k=int8,v=int4", block_size=32, sink_tokens=None, recent_tokens=None, protect_layers="0")
    info = engine.info
    # Two encoded layers of two heads: 34 and 20 bytes a row; one raw layer of 2 x 32 float32.
    assert info.predicted_bytes_per_token == info.actual_bytes_per_token == 2 * 2 * (34 + 20) + 2 * 64 * 4
    assert info.bits_per_value == 8 * (34 + 20) / 64
    assert (info.codec, info.sink_tokens, info.recent_tokens) == ("k=int8,v=int4", 32, 64)
    assert info.protect_layers == (0,)
    assert info.predicted_arena_bytes == info.actual_arena_bytes
    for item, span, fmt in zip(engine.plan.storage, engine.plan.spans, engine.store.formats, strict=True):
        assert span.span_bytes == item.group.num_layers * fmt.layer_bytes
        assert engine.plan.slab_bytes % span.span_bytes < 0.01 * engine.plan.slab_bytes
    ask(engine, "x", prompt_of(0, 20))
    assert run(engine)["x", 0][-1].usage.approximations == (
        "codec k=int8,v=int4; raw: first 32 tokens; last 64 tokens and the open block; layers 0",
    )


def test_no_tokens_are_named_where_only_the_open_block_stays_raw() -> None:
    engine = codec_engine("int8", block_size=32, sink_tokens=0, recent_tokens=0)
    ask(engine, "x", prompt_of(0, 20))
    assert run(engine)["x", 0][-1].usage.approximations == ("codec int8; raw: the open block",)
    assert dict(banner.rows(engine.info, "http://x", ("m",)))["codec"].endswith("side data; raw: the open block")


def test_a_raw_pipeline_has_no_approximation() -> None:
    engine = codec_engine("raw", protect_layers="1")
    assert engine.info.bits_per_value == 32.0 and not any(item.encoded for item in engine.plan.storage)
    ask(engine, "x", prompt_of(0, 20))
    assert run(engine)["x", 0][-1].usage.approximations == ()


@pytest.mark.parametrize(
    ("codec", "model_type", "more", "words"),
    [
        ("kvquant4", "llama", {"cache_dir": "nowhere"}, "calibration.*kvloom calibrate"),
        ("bfloat16", "llama", {}, "computes in float32.*--dtype bfloat16"),
        ("int8", "llama", {"protect_layers": "3"}, "layer 3.*layers 0 to 2"),
        ("int8", "llama", {"protect_layers": "0,1,2"}, "every full-attention layer is protected"),
        ("int8", "gemma3_text", {"protect_layers": "2"}, "would encode nothing"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(codec: str, model_type: str, more: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        codec_engine(codec, model_type, **more)


def test_codecs_never_share_cached_blocks() -> None:
    namespaces = {
        codec_engine(codec, sink_tokens=sinks)._namespace for codec in ("raw", "int8", "int4") for sinks in (0, 8)
    }
    assert len(namespaces) == 6


def test_values_that_are_not_finite_are_counted() -> None:
    loaded = load_tiny("llama")
    engine = codec_engine("int8", loaded=loaded)
    engine.loaded.model.model.layers[1].self_attn.v_proj.weight[0] = float("inf")
    ask(engine, "x", prompt_of(0, 60), max_tokens=1)
    run(engine)
    assert any("not finite" in kind and count > 0 for kind, count in engine.snapshot().fallbacks.items())
