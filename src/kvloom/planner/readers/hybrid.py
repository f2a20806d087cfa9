"""Hybrids: some layers attend, the others keep a recurrent state of fixed size per request.

A recurrent layer holds a short convolution window and a state matrix, however long the context:
bytes per *request*, not per token. Sizes are those of the published code's cache tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvloom.core.errors import CorruptModelError
from kvloom.core.layout import LayerSpec
from kvloom.planner.architecture import Architecture, Parameters, RecurrentState
from kvloom.planner.errors import UnknownError
from kvloom.planner.readers import parts
from kvloom.planner.readers.fields import FULL, LINEAR, SLIDING, Fields

FLOAT32 = 4


def _assemble(
    fields: Fields,
    *,
    model_type: str,
    attending: Sequence[int],
    layer: LayerSpec,
    num_layers: int,
    query_heads: int,
    score_dim: float,
    states: tuple[RecurrentState, ...],
    intermediate: int,
    parameters: Parameters | None = None,
    expanded: LayerSpec | None = None,
) -> Architecture:
    fields.notes.append("recurrent layers hold a fixed state per request; speculative or prefix copies are not counted")
    return Architecture(
        model_type=model_type,
        kind="hybrid" if attending else "recurrent",
        layers=(layer,) * len(attending),
        positions=tuple(attending),
        num_layers=num_layers,
        num_query_heads=query_heads,
        score_dim=score_dim,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        intermediate_size=intermediate,
        max_positions=fields.optional("max_position_embeddings"),
        parameters=parameters,
        states=states,
        expanded=expanded,
        notes=tuple(fields.notes),
    )


def _states(recurrent: Sequence[int], *named: tuple[str, int, int | None, int]) -> tuple[RecurrentState, ...]:
    return tuple(
        RecurrentState(name=name, layers=tuple(recurrent), elements=elements, element_bytes=size, shards=shards)
        for name, elements, size, shards in named
        if recurrent
    )


def _split(kinds: Sequence[str], attention: Sequence[str], recurrent: Sequence[str]) -> tuple[list[int], list[int]]:
    return (
        [index for index, kind in enumerate(kinds) if kind in attention],
        [index for index, kind in enumerate(kinds) if kind in recurrent],
    )


def _jamba(fields: Fields) -> Architecture:
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    heads, kv_heads = fields.heads()
    head_dim = fields.head_dim(heads)
    period, offset = fields.integer("attn_layer_period", default=8), fields.count("attn_layer_offset", default=4)
    attending = [index for index in range(num_layers) if index % period == offset]
    recurrent = [index for index in range(num_layers) if index % period != offset]
    inner = fields.integer("mamba_expand", default=2) * hidden
    state, conv = fields.integer("mamba_d_state", default=16), fields.integer("mamba_d_conv", default=4)
    rank = fields.values.get("mamba_dt_rank")
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    mixer = parts.linear(hidden, 2 * inner) + inner * conv + inner + parts.linear(inner, rank + 2 * state)
    mixer += parts.linear(rank, inner, bias=True) + inner * state + inner + parts.linear(inner, hidden)
    mixer += rank + 2 * state
    intermediate = fields.integer("intermediate_size")
    experts, e_period = fields.integer("num_experts", default=16), fields.integer("expert_layer_period", default=2)
    sparse = sum(index % e_period == fields.count("expert_layer_offset", default=1) for index in range(num_layers))
    sparse = sparse if experts > 1 else 0
    one = parts.mlp(hidden, intermediate)
    vocab = fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    total = len(attending) * parts.attention(hidden, heads, kv_heads, head_dim) + len(recurrent) * mixer
    total += num_layers * 2 * hidden + hidden + vocab * hidden * (1 if tied else 2)
    total += (num_layers - sparse) * one + sparse * (hidden * experts + one * experts)
    return _assemble(
        fields,
        model_type="jamba",
        attending=attending,
        layer=LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim),
        num_layers=num_layers,
        query_heads=heads,
        score_dim=float(heads * head_dim),
        # the published code multiplies the state in float32 and stores it so
        states=_states(recurrent, ("convolution", inner * conv, None, inner), ("state", inner * state, FLOAT32, inner)),
        intermediate=intermediate,
        parameters=Parameters(
            total=total,
            embedding=vocab * hidden,
            expert=sparse * one,
            num_experts=experts if sparse else 0,
            top_k=fields.integer("num_experts_per_tok", default=2) if sparse else 0,
            tied=tied,
        ),
    )


def _mamba2_states(
    recurrent: Sequence[int], *, inner: int, groups: int, state: int, conv: int, heads: int
) -> tuple[RecurrentState, ...]:
    width = inner + 2 * groups * state
    return _states(recurrent, ("convolution", width * conv, None, groups), ("state", inner * state, None, heads))


def _mamba2_hybrid(model_type: str) -> Callable[[Fields], Architecture]:
    """Granite 4, Bamba and Falcon-H1: attention beside Mamba-2 mixers."""

    def read(fields: Fields) -> Architecture:
        num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
        heads, kv_heads = fields.heads()
        head_dim = fields.head_dim(heads)
        if model_type == "falcon_h1":  # every layer has both
            attending = recurrent = list(range(num_layers))
        elif model_type == "bamba":
            listed = fields.values.get("attn_layer_indices") or []
            attending = sorted(int(index) for index in listed)
            recurrent = [index for index in range(num_layers) if index not in attending]
        else:
            kinds = (
                fields.names("layer_types", num_layers)
                or fields.names("layers_block_type", num_layers)
                or [LINEAR] * num_layers
            )
            attending, recurrent = _split(kinds, ("attention", FULL), ("mamba", LINEAR))
            _all_known(fields, kinds, attending, recurrent)
        inner = fields.integer("mamba_expand", default=2) * hidden
        if model_type == "falcon_h1" and fields.has("mamba_d_ssm"):
            inner = fields.integer("mamba_d_ssm")
        return _assemble(
            fields,
            model_type=model_type,
            attending=attending,
            layer=LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim),
            num_layers=num_layers,
            query_heads=heads,
            score_dim=float(heads * head_dim),
            states=_mamba2_states(
                recurrent,
                inner=inner,
                groups=fields.integer("mamba_n_groups", default=1),
                state=fields.integer("mamba_d_state", default=256),
                conv=fields.integer("mamba_d_conv", default=4),
                heads=fields.integer("mamba_n_heads", default=128),
            ),
            intermediate=fields.integer("intermediate_size", "shared_intermediate_size"),
        )

    return read


def _all_known(fields: Fields, kinds: Sequence[str], *found: Sequence[int]) -> None:
    seen = {index for group in found for index in group}
    for index, kind in enumerate(kinds):
        if index not in seen:
            raise UnknownError(f"{fields.origin}: layer {index} is of unknown type {kind!r}; its cache cannot be sized")


def _nemotron_h(fields: Fields) -> Architecture:
    pattern = fields.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        names = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
        kinds = [names.get(sign, sign) for sign in pattern]
    else:
        given = fields.values.get("layers_block_type") or fields.values.get("layer_types")
        if not isinstance(given, list):
            raise CorruptModelError(f"{fields.origin}: hybrid_override_pattern (or layers_block_type) is missing")
        kinds = [{"mamba": LINEAR, "attention": FULL}.get(str(kind), str(kind)) for kind in given]
    attending, recurrent = _split(kinds, (FULL,), (LINEAR,))
    idle, _ = _split(kinds, ("mlp", "moe"), ())
    _all_known(fields, kinds, attending, recurrent, idle)
    heads, kv_heads = fields.heads()
    head_dim = fields.head_dim(heads, 128)
    inner = fields.integer("mamba_num_heads", default=128) * fields.integer("mamba_head_dim", default=64)
    return _assemble(
        fields,
        model_type="nemotron_h",
        attending=attending,
        layer=LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim),
        num_layers=len(kinds),
        query_heads=heads,
        score_dim=float(heads * head_dim),
        states=_mamba2_states(
            recurrent,
            inner=inner,
            groups=fields.integer("n_groups", default=8),
            state=fields.integer("ssm_state_size", default=128),
            conv=fields.integer("conv_kernel", "mamba_d_conv", default=4),
            heads=fields.integer("mamba_num_heads", default=128),
        ),
        intermediate=fields.integer("intermediate_size"),
    )


def _delta_net(model_type: str) -> Callable[[Fields], Architecture]:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention every fourth layer."""

    def read(fields: Fields) -> Architecture:
        num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
        heads, kv_heads = fields.heads()
        head_dim = fields.head_dim(heads, 256)
        period = fields.integer("full_attention_interval", default=4)
        default = [FULL if (index + 1) % period == 0 else LINEAR for index in range(num_layers)]
        attending, recurrent = _split(fields.layer_types(num_layers, default), (FULL,), (LINEAR,))
        key_heads = fields.integer("linear_num_key_heads", default=16)
        value_heads = fields.integer("linear_num_value_heads", default=32)
        key = key_heads * fields.integer("linear_key_head_dim", default=128)
        value_dim = fields.integer("linear_value_head_dim", default=128)
        value = value_heads * value_dim
        conv = fields.integer("linear_conv_kernel_dim", default=4)
        matrix = value_heads * fields.integer("linear_key_head_dim", default=128) * value_dim
        return _assemble(
            fields,
            model_type=model_type,
            attending=attending,
            layer=LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim),
            num_layers=num_layers,
            query_heads=heads,
            score_dim=float(heads * head_dim),
            states=_states(
                recurrent,
                ("convolution", (2 * key + value) * conv, None, key_heads),
                ("state", matrix, FLOAT32, value_heads),
            ),
            intermediate=fields.integer("intermediate_size", "shared_expert_intermediate_size"),
            parameters=_delta_net_parameters(fields, num_layers, hidden, heads, kv_heads, head_dim, attending)
            if model_type == "qwen3_next"
            else None,
        )

    return read


