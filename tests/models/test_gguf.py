"""GGUF files: tiny ones written with gguf-py convert to the weights they were made from; broken ones are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvloom.core.config import EngineConfig
from kvloom.core.errors import CorruptModelError, ModelError, UnsupportedModelError
from kvloom.models import sources
from kvloom.models.gguf.convert import tensor_values
from kvloom.models.gguf.header import read_header
from kvloom.models.loader import load_model
from tests.models import tiny
from tests.models.harness import PagedRunner, difference, eager_logits, random_ids

Q = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
LLAMA_NAMES = NAMES | {"post_attention_layernorm": "ffn_norm"}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TEMPLATE = "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    if name in TOP or name == "lm_head.weight":
        return TOP.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    base, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[base]}.{suffix}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter: rows [head][2][half] become [head][half][2]."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: Any,
    *,
    kind: Q = Q.F32,
    metadata: Mapping[str, Any] | None = None,
    without: str = "",
    pre: str = "gpt-2",
) -> Any:
    """A GGUF file of a tiny random model, as llama.cpp's converter writes it; returns the model."""
    model = tiny.build(config)
    architecture = "llama" if config.model_type == "llama" else "gemma3"
    names = LLAMA_NAMES if architecture == "llama" else GEMMA_NAMES
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    if architecture == "gemma3":
        numbers["attention.sliding_window"] = config.sliding_window
    for name, number in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0 if architecture == "llama" else 1000000.0)
    tokenizer = tiny.build_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 4)
    writer.add_token_merges(["a b", "c d"][:0])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_unk_token_id(259)
    writer.add_eot_token_id(258)
    writer.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add[type(value)](key, value)
    for name, weight in model.state_dict().items():
        values = weight.numpy().copy()
        if architecture == "llama" and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        elif architecture == "gemma3" and name.endswith("norm.weight"):
            values += 1
        if name == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        quantised = kind if values.ndim == 2 else Q.F32
        if quantised == Q.F32:
            writer.add_tensor(gguf_name(name, names), values)
        else:
            writer.add_tensor(gguf_name(name, names), gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def load(path: Path, **changes: Any) -> Any:
    return load_model(EngineConfig(model=str(path), cache_dir=str(path.parent / "cache"), **changes))


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny.llama_config(),
    "llama-tied": lambda: tiny.llama_config(tie_word_embeddings=True),
    "gemma3": lambda: tiny.gemma3_config(
        num_hidden_layers=7, layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gguf_file_loads_as_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    model = write_gguf(tmp_path / "tiny.gguf", config)
    loaded = load(tmp_path / "tiny.gguf", dtype="float32")
    expected = model.state_dict()
    for key, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, expected[key].to(torch.bfloat16).float()), key
    assert loaded.name == "tiny"
    assert loaded.model_type == config.model_type
    assert loaded.hf_config.tie_word_embeddings == config.tie_word_embeddings
    assert loaded.hf_config.rope_parameters == config.rope_parameters
    assert getattr(loaded.hf_config, "layer_types", None) == getattr(config, "layer_types", None)
    assert loaded.eos_token_ids == (257, 258)
    model.load_state_dict(loaded.model.state_dict())
    ids = random_ids(40, tiny.VOCAB_SIZE, 0)
    got = PagedRunner(loaded.model, loaded.layout).step({"a": ids})["a"]
    assert difference(got, eager_logits(model, ids)) < 1e-5


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q4_0, Q.Q5_1, Q.Q8_0])
def test_quantised_weights_are_rounded_once(kind: Q, tmp_path: Path) -> None:
    """Equal to gguf-py's own reader and dequantisation, then rounded to bfloat16."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.llama_config(), kind=kind)
    header = read_header(path)
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == len(header.tensors)
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(tensor_values(header, header.tensors[tensor.name]), expected), tensor.name
    weights = load_file(sources.converted(path, tmp_path / "cache") / "model.safetensors")
    v_proj = torch.from_numpy(tensor_values(header, header.tensors["blk.0.attn_v.weight"]))
    assert torch.equal(weights["model.layers.0.self_attn.v_proj.weight"], v_proj.to(torch.bfloat16))


def test_tokenizer_template_and_special_tokens_survive(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny.llama_config())
    tokenizer = load(tmp_path / "tiny.gguf").tokenizer
    reference = tiny.build_tokenizer()
    for text in ("hello", "a  b\n\n\tc", "héllo 你好 🎉", "<bos>x<eos>", "12345", ""):
        assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<bos>user: hi\n"
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"][0] == 256


# --- The cache of conversions -------------------------------------------------------------------------


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(path, tiny.llama_config())
    first = sources.converted(path, cache)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert sources.converted(path, cache) == first
    moved = path.rename(tmp_path / "sub.gguf")
    same = sources.converted(moved, cache)
    assert same.name != first.name  # named after the file too, for people
    assert (first / "config.json").stat().st_mtime_ns == stamp
    write_gguf(path, tiny.llama_config(initializer_range=0.1))
    assert sources.converted(path, cache) != first


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(path, tiny.llama_config(), pre="unheard-of")
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="unheard-of"):
            sources.converted(path, cache)
    assert not [entry for entry in (cache / "gguf").iterdir() if entry.is_dir()]


def test_an_abandoned_conversion_is_cleaned_up_and_made_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(path, tiny.llama_config())
    target = sources.converted(path, cache)
    target.rename(cache / "gguf" / f".{target.name}-abandoned")  # as a killed process leaves it
    assert sources.converted(path, cache) == target
    assert [entry.name for entry in (cache / "gguf").iterdir() if entry.is_dir()] == [target.name]


def test_starting_together_converts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: each takes the file lock on its own."""
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(path, tiny.llama_config())
    calls: list[Path] = []
    convert = sources._convert_into

    def counted(path: Path, target: Path) -> None:
        calls.append(target)
        convert(path, target)

    monkeypatch.setattr(sources, "_convert_into", counted)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: sources.converted(path, cache), range(4)))
    assert len(found) == len(calls) == 1
    assert len([entry for entry in (cache / "gguf").iterdir() if entry.is_dir()]) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.llama_config())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="--cache-dir or KVLOOM_CACHE_DIR"):
        sources.converted(path, tmp_path / "file")


