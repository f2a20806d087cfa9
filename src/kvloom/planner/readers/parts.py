"""Parameter counts of the parts that transformer decoders are made of."""

from __future__ import annotations


def linear(inputs: int, outputs: int, *, bias: bool = False) -> int:
    """A matrix, and its bias."""
    return inputs * outputs + (outputs if bias else 0)


def attention(
    hidden: int, query_heads: int, kv_heads: int, head_dim: int, *, qkv_bias: bool = False, out_bias: bool = False
) -> int:
    """Query, key, value and output projections."""
    query = query_heads * head_dim
    kv = kv_heads * head_dim
    return linear(hidden, query + 2 * kv, bias=qkv_bias) + linear(query, hidden, bias=out_bias)


def mlp(hidden: int, intermediate: int, *, gated: bool = True, bias: bool = False) -> int:
    """Up (and gate) and down projections."""
    up = (2 if gated else 1) * linear(hidden, intermediate, bias=bias)
    return up + linear(intermediate, hidden, bias=bias)


def latent_attention(
    hidden: int,
    heads: int,
    *,
    query_rank: int | None,
    latent: int,
    rope: int,
    nope: int,
    value: int,
    bias: bool = False,
) -> int:
    """Multi-head latent attention: low-rank query (optional), latent, expansion, output, two norms."""
    if query_rank is None:
        query = linear(hidden, heads * (nope + rope))
    else:
        query = linear(hidden, query_rank, bias=bias) + query_rank + linear(query_rank, heads * (nope + rope))
    down = linear(hidden, latent + rope, bias=bias) + latent
    up = linear(latent, heads * (nope + value))
    return query + down + up + linear(heads * value, hidden, bias=bias)
