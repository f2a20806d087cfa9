"""Any other decoder, under ``--allow-unverified`` only: its layout is read off common configuration fields.

What is known to be wrong through our attention is refused even then. The self-check at load
compares the guess with what the layers do, so that most wrong guesses are refused as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.models.families.base import DecoderFamily, layer_type_windows

# Fields that only models with another kind of token mixing have.
_RECURRENT = ("ssm_state_size", "mamba_d_state", "state_size", "linear_conv_kernel_dim", "conv_kernel", "conv_L_cache")


class Generic(DecoderFamily):
    """A guess from ``num_key_value_heads``, ``head_dim``, ``layer_types`` and ``sliding_window``."""

    verified_with = ()

    def text_config(self, config: Any) -> Any:
        return config.get_text_config(decoder=True)

    def windows(self, config: Any, num_layers: int) -> Sequence[int | None]:
        if getattr(config, "layer_types", None):
            return layer_type_windows(config, num_layers)
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):
            return [int(window)] * num_layers
        return [None] * num_layers

    def unsupported(self, config: Any) -> str | None:
        if getattr(config, "is_encoder_decoder", False):
            return "it is an encoder-decoder model; kvloom serves decoders"
        recurrent = [name for name in _RECURRENT if getattr(config, name, None)]
        if recurrent:
            return f"it has recurrent or convolutional layers ({recurrent[0]}), whose state the cache does not hold"
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            return f"it has layers of type {', '.join(sorted(kinds))}; served are full_attention and sliding_attention"
        if getattr(config, "attention_chunk_size", None):
            return "it attends in chunks (attention_chunk_size), which its code states only in masks"
        if getattr(config, "kv_lora_rank", None):
            return "it is an MLA model (kv_lora_rank), which needs a family file of its own"
        if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "absolute") == "relative_key":
            return "it adds position biases to its logits, which the kernels do not"
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
            if not isinstance(getattr(config, name, None), int):
                return f"its configuration gives no single number as {name}, from which the layout would be read"
        return super().unsupported(config)
