"""GPT-BigCode (SantaCoder, StarCoder): learned positions, and one KV head for all query heads."""

from __future__ import annotations

from typing import Any

from kvloom.core.layout import LayerSpec
from kvloom.models.families.base import DecoderFamily, head_dim


class GptBigCode(DecoderFamily):
    """Multi-query unless the configuration says otherwise."""

    def layers(self, config: Any) -> list[LayerSpec]:
        heads = 1 if config.multi_query else int(config.num_attention_heads)
        return [LayerSpec.kv(num_heads=heads, k_dim=head_dim(config))] * int(config.num_hidden_layers)