def _delta_net_parameters(
    fields: Fields,
    num_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    attending: Sequence[int],
) -> Parameters:
    key_heads = fields.integer("linear_num_key_heads", default=16)
    value_heads = fields.integer("linear_num_value_heads", default=32)
    key = key_heads * fields.integer("linear_key_head_dim", default=128)
    value_dim = fields.integer("linear_value_head_dim", default=128)
    value = value_heads * value_dim
    conv = fields.integer("linear_conv_kernel_dim", default=4)
    # attention: the query projection also makes an output gate; q and k have a norm per head
    attention = parts.attention(hidden, heads, kv_heads, head_dim) + hidden * heads * head_dim + 2 * head_dim
    mixer = parts.linear(hidden, 2 * key + 2 * value + 2 * value_heads) + (2 * key + value) * conv
    mixer += 2 * value_heads + value_dim + parts.linear(value, hidden)
    experts, width = fields.integer("num_experts"), fields.integer("moe_intermediate_size")
    shared = parts.mlp(hidden, fields.integer("shared_expert_intermediate_size")) + hidden
    vocab = fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    total = len(attending) * attention + (num_layers - len(attending)) * mixer
    total += num_layers * (2 * hidden + hidden * experts + shared) + hidden + vocab * hidden * (1 if tied else 2)
    expert = num_layers * parts.mlp(hidden, width)
    return Parameters(
        total=total + experts * expert,
        embedding=vocab * hidden,
        expert=expert,
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok"),
        tied=tied,
    )


