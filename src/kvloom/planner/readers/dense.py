"""Llama and its relatives: one attention block and one (possibly expert) MLP per layer.

Everything that differs between them and touches sizes is in :class:`Traits`; a new relative is one
line in ``TRAITS``. Defaults are those of each architecture's published code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvloom.core.layout import LayerSpec
from kvloom.planner.architecture import Architecture, Parameters
from kvloom.planner.readers import parts
from kvloom.planner.readers.fields import CHUNKED, FULL, SLIDING, Fields

Pattern = Callable[[Fields, int], list[str]]


def every_layer_full(fields: Fields, num_layers: int) -> list[str]:
    """No windows, whatever the config says about them."""
    return [FULL] * num_layers


def all_sliding_if_set(fields: Fields, num_layers: int) -> list[str]:
    """A ``sliding_window`` that is set applies to every layer."""
    return [SLIDING if fields.has("sliding_window") else FULL] * num_layers


def all_sliding_unless_null(fields: Fields, num_layers: int) -> list[str]:
    """Mistral's own class: a window unless ``sliding_window`` is written as null."""
    return [FULL if _written_as_null(fields) else SLIDING] * num_layers


def _written_as_null(fields: Fields) -> bool:
    return "sliding_window" in fields.values and not fields.has("sliding_window")


def qwen_windows(fields: Fields, num_layers: int) -> list[str]:
    """Qwen's rule: only with ``use_sliding_window``, and then from layer ``max_window_layers`` on."""
    if not fields.flag("use_sliding_window") or _written_as_null(fields):
        return [FULL] * num_layers
    first = fields.count("max_window_layers", default=28)
    return [SLIDING if index >= first else FULL for index in range(num_layers)]


def every_nth_full(default_period: int, field: str = "sliding_window_pattern") -> Pattern:
    """Every n-th layer sees everything, the others a window."""

    def pattern(fields: Fields, num_layers: int) -> list[str]:
        period = fields.integer(field, default=default_period)
        return [FULL if (index + 1) % period == 0 else SLIDING for index in range(num_layers)]

    return pattern


def exaone_windows(fields: Fields, num_layers: int) -> list[str]:
    """Every ``sliding_window_pattern``-th layer sees everything; a pattern may be spelt "LLLG"."""
    if _written_as_null(fields):
        return [FULL] * num_layers
    spelt = fields.values.get("sliding_window_pattern")
    if isinstance(spelt, str) and spelt:
        return [FULL if spelt[index % len(spelt)] == "G" else SLIDING for index in range(num_layers)]
    return every_nth_full(4)(fields, num_layers)


