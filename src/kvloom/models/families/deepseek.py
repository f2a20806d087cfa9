"""DeepSeek V2 and V3 and models built like them: multi-head latent attention, mixtures of experts.

The cache keeps one latent and one rotated vector per token and layer, whatever the number of heads;
``attention/mla.py`` attends to them without expanding. Rotary scaling (yarn, with the factor that it
puts on the logits) and the experts are transformers' own code.

transformers' attention modules, from 5.15 on, call ``self.expand_kv(latent, rope)`` between rotating
and attending. On instances that were prepared it hands both over as they are, so that
``paged_attention`` receives the latent as its key and the rotated part as its value.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from kvloom.attention.interface import ATTENTION_NAME
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import LayerSpec
from kvloom.models.families.base import DecoderFamily


class DeepSeek(DecoderFamily):
    """``kv_lora_rank`` and ``qk_rope_head_dim`` are the layout; nothing else of attention differs."""

    def layers(self, config: Any) -> list[LayerSpec]:
        layer = LayerSpec.mla(latent_dim=int(config.kv_lora_rank), rope_dim=int(config.qk_rope_head_dim))
        return [layer] * int(config.num_hidden_layers)

    def prepare(self, model: nn.Module, max_model_len: int) -> None:
        super().prepare(model, max_model_len)
        for module in model.modules():
            if hasattr(module, "kv_b_proj"):
                hand_over_latents(module)


def hand_over_latents(module: Any) -> None:
    """Let this attention module pass latents on unexpanded.

    Raises:
        UnsupportedModelError: it is not built as the absorbed form needs it.
    """
    name, projection = type(module).__name__, module.kv_b_proj
    if not callable(getattr(module, "expand_kv", None)):
        raise UnsupportedModelError(
            f"{name} has no expand_kv, in which transformers 5.15 and later expand latents; use such a version"
        )
    shape = (module.num_heads * (module.qk_nope_head_dim + module.v_head_dim), module.kv_lora_rank)
    if type(projection) is not nn.Linear or projection.bias is not None or tuple(projection.weight.shape) != shape:
        raise UnsupportedModelError(
            f"{name} expands latents by {projection}; absorbing that needs a plain matrix of shape {shape}"
        )
    module.expand_kv = MethodType(_expand_kv, module)  # a bound method, so that copies of the model have their own


def _expand_kv(self: Any, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of ``expand_kv``; other attention implementations on the same instance still get keys and values."""
    if self.config._attn_implementation == ATTENTION_NAME:
        return latent, rope
    expanded: tuple[torch.Tensor, torch.Tensor] = type(self).expand_kv(self, latent, rope)
    return expanded
