"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token's keys and values are linear maps of one latent vector c: head h has key ``[U_h c | r]`` with
the rotated part r that all heads share, and value ``W_h c``. Since ``q·(U_h c) = (U_hᵀ q)·c`` and
``Σ p_t (W_h c_t) = W_h (Σ p_t c_t)``, the two halves of the up-projection ``kv_b_proj`` can be
applied to the query and to the output instead: only c and r are stored, and what is stored is
never expanded, neither past tokens nor new ones.

transformers' attention modules from 5.15 on call ``self.expand_kv(latent, rope)`` between rotating
and attending. ``hand_over_latents`` replaces that method on one instance, so that ``paged_attention``
receives the latent as its key and the rope part as its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvloom.attention.batch import KVBatch
from kvloom.core.errors import UnsupportedModelError
from kvloom.kernels.ops import BlockFormat


def hand_over_latents(module: Any) -> None:
    """Let this attention module pass (latent, rope) on as (key, value).

    Raises:
        UnsupportedModelError: it is not built as the absorbed form needs it.
    """
    rows = int(module.num_heads) * (int(module.qk_nope_head_dim) + int(module.v_head_dim))
    projection = getattr(module, "kv_b_proj", None)
    if not callable(getattr(module, "expand_kv", None)):
        raise UnsupportedModelError(
            f"{type(module).__name__} has no expand_kv, with which transformers 5.15 and later expand latents; "
            "install a transformers version that kvloom supports"
        )
    if (
        type(projection) is not nn.Linear
        or projection.bias is not None
        or projection.weight.shape != (rows, int(module.kv_lora_rank))
    ):
        raise UnsupportedModelError(
            f"{type(module).__name__} expands its latents with {projection}; the absorbed form needs a plain matrix of "
            f"{rows} rows and {module.kv_lora_rank} columns"
        )
    module.expand_kv = _unexpanded


def _unexpanded(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rope


def latent_attention(
    module: nn.Module,
    query: torch.Tensor,
    kv: KVBatch,
    fmt: BlockFormat,
    layer_offset: int,
    tables: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attend to the latents in the cache, the new ones included.

    Args:
        module: the attention module, for its ``kv_b_proj``.
        query: [1, num_heads, T, nope_dim + rope_dim], its last part rotated; rows of padding last.
        scaling: of the logits; None means by the query's dim.

    Returns:
        [1, T, num_heads, v_dim]; zeros in rows of padding.
    """
    latent_dim, rope_dim = (plane.dim for plane in fmt.planes)
    num_heads, dim = query.shape[1], query.shape[3]
    projection: torch.Tensor = module.kv_b_proj.weight  # type: ignore[assignment,union-attr]
    up = projection.view(num_heads, -1, latent_dim)  # [heads, nope_dim + v_dim, latent_dim]
    nope_dim = dim - rope_dim
    q_nope, q_rope = query[0, ..., :nope_dim], query[0, ..., nope_dim:]  # [heads, T, …]
    # Rows of padding take part in both products, so that their shapes, and with them the rounding
    # of the other rows, are the step's.
    q_latent = torch.bmm(q_nope, up[:, :nope_dim]).transpose(0, 1)  # [T, heads, latent_dim]
    num_tokens = kv.queries.num_tokens
    mean, _ = kv.store.backend.attend_latent(
        q_latent[:num_tokens],
        q_rope.transpose(0, 1)[:num_tokens],
        kv.store.arena,
        fmt,
        layer_offset,
        tables,
        kv.queries,
        scale=dim**-0.5 if scaling is None else float(scaling),
    )
    if kv.num_padding:
        mean = torch.cat([mean, mean.new_zeros(kv.num_padding, *mean.shape[1:])])
    out = torch.bmm(mean.transpose(0, 1), up[:, nope_dim:].transpose(1, 2))  # [heads, T, v_dim]
    return out.transpose(0, 1).unsqueeze(0)