# --- Packages -----------------------------------------------------------------------------------------


def make_package(root: Path, name: str, code: str = "") -> Path:
    (root / name / "data").mkdir(parents=True)
    (root / name / "__init__.py").write_text(code)
    return root / name / "data"


def test_a_package_is_searched_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_package(tmp_path, "kvloom_test_shipped", "raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    write_gguf(data / "one.gguf", tiny.llama_config())
    loaded = load_model(EngineConfig(model="package:kvloom-test-shipped", cache_dir=str(tmp_path / "cache")))
    assert loaded.name == "kvloom-test-shipped"
    write_gguf(data / "two-b.gguf", tiny.llama_config())
    with pytest.raises(ModelError, match=r"ships 2 GGUF files; name one: package:kvloom_test_shipped/one\.gguf"):
        sources.package_file("kvloom_test_shipped", tmp_path / "cache")
    assert sources.package_file("kvloom_test_shipped/two-b.gguf", tmp_path / "cache") == data / "two-b.gguf"


def test_a_package_in_parts_is_assembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "whole.gguf", tiny.llama_config())
    code = f"import shutil\ndef assemble(path):\n    shutil.copy({str(tmp_path / 'whole.gguf')!r}, path)\n"
    make_package(tmp_path, "kvloom_test_parts", code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    assembled = sources.package_file("kvloom_test_parts", tmp_path / "cache")
    assert assembled.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "whole.gguf").unlink()
    assert sources.package_file("kvloom_test_parts", tmp_path / "cache") == assembled


def test_a_package_without_a_file_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "kvloom_test_unimportable", "import no_such_inference_engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be imported.*no_such_inference_engine"):
        sources.package_file("kvloom_test_unimportable", tmp_path / "cache")


def test_a_package_whose_parts_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "kvloom_test_broken", "def assemble(path):\n    raise FileNotFoundError('part 3')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    with pytest.raises(ModelError, match=r"part 3.*pip install --force-reinstall kvloom-test-broken"):
        sources.package_file("kvloom_test_broken", tmp_path / "cache")


# --- Broken and unknown files -------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_file(share: float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.llama_config())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CorruptModelError, match=r"tiny\.gguf.*download it again"):
        load(path)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModelError, match="not a GGUF file"):
        load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(100))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(100))
    with pytest.raises(CorruptModelError):
        load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(100))
    with pytest.raises(CorruptModelError):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; converted are gemma3, llama"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 32 channels"),
        ({"tokenizer.ggml.model": "t5"}, "type 't5'"),
    ],
)
def test_what_is_not_converted(metadata: dict[str, Any], words: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.llama_config())
    header = read_header(path)
    header.metadata.update(metadata)
    monkeypatch.setattr("kvloom.models.gguf.convert.read_header", lambda _: header)
    with pytest.raises(UnsupportedModelError, match=words):
        load(path)


def test_a_file_without_one_of_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.llama_config(), without="model.layers.2.mlp.up_proj.weight")
    with pytest.raises(CorruptModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load(path)


def test_converted_files_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.llama_config())
    directory = sources.converted(path, tmp_path / "cache")
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [257, 258]
