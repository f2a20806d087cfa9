"""A tiny configuration for every model type in ``families.FAMILIES``.

Each is as small as its architecture allows while every feature that touches attention is on:
windows short enough to be passed within a few tokens, fewer KV heads than query heads, biases, sinks,
soft caps. The conformance suite fails for a type in ``FAMILIES`` that has no entry here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.tiny import SPREAD, VOCAB_SIZE

WINDOW = 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
SLIDE, FULL = "sliding_attention", "full_attention"
SLIDING = {"sliding_window": WINDOW, "layer_types": [SLIDE, FULL]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
MLA_EXPERTS = (
    MLA
    | EXPERTS
    | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
)
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 256,
}

# Model type -> what differs from SHAPE.
CHANGES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {"attention_bias": True},
    "axk1": MLA_EXPERTS,
    "cohere": {"use_qk_norm": True},
    "cohere2": SLIDING,
    "deepseek_v2": MLA_EXPERTS,
    "deepseek_v3": MLA_EXPERTS,
    "ernie4_5": {"use_bias": True, "head_dim": 16},
    "exaone4": SLIDING,
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": SLIDING | {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    "falcon": {},
    "gemma3_text": SLIDING | {"head_dim": 32, "query_pre_attn_scalar": 32, "num_key_value_heads": 1},
    "gemma4_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "layer_types": [SLIDE, FULL, SLIDE, SLIDE, FULL],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": True,
    },
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "glm4_moe_lite": MLA_EXPERTS,
    "gpt2": {"n_inner": 96},
    "gpt_bigcode": {"n_inner": 96},
    "gpt_neox": {},
    "gpt_oss": SLIDING | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {"head_dim": 16},
    "llama": {"head_dim": 32},
    "minicpm3": MLA,
    "ministral": SLIDING | {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW, "head_dim": 32},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"qk_layernorm": True},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256, "sliding_window": WINDOW},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "attention_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen2_moe": EXPERTS
    | {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 32},
    "qwen3_moe": EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW, "num_experts": 4, "head_dim": 32},
    "seed_oss": {"head_dim": 32},
    "smollm3": SLIDING | {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": WINDOW},
    "youtu": MLA,
}

# Multimodal model type -> the text model inside, which is what is served.
WRAPPED = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
# Types whose configuration refuses num_key_value_heads or takes it for something else.
WITHOUT_KV_HEADS = ("falcon", "gpt2", "gpt_bigcode", "gpt_neox")


def tiny_config(model_type: str, **changes: Any) -> Any:
    """transformers' configuration of a tiny ``model_type``.

    Raises:
        ValueError: this transformers does not know the type.
    """
    if model_type in WRAPPED:
        text = tiny_config(WRAPPED[model_type], **changes)
        return AutoConfig.for_model(model_type, text_config=text.to_dict())
    settings = SHAPE | CHANGES[model_type] | changes
    if model_type in WITHOUT_KV_HEADS:
        del settings["num_key_value_heads"]
    return AutoConfig.for_model(model_type, **settings)


def build(model_type: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A random float32 model of ``tiny_config(model_type)``; equal arguments give equal weights."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes).get_text_config()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.eval().requires_grad_(False)
