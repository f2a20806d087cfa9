"""Multi-head latent attention: what is stored, that it is never expanded, and what the conformance suite lacks.

``test_families.py`` compares every MLA type with eager attention and runs it through the engine.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.attention.scratch import scratch_store
from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.errors import CapacityError, CodecError, ConfigError, KvloomError, UnsupportedModelError
from kvloom.core.layout import KVLayout, LayerSpec, group_layers
from kvloom.engine.engine import Engine
from kvloom.kernels.ops import KernelBackend
from kvloom.models.families import find_family
from kvloom.models.families.deepseek import DeepSeek, hand_over_latents
from kvloom.models.loader import LoadedModel
from kvloom.models.parity import quick_cases
from tests.engine.tiny import ask, assert_greedy, prompt_of, run, tokens
from tests.models import configs
from tests.models.harness import (
    PagedRunner,
    backend_or_skip,
    backends,
    check_parity,
    difference,
    eager_logits,
    random_ids,
)
from tests.models.tiny import VOCAB_SIZE

TIGHT = 2e-5  # rounding in float32 stays below this; the promise is 1e-4
MODELS = ("deepseek_v2", "deepseek_v3")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "queries of full rank": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "five heads, odd dims": {
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "qk_nope_head_dim": 12,
        "v_head_dim": 7,
    },
    "latent without native kernels": {"kv_lora_rank": 20},
}


def load(model_type: str, max_model_len: int = 512, **changes: Any) -> tuple[Any, Any, KVLayout]:
    """(model with our attention, equal one with eager, layout)."""
    register_attention()
    family = find_family(model_type, allow_unverified=False)
    model = configs.build(model_type, ATTENTION_NAME, **changes)
    assert family.unsupported(model.config) is None
    family.prepare(model, max_model_len)
    layout = group_layers(family.layers(model.config))
    return model, configs.build(model_type, **changes), layout


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", MODELS)
def test_logits_equal_eager(model_type: str, variant: str, backend: str) -> None:
    kernels = backend_or_skip(backend)
    model, eager, layout = load(model_type, **VARIANTS[variant])
    check_parity(model, eager, layout, backend=kernels, tolerance=TIGHT)
    assert bool(kernels.fallbacks) == (backend == "cpu" and "without native" in variant)


def test_long_rope_is_fixed_at_load() -> None:
    """MiniCPM3's checkpoints have it; within the original length plain eager uses the short factors too."""
    model, eager, layout = load("minicpm3", max_model_len=256, rope_parameters=configs.LONGROPE | {"factor": 2.0})
    cases = quick_cases(0, 16, VOCAB_SIZE)
    check_parity(model, eager, layout, cases=cases, tolerance=TIGHT)


def test_yarn_scales_the_logits() -> None:
    """Guards the comparison above: without mscale_all_dim the same model answers otherwise."""
    ids = random_ids(40, VOCAB_SIZE, 0)
    scaled, plain = (
        eager_logits(configs.build("deepseek_v3", rope_parameters=YARN | {"mscale_all_dim": factor}), ids)
        for factor in (0.9, 0.0)
    )
    assert difference(scaled, plain) > 1e-2


# --- What is stored -----------------------------------------------------------------------------------


