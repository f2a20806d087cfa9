"""From a ``config.json`` to an :class:`Architecture`: one reader per family, chosen by ``model_type``.

A new architecture is one line in a family's table (``dense.TRAITS``, ``latent.LATENT``,
``classic.CLASSIC``, ``hybrid.HYBRID``) or one new file here. What no table names is unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from kvloom.planner.architecture import Architecture
from kvloom.planner.errors import UnknownError
from kvloom.planner.readers.classic import CLASSIC, read_classic
from kvloom.planner.readers.dense import TRAITS, read_dense
from kvloom.planner.readers.fields import Fields
from kvloom.planner.readers.hybrid import HYBRID, read_hybrid
from kvloom.planner.readers.latent import LATENT, read_latent
from kvloom.planner.readers.sharing import SHARING, read_sharing

Reader = Callable[[str, Fields], Architecture]

READERS: Mapping[str, Reader] = {
    **dict.fromkeys(TRAITS, read_dense),
    **dict.fromkeys(LATENT, read_latent),
    **dict.fromkeys(CLASSIC, read_classic),
    **dict.fromkeys(HYBRID, read_hybrid),
    **dict.fromkeys(SHARING, read_sharing),
}

# Multimodal wrappers keep the language model's config one level down.
_NESTED = ("text_config", "language_config", "llm_config")
# Wrappers whose inner config often omits its own model_type.
_INNER_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "mistral3": "mistral",
}
# Inner names that differ from a reader's name but mean the same decoder.
_SAME: Mapping[str, str] = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "ministral3": "mistral",
    "glm_moe_dsa_text": "glm_moe_dsa",
}


def read_architecture(config: Mapping[str, Any], *, origin: str) -> Architecture:
    """The architecture that ``config`` describes. ``origin`` names it in messages.

    Raises:
        UnknownError: no ``model_type``, or one that no reader knows (exit status 3).
        CorruptModelError: a field is missing or impossible (exit status 2).
    """
    values, model_type = _language_part(config)
    if model_type is None:
        raise UnknownError(
            f"{origin}: no model_type, so the architecture is unknown; use the config.json that ships with the model"
        )
    reader = READERS.get(model_type)
    if reader is None:
        near = difflib.get_close_matches(model_type, list(READERS), n=1, cutoff=0.8)
        hint = f" (the nearest known one is {near[0]!r}, which may differ in exactly what matters)" if near else ""
        raise UnknownError(
            f"{origin}: architecture {model_type!r} is unknown to this version of kvloom{hint}; its cache cannot be "
            "sized, and kvloom does not guess. Known: " + ", ".join(sorted(READERS))
        )
    return reader(model_type, Fields(values, origin=origin))


def _language_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    outer = config.get("model_type")
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            kind = inner.get("model_type") or _INNER_TYPES.get(str(outer))
            values = {**inner}
            if "tie_word_embeddings" in config:
                values.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
            return values, _SAME.get(str(kind), str(kind)) if kind else None
    if not isinstance(outer, str):
        return config, None
    return config, _SAME.get(outer, _INNER_TYPES.get(outer, outer))
