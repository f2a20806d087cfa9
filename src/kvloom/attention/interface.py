"""The attention function that transformers' model code calls, once per layer and step.

A model loaded with ``attn_implementation="kvloom"`` looks this function up in transformers'
``AttentionInterface`` and calls it with the layer's rotated query, key and value. It writes key and
value into the arena and attends over the batch's block tables. Everything it needs beyond that
travels in the keyword argument ``kv`` (a ``KVBatch``)::

    model(input_ids=[1, T], position_ids=[1, T], use_cache=False, logits_to_keep=rows, kv=batch)

No mask function is registered under the same name, so transformers builds no mask: causality and
windows come from the layout, and what a model says only through a mask must be known to its family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvloom.attention.batch import KVBatch
from kvloom.attention.encoded import attend_parts, encode_due
from kvloom.attention.mla import latent_attention
from kvloom.core.errors import UnsupportedModelError
from kvloom.kernels.ops import BlockFormat, KeyRange

ATTENTION_NAME = "kvloom"

# Keyword arguments that reach an attention function through transformers' layers without changing
# what attention means: positions are applied already (rotary), the others steer caching or outputs.
HARMLESS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)

_ABSENT: Any = object()  # a model that passes sliding_window=None says something; one that passes nothing does not


def register_attention() -> None:
    """Make ``attn_implementation="kvloom"`` known to transformers; called when a model is loaded."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = _ABSENT,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    kv: KVBatch | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store this layer's new keys and values, and attend over each sequence's cached ones.

    Args:
        module: the attention module; ``module.layer_idx`` finds its home in the layout.
        query: [1, num_query_heads, T, k_dim], position embeddings applied; T counts ``kv``'s tokens
            and its rows of padding, which come last.
        key: [1, num_heads, T, k_dim], position embeddings applied; of an MLA layer the latent.
        value: [1, num_heads, T, v_dim]; of an MLA layer the rope part (see ``mla``).
        attention_mask: must be None.
        scaling: of the logits; None means ``k_dim ** -0.5``.
        dropout: must be 0.
        sliding_window: where the model passes it, it must equal the layout's window.
        softcap: logits become ``softcap * tanh(logit / softcap)``.
        s_aux: [num_query_heads] sink logits, in the softmax denominator only.
        is_causal: must not be False.
        kv: this step's batch.

    Returns:
        ([1, T, num_query_heads, v_dim], None); zeros in rows of padding.

    Raises:
        UnsupportedModelError: the model asks for something that this attention does not compute.
    """
    layer = getattr(module, "layer_idx", None)
    if kv is None:
        raise UnsupportedModelError(
            f"layer {layer} was called without the batch: the model's code does not pass keyword arguments on to its "
            "attention, so it cannot run on a paged cache; use another model"
        )
    if attention_mask is not None:
        raise _refusal(layer, "attention_mask", f"a tensor of shape {tuple(attention_mask.shape)}")
    if dropout:
        raise _refusal(layer, "dropout", dropout)
    if is_causal is False:
        raise _refusal(layer, "is_causal", is_causal)
    for name, argument in others.items():
        # None and False mean that a feature is off, whatever the feature is.
        if name not in HARMLESS and argument is not None and argument is not False:
            raise _refusal(layer, name, type(argument).__name__)

    store = kv.store
    if not isinstance(layer, int) or not 0 <= layer < store.layout.num_layers:
        raise UnsupportedModelError(
            f"{type(module).__name__} has layer_idx {layer!r}, but the layout has layers 0 to "
            f"{store.layout.num_layers - 1}; the model's layers do not match its configuration"
        )
    group, index = store.layout.homes[layer]
    fmt, tables = store.formats[group], kv.tables[group]
    offset = index * fmt.layer_bytes
    window = store.layout.groups[group].window
    if sliding_window is not _ABSENT and sliding_window != window:
        raise UnsupportedModelError(
            f"layer {layer} attends with sliding_window={sliding_window}, but the cache layout gives it window "
            f"{window}; the layout would free tokens that the layer still reads, or keep ones it must not see"
        )
    num_tokens = kv.queries.num_tokens
    if query.shape[0] != 1 or query.shape[2] != num_tokens + kv.num_padding:
        raise UnsupportedModelError(
            f"layer {layer} got queries of shape {tuple(query.shape)}; expected [1, heads, "
            f"{num_tokens} + {kv.num_padding} tokens, dim]"
        )

    q, k, v = (x[0].transpose(0, 1)[:num_tokens].contiguous() for x in (query, key, value))  # [T, heads, dim]
    if layer not in store.layout.shared:
        store.backend.write((k, v), store.arena, fmt, offset, tables, kv.queries)
    item = store.storage[group]
    if item.twin is not None and layer not in store.layout.shared:
        encode_due(kv, item, index)
    if fmt.planes[0].name == "latent":
        if softcap is not None or s_aux is not None:
            raise _refusal(layer, "softcap or s_aux", "to latent attention")
        return latent_attention(module, query, kv, item, index, scaling), None
    scale = k.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if item.twin is not None:

        def attend(
            part: BlockFormat, part_offset: int, part_tables: torch.Tensor, keys: KeyRange
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return store.backend.attend(
                q, store.arena, part, part_offset, part_tables, kv.queries, scale=scale, softcap=softcap, keys=keys,
                want_lse=True,
            )  # fmt: skip

        out = attend_parts(kv, item, index, attend, s_aux, q.dtype)
    else:
        out, _ = store.backend.attend(
            q,
            store.arena,
            fmt,
            offset,
            tables,
            kv.queries,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=s_aux,
        )
    if kv.num_padding:
        out = torch.cat([out, out.new_zeros(kv.num_padding, *out.shape[1:])])
    return out.unsqueeze(0), None


def _refusal(layer: object, name: str, argument: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer} passes {name} ({argument}) to attention, which the paged attention does not compute; "
        "ignoring it would change the answers"
    )
