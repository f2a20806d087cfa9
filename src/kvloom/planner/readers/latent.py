"""Multi-head latent attention: DeepSeek V2, V3, V3.2 and relatives.

The cache holds one latent and one rope vector per token and layer, whatever the number of heads;
V3.2's sparse attention adds one indexer key. Dimensions are ``kv_lora_rank`` and
``qk_rope_head_dim``; ``q_lora_rank`` is the query's and never the cache's.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.core.layout import LayerSpec, Plane
from kvloom.planner.architecture import Architecture, Parameters
from kvloom.planner.readers import parts
from kvloom.planner.readers.fields import Fields

# model_type -> (attention blocks per layer, whether an indexer key is cached)
LATENT: Mapping[str, tuple[int, bool]] = {
    "deepseek_v2": (1, False),
    "deepseek_v3": (1, False),
    "deepseek_v32": (1, True),
    "kimi_k2": (1, False),
    "glm_moe_dsa": (1, True),
    "glm4_moe_lite": (1, False),
    "minicpm3": (1, False),
    "longcat_flash": (2, False),
}


def read_latent(model_type: str, fields: Fields) -> Architecture:
    """The architecture of an MLA model."""
    per_layer, indexed = LATENT[model_type]
    blocks = fields.integer("num_hidden_layers", "num_layers")
    num_layers = blocks * per_layer
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    latent = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim")
    nope = fields.integer("qk_nope_head_dim")
    value = fields.integer("v_head_dim", default=hidden // heads, rule="hidden_size / heads")
    layer = LayerSpec.mla(latent_dim=latent, rope_dim=rope)
    if indexed:
        index_dim = fields.integer("index_head_dim")
        layer = LayerSpec(planes=(*layer.planes, Plane(name="index", dim=index_dim)), num_heads=1)
        fields.notes.append(
            f"the sparse-attention indexer caches one key of {index_dim} values per token and layer beside the latent"
        )
    verified = model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32")
    return Architecture(
        model_type=model_type,
        kind="MLA",
        layers=(layer,) * num_layers,
        positions=tuple(range(num_layers)),
        num_layers=num_layers,
        num_query_heads=heads,
        score_dim=heads * (nope + rope + value) / 2,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        intermediate_size=fields.integer("intermediate_size", "ffn_hidden_size"),
        max_positions=fields.optional("max_position_embeddings"),
        parameters=_parameters(fields, num_layers, hidden, heads, latent, rope, nope, value, indexed)
        if verified
        else None,
        expanded=LayerSpec.kv(num_heads=heads, k_dim=nope + rope, v_dim=value),
        notes=tuple(fields.notes),
    )


def _parameters(
    fields: Fields,
    num_layers: int,
    hidden: int,
    heads: int,
    latent: int,
    rope: int,
    nope: int,
    value: int,
    indexed: bool,
) -> Parameters:
    query_rank = fields.optional("q_lora_rank")
    attention = parts.latent_attention(
        hidden, heads, query_rank=query_rank, latent=latent, rope=rope, nope=nope, value=value
    )
    if indexed:
        index_dim = fields.integer("index_head_dim")
        index_heads = fields.integer("index_n_heads")
        # queries from the low-rank query, one key with LayerNorm, one weight per index head
        attention += parts.linear(query_rank or hidden, index_heads * index_dim)
        attention += parts.linear(hidden, index_dim) + 2 * index_dim + parts.linear(hidden, index_heads)
    vocab = fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    total = num_layers * (attention + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2)
    intermediate = fields.integer("intermediate_size")
    experts = fields.optional("n_routed_experts", "num_local_experts")
    if experts is None:
        total += num_layers * parts.mlp(hidden, intermediate)
        return Parameters(total=total, embedding=vocab * hidden, tied=tied)
    dense = min(fields.count("first_k_dense_replace"), num_layers)
    sparse = num_layers - dense
    width = fields.integer("moe_intermediate_size")
    shared = parts.mlp(hidden, width * fields.count("n_shared_experts"))
    total += dense * parts.mlp(hidden, intermediate) + sparse * (shared + hidden * experts)
    expert = sparse * parts.mlp(hidden, width)
    return Parameters(
        total=total + expert * experts,
        embedding=vocab * hidden,
        expert=expert,
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok"),
        tied=tied,
    )
