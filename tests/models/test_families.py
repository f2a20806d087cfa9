"""The conformance suite: every model type of ``families.FAMILIES``, against transformers' eager attention.

It walks the table, so a new family is tested without being mentioned here; it needs one line in
``configs.py``. Types that the installed transformers does not know are skipped, visibly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.core.errors import ConfigError
from kvloom.core.layout import KVLayout, group_layers
from kvloom.engine.engine import Engine
from kvloom.models.families import FAMILIES, find_family
from kvloom.models.families.base import ModelFamily
from kvloom.models.parity import longest_window, quick_cases
from kvloom.models.seam import check_calls, check_masks
from tests.engine.tiny import as_loaded, ask, assert_greedy, make_engine, minimum_memory, prompt_of, tokens
from tests.models import configs
from tests.models.harness import TOLERANCE, backend_or_skip, backends, check_parity
from tests.models.tiny import VOCAB_SIZE

LONGROPE_LENGTH = 256  # configs.LONGROPE's original length: the short regime, in which plain eager runs too
# Why a type's masks cannot be looked at: its code is built otherwise. Parity past the window covers it.
UNSEEN_MASKS = {"falcon", "gpt2"}
MIXTURES = ["gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"]


@dataclass
class Subject:
    """One model type: its family, and equal weights with our attention and with eager."""

    model_type: str
    family: ModelFamily
    config: Any
    layout: KVLayout
    model: Any
    eager: Any

    def engine(self, **settings: Any) -> Engine:
        return make_engine(self.model_type, loaded=as_loaded(self.model, self.model_type), **settings)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model_type = request.param
    skip_unknown(model_type)
    if model_type in configs.WRAPPED:
        pytest.skip(f"its text part is {configs.WRAPPED[model_type]}, tested here; other tests load whole checkpoints")
    register_attention()
    family = find_family(model_type, allow_unverified=False)
    config = family.text_config(configs.tiny_config(model_type))
    assert family.unsupported(config) is None
    model = configs.build(model_type, family.build_attention)
    family.prepare(model, LONGROPE_LENGTH)
    yield Subject(model_type, family, config, group_layers(family.layers(config)), model, configs.build(model_type))


def skip_unknown(model_type: str) -> None:
    try:
        configs.tiny_config(model_type)
    except ValueError as error:
        pytest.skip(f"this transformers has no {model_type}: {str(error).splitlines()[0]}")


def test_every_type_has_a_tiny_configuration() -> None:
    missing = set(FAMILIES) - set(configs.CHANGES) - set(configs.WRAPPED)
    assert not missing, f"add a tiny configuration to tests/models/configs.py for {', '.join(sorted(missing))}"


def test_the_loader_s_checks_pass(subject: Subject) -> None:
    assert check_calls(subject.model, subject.layout, subject.family.query_heads(subject.config)) == VOCAB_SIZE
    unseen = check_masks(subject.model, subject.layout, subject.config)
    assert (unseen is not None) == (subject.model_type in UNSEEN_MASKS), unseen


@pytest.mark.parametrize("backend", backends())
def test_logits_equal_eager(subject: Subject, backend: str) -> None:
    """Ragged batch, chunked prefill, decode past every window, prefix hit, preemption."""
    kernels = backend_or_skip(backend)
    cases = quick_cases(longest_window(subject.layout), 16, VOCAB_SIZE)
    check_parity(subject.model, subject.eager, subject.layout, backend=kernels, cases=cases, tolerance=TOLERANCE)
    refused = any(kernels.unsupported(fmt, heads) for fmt, heads in formats_of(subject, kernels))
    assert bool(kernels.fallbacks) == refused  # what the native kernels lack is computed all the same, and counted


def formats_of(subject: Subject, kernels: Any) -> list[Any]:
    from kvloom.attention.scratch import scratch_store

    store, _ = scratch_store(
        subject.layout,
        kernels,
        num_spans=[1] * len(subject.layout.groups),
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    heads = subject.family.query_heads(subject.config)
    return [(store.formats[group], heads[layer]) for layer, (group, _) in enumerate(subject.layout.homes)]


def test_bytes_per_token_equal_what_transformers_caches(subject: Subject) -> None:
    """The engine's count, against the tensors in transformers' own cache after eight tokens."""
    ids = torch.arange(8).unsqueeze(0)
    with torch.inference_mode():
        cache = subject.eager(input_ids=ids, use_cache=True)
    cache = cache.cache if hasattr(cache, "cache") else cache.past_key_values
    planes = [plane for layer in cache.layers if layer.keys is not None for plane in (layer.keys, layer.values)]
    expected = sum(plane.numel() * plane.element_size() for plane in planes) // 8
    info = subject.engine().info
    assert info.actual_bytes_per_token == info.predicted_bytes_per_token == expected


def test_the_engine_shares_preempts_and_forks_exactly(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slabs as small as tiny layers: one sequence of full length fits, so that several preempt each other.
    monkeypatch.setattr("kvloom.core.sizes.MIN_SLAB_BYTES", 1)
    settings: dict[str, Any] = {
        "kernels": "auto",
        "block_size": 16,
        "max_model_len": 96,
        "max_sequences": 4,
        "max_batch_tokens": 32,
    }
    loaded = as_loaded(subject.model, subject.model_type)
    engine = subject.engine(kv_cache_memory=minimum_memory(subject.model_type, loaded=loaded, **settings), **settings)
    shared = prompt_of(1, 32)
    prompts = {f"r{i}": shared + prompt_of(10 + i, 5 + i) for i in range(1, 8)}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, max_tokens=12, n=4 if name == "r3" else 1)
    outputs: dict[Any, Any] = {}
    open_span = sum(span.span_bytes for span in engine.plan.spans)
    for number in range(1000):
        if not engine.has_work:
            break
        if number == 9:  # a pressing one, so that preemption does not hang on a layout's exact sizes
            prompts["urgent"] = prompt_of(99, 40)
            ask(engine, "urgent", prompts["urgent"], max_tokens=12, priority=-1)
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.manager.check()
        cache, live = engine.snapshot().cache, engine.snapshot().running
        assert cache.used_bytes - cache.token_bytes <= (live + 1) * open_span
        assert cache.overhead_bytes < 0.01 * cache.arena_bytes
    snapshot = engine.snapshot()
    assert snapshot.prefix_hit_tokens > 0
    assert snapshot.preemptions > 0
    for name, prompt in prompts.items():
        assert_greedy(subject.eager, prompt, tokens(outputs[name, 0]))
    assert all(tokens(outputs["r3", i]) == tokens(outputs["r3", 0]) for i in range(4))
    assert snapshot.cache.used_bytes == 0 and snapshot.running == snapshot.waiting == 0

    off = subject.engine(kernels="auto", block_size=16, prefix_cache=False)
    ask(off, "r2", prompts["r2"], max_tokens=12)
    alone = [token for _ in range(100) if off.has_work for output in off.step() for token in output.token_ids]
    assert alone == tokens(outputs["r2", 0])


@pytest.mark.parametrize("model_type", MIXTURES)
def test_deterministic_mixtures_hold_or_are_refused(model_type: str) -> None:
    """Which experts a token shares depends on the batch; what that does to rounding is checked at load."""
    skip_unknown(model_type)
    register_attention()
    loaded = as_loaded(configs.build(model_type, ATTENTION_NAME), model_type)

    def logprobs(engine: Any) -> list[float]:
        found: list[float] = []
        while engine.has_work:
            for output in engine.step():
                if output.request_id == "x":
                    found += [entry.logprob for entry in output.logprobs or ()]
        return found

    try:
        alone = make_engine(model_type, loaded=loaded, deterministic=True, prefix_cache=False)
    except ConfigError as error:
        assert "--deterministic was asked for" in str(error)
        return
    prompt = prompt_of(4, 40)
    ask(alone, "x", prompt, max_tokens=8, logprobs=0)
    expected = logprobs(alone)
    busy = make_engine(model_type, loaded=loaded, deterministic=True, max_batch_tokens=32)
    for i in range(3):
        ask(busy, f"other{i}", prompt[: 9 * i] + prompt_of(20 + i, 9 + i), max_tokens=10)
    ask(busy, "x", prompt, max_tokens=8, logprobs=0)
    assert logprobs(busy) == expected