def v3_shapes() -> dict[str, Any]:
    """V3's cache per layer; everything that is not cached is small."""
    return {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def test_v3_keeps_576_values_per_token_and_layer() -> None:
    (layer,) = set(DeepSeek().layers(configs.tiny_config("deepseek_v3", **v3_shapes())))
    assert sum(plane.dim for plane in layer.planes) * layer.num_heads == 512 + 64 == 576
    expanded = LayerSpec.kv(num_heads=128, k_dim=128 + 64, v_dim=128)
    assert sum(plane.dim for plane in expanded.planes) * expanded.num_heads == 40_960


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_the_engine_allocates_that(kernels: str) -> None:
    backend_or_skip(kernels)
    engine = make_engine(*load("deepseek_v3", **v3_shapes()), kernels=kernels)
    layers = engine.plan.layout.num_layers
    assert engine.info.predicted_bytes_per_token == engine.info.actual_bytes_per_token == layers * 576 * 4  # float32
    assert sum(span.span_bytes for span in engine.plan.spans) == layers * 576 * 4 * 16  # one block: no padding
    ask(engine, "r", prompt_of(0, 40), max_tokens=6)
    while engine.has_work:
        engine.step()
        cache = engine.snapshot().cache
        if engine.has_work:
            assert cache.token_bytes % (layers * 576 * 4) == 0 and cache.token_bytes > 0
        engine.manager.check()
    assert engine.snapshot().cache.used_bytes == 0


# --- That it is never expanded ------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_latents_are_never_expanded(model_type: str) -> None:
    """The up-projection is not applied to a token, old or new, and no layer sees a key or value per head."""
    model, eager, layout = load(model_type)
    attentions = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    assert len(attentions) == layout.num_layers

    def refuse(*_: Any) -> None:
        raise AssertionError("a latent was expanded")

    for module in attentions:
        module.kv_b_proj.register_forward_pre_hook(refuse)
    largest = LargestTensor()
    runner = PagedRunner(model, layout, max_tokens=512)
    ids = random_ids(400, VOCAB_SIZE, 0)
    runner.step({"a": ids[:-1]}, last_only=True)
    with largest:
        got = runner.step({"a": ids[-1:]})["a"]
    assert difference(got, eager_logits(eager, ids)[-1:]) < TIGHT
    config = model.config
    expanded = 400 * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    # Of one decoded token the largest are weights and, in the reference, one layer's gathered latents.
    assert largest.of_tokens(400) <= 400 * (config.kv_lora_rank + config.qk_rope_head_dim) < expanded


class LargestTensor(torch.overrides.TorchFunctionMode):
    """Notes the shape of every tensor that torch functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.shapes.add(tuple(result.shape))
        return result

    def of_tokens(self, count: int) -> int:
        """Elements of the largest floating or integer tensor that has one row per past token."""
        return max(torch.Size(shape).numel() for shape in self.shapes if count in shape)


@pytest.mark.parametrize("model_type", MODELS)
def test_prepared_instances_alone_are_changed(model_type: str) -> None:
    """Other models of the class, copies, and the same instance under eager attention work as ever."""
    model, eager, layout = load(model_type)
    ids = random_ids(30, VOCAB_SIZE, 1)
    expected = eager_logits(eager, ids)
    assert difference(eager_logits(configs.build(model_type), ids), expected) == 0
    twin = copy.deepcopy(model)
    assert difference(PagedRunner(twin, layout).step({"a": ids})["a"], expected) < TIGHT
    for module in twin.modules():
        if hasattr(module, "kv_b_proj"):
            nn.init.zeros_(module.kv_b_proj.weight)
    assert difference(PagedRunner(model, layout).step({"a": ids})["a"], expected) < TIGHT
    model.set_attn_implementation("eager")
    assert difference(eager_logits(model, ids), expected) == 0


# --- Through the engine -------------------------------------------------------------------------------


def make_engine(
    model: Any, _: Any, layout: KVLayout, *, prefix_cache: bool = True, codec: str = "raw", **settings: Any
) -> Engine:
    """An engine for what ``load`` returned."""
    loaded = LoadedModel(
        model=model,
        hf_config=model.config,
        tokenizer=None,
        layout=layout,
        num_query_heads=(model.config.num_attention_heads,) * layout.num_layers,
        model_type=model.config.model_type,
        name="tiny",
        max_model_len=512,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        weights_digest="tiny",
        tokenizer_digest="none",
        generation_defaults={},
        verified=True,
    )
    defaults: dict[str, Any] = {"kv_cache_memory": "16MiB", "max_batch_tokens": 64, "debug_poison": True}
    pipeline = PipelineConfig(block_size=16, prefix_cache=prefix_cache, codec=codec, sink_tokens=16, recent_tokens=16)
    return Engine(EngineConfig(pipeline=pipeline, **(defaults | settings)), loaded)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("model_type", MODELS)
def test_hits_forks_and_preemption_change_no_answer(model_type: str, kernels: str) -> None:
    backend_or_skip(kernels)
    subject = load(model_type)
    settings: dict[str, Any] = {"kernels": kernels, "max_model_len": 192}
    with pytest.raises(CapacityError) as caught:
        make_engine(*subject, kv_cache_memory="1kB", **settings)
    least = str(caught.value).split("--kv-cache-memory ")[1].split()[0]  # one sequence of full length
    engine = make_engine(*subject, kv_cache_memory=least, **settings)
    shared = prompt_of(1, 64)
    prompts = {f"r{i}": shared + prompt_of(10 + i, 20 + i) for i in range(16)}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, max_tokens=60, n=2 if name == "r3" else 1)
    outputs = run(engine)
    snapshot = engine.snapshot()
    assert snapshot.prefix_hit_tokens > 0 and snapshot.preemptions > 0
    assert snapshot.cache.used_bytes == 0 and snapshot.running == snapshot.waiting == 0
    for name, prompt in prompts.items():
        assert_greedy(subject[1], prompt, tokens(outputs[name, 0]))
    assert tokens(outputs["r3", 1]) == tokens(outputs["r3", 0])

    off = make_engine(*subject, kernels=kernels, prefix_cache=False)
    ask(off, "r2", prompts["r2"], max_tokens=60)
    assert tokens(run(off)["r2", 0]) == tokens(outputs["r2", 0])


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_deterministic_holds_or_is_refused(model_type: str) -> None:
    """A mixture's experts see other batches, which the check at load notices; a dense model holds."""
    subject = load(model_type)
    try:
        alone = make_engine(*subject, deterministic=True, prefix_cache=False)
    except ConfigError as error:
        assert "--deterministic" in str(error) and model_type == "deepseek_v3"
        return
    prompt = prompt_of(3, 40)
    ask(alone, "x", prompt, max_tokens=10, logprobs=0)
    expected = run(alone)["x", 0]
    busy = make_engine(*subject, deterministic=True, max_batch_tokens=32)
    for i in range(3):
        ask(busy, f"other{i}", prompt[: 16 * i] + prompt_of(20 + i, 9 + i), max_tokens=12)
    ask(busy, "x", prompt, max_tokens=10, logprobs=0)
    found = run(busy)["x", 0]
    assert tokens(found) == tokens(expected)
    wanted = [entry.logprob for output in expected for entry in output.logprobs or ()]
    assert [entry.logprob for output in found for entry in output.logprobs or ()] == wanted
    assert len(wanted) == 10


# --- Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("allow_unverified", [False, True])
def test_sparse_attention_is_refused(model_type: str, allow_unverified: bool) -> None:
    with pytest.raises(UnsupportedModelError, match="an indexer chooses the keys"):
        find_family(model_type, allow_unverified=allow_unverified)


def test_an_unlike_projection_is_refused() -> None:
    model = configs.build("deepseek_v3")
    module = model.model.layers[0].self_attn
    rows, rank = module.kv_b_proj.weight.shape
    for projection in (nn.Linear(rank, rows, bias=True), nn.Linear(rank, rows - 1, bias=False), nn.Identity()):
        module.kv_b_proj = projection
        with pytest.raises(UnsupportedModelError, match="needs a plain matrix of shape"):
            hand_over_latents(module)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    """Its expanded keys do not fit into the planes: an error, no wrong answer."""
    register_attention()
    model, _, layout = load("deepseek_v3")
    unprepared = configs.build("deepseek_v3", ATTENTION_NAME)
    backend: KernelBackend = backend_or_skip("cpu")
    with pytest.raises((ValueError, KvloomError)):
        PagedRunner(unprepared, layout, backend=backend).step({"a": [1, 2, 3]})
    store, _ = scratch_store(
        layout, backend, num_spans=[1], block_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    assert [plane.name for plane in store.formats[0].planes] == ["latent", "rope"]
    assert model.config.model_type == "deepseek_v3"


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_encoded_latents_cost_little_and_hits_nothing(kernels: str) -> None:
    prompt = prompt_of(1, 120)

    def logprobs(engine: Engine, name: str) -> list[float]:
        ask(engine, name, prompt, max_tokens=6, logprobs=0, ignore_eos=True)
        return [entry.logprob for output in run(engine)[name, 0] for entry in output.logprobs or ()]

    exact = logprobs(make_engine(*load("deepseek_v3"), kernels=kernels), "x")
    engine = make_engine(*load("deepseek_v3"), kernels=kernels, codec="int8", max_batch_tokens=32)
    cold = logprobs(engine, "cold")
    assert cold != exact and cold == pytest.approx(exact, abs=0.2)
    assert logprobs(engine, "warm") == pytest.approx(cold, abs=1e-4)
    assert engine.snapshot().prefix_hit_tokens == 112
    planes = engine.store.formats[1].planes
    assert [plane.codec is not None for plane in planes] == [True, False]  # rope stays raw
    kinds = {kind.split(":")[0] for kind in engine.snapshot().fallbacks}
    assert kinds == (set() if kernels == "reference" else {"decode", "encode"})


def test_decoded_latents_are_attended_as_the_reference_does() -> None:
    prompt = prompt_of(2, 150)

    def logprobs(kernels: str) -> list[float]:
        engine = make_engine(*load("deepseek_v3"), kernels=kernels, codec="turboquant4", max_batch_tokens=37)
        ask(engine, "x", prompt, max_tokens=20, logprobs=0, ignore_eos=True)
        ask(engine, "y", prompt[:90] + prompt_of(3, 40), max_tokens=8, logprobs=0, ignore_eos=True)
        answers = run(engine)
        return [entry.logprob for key in sorted(answers) for output in answers[key] for entry in output.logprobs or ()]

    assert logprobs("cpu") == pytest.approx(logprobs("reference"), abs=1e-3)


def test_codecs_with_scales_per_channel_are_refused_for_latents() -> None:
    with pytest.raises(CodecError, match=r"latent is key and value at once.*int8"):
        make_engine(*load("deepseek_v3"), codec="kivi2")
