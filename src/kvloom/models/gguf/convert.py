"""Write a GGUF file as a directory that transformers loads: bf16 safetensors, configuration, tokenizer.

Every weight is dequantised by gguf-py's own arithmetic and rounded once to bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.torch import save_file

from kvloom.core.errors import CorruptModelError, UnsupportedModelError
from kvloom.models.gguf.architectures import Architecture, find_architecture
from kvloom.models.gguf.header import GGUFHeader, GGUFTensor, read_header
from kvloom.models.gguf.tokenizer import build_tokenizer, special_token

SHARD_BYTES = 2 * 2**30  # bounds memory: one shard is held at a time
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def convert(path: Path, directory: Path, progress: Callable[[int, int], None]) -> None:
    """Write ``path``'s model into the empty ``directory``.

    Args:
        progress: called with (values done, values in all) after each tensor.

    Raises:
        CorruptModelError: truncated or incomplete.
        UnsupportedModelError: an architecture, tokenizer or quantisation that is not converted.
    """
    header = read_header(path)
    architecture = find_architecture(header)
    config = architecture.config()
    (directory / "config.json").write_text(_json(config), encoding="utf-8")
    (directory / "generation_config.json").write_text(_json(_generation_config(header, config)), encoding="utf-8")
    _write_tokenizer(header, config, directory)
    _write_weights(header, architecture, directory, progress)


def tensor_values(header: GGUFHeader, tensor: GGUFTensor) -> np.ndarray:
    """A tensor's float32 values, as stored in the file.

    Raises:
        UnsupportedModelError: gguf-py does not dequantise this type.
    """
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    raw = np.memmap(header.path, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,))
    rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
    try:
        values: np.ndarray = dequantize(rows, tensor.kind)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{header.path}: tensor {tensor.name!r} is quantised as {tensor.kind.name}, which gguf-py does not "
            "dequantise; use another quantisation of the model"
        ) from None
    return np.asarray(values, dtype=np.float32).reshape(tensor.shape)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _generation_config(header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any]:
    # Chat models end a turn with EOT, a text with EOS; either stops generation.
    ends = [header.metadata.get(f"tokenizer.ggml.{name}") for name in ("eos_token_id", "eot_token_id")]
    found = sorted({int(end) for end in ends if end is not None})
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": found, "pad_token_id": config["pad_token_id"]}


def _write_tokenizer(header: GGUFHeader, config: dict[str, Any], directory: Path) -> None:
    metadata = header.metadata
    tokenizer = build_tokenizer(metadata, header.architecture)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > config["vocab_size"]:
        raise CorruptModelError(
            f"{header.path} has a vocabulary of {size} tokens but an embedding of {config['vocab_size']} rows; "
            "use a complete file"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _NAMED_TOKENS.items():
        token = special_token(metadata, key)
        if token is not None:
            settings[name] = token
    (directory / "tokenizer_config.json").write_text(_json(settings), encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_weights(
    header: GGUFHeader, architecture: Architecture, directory: Path, progress: Callable[[int, int], None]
) -> None:
    total = sum(int(np.prod(tensor.shape)) for tensor in header.tensors.values())
    done = 0
    written: list[Path] = []
    index: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    held_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal held, held_bytes
        written.append(directory / f"shard-{len(written)}.safetensors")
        save_file(held, str(written[-1]), metadata={"format": "pt"})
        held, held_bytes = {}, 0

    for tensor in header.tensors.values():
        name = architecture.rename(tensor.name)
        if name is not None:
            values = architecture.restore(tensor.name, tensor_values(header, tensor))
            weight = torch.from_numpy(np.require(values, requirements=["C", "W"])).to(torch.bfloat16)
            size = weight.numel() * weight.element_size()
            if held and held_bytes + size > SHARD_BYTES:
                flush()
            held[name] = weight
            index[name] = len(written)
            held_bytes += size
            total_bytes += size
        done += int(np.prod(tensor.shape))
        progress(done, total)
    flush()
    _name_shards(directory, written, index, total_bytes)


def _name_shards(directory: Path, written: list[Path], index: dict[str, int], total_bytes: int) -> None:
    """Give the shards Hugging Face's names, which state their number."""
    if len(written) == 1:
        written[0].rename(directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(written):05d}.safetensors" for i in range(len(written))]
    for path, name in zip(written, names, strict=True):
        path.rename(directory / name)
    weight_map = {tensor: names[shard] for tensor, shard in index.items()}
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(_json(content), encoding="utf-8")
