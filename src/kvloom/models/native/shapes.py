"""Which transformers models have the shape that the native step computes, and where their weights are.

A Llama-shaped decoder: RMS norms, attention with half-split rotary positions, a gated MLP. What differs
between families is stated per model type in ``SHAPES``; everything else is read off the modules.
A wrong entry does not serve wrong answers: every model is compared with its own transformers code at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a model type's modules are called, beyond Llama's.

    Norms are attributes of a decoder layer; None where the model has none in that place.
    """

    input_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    norm_offset: float = 0.0  # Gemma's norms multiply by 1 + weight


_LLAMA = Shape()
_GEMMA = Shape(norm_offset=1.0)
_SANDWICH = Shape(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)

SHAPES: Mapping[str, Shape] = {
    "gemma": _GEMMA,
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "granite": _LLAMA,
    "llama": _LLAMA,
    "ministral": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
}

ACTIVATIONS: Mapping[str, int] = {"silu": 0, "gelu_pytorch_tanh": 1}  # Activation in csrc/types.h


def activation_of(config: Any) -> str:
    """Name of the MLP's activation in ``config``."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def unrecognised(model_type: str, config: Any) -> str | None:
    """Why a model of this type and configuration has no native step, or None. Torch-free: asked before loading."""
    if model_type not in SHAPES:
        return f"no native step for model type {model_type!r}; there is one for {', '.join(SHAPES)}"
    if activation_of(config) not in ACTIVATIONS:
        return f"no native step with activation {activation_of(config)!r}; there is one for {', '.join(ACTIVATIONS)}"
    return None
