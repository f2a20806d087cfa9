"""DeepSeek V2 and V3 and models built like them: multi-head latent attention, mixtures of experts.

The cache keeps one latent and one rotated vector per token and layer, whatever the number of heads;
``attention/mla.py`` attends to them without expanding. Rotary scaling (yarn and the factor it puts
on the logits, mscale) and the experts are transformers' own code.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kvloom.attention.mla import hand_over_latents
from kvloom.core.layout import LayerSpec
from kvloom.models.families.base import DecoderFamily


class DeepSeek(DecoderFamily):
    """Model types ``deepseek_v2`` and ``deepseek_v3``."""

    def layers(self, config: Any) -> list[LayerSpec]:
        layer = LayerSpec.mla(latent_dim=int(config.kv_lora_rank), rope_dim=int(config.qk_rope_head_dim))
        return [layer] * int(config.num_hidden_layers)

    def unsupported(self, config: Any) -> str | None:
        if getattr(config, "index_topk", None):
            return "it chooses the keys that a query sees with an indexer, whose keys the cache does not hold"
        return super().unsupported(config)

    def prepare(self, model: nn.Module, max_model_len: int) -> None:
        super().prepare(model, max_model_len)
        for module in model.modules():
            if hasattr(module, "kv_b_proj"):
                hand_over_latents(module)
