"""What a model family tells kvloom, and the plain decoder that most families are.

A family is one file: it turns a transformers configuration into the layers to be cached, says what
of it cannot be served, and may change a loaded model. It is listed in ``families.FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from kvloom.attention.interface import ATTENTION_NAME
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import LayerSpec
from kvloom.models.rope import fix_longrope

# Rotary types whose frequencies are fixed when the model is built, and "longrope", which ``prepare`` fixes.
# "dynamic" chooses them by the longest sequence of the batch, so that one request would change another's answer.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "longrope")


class ModelFamily(Protocol):
    """What the loader asks. ``config`` is transformers' configuration of the text model."""

    verified_with: tuple[str, ...]
    """transformers versions with which the family's parity tests passed; empty: never verified."""

    weight_names: Mapping[str, str]
    """Patterns that rename a checkpoint's weights to the text model's, where the text model is a part."""

    build_attention: str
    """transformers' name of the attention to build the model with: ours, unless ``prepare`` switches to it."""

    ignored_weights: str | None
    """Pattern of weights in the checkpoint that the text model does not have, such as a vision tower's."""

    def text_config(self, config: Any) -> Any:
        """The text model's configuration within the checkpoint's."""
        ...

    def layers(self, config: Any) -> list[LayerSpec]:
        """What each layer stores, in model order."""
        ...

    def query_heads(self, config: Any) -> list[int]:
        """Number of query heads of each layer."""
        ...

    def unsupported(self, config: Any) -> str | None:
        """Why this configuration would be served wrongly, or None."""
        ...

    def max_length(self, config: Any) -> int:
        """Most positions that the model was made for, rotary scaling included."""
        ...

    def prepare(self, model: nn.Module, max_model_len: int) -> None:
        """Change this loaded model instance, which will see at most ``max_model_len`` positions."""
        ...


class DecoderFamily:
    """A decoder of equal layers with rotary positions; families override what differs."""

    verified_with: tuple[str, ...] = ("5.15.0", "5.24.0")
    weight_names: Mapping[str, str] = MappingProxyType({})
    ignored_weights: str | None = None
    build_attention: str = ATTENTION_NAME

    def text_config(self, config: Any) -> Any:
        return config

    def layers(self, config: Any) -> list[LayerSpec]:
        heads, dim = key_value_heads(config), head_dim(config)
        return [
            LayerSpec.kv(num_heads=heads, k_dim=dim, window=window)
            for window in self.windows(config, int(config.num_hidden_layers))
        ]

    def query_heads(self, config: Any) -> list[int]:
        return [int(config.num_attention_heads)] * int(config.num_hidden_layers)

    def windows(self, config: Any, num_layers: int) -> Sequence[int | None]:
        """Each layer's window; None where it attends to everything."""
        return [None] * num_layers

    def unsupported(self, config: Any) -> str | None:
        return rope_reason(config)

    def max_length(self, config: Any) -> int:
        return scaled_length(config)

    def prepare(self, model: nn.Module, max_model_len: int) -> None:
        fix_longrope(model, max_model_len)


def key_value_heads(config: Any) -> int:
    """KV heads of a layer; configurations without the field have one per query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Channels per head; configurations may leave it to the hidden size."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Every set of rotary parameters in ``config``: one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if all(isinstance(value, dict) or value is None for value in parameters.values()):
        return [value for value in parameters.values() if value]
    return [parameters]


def rope_reason(config: Any) -> str | None:
    """Why the model's rotary scaling cannot be served, or None."""
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in FIXED_ROPE_TYPES:
            return (
                f"its rotary scaling {kind!r} depends on the longest sequence in the batch, so that requests would "
                f"change each other's answers; served: {', '.join(FIXED_ROPE_TYPES)}"
            )
    return None


def scaled_length(config: Any) -> int:
    """``max_position_embeddings``, or what yarn extends the original length to if that is more.

    Configurations with other scalings state the extended length themselves.
    """
    longest = int(config.max_position_embeddings)
    for parameters in rope_parameters(config):
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "yarn" and original and parameters.get("factor"):
            longest = max(longest, int(original * parameters["factor"]))
    return longest


def layer_type_windows(config: Any, num_layers: int) -> list[int | None]:
    """Each layer's window from ``layer_types`` and ``sliding_window``.

    Raises:
        UnsupportedModelError: a layer is of another type than full or sliding attention, or the
            two fields contradict each other.
    """
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * num_layers)[:num_layers]
    window = getattr(config, "sliding_window", None)
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers, of types {', '.join(sorted(set(kinds)))}; "
            "served are one per layer, full_attention or sliding_attention"
        )
    if "sliding_attention" not in kinds:
        return [None] * num_layers
    if not window:
        raise UnsupportedModelError(f"layer_types has sliding_attention layers but sliding_window is {window}")
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]