def _lfm2(fields: Fields) -> Architecture:
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    heads, kv_heads = fields.heads()
    listed = fields.values.get("full_attn_idxs")
    default = [FULL if listed is None or index in listed else "conv" for index in range(num_layers)]
    attending, recurrent = _split(fields.layer_types(num_layers, default), (FULL,), ("conv",))
    head_dim = fields.head_dim(heads)
    return _assemble(
        fields,
        model_type="lfm2",
        attending=attending,
        layer=LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim),
        num_layers=num_layers,
        query_heads=heads,
        score_dim=float(heads * head_dim),
        states=_states(recurrent, ("convolution", hidden * fields.integer("conv_L_cache", default=3), None, hidden)),
        intermediate=fields.integer("intermediate_size", "block_ff_dim"),
    )


def _kimi_linear(fields: Fields) -> Architecture:
    num_layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    linear = fields.values.get("linear_attn_config")
    linear = linear if isinstance(linear, Mapping) else {}
    listed = linear.get("full_attn_layers")
    if isinstance(listed, Sequence):  # 1-based in the checkpoint
        default = [FULL if index + 1 in listed else LINEAR for index in range(num_layers)]
    else:
        default = [FULL if (index + 1) % 4 == 0 else LINEAR for index in range(num_layers)]
    attending, recurrent = _split(fields.layer_types(num_layers, default), (FULL,), (LINEAR,))
    state_heads = int(linear.get("num_heads") or fields.integer("linear_num_heads", default=32))
    dim = int(linear.get("head_dim") or fields.integer("linear_head_dim", default=128))
    conv = int(linear.get("short_conv_kernel_size") or fields.integer("linear_conv_kernel_dim", default=4))
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    value = fields.integer("v_head_dim")
    return _assemble(
        fields,
        model_type="kimi_linear",
        attending=attending,
        layer=LayerSpec.mla(latent_dim=fields.integer("kv_lora_rank"), rope_dim=rope),
        num_layers=num_layers,
        query_heads=heads,
        score_dim=heads * (nope + rope + value) / 2,
        states=_states(
            recurrent,
            ("convolution", 3 * state_heads * dim * conv, None, state_heads),
            ("state", state_heads * dim * dim, FLOAT32, state_heads),
        ),
        intermediate=fields.integer("intermediate_size"),
        expanded=LayerSpec.kv(num_heads=heads, k_dim=nope + rope, v_dim=value),
    )


