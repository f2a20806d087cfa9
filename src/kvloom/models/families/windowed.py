"""Mistral, Mixtral, Qwen3-MoE, Starcoder2 …: the same window on every layer, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.models.families.base import DecoderFamily


class Windowed(DecoderFamily):
    """``sliding_window`` holds for every layer; null means full attention."""

    def windows(self, config: Any, num_layers: int) -> Sequence[int | None]:
        window = config.sliding_window
        return [int(window) if window else None] * num_layers
