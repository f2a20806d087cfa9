"""Rotary positions that hold still: long-RoPE's factors are chosen once, when the model is loaded.

transformers chooses between the short and the long factors by the longest position of the batch, so
that a long request would change a short one's answer, and keys in the cache would mix both. Here the
choice falls with ``max_model_len``: beyond the original length every position uses the long factors,
up to it every position the short ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from kvloom.core.errors import UnsupportedModelError


def fix_longrope(model: nn.Module, max_model_len: int) -> None:
    """Fix the long-RoPE factors of this model instance for sequences up to ``max_model_len`` tokens.

    Raises:
        UnsupportedModelError: the rotary module is not built as transformers' own ones are.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and "longrope" in kind.values():
            raise UnsupportedModelError(
                "it has long-RoPE on some layer types only, whose factors cannot be fixed; served is long-RoPE on all"
            )
        if kind != "longrope":
            continue
        module.get_buffer("inv_freq").copy_(_frequencies(module, max_model_len))
        # transformers looks at this name before every pass and leaves other types' frequencies alone.
        module.rope_type = "default"  # type: ignore[assignment]


def _frequencies(module: Any, max_model_len: int) -> torch.Tensor:
    """[dim / 2] inverse frequencies of one regime, as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = module.config.rope_parameters["original_max_position_embeddings"]
    # Only the side of the original length on which this falls matters.
    length = original + 1 if max_model_len > original else original
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=length)[0]
    return frequencies


def rope_digest(model: nn.Module) -> str:
    """Hexadecimal digest of the rotary frequencies that the model computes with, and their scales.

    Two loads of one checkpoint may differ in them (long-RoPE); their keys must not be shared.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        for key in sorted(vars(module)):
            if key.endswith("attention_scaling"):
                digest.update(f"{name}.{key}={getattr(module, key)!r}".encode())
        for key, buffer in sorted(module.named_buffers(recurse=False)):
            if key.endswith("inv_freq") and "original" not in key:
                digest.update(f"{name}.{key}".encode())
                digest.update(buffer.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
