"""Gemma 4: head size and KV heads differ between full and sliding layers; the last layers store nothing.

A layer among the last ``num_kv_shared_layers`` attends to the keys and values of the last earlier
layer of its own type. It names that layer in ``shares_with``, so that nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvloom.core.layout import LayerSpec
from kvloom.models.families.alternating import Alternating


class Gemma4Text(Alternating):
    """Shapes from ``per_layer_config``, windows from ``layer_types``, sharing from ``num_kv_shared_layers``."""

    def layers(self, config: Any) -> list[LayerSpec]:
        count = int(config.num_hidden_layers)
        kinds = list(config.layer_types)
        first_shared = count - int(config.num_kv_shared_layers or 0)
        owners = {kind: max(i for i in range(first_shared) if kinds[i] == kind) for kind in kinds[first_shared:]}
        return [
            LayerSpec.kv(
                num_heads=int(config.per_layer_config[index].num_key_value_heads),
                k_dim=int(config.per_layer_config[index].head_dim),
                window=window,
                shares_with=owners[kinds[index]] if index >= first_shared else None,
            )
            for index, window in enumerate(self.windows(config, count))
        ]

    def unsupported(self, config: Any) -> str | None:
        kinds = list(config.layer_types)
        first_shared = int(config.num_hidden_layers) - int(config.num_kv_shared_layers or 0)
        if set(kinds[first_shared:]) - set(kinds[:first_shared]):
            return (
                f"num_kv_shared_layers is {config.num_kv_shared_layers} of {config.num_hidden_layers} layers, so that "
                "some read keys that none of its own layers stores (an assistant model); serve the model it assists"
            )
        if config.use_bidirectional_attention == "all":
            return "it attends in both directions (an embedding model), which a causal cache cannot serve"
        # "vision" concerns image tokens alone, and images are not served.
        return super(Alternating, self).unsupported(config)


class Gemma4(Gemma4Text):
    """The text part of a multimodal checkpoint."""

    weight_names: Mapping[str, str] = MappingProxyType({r"^(model\.)?language_model\.(model\.)?": "model."})
    ignored_weights = r"vision_tower|audio_tower|embed_vision|embed_audio"

    def text_config(self, config: Any) -> Any:
        return config.get_text_config()