def _recurrent_gemma(fields: Fields) -> Architecture:
    num_layers = fields.integer("num_hidden_layers")
    heads, kv_heads = fields.heads()
    head_dim = fields.head_dim(heads)
    blocks = fields.values.get("block_types") or fields.values.get("_block_types")
    blocks = list(blocks) if blocks else ["recurrent", "recurrent", "attention"]
    kinds = [blocks[index % len(blocks)] for index in range(num_layers)]
    attending, recurrent = _split(kinds, ("attention", SLIDING), ("recurrent",))
    width = fields.integer("lru_width", default=fields.integer("hidden_size"))
    window = fields.integer("attention_window_size", "sliding_window", default=2048)
    return _assemble(
        fields,
        model_type="recurrent_gemma",
        attending=attending,
        layer=LayerSpec.kv(num_heads=kv_heads, k_dim=head_dim, window=window),
        num_layers=num_layers,
        query_heads=heads,
        score_dim=float(heads * head_dim),
        states=_states(
            recurrent,
            ("convolution", width * (fields.integer("conv1d_width", default=4) - 1), None, width),
            ("state", width, FLOAT32, width),
        ),
        intermediate=fields.integer("intermediate_size"),
    )


def _mamba(fields: Fields) -> Architecture:
    """Mamba: no attention at all; only the state per request."""
    num_layers, hidden = fields.integer("num_hidden_layers", "n_layer"), fields.integer("hidden_size", "d_model")
    inner = fields.integer("intermediate_size", default=fields.integer("expand", default=2) * hidden)
    state, conv = fields.integer("state_size", default=16), fields.integer("conv_kernel", default=4)
    layers = list(range(num_layers))
    return _assemble(
        fields,
        model_type="mamba",
        attending=[],
        layer=LayerSpec.kv(num_heads=1, k_dim=1),
        num_layers=num_layers,
        query_heads=0,
        score_dim=0.0,
        states=_states(layers, ("convolution", inner * conv, None, inner), ("state", inner * state, FLOAT32, inner)),
        intermediate=inner,
    )


def _mamba2(fields: Fields) -> Architecture:
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    inner = fields.integer("expand", default=2) * hidden
    return _assemble(
        fields,
        model_type="mamba2",
        attending=[],
        layer=LayerSpec.kv(num_heads=1, k_dim=1),
        num_layers=num_layers,
        query_heads=0,
        score_dim=0.0,
        states=_mamba2_states(
            range(num_layers),
            inner=inner,
            groups=fields.integer("n_groups", default=8),
            state=fields.integer("state_size", default=128),
            conv=fields.integer("conv_kernel", default=4),
            heads=fields.integer("num_heads", default=128),
        ),
        intermediate=inner,
    )


HYBRID: Mapping[str, Callable[[Fields], Architecture]] = {
    "jamba": _jamba,
    "granitemoehybrid": _mamba2_hybrid("granitemoehybrid"),
    "bamba": _mamba2_hybrid("bamba"),
    "falcon_h1": _mamba2_hybrid("falcon_h1"),
    "nemotron_h": _nemotron_h,
    "qwen3_next": _delta_net("qwen3_next"),
    "qwen3_5_text": _delta_net("qwen3_5_text"),
    "qwen3_5_moe_text": _delta_net("qwen3_5_moe_text"),
    "lfm2": _lfm2,
    "kimi_linear": _kimi_linear,
    "recurrent_gemma": _recurrent_gemma,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
}


def read_hybrid(model_type: str, fields: Fields) -> Architecture:
    """The architecture of a hybrid or recurrent model."""
    return HYBRID[model_type](fields)
