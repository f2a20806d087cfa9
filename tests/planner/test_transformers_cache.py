"""The planner's sizes against the tensors that transformers' own cache really holds.

One tiny random model per family: run a prompt, add up the cache's tensors, compare with the ideal
accounting of the very same config. transformers' sliding layers keep window - 1 tokens (the query's
own key is added at the step), which is accounted for here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvloom.core.codec_sizes import parse_codec
from kvloom.planner.accounting import Ideal
from kvloom.planner.architecture import Architecture
from kvloom.planner.formats import CacheFormat
from kvloom.planner.readers import READERS, read_architecture
from kvloom.planner.readers.dense import TRAITS

TOKENS = 24
FLOAT32 = 4

_DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_WINDOW = {"sliding_window": 8}
_MOE = {"num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_LINEAR_MIX = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_WINDOW_MIX = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "mistral": {**_DENSE, **_WINDOW, **_HEAD},
    "ministral": {**_DENSE, **_WINDOW, **_HEAD, "layer_types": _WINDOW_MIX},
    "qwen2": {**_DENSE, **_WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {**_DENSE, **_HEAD},
    "phi3": {**_DENSE, **_WINDOW},
    "gemma": {**_DENSE, **_HEAD},
    "gemma2": {**_DENSE, **_WINDOW, **_HEAD},
    "gemma3_text": {**_DENSE, **_WINDOW, **_HEAD, "num_hidden_layers": 7},
    "olmo2": _DENSE,
    "olmo3": {**_DENSE, **_WINDOW},
    "cohere2": {**_DENSE, **_WINDOW},
    "cohere": _DENSE,
    "smollm3": _DENSE,
    "granite": _DENSE,
    "seed_oss": {**_DENSE, **_HEAD},
    "starcoder2": _DENSE,
    "exaone4": {**_DENSE, **_WINDOW, "layer_types": _WINDOW_MIX},
    "glm4": {**_DENSE, **_HEAD},
    "stablelm": _DENSE,
    "mixtral": {**_DENSE, **_MOE, "num_local_experts": 4},
    "qwen2_moe": {
        **_DENSE,
        **_MOE,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {**_DENSE, **_MOE, **_HEAD, "num_experts": 4, "moe_intermediate_size": 16},
    "olmoe": {**_DENSE, **_MOE, "num_experts": 4},
    "gpt_oss": {**_DENSE, **_MOE, **_HEAD, **_WINDOW, "num_local_experts": 4},
    "granitemoe": {**_DENSE, **_MOE, "num_local_experts": 4},
    "glm4_moe": {**_DENSE, **_MLA, **_HEAD},
    "phimoe": {**_DENSE, **_MOE, "num_local_experts": 4, "sliding_window": None},
    "minimax_m2": {**_DENSE, **_MOE, **_HEAD, "num_local_experts": 4},
    "ernie4_5": {**_DENSE, **_HEAD},
    "internlm3": _DENSE,
    "llama4_text": {
        **_DENSE,
        **_HEAD,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
    },
    "deepseek_v2": {**_DENSE, **_MLA, "num_key_value_heads": 4},
    "deepseek_v3": {**_DENSE, **_MLA, "num_key_value_heads": 4},
    "deepseek_v32": {
        **_DENSE,
        **_MLA,
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
    },
    "glm_moe_dsa": {
        **_DENSE,
        **_MLA,
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
    },
    "minicpm3": {**_DENSE, **_MLA, "num_key_value_heads": 4},
    "longcat_flash": {
        **{key: value for key, value in _DENSE.items() if key != "num_hidden_layers"},
        **_MLA,
        "num_layers": 2,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 1,
        "head_dim": 8,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 64},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 64},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "pad_token_id": 0, "n_layer": 3, "n_head": 4, "vocab_size": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64},
    "gpt_neox": {key: value for key, value in _DENSE.items() if key != "num_key_value_heads"},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "vocab_size": 64},
    "mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "vocab_size": 64},
    "phi": _DENSE,
    "jamba": {
        **_DENSE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "granitemoehybrid": {
        **_DENSE,
        **_MAMBA2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
        "layer_types": _LINEAR_MIX,
    },
    "bamba": {**_DENSE, **_MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_DENSE, **_MAMBA2, "mamba_d_ssm": 64},
    "nemotron_h": {
        **{key: value for key, value in _DENSE.items() if key != "num_hidden_layers"},
        **_HEAD,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "use_mamba_kernels": False,
    },
    "qwen3_next": {
        **_DENSE,
        **_HEAD,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_5_text": {
        **_DENSE,
        **_HEAD,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "lfm2": {**_DENSE, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "kimi_linear": {
        **_DENSE,
        **_MLA,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "layer_types": _LINEAR_MIX,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8, "use_mambapy": False},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
    },
    "gemma3n_text": {
        **_DENSE,
        **_WINDOW,
        **_HEAD,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _WINDOW_MIX,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_DENSE,
        **_WINDOW,
        **_HEAD,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "layer_types": _WINDOW_MIX,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
}

# What a config must state; everything else has a default in the architecture's code.
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "attention_chunk_size",
    "intermediate_size_mlp",
)

# Families whose transformers class stores its cache elsewhere, or that transformers does not have.
NOT_COMPARED = {
    "kimi_k2": "no class of its own in transformers: deepseek_v3's shapes",
    "glm4_moe_lite": "deepseek_v3's shapes; its tiny config needs fields not set here",
    "qwen3_5_moe_text": "qwen3_5_text's attention with experts",
    "recurrent_gemma": "keeps its recurrent state inside the modules, not in the cache",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are too small to share among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_family_is_compared_or_says_why() -> None:
    assert set(CONFIGS) | set(NOT_COMPARED) == set(READERS)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_cache_tensors(family: str) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        output = model(torch.randint(3, 60, (1, TOKENS)), use_cache=True, **_cache_argument(cache))
    held = getattr(output, "cache", None) or getattr(output, "past_key_values", None) or cache
    architecture = read_architecture({**CONFIGS[family], "model_type": family}, origin=family)
    assert _bytes_of(held) == _expected(architecture), f"{family}: {architecture.layout.groups}"


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_parameter_count(family: str) -> None:
    """The weight formulas, against a model without storage; families without a formula claim nothing."""
    architecture = read_architecture({**CONFIGS[family], "model_type": family}, origin=family)
    if architecture.parameters is None:
        pytest.skip("no verified formula for this family, so none is given")
    config = AutoConfig.for_model(family, **CONFIGS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(tensor.numel() for tensor in model.parameters())
    assert architecture.parameters.total == counted


@pytest.mark.parametrize("family", sorted(TRAITS))
def test_defaults_of_missing_fields(family: str) -> None:
    """A config that leaves fields out is read as the architecture's own configuration class would."""
    least = {key: CONFIGS[family][key] for key in _NEEDED if key in CONFIGS[family]}
    full = AutoConfig.for_model(family, **least).to_dict()
    ours = read_architecture({**least, "model_type": family}, origin=family)
    theirs = read_architecture({**full, "model_type": family}, origin=family)
    assert ours.layers == theirs.layers
    assert ours.parameters == theirs.parameters


def _cache_argument(cache: DynamicCache) -> dict[str, Any]:
    """transformers 5.24 renamed the argument; 5.15 to 5.23 know the old name only."""
    import inspect

    from transformers import LlamaForCausalLM

    name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
    return {name: cache}


def _expected(architecture: Architecture) -> int:
    form = CacheFormat(codec=parse_codec("float32"))
    total = architecture.state_bytes(FLOAT32)
    for group in Ideal(architecture, form).sequence(TOKENS).groups:
        tokens = TOKENS if group.window is None else min(TOKENS, group.window - 1)
        total += ceil(group.sequence_bytes / group.stored_tokens) * tokens
    return total


def _bytes_of(cache: Any) -> int:
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if name.startswith("_"):
                continue
            for tensor in _tensors(value):
                if tensor.is_floating_point():
                    seen[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
