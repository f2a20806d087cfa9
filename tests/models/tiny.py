"""Tiny random models, made by hand or saved as a directory with a tokenizer, for tests only."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 260
# Weights far larger than a trained model's, so that attention is peaked and a wrong key shows in the logits.
SPREAD = 0.25


def llama_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": SPREAD,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(settings | changes))


def gemma3_config(**changes: Any) -> Gemma3TextConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 1024,
        "initializer_range": SPREAD,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    return Gemma3TextConfig(**(settings | changes))


MODEL_CLASSES = {"llama": LlamaForCausalLM, "gemma3_text": Gemma3ForCausalLM}


def build(config: Any, *, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """A random model of ``config``; equal configurations give equal weights."""
    torch.manual_seed(0)
    own = copy.deepcopy(config)  # a model writes its attention implementation into its configuration
    model = MODEL_CLASSES[config.model_type]._from_config(own, attn_implementation=attention)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # rotary frequencies stay float32, as in a loaded model
    return model.eval().requires_grad_(False)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    special = ["<bos>", "<eos>", "<pad>", "<unk>"]
    vocab |= {token: len(alphabet) + number for number, token in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def save(directory: Path, config: Any, **options: Any) -> Path:
    """Write a random model of ``config`` and its tokenizer to ``directory``."""
    model = build(config)
    model.generation_config.eos_token_id = [257, 258]
    model.save_pretrained(directory, **options)
    build_tokenizer().save_pretrained(directory)
    return directory
