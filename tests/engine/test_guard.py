"""The codec guard: layers with huge key biases are found and kept raw, or refused; healthy ones are not touched."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from kvloom.attention.coders import coder_maker
from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES
from kvloom.core.config import EngineConfig, PipelineConfig, engine_config
from kvloom.core.errors import ConfigError
from kvloom.core.layout import group_layers
from kvloom.core.storage import Encoding
from kvloom.engine.engine import Engine
from kvloom.engine.guard import LIMIT_NATS, GuardReport, Probe, logit_error, measure, probe_tokens
from kvloom.engine.pipeline import resolve_encoding
from kvloom.kernels.ops import choose_backend
from kvloom.models.calibration import collect
from kvloom.models.capture import capture
from kvloom.models.families import find_family
from kvloom.models.loader import LoadedModel
from kvloom.models.rope_table import rope_table
from tests.engine.tiny import VOCAB, as_loaded, ask, load_tiny, prompt_of, run, tokens
from tests.models.configs import build

BIAS = 200.0
CALIBRATED = ("loom", "kvquant", "turboquant3.5", "turboquant2.5")
SERVED = [name for name in CODEC_CHOICES if name != "raw" and name not in RAW_DTYPES]


def qwen2(biased: tuple[int, ...], layers: int = 3) -> LoadedModel:
    """Tiny Qwen 2 whose layers ``biased`` have huge key biases in the channels that turn slowest, as Qwen2.5 has.

    Its weights make queries of the size that real models have (RMS about 2).
    """
    register_attention()
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.5 if "q_proj" in name or "norm" in name else 0.15
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            if "norm" in name:
                parameter.add_(1.0)
        for layer in biased:
            bias = model.model.layers[layer].self_attn.k_proj.bias
            bias[[14, 15, 31]] += torch.tensor([BIAS, -BIAS, BIAS])
    return as_loaded(model.requires_grad_(False), "qwen2")


def engine_of(codec: str, loaded: LoadedModel, *, kernels: str = "reference", **pipeline: Any) -> Engine:
    """An engine with blocks of 16, one sink block and one recent block."""
    config = EngineConfig(
        kernels=kernels, kv_cache_memory="16MiB", max_batch_tokens=64, deterministic=True, debug_poison=True,
        pipeline=PipelineConfig(codec=codec, block_size=16, sink_tokens=16, recent_tokens=16, **pipeline),
    )  # fmt: skip
    return Engine(config, loaded)


def errors_of(loaded: LoadedModel, codec: str, block_size: int = 16, **more: Any) -> dict[int, float]:
    encoding = resolve_encoding(PipelineConfig(codec=codec, block_size=block_size, **more), loaded.layout, "float32")
    assert encoding is not None
    backend = choose_backend("reference", torch.device("cpu"), deterministic=False, num_threads=1)
    calibration = rope = None
    if codec.startswith(CALIBRATED):
        dim = loaded.layout.groups[0].planes[0].dim
        rope = rope_table(loaded.model, 512, dim)
        windows = [torch.tensor(prompt_of(seed, 128)) for seed in range(3)]
        calibration = collect(loaded, windows, rope, fisher=True, about={})
    probe = Probe(loaded=loaded, block_size=block_size, max_tokens=512)
    return dict(measure(encoding, probe, coder_maker(backend, calibration, rope)).errors)


@pytest.mark.parametrize("codec", SERVED)
def test_no_codec_is_kept_from_a_healthy_model(codec: str) -> None:
    for loaded in (load_tiny("llama"), qwen2(())):
        errors = errors_of(loaded, codec)
        assert set(errors) == {0, 1, 2} and 0 < max(errors.values()) < LIMIT_NATS


@pytest.mark.parametrize(
    ("codec", "ruined"),
    [
        ("int4", True), ("q4_0", True), ("turboquant4", True), ("turboquant3", True), ("turboquant2", True),
        ("turboquant4-prod", True), ("k=int4,v=kivi2", True),
        ("int8", False), ("q8_0", False), ("kivi4", False), ("kivi2", False), ("kvarn-k4v2", False),
        ("loom4", False), ("kvquant4", False), ("k=int8,v=int4", False),
    ],
)  # fmt: skip
def test_huge_key_biases_are_found_where_they_do_harm(codec: str, ruined: bool) -> None:
    errors = errors_of(qwen2((1,)), codec)
    assert GuardReport(errors=errors).flagged == ((1,) if ruined else ())
    assert max(errors[0], errors[2]) < LIMIT_NATS


def test_the_limit_is_exclusive_and_the_report_sorted() -> None:
    report = GuardReport(errors={5: LIMIT_NATS, 3: LIMIT_NATS + 0.1, 1: 90.0, 2: 0.1})
    assert report.flagged == (1, 3) and report.worst == (1, 90.0)
    assert GuardReport().flagged == ()


def test_the_error_is_that_of_logits_in_the_worst_head() -> None:
    class Shift:
        """Decodes to keys with channel 0 of head 1 off by 2."""

        name, num_bytes = "shift", 0

        def encode(self, rows: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
            assert layer == 0 and first_position is not None and first_position.tolist() == [16, 32]
            return rows

        def decode(self, data: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
            data = data.clone()
            data[:, 1, :, 0] += 2.0
            return data

    loaded = load_tiny("llama")
    vectors = capture(loaded.model, loaded.layout, torch.tensor(prompt_of(0, 50)))[0]
    squares = []
    for query in range(16, 50):
        heads = vectors.queries[0][query, 2:, 0] * 2.0 * vectors.scale  # query heads 2 and 3 read KV head 1
        squares += [heads.square()] * (min(query, 47) - 15)
    expected = float(torch.cat(squares).mean().sqrt())
    assert logit_error(vectors, 0, Shift(), 16, 1) == pytest.approx(expected, rel=1e-5)


def test_protected_layers_generate_and_warm_equals_cold(caplog: pytest.LogCaptureFixture) -> None:
    loaded = qwen2((1,))
    for kernels in ("reference", "cpu"):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            engine = engine_of("int4", loaded, kernels=kernels)
        assert [record for record in caplog.records if "layer 1" in record.getMessage() and "int4" in record.message]
        assert len(caplog.records) == 1
        info = engine.info
        assert info.guarded_layers == info.protect_layers == (1,)
        assert info.predicted_bytes_per_token == info.actual_bytes_per_token
        answers = []
        for name in ("cold", "warm"):
            ask(engine, name, prompt_of(3, 150), max_tokens=12, logprobs=0)
            outputs = run(engine)[name, 0]
            answers.append([(entry.token_id, entry.logprob) for one in outputs for entry in one.logprobs or ()])
        assert answers[0] == answers[1] and len(answers[0]) == 12
        assert outputs[-1].usage.cached_tokens == 144
        assert "layers 1 (1 by the codec guard)" in outputs[-1].usage.approximations[0]
        by_hand = engine_of("int4", loaded, kernels=kernels, protect_layers="1", codec_guard="off")
        ask(by_hand, "x", prompt_of(3, 150), max_tokens=12)
        assert tokens(run(by_hand)["x", 0]) == [token for token, _ in answers[0]]


def test_the_guard_adds_to_layers_protected_by_hand() -> None:
    engine = engine_of("turboquant4", qwen2((1,), layers=4), protect_layers="3")
    assert engine.info.protect_layers == (1, 3) and engine.info.guarded_layers == (1,)
    protected = engine_of("turboquant4", qwen2((1,)), protect_layers="1")
    assert protected.info.protect_layers == (1,) and protected.info.guarded_layers == ()


def test_refusal_names_layers_error_limit_and_remedies() -> None:
    with pytest.raises(ConfigError) as refused:
        engine_of("turboquant4", qwen2((1,)), codec_guard="refuse")
    words = ("'turboquant4'", "layer 1", "nats", "4 is the limit", "int8", "kivi4", "kvloom calibrate",
             "--protect-layers 1 ", "--codec-guard off")  # fmt: skip
    assert all(word in str(refused.value) for word in words), refused.value
    with pytest.raises(ConfigError, match=r"layers 0, 1.*more than half.*--codec-guard off"):
        engine_of("int4", qwen2((0, 1)))
    engine_of("int8", qwen2((0, 1)), codec_guard="refuse")


def test_off_encodes_everything() -> None:
    engine = engine_of("int4", qwen2((0, 1)), codec_guard="off")
    assert engine.info.protect_layers == engine.info.guarded_layers == ()


def test_guarded_layers_are_part_of_the_namespace() -> None:
    spaces = {engine_of("int4", qwen2(biased))._namespace for biased in ((), (1,))}
    assert len(spaces) == 2


def test_a_model_that_cannot_be_measured_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr("kvloom.engine.guard.capture", fail)
    with caplog.at_level(logging.WARNING):
        engine = engine_of("int4", qwen2((1,)), codec_guard="refuse")
    assert engine.info.guarded_layers == ()
    assert "no such layer" in caplog.text and "unguarded" in caplog.text


def test_a_raw_pipeline_and_a_native_model_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("raw", qwen2((1,)), kernels="cpu")
    assert engine.info.step == "native"
    monkeypatch.setattr("kvloom.engine.guard.capture", None)
    assert engine_of("int4", engine.loaded, kernels="cpu").info.guarded_layers == ()
    assert engine_of("raw", qwen2((1,))).info.guarded_layers == ()


def test_windows_are_skipped_and_a_short_context_measures_nothing() -> None:
    assert set(errors_of(load_tiny("gemma3_text"), "int4")) == {2}
    loaded = qwen2((1,))
    encoding = Encoding(name="int4", key="int4", value="int4", sink_tokens=16)
    backend = choose_backend("reference", torch.device("cpu"), deterministic=False, num_threads=1)
    make = coder_maker(backend, None, None)
    assert measure(encoding, Probe(loaded=loaded, block_size=16, max_tokens=31), make).errors == {}
    assert set(measure(encoding, Probe(loaded=loaded, block_size=16, max_tokens=32), make).errors) == {0, 1, 2}
    assert set(measure(encoding, Probe(loaded=loaded, block_size=256, max_tokens=512), make).errors) == {0, 1, 2}
    values = replace(encoding, key="raw")
    assert measure(values, Probe(loaded=loaded, block_size=16, max_tokens=512), make).errors == {}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma4_text", "gemma2", "gpt_oss", "falcon"])
def test_latents_shared_layers_softcaps_and_own_attention_are_measured(model_type: str) -> None:
    register_attention()
    family = find_family(model_type, allow_unverified=False)
    model = build(model_type, family.build_attention)
    family.prepare(model, 512)
    model.set_attn_implementation(ATTENTION_NAME)
    layout = group_layers(family.layers(model.config))
    loaded = replace(
        load_tiny("llama"), model=model, layout=layout, vocab_size=model.config.vocab_size, max_model_len=512
    )
    full = {layer for group in layout.groups if group.window is None for layer in group.layers}
    errors = errors_of(loaded, "int8")
    assert set(errors) == full and all(0 < error < 0.5 for error in errors.values())


def test_probe_tokens_fit_the_vocabulary() -> None:
    loaded = load_tiny("llama")
    assert probe_tokens(loaded, 192).shape == (192,) and int(probe_tokens(loaded, 192).max()) < VOCAB

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    texty = replace(loaded, tokenizer=tokenizer, vocab_size=0x110000)
    assert "".join(map(chr, probe_tokens(texty, 10).tolist())).isprintable()
    assert int(probe_tokens(replace(texty, vocab_size=VOCAB), 192).max()) < VOCAB


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"codec_guard is 'maybe'.*protect, refuse, off"):
        PipelineConfig(codec_guard="maybe")


@pytest.mark.parametrize(
    "written", [{"pipeline": {"codec_guard": False}}, {"codec_guard": False}, {"codec_guard": "off"}]
)
def test_off_in_yaml_is_a_boolean(written: dict[str, Any]) -> None:
    assert engine_config(("k.yaml", written)).pipeline.codec_guard == "off"
