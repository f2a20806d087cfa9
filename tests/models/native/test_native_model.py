"""The native step gives the logits of transformers' eager attention, in every recognised shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.core.layout import KVLayout, group_layers
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import BlockFormat
from kvloom.models.families import find_family
from kvloom.models.native.model import NativeModel, NoNativeStepError
from kvloom.models.native.shapes import SHAPES
from kvloom.models.paged import PagedRunner
from tests.models import configs, tiny
from tests.models.harness import check_parity, paged, random_ids

TIGHT = 5e-5


def layout_of(config: Any) -> KVLayout:
    return group_layers(find_family(config.model_type, allow_unverified=False).layers(config))


def native_of(model: Any, model_type: str, layout: KVLayout, backend: CpuBackend, **options: Any) -> NativeModel:
    native = NativeModel(model, model_type, layout, backend, **options)
    native.config = model.config  # the harness asks for the vocabulary
    native.set_embedding_scale(native.exact_embedding_scale)
    return native


@pytest.mark.parametrize("model_type", [name for name in SHAPES if name not in configs.WRAPPED])
def test_logits_equal_eager(model_type: str) -> None:
    backend = CpuBackend(num_threads=1)
    eager, model = configs.build(model_type), configs.build(model_type)
    for prepared in (eager, model):
        find_family(model_type, allow_unverified=False).prepare(prepared, 200)
    layout = layout_of(eager.config)
    native = native_of(model, model_type, layout, backend)
    check_parity(native, eager, layout, backend=backend, tolerance=TIGHT)
    assert not backend.fallbacks


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4, "head_dim": 64},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"hidden_size": 72, "intermediate_size": 130, "vocab_size": 263},  # no whole panels, chunks or vectors
        {"hidden_size": 320, "intermediate_size": 600},  # more than one chunk of channels
    ],
)
def test_shapes_of_llama(changes: dict[str, Any]) -> None:
    config = tiny.llama_config(**changes)
    layout = layout_of(config)
    backend = CpuBackend(num_threads=2)
    eager = tiny.build(config)
    native = native_of(tiny.build(config), "llama", layout, backend)
    check_parity(native, eager, layout, backend=backend, tolerance=TIGHT)


def test_float32_weights_that_are_bfloat16_are_kept_as_such_and_exact() -> None:
    config = tiny.llama_config()
    eager, model = tiny.build(config), tiny.build(config)
    for rounded in (eager, model):
        for parameter in rounded.parameters():
            parameter.data = parameter.data.bfloat16().float()
    layout, backend = layout_of(config), CpuBackend(num_threads=1)
    native = native_of(model, "llama", layout, backend)
    assert all(linear.dtype == torch.bfloat16 for layer in native._packed for linear in layer)
    check_parity(native, eager, layout, backend=backend, tolerance=TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    config = tiny.llama_config(initializer_range=0.05)
    layout, backend = layout_of(config), CpuBackend(num_threads=1)
    ids = random_ids(50, tiny.VOCAB_SIZE, 2)
    expected = PagedRunner(paged(tiny.build(config)), layout).step({"a": ids})["a"]
    native = NativeModel(tiny.build(config, dtype=dtype), "llama", layout, backend)
    got = PagedRunner(native, layout, backend=backend).step({"a": ids})["a"]
    assert float((got - expected).abs().max() / expected.abs().max()) < 0.05


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_in_any_batch(model_type: str, dtype: torch.dtype) -> None:
    config = tiny.llama_config() if model_type == "llama" else tiny.gemma3_config()
    layout, backend = layout_of(config), CpuBackend(num_threads=2)
    native = NativeModel(tiny.build(config, dtype=dtype), model_type, layout, backend)
    ids = random_ids(150, tiny.VOCAB_SIZE, 3)
    whole = PagedRunner(native, layout, backend=backend).step({"a": ids})["a"]
    runner = PagedRunner(native, layout, backend=backend, seed=1)
    found = []
    for start, count in ((0, 17), (17, 1), (18, 64), (82, 1), (83, 1), (84, 66)):
        others = {f"other {start} {i}": random_ids(1 + 3 * i, tiny.VOCAB_SIZE, i) for i in range(start % 5)}
        found.append(runner.step({**others, "a": ids[start : start + count]})["a"])
        for name in others:
            runner.drop(name)
    assert torch.equal(torch.cat(found), whole)


def test_only_some_rows_are_asked_for() -> None:
    config = tiny.llama_config()
    layout, backend = layout_of(config), CpuBackend(num_threads=1)
    native = NativeModel(tiny.build(config), "llama", layout, backend)
    ids = random_ids(40, tiny.VOCAB_SIZE, 4)
    every = PagedRunner(native, layout, backend=backend).step({"a": ids})["a"]
    last = PagedRunner(native, layout, backend=backend).step({"a": ids}, rows=3)["a"]
    assert torch.equal(last, every[-3:])


def test_token_ids_outside_the_vocabulary_are_an_error() -> None:
    config = tiny.llama_config()
    layout, backend = layout_of(config), CpuBackend(num_threads=1)
    native = NativeModel(tiny.build(config), "llama", layout, backend)
    with pytest.raises(ValueError, match="token id 260 is outside the vocabulary of 260"):
        PagedRunner(native, layout, backend=backend).step({"a": [1, 260]})


def test_what_the_step_does_not_compute_is_refused() -> None:
    backend = CpuBackend(num_threads=1)
    model = configs.build("olmo2")
    with pytest.raises(NoNativeStepError, match="olmo2"):
        NativeModel(model, "olmo2", layout_of(model.config), backend)
    config = tiny.llama_config(hidden_act="gelu")
    with pytest.raises(NoNativeStepError, match="'gelu'"):
        NativeModel(tiny.build(config), "llama", layout_of(config), backend)


def test_formats_that_kernels_do_not_read_are_an_error() -> None:
    backend = CpuBackend(num_threads=1)
    with pytest.raises(ValueError, match="no native kernel"):
        backend.native_format(BlockFormat(block_size=16, num_heads=1, block_bytes=0, layer_bytes=0, planes=()), 1)