def only_if_listed(fields: Fields, num_layers: int) -> list[str]:
    """Windows only where ``layer_types`` says so."""
    return [FULL] * num_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What sets a relative of Llama apart, as far as sizes go.

    ``head_norm``: "head" one vector of head_dim each for q and k (shared by the heads), "full" one
    over all heads. ``norms``: vectors of ``hidden`` per layer. ``expert_style``: see ``_experts``.
    """

    windows: Pattern = every_layer_full
    window_default: int | None = None
    head_dim_default: int | None = None
    qkv_bias: bool | None = False  # None: read ``attention_bias``
    bias_default: bool = False  # what a missing ``attention_bias`` means
    out_bias: bool | None = False
    head_norm: str | None = None
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    gated: bool = True
    mlp_bias: bool | None = False
    tied_default: bool = False
    expert_style: str | None = None
    weights: bool = True  # False: the formula for weights is not verified, so none is given
    defaults: Mapping[str, int] | None = None


_WINDOWED_GEMMA = Traits(
    windows=every_nth_full(2),
    window_default=4096,
    head_dim_default=256,
    norms=4,
    tied_default=True,
    defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000},
)

TRAITS: Mapping[str, Traits] = {
    "llama": Traits(qkv_bias=None, out_bias=None, mlp_bias=None),
    "mistral": Traits(windows=all_sliding_unless_null, window_default=4096),
    "ministral": Traits(windows=all_sliding_unless_null, window_default=4096),
    "qwen2": Traits(windows=qwen_windows, window_default=4096, qkv_bias=True),
    "qwen3": Traits(
        windows=qwen_windows, window_default=4096, head_dim_default=128, qkv_bias=None, out_bias=None, head_norm="head"
    ),
    "phi3": Traits(windows=all_sliding_if_set),
    "gemma": Traits(head_dim_default=256, tied_default=True),
    "gemma2": _WINDOWED_GEMMA,
    "gemma3_text": Traits(
        windows=every_nth_full(6),
        window_default=4096,
        head_dim_default=256,
        head_norm="head",
        norms=4,
        tied_default=True,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    ),
    "olmo2": Traits(head_norm="full", qkv_bias=None, out_bias=None),
    "olmo3": Traits(windows=every_nth_full(4), window_default=4096, head_norm="full", qkv_bias=None, out_bias=None),
    "cohere2": Traits(
        windows=every_nth_full(4), window_default=4096, norms=1, qkv_bias=None, out_bias=None, tied_default=True
    ),
    "cohere": Traits(norms=1, qkv_bias=None, out_bias=None, tied_default=True, weights=False),
    "smollm3": Traits(windows=only_if_listed, qkv_bias=None, out_bias=None, mlp_bias=None, tied_default=True),
    "granite": Traits(qkv_bias=None, out_bias=None, mlp_bias=None),
    "seed_oss": Traits(qkv_bias=None, weights=False, head_dim_default=128),
    "starcoder2": Traits(
        windows=all_sliding_if_set,
        qkv_bias=True,
        out_bias=True,
        norm_bias=True,
        gated=False,
        mlp_bias=True,
        tied_default=True,
    ),
    "exaone4": Traits(windows=exaone_windows, window_default=4096, head_norm="head", weights=False),
    "glm4": Traits(qkv_bias=None, bias_default=True, norms=4, head_dim_default=128),
    "stablelm": Traits(weights=False),
    "mixtral": Traits(windows=all_sliding_if_set, expert_style="mixtral"),
    "qwen2_moe": Traits(windows=qwen_windows, window_default=4096, qkv_bias=True, expert_style="qwen2_moe"),
    "qwen3_moe": Traits(
        windows=qwen_windows,
        window_default=4096,
        qkv_bias=None,
        out_bias=None,
        head_norm="head",
        expert_style="qwen3_moe",
    ),
    "olmoe": Traits(head_norm="full", qkv_bias=None, out_bias=None, expert_style="olmoe"),
    "gpt_oss": Traits(
        windows=lambda fields, n: [SLIDING if i % 2 == 0 else FULL for i in range(n)],
        window_default=128,
        head_dim_default=64,
        qkv_bias=True,
        out_bias=True,
        expert_style="gpt_oss",
    ),
    "granitemoe": Traits(qkv_bias=None, out_bias=None, expert_style="granitemoe", tied_default=False),
    "glm4_moe": Traits(qkv_bias=None, weights=False, head_dim_default=128),
    "phimoe": Traits(windows=all_sliding_if_set, weights=False),
    "minimax_m2": Traits(weights=False, head_dim_default=128),
    "ernie4_5": Traits(weights=False, head_dim_default=128, tied_default=True),
    "internlm3": Traits(weights=False, head_dim_default=128),
    "llama4_text": Traits(
        windows=lambda fields, n: llama4_chunks(fields, n), head_dim_default=128, expert_style="llama4"
    ),
}


def llama4_chunks(fields: Fields, num_layers: int) -> list[str]:
    """Llama 4: layers with RoPE attend within their chunk, every fourth (without RoPE) to all."""
    flags = fields.values.get("no_rope_layers")
    if isinstance(flags, list) and len(flags) == num_layers:
        return [CHUNKED if flag else FULL for flag in flags]
    interval = fields.integer("no_rope_layer_interval", default=4)
    return [FULL if (index + 1) % interval == 0 else CHUNKED for index in range(num_layers)]


def read_dense(model_type: str, fields: Fields) -> Architecture:
    """The architecture of a Llama relative."""
    traits = TRAITS[model_type]
    if traits.defaults:
        missing = {name: value for name, value in traits.defaults.items() if not fields.has(name)}
        fields.notes.extend(
            f"{name} is not in the config; the architecture's default: {value}" for name, value in missing.items()
        )
        fields.values = {**fields.values, **missing}
    num_layers = fields.integer("num_hidden_layers")
    hidden = fields.integer("hidden_size")
    query_heads, kv_heads = fields.heads()
    head_dim = fields.head_dim(query_heads, traits.head_dim_default)
    kinds = fields.layer_types(num_layers, traits.windows(fields, num_layers))
    window: int | None = None
    if SLIDING in kinds:
        window = fields.integer(
            "sliding_window", default=traits.window_default, rule="the architecture's default window"
        )
    chunk = fields.integer("attention_chunk_size") if CHUNKED in kinds else None
    sizes = {FULL: None, SLIDING: window, CHUNKED: chunk}
    layers = tuple(LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim, window=sizes[kind]) for kind in kinds)
    intermediate = fields.integer("intermediate_size")
    return Architecture(
        model_type=model_type,
        kind=attention_kind(query_heads, kv_heads),
        layers=layers,
        positions=tuple(range(num_layers)),
        num_layers=num_layers,
        num_query_heads=query_heads,
        score_dim=float(query_heads * head_dim),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        intermediate_size=intermediate,
        max_positions=fields.optional("max_position_embeddings"),
        parameters=_parameters(traits, fields, num_layers, hidden, query_heads, kv_heads, head_dim, intermediate)
        if traits.weights
        else None,
        chunked=frozenset(index for index, kind in enumerate(kinds) if kind == CHUNKED),
        notes=tuple(fields.notes),
    )


def attention_kind(query_heads: int, kv_heads: int) -> str:
    """MHA, GQA or MQA."""
    if kv_heads == query_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def _parameters(
    traits: Traits,
    fields: Fields,
    num_layers: int,
    hidden: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
) -> Parameters:
    stated = fields.flag("attention_bias", default=traits.bias_default)
    qkv_bias = stated if traits.qkv_bias is None else traits.qkv_bias
    out_bias = stated if traits.out_bias is None else traits.out_bias
    mlp_bias = fields.flag("mlp_bias") if traits.mlp_bias is None else traits.mlp_bias
    attention = parts.attention(hidden, query_heads, kv_heads, head_dim, qkv_bias=qkv_bias, out_bias=out_bias)
    if traits.head_norm == "head":
        attention += 2 * head_dim
    elif traits.head_norm == "full":
        attention += (query_heads + kv_heads) * head_dim
    norm = hidden * (2 if traits.norm_bias else 1)
    common = num_layers * (attention + traits.norms * norm) + (norm if traits.final_norm else 0)
    vocab = fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings", default=traits.tied_default)
    embedding = vocab * hidden
    total = common + embedding * (1 if tied else 2)
    if traits.expert_style is None:
        total += num_layers * parts.mlp(hidden, intermediate, gated=traits.gated, bias=mlp_bias)
        return Parameters(total=total, embedding=embedding, tied=tied)
    extra, expert, num_experts, top_k = _experts(traits.expert_style, fields, num_layers, hidden, intermediate)
    return Parameters(
        total=total + extra + expert * num_experts,
        embedding=embedding,
        expert=expert,
        num_experts=num_experts,
        top_k=top_k,
        tied=tied,
    )


def _experts(style: str, fields: Fields, num_layers: int, hidden: int, intermediate: int) -> tuple[int, int, int, int]:
    """(parameters besides attention and routed experts, one expert over all layers, experts, top_k)."""
    experts = fields.integer("num_local_experts", "num_experts", "n_routed_experts")
    top_k = fields.integer("num_experts_per_tok", "num_experts_per_token")
    if style == "gpt_oss":
        per_layer = parts.mlp(hidden, intermediate, bias=True)
        sinks = fields.integer("num_attention_heads")
        return num_layers * (parts.linear(hidden, experts, bias=True) + sinks), num_layers * per_layer, experts, top_k
    if style == "llama4":
        step = fields.integer("interleave_moe_layer_step", default=1)
        listed = fields.values.get("moe_layers")
        sparse = len(listed) if isinstance(listed, list) else len(range(step - 1, num_layers, step))
        shared = parts.mlp(hidden, intermediate)
        dense = (num_layers - sparse) * parts.mlp(hidden, fields.integer("intermediate_size_mlp"))
        return dense + sparse * (shared + hidden * experts), sparse * shared, experts, top_k
    if style in ("mixtral", "olmoe", "granitemoe"):
        return num_layers * hidden * experts, num_layers * parts.mlp(hidden, intermediate), experts, top_k
    width = fields.integer("moe_intermediate_size")
    step = fields.integer("decoder_sparse_step", default=1)
    dense_only = set(fields.values.get("mlp_only_layers") or ())
    sparse = sum(index not in dense_only and (index + 1) % step == 0 for index in range(num_layers))
    extra = (num_layers - sparse) * parts.mlp(hidden, intermediate) + sparse * hidden * experts
    if style == "qwen2_moe":
        extra += sparse * (parts.mlp(hidden, fields.integer("shared_expert_intermediate_size")) + hidden)
    return extra, sparse * parts.mlp(hidden, width), experts, top_k
