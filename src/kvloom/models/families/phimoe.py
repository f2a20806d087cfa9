"""Phi-3.5-MoE: a window that only the mask states, and long-RoPE with a scale of its own.

The cache reads windows from the layout, so the window holds although the model passes none to its
attention. The rotary module picks ``short_mscale`` or ``long_mscale`` by the longest position of each
batch; ``prepare`` leaves it one of them.
"""

from __future__ import annotations

import copy
from typing import Any

from kvloom.models.families.windowed import Windowed


class Phimoe(Windowed):
    """``sliding_window`` holds for every layer."""

    def prepare(self, model: Any, max_model_len: int) -> None:
        for module in model.modules():
            if getattr(module, "rope_type", None) == "longrope":
                # Its own copy: the model's configuration goes on describing the checkpoint.
                module.config = copy.deepcopy(module.config)
                parameters = module.config.rope_parameters
                regime = "long" if max_model_len > parameters["original_max_position_embeddings"] else "short"
                for other in ("short_mscale", "long_mscale"):
                    parameters[other] = module.config.rope_parameters[f"{regime}_mscale"]
                module.attention_scaling = parameters["short_mscale"]
        super().prepare(model, max_model_len)
