"""Models whose later layers read the keys and values of earlier ones: Gemma 3n and Gemma 4.

The last ``num_kv_shared_layers`` layers store nothing: each reads the cache of the last storing
layer of its own kind (full or sliding). Gemma 4 also gives full layers their own head count and
width.
"""

from __future__ import annotations

from kvloom.core.errors import CorruptModelError
from kvloom.core.layout import LayerSpec
from kvloom.planner.architecture import Architecture
from kvloom.planner.readers.dense import attention_kind
from kvloom.planner.readers.fields import FULL, SLIDING, Fields

SHARING: tuple[str, ...] = ("gemma3n_text", "gemma4_text")


def read_sharing(model_type: str, fields: Fields) -> Architecture:
    """The architecture of a model with cross-layer sharing."""
    gemma4 = model_type == "gemma4_text"
    num_layers = fields.integer("num_hidden_layers")
    query_heads, kv_heads = fields.heads()
    head_dim = fields.head_dim(query_heads, 256)
    window = fields.integer("sliding_window", default=512, rule="the architecture's default window")
    period = 6 if gemma4 else 5
    default = [FULL if (index + 1) % period == 0 else SLIDING for index in range(num_layers)]
    kinds = fields.layer_types(num_layers, default)
    shared = fields.count("num_kv_shared_layers", default=0 if gemma4 else 15)
    full_heads, full_dim = kv_heads, head_dim
    if gemma4:
        kinds = [*kinds[:-1], FULL]  # the architecture's code forces the last layer to full attention
        full_dim = fields.integer("global_head_dim", default=512, rule="the architecture's default for full layers")
        if fields.flag("attention_k_eq_v") and fields.has("num_global_key_value_heads"):
            full_heads = fields.integer("num_global_key_value_heads")
    first_shared = num_layers - shared
    if not 0 < first_shared <= num_layers:
        raise CorruptModelError(
            f"{fields.origin}: num_kv_shared_layers is {shared} of {num_layers} layers; at least one must store"
        )
    layers: list[LayerSpec] = []
    for index, kind in enumerate(kinds):
        owner: int | None = None
        if index >= first_shared:
            storing = [i for i in range(first_shared) if kinds[i] == kind]
            if not storing:
                raise CorruptModelError(f"{fields.origin}: layer {index} shares, but no earlier {kind} layer stores")
            owner = storing[-1]
        full = kind == FULL
        layers.append(
            LayerSpec.kv(
                num_heads=full_heads if full else kv_heads,
                k_dim=full_dim if full else head_dim,
                window=None if full else window,
                shares_with=owner,
            )
        )
    if shared:
        fields.notes.append(f"the last {shared} layers read earlier layers' keys and values and store none")
    if gemma4 and fields.flag("attention_k_eq_v"):
        fields.notes.append("full layers project keys and values once, yet cache both (they are normalised apart)")
    widths = [
        query_heads * (full_dim if kind == FULL else head_dim) for kind in kinds
    ]  # query heads are the same everywhere, their width follows the layer's kind
    inner = fields.values.get("intermediate_size")
    return Architecture(
        model_type=model_type,
        kind=attention_kind(query_heads, kv_heads),
        layers=tuple(layers),
        positions=tuple(range(num_layers)),
        num_layers=num_layers,
        num_query_heads=query_heads,
        score_dim=sum(widths) / num_layers,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size", default=262144),
        intermediate_size=max(inner) if isinstance(inner, list) and inner else fields.integer("intermediate_size"),
        max_positions=fields.optional("max_position_embeddings"),
        parameters=None,
        notes=tuple(fields.notes),
    )
