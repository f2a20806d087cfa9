"""The engine chooses the native step where there is one, says so, and answers alike without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom.core.config import EngineConfig
from kvloom.core.errors import ConfigError
from kvloom.engine.engine import Engine
from kvloom.kernels.cpu import CpuBackend
from kvloom.models.native import build, check
from kvloom.models.native.model import NativeModel
from kvloom.models.upcast import in_float32
from tests.engine.tiny import ask, load_tiny, make_engine, prompt_of, run, tokens


def engine_of(model_type: str, kernels: str = "cpu", **changes: Any) -> Engine:
    return make_engine(model_type, kernels=kernels, **changes)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_native_and_transformers_write_the_same_tokens(model_type: str) -> None:
    native, plain = engine_of(model_type), engine_of(model_type, step="transformers")
    assert (native.info.step, plain.info.step) == ("native", "transformers")
    assert native.info.weight_bytes > 0
    assert 0 < native.rounding_noise < 1e-2
    answers = []
    for engine in (native, plain, engine_of(model_type, kernels="reference")):
        ask(engine, "x", prompt_of(1, 70), max_tokens=40)
        answers.append(tokens(run(engine)["x", 0]))
    assert answers[0] == answers[1] == answers[2]


def test_reference_kernels_have_no_native_step() -> None:
    assert engine_of("llama", kernels="reference").info.step == "transformers (kernels 'reference' have no native step)"
    with pytest.raises(ConfigError, match="needs --kernels cpu"):
        EngineConfig(step="native", kernels="reference")


def test_a_model_type_without_one_says_so() -> None:
    other = replace(load_tiny("llama"), model_type="olmo")
    engine = engine_of("llama", loaded=other)
    assert engine.info.step.startswith("transformers (no native step for model type 'olmo'")
    with pytest.raises(ConfigError, match="step is 'native', but no native step for model type 'olmo'"):
        engine_of("llama", loaded=other, step="native")


def test_a_step_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(*_: Any) -> check.Verdict:
        return check.Verdict(error=0.01, difference=0.1, pairs_error=None)

    monkeypatch.setattr(build, "verify", verdict)
    assert "its logits differed from transformers' by 0.01" in engine_of("llama").info.step


def test_the_check_sees_a_wrong_weight() -> None:
    loaded, backend = load_tiny("llama"), CpuBackend(num_threads=1)
    native = NativeModel(loaded.model, "llama", loaded.layout, backend)
    assert check.verify(native, native, loaded.model, loaded.layout, backend).passed
    native._kept[-1].mul_(1.01)  # one norm
    assert not check.verify(native, native, loaded.model, loaded.layout, backend).passed


def test_weights_stay_as_they_were_after_the_check() -> None:
    loaded = load_tiny("llama")
    model = loaded.model.bfloat16()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with in_float32(model):
        out = model.lm_head(torch.zeros(1, model.config.hidden_size))
        assert out.dtype == torch.float32
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert model.dtype == torch.bfloat16
