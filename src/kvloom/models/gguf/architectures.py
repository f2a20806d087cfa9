"""GGUF architectures in transformers' words: configuration, tensor names, and what conversion changed.

llama.cpp's converter renames tensors and changes some values (Llama's query and key rows, Gemma's
norm weights); each class here undoes exactly that. A new architecture is one class and one line in
``ARCHITECTURES``.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvloom.core.errors import CorruptModelError, UnsupportedModelError
from kvloom.models.gguf.header import GGUFHeader

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Architecture:
    """How one GGUF architecture reads; subclasses say what differs from a plain decoder."""

    model_type = ""
    class_name = ""
    names = _NAMES
    skipped: frozenset[str] = frozenset()

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header

    def key(self, name: str, default: Any = None) -> Any:
        """The metadata value ``<architecture>.<name>``.

        Raises:
            CorruptModelError: it is missing and there is no default.
        """
        full = f"{self.header.architecture}.{name}"
        value = self.header.metadata.get(full, default)
        if value is None:
            raise CorruptModelError(f"{self.header.path} has no metadata value {full!r}; use a complete file")
        return value

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        metadata = self.header.metadata
        heads = self.key("attention.head_count")
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "hidden_size": self.key("embedding_length"),
            "intermediate_size": self.key("feed_forward_length"),
            "num_hidden_layers": self.key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.key("attention.head_count_kv", heads),
            "head_dim": self.key("attention.key_length", self.key("embedding_length") // heads),
            "rms_norm_eps": round(self.key("attention.layer_norm_rms_epsilon"), 12),  # stored as float32
            "max_position_embeddings": self.key("context_length"),
            # The embedding's rows are the logits' width, whatever the vocabulary's length says.
            "vocab_size": self.header.tensors["token_embd.weight"].shape[0],
            # llama.cpp leaves the output projection out when it is the embedding.
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
        }

    def rename(self, name: str) -> str | None:
        """transformers' name of a tensor; None for one that is not a weight.

        Raises:
            UnsupportedModelError: the tensor is not known, so the model is another than we think.
        """
        if name in self.skipped:
            return None
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)\.(weight|bias)", name)
        if layer is not None and layer[2] in self.names:
            return f"model.layers.{layer[1]}.{self.names[layer[2]]}.{layer[3]}"
        base, _, suffix = name.rpartition(".")
        if layer is None and base in self.names and suffix in ("weight", "bias"):
            return f"{self.names[base]}.{suffix}"
        raise UnsupportedModelError(
            f"{self.header.path} has a tensor {name!r}, which architecture {self.header.architecture!r} has no place "
            "for; use the model's safetensors directory instead"
        )

    def restore(self, name: str, values: np.ndarray) -> np.ndarray:
        """Undo what llama.cpp's converter did to a tensor's float32 values."""
        return values


class LlamaArchitecture(Architecture):
    """Llama: query and key rows were interleaved for llama.cpp's rotary layout."""

    model_type = "llama"
    class_name = "LlamaForCausalLM"

    def config(self) -> dict[str, Any]:
        scaling = self.key("rope.scaling.type", "none")
        if "rope_freqs.weight" in self.header.tensors or scaling not in ("none", "linear", "yarn"):
            raise UnsupportedModelError(
                f"{self.header.path} scales its rotary frequencies by a table (rope_freqs) or by {scaling!r}, whose "
                "parameters GGUF does not keep; use the model's safetensors directory instead"
            )
        rope = {"rope_type": "default", "rope_theta": self.key("rope.freq_base", 10000.0)}
        if scaling != "none":
            rope |= {"rope_type": scaling, "factor": self.key("rope.scaling.factor")}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = self.key("rope.scaling.original_context_length")
        config = super().config()
        if self.key("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
            raise UnsupportedModelError(
                f"{self.header.path} rotates {self.key('rope.dimension_count')} of {config['head_dim']} channels, "
                "which transformers' Llama cannot; use the model's safetensors directory instead"
            )
        biased = "blk.0.attn_q.bias" in self.header.tensors
        return config | {"hidden_act": "silu", "attention_bias": biased, "rope_parameters": rope}

    def restore(self, name: str, values: np.ndarray) -> np.ndarray:
        if ".attn_q." in name:
            return _deinterleave(values, self.key("attention.head_count"))
        if ".attn_k." in name:
            return _deinterleave(values, self.key("attention.head_count_kv", self.key("attention.head_count")))
        return values


class Gemma3Architecture(Architecture):
    """Gemma 3's text model: norm weights were stored plus one."""

    model_type = "gemma3_text"
    class_name = "Gemma3ForCausalLM"
    names = _NAMES | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    def config(self) -> dict[str, Any]:
        config = super().config()
        full = {"rope_type": "default", "rope_theta": self.key("rope.freq_base", 1000000.0)}
        scaling = self.key("rope.scaling.type", "none")
        if scaling == "linear":
            full |= {"rope_type": "linear", "factor": self.key("rope.scaling.factor")}
        elif scaling != "none":
            raise UnsupportedModelError(f"{self.header.path} scales rotary frequencies by {scaling!r}; known: linear")
        sliding = {"rope_type": "default", "rope_theta": self.key("rope.freq_base_swa", 10000.0)}
        layers = config["num_hidden_layers"]
        # llama.cpp's rule for the largest model (27B): logits scale with the hidden size per head.
        scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
        softcap = self.header.metadata.get("gemma3.final_logit_softcapping")
        return config | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.key("attention.sliding_window"),
            "layer_types": ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)],
            "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
            "final_logit_softcapping": softcap or None,
        }

    def restore(self, name: str, values: np.ndarray) -> np.ndarray:
        return values - 1 if name.endswith("norm.weight") else values


# general.architecture -> class
ARCHITECTURES: dict[str, type[Architecture]] = {
    "gemma3": Gemma3Architecture,
    "llama": LlamaArchitecture,
}


def find_architecture(header: GGUFHeader) -> Architecture:
    """How to read ``header``'s file.

    Raises:
        UnsupportedModelError: its architecture is not listed.
        CorruptModelError: it has no embedding.
    """
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{header.path} is of GGUF architecture {header.architecture!r}; converted are "
            f"{', '.join(sorted(ARCHITECTURES))}; use the model's safetensors directory instead"
        )
    if "token_embd.weight" not in header.tensors:
        raise CorruptModelError(f"{header.path} has no token embedding (token_embd.weight); use a complete file")
    return found(header)


def _deinterleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows ``[head][pair][2]`` back to ``[head][2][pair]``, as transformers' rotation expects them."""
    rows = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    restored: np.ndarray = rows.swapaxes(1, 2).reshape(values.shape)
    return restored
