"""Older decoders with their own field names: GPT-2, OPT, BLOOM, Falcon, MPT, GPT-J, GPT-NeoX, Phi."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvloom.core.layout import LayerSpec
from kvloom.planner.architecture import Architecture, Parameters
from kvloom.planner.readers import parts
from kvloom.planner.readers.dense import attention_kind
from kvloom.planner.readers.fields import Fields


def _uniform(
    fields: Fields,
    model_type: str,
    *,
    num_layers: int,
    hidden: int,
    query_heads: int,
    kv_heads: int,
    intermediate: int,
    max_positions: int | None,
    parameters: Parameters | None,
) -> Architecture:
    head_dim = fields.head_dim(query_heads) if fields.has("hidden_size") else hidden // query_heads
    return Architecture(
        model_type=model_type,
        kind=attention_kind(query_heads, kv_heads),
        layers=(LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim),) * num_layers,
        positions=tuple(range(num_layers)),
        num_layers=num_layers,
        num_query_heads=query_heads,
        score_dim=float(query_heads * head_dim),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        intermediate_size=intermediate,
        max_positions=max_positions,
        parameters=parameters,
        notes=tuple(fields.notes),
    )


def _gpt2(fields: Fields) -> Architecture:
    num_layers, hidden, heads = fields.integer("n_layer"), fields.integer("n_embd"), fields.integer("n_head")
    positions = fields.integer("n_positions", "n_ctx")
    inner = fields.integer("n_inner", default=4 * hidden)
    kv_heads = heads
    if fields.values.get("model_type") == "gpt_bigcode" and fields.flag("multi_query", default=True):
        kv_heads = 1
    layer = parts.attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=True, out_bias=True)
    layer += parts.mlp(hidden, inner, gated=False, bias=True) + 4 * hidden
    embedding = fields.integer("vocab_size") * hidden
    total = num_layers * layer + 2 * hidden + embedding + positions * hidden
    return _uniform(
        fields,
        "gpt2" if kv_heads == heads else "gpt_bigcode",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        intermediate=inner,
        max_positions=positions,
        parameters=Parameters(total=total, embedding=embedding, tied=True),
    )


def _opt(fields: Fields) -> Architecture:
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    heads, inner = fields.integer("num_attention_heads"), fields.integer("ffn_dim")
    positions = fields.integer("max_position_embeddings")
    width = fields.integer("word_embed_proj_dim", default=hidden)
    layer = parts.attention(hidden, heads, heads, hidden // heads, qkv_bias=True, out_bias=True)
    layer += parts.mlp(hidden, inner, gated=False, bias=True) + 4 * hidden
    embedding = fields.integer("vocab_size") * width
    total = num_layers * layer + embedding + (positions + 2) * hidden  # OPT offsets positions by two
    if width != hidden:
        total += 2 * width * hidden
    if fields.flag("do_layer_norm_before", default=True):
        total += 2 * hidden
    return _uniform(
        fields,
        "opt",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=heads,
        intermediate=inner,
        max_positions=positions,
        parameters=Parameters(total=total, embedding=embedding, tied=True),
    )


def _bloom(fields: Fields) -> Architecture:
    num_layers = fields.integer("n_layer", "num_hidden_layers")
    hidden, heads = fields.integer("hidden_size", "n_embed"), fields.integer("n_head", "num_attention_heads")
    layer = parts.attention(hidden, heads, heads, hidden // heads, qkv_bias=True, out_bias=True)
    layer += parts.mlp(hidden, 4 * hidden, gated=False, bias=True) + 4 * hidden
    embedding = fields.integer("vocab_size") * hidden
    return _uniform(
        fields,
        "bloom",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=heads,
        intermediate=4 * hidden,
        max_positions=None,
        parameters=Parameters(total=num_layers * layer + embedding + 4 * hidden, embedding=embedding, tied=True),
    )


def _falcon(fields: Fields) -> Architecture:
    num_layers = fields.integer("num_hidden_layers", "n_layer")
    hidden = fields.integer("hidden_size", "n_embed")
    heads = fields.integer("num_attention_heads", "n_head")
    new = fields.flag("new_decoder_architecture")
    if new:
        kv_heads = fields.integer("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    bias = fields.flag("bias")
    layer = parts.attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=bias, out_bias=bias)
    layer += parts.mlp(hidden, fields.integer("ffn_hidden_size", default=4 * hidden), gated=False, bias=bias)
    norms = fields.integer("num_ln_in_parallel_attn", default=2) if new else 1
    if not new and not fields.flag("parallel_attn", default=True):
        norms = 2
    embedding = fields.integer("vocab_size") * hidden
    total = num_layers * (layer + norms * 2 * hidden) + 2 * hidden + embedding
    return _uniform(
        fields,
        "falcon",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        intermediate=4 * hidden,
        max_positions=fields.optional("max_position_embeddings"),
        parameters=Parameters(total=total, embedding=embedding, tied=True),
    )


def _neox(fields: Fields) -> Architecture:
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    heads, inner = fields.integer("num_attention_heads"), fields.integer("intermediate_size")
    layer = parts.attention(hidden, heads, heads, hidden // heads, qkv_bias=True, out_bias=True)
    layer += parts.mlp(hidden, inner, gated=False, bias=True) + 4 * hidden
    embedding = fields.integer("vocab_size") * hidden
    tied = fields.flag("tie_word_embeddings")
    total = num_layers * layer + 2 * hidden + embedding * (1 if tied else 2)
    return _uniform(
        fields,
        "gpt_neox",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=heads,
        intermediate=inner,
        max_positions=fields.optional("max_position_embeddings"),
        parameters=Parameters(total=total, embedding=embedding, tied=tied),
    )


def _gptj(fields: Fields) -> Architecture:
    num_layers, hidden, heads = fields.integer("n_layer"), fields.integer("n_embd"), fields.integer("n_head")
    inner = fields.integer("n_inner", default=4 * hidden)
    layer = parts.attention(hidden, heads, heads, hidden // heads) + 2 * hidden
    layer += parts.mlp(hidden, inner, gated=False, bias=True)
    vocab = fields.integer("vocab_size")
    total = num_layers * layer + 2 * hidden + 2 * vocab * hidden + vocab
    return _uniform(
        fields,
        "gptj",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=heads,
        intermediate=inner,
        max_positions=fields.optional("n_positions"),
        parameters=Parameters(total=total, embedding=vocab * hidden),
    )


def _mpt(fields: Fields) -> Architecture:
    num_layers, hidden, heads = fields.integer("n_layers"), fields.integer("d_model"), fields.integer("n_heads")
    attn = fields.values.get("attn_config") or {}
    kv_heads = int(attn.get("kv_n_heads") or heads) if isinstance(attn, Mapping) else heads
    if isinstance(attn, Mapping) and attn.get("attn_type") == "multiquery_attention":
        kv_heads = 1
    return _uniform(
        fields,
        "mpt",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        intermediate=4 * hidden,
        max_positions=fields.optional("max_seq_len"),
        parameters=None,
    )


def _phi(fields: Fields) -> Architecture:
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    heads, kv_heads = fields.heads()
    inner = fields.integer("intermediate_size")
    layer = parts.attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=True, out_bias=True)
    layer += parts.mlp(hidden, inner, gated=False, bias=True) + 2 * hidden
    vocab = fields.integer("vocab_size")
    total = num_layers * layer + 2 * hidden + 2 * vocab * hidden + vocab
    return _uniform(
        fields,
        "phi",
        num_layers=num_layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        intermediate=inner,
        max_positions=fields.optional("max_position_embeddings"),
        parameters=Parameters(total=total, embedding=vocab * hidden),
    )


CLASSIC: Mapping[str, Callable[[Fields], Architecture]] = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt_neox": _neox,
    "gptj": _gptj,
    "mpt": _mpt,
    "phi": _phi,
}


def read_classic(model_type: str, fields: Fields) -> Architecture:
    """The architecture of an older decoder."""
    return CLASSIC[model_type](fields)
