"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token's keys and values are linear maps of one latent vector c: head h has key ``[U_h c | r]`` with
the rotated part r that all heads share, and value ``W_h c``. Since ``q·(U_h c) = (U_hᵀ q)·c`` and
``Σ p_t (W_h c_t) = W_h (Σ p_t c_t)``, the two halves of the up-projection ``kv_b_proj`` can be
applied to the query and to the output instead: only c and r are stored, and what is stored is
never expanded, neither past tokens nor new ones.
"""

from __future__ import annotations

import torch
from torch import nn

from kvloom.attention.batch import KVBatch
from kvloom.attention.encoded import attend_parts
from kvloom.core.storage import StorageGroup
from kvloom.kernels.ops import EVERY_KEY, BlockFormat, KeyRange


def latent_attention(
    module: nn.Module,
    query: torch.Tensor,
    kv: KVBatch,
    item: StorageGroup,
    index: int,
    scaling: float | None,
) -> torch.Tensor:
    """Attend to the latents in the cache, the new ones included.

    Args:
        module: the attention module, for ``kv_b_proj`` [heads * (nope_dim + v_dim), latent_dim].
        query: [1, heads, T, nope_dim + rope_dim], its last part rotated; rows of padding last.
        item, index: the storage group of the layer's raw blocks, and its place in there.
        scaling: of the logits; None means by the query's dim.

    Returns:
        [1, T, heads, v_dim]; zeros in rows of padding.
    """
    fmt = kv.store.formats[item.home]
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
    q_latent_rows, q_rope_rows = q_latent[:num_tokens], q_rope.transpose(0, 1)[:num_tokens]
    scale = dim**-0.5 if scaling is None else float(scaling)

    def attend(
        part: BlockFormat, layer_offset: int, tables: torch.Tensor, keys: KeyRange, want_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return kv.store.backend.attend_latent(
            q_latent_rows, q_rope_rows, kv.store.arena, part, layer_offset, tables, kv.queries, scale=scale, keys=keys,
            want_lse=want_lse,
        )  # fmt: skip

    if item.twin is not None:
        mean = attend_parts(kv, item, index, attend, None, q_latent.dtype)
    else:
        mean, _ = attend(fmt, index * fmt.layer_bytes, kv.tables[item.home], EVERY_KEY, want_lse=False)
    if kv.num_padding:
        mean = torch.cat([mean, mean.new_zeros(kv.num_padding, *mean.shape[1:])])
    out = torch.bmm(mean.transpose(0, 1), up[:, nope_dim:].transpose(1, 2))  # [heads, T, v_dim]
    return out.transpose(0, 1).unsqueeze(0)
