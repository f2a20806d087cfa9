"""Qwen2, Qwen3, Gemma 2, Cohere2, OLMo 3 …: ``layer_types`` says which layers slide over a window.

transformers derives the list from each model's older fields: Qwen's ``use_sliding_window`` and
``max_window_layers``, Gemma 2's every second layer, Cohere2's ``sliding_window_pattern``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.models.families.base import DecoderFamily, layer_type_windows


class Alternating(DecoderFamily):
    """Full and windowed layers, each kind in its own layer group."""

    def windows(self, config: Any, num_layers: int) -> Sequence[int | None]:
        return layer_type_windows(config, num_layers)

    def unsupported(self, config: Any) -> str | None:
        if getattr(config, "use_bidirectional_attention", False):
            return "it attends in both directions (an embedding model), which a causal cache cannot serve"
        return super().unsupported(config)
