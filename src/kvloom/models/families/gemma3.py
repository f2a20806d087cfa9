"""Gemma 3: windows on five of six layers, query and key norms, two rotary bases.

The multimodal checkpoints (model type ``gemma3``) are served as text models; their vision tower is
not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvloom.models.families.base import DecoderFamily, layer_type_windows


class Gemma3Text(DecoderFamily):
    """``layer_types`` says which layers slide over ``sliding_window`` tokens."""

    def windows(self, config: Any, num_layers: int) -> Sequence[int | None]:
        return layer_type_windows(config, num_layers)

    def unsupported(self, config: Any) -> str | None:
        if getattr(config, "use_bidirectional_attention", False):
            return "it attends in both directions (an embedding model), which a causal cache cannot serve"
        if getattr(config, "attn_logit_softcapping", None):
            # transformers' Gemma 3 reads this value but never applies it; which of the two is meant is unknown.
            return "attn_logit_softcapping is set, which transformers' Gemma 3 ignores"
        return super().unsupported(config)


class Gemma3(Gemma3Text):
    """The text part of a multimodal checkpoint."""

    weight_names: Mapping[str, str] = MappingProxyType(
        {
            r"^(model\.)?language_model\.lm_head": "lm_head",
            r"^(model\.)?language_model\.(model\.)?": "model.",
        }
    )
    ignored_weights = r"vision_tower|multi_modal_projector"

    def text_config(self, config: Any) -> Any:
        return config.get_text_config()
