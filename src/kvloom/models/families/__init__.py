"""Model families: which architectures kvloom serves, one file per family.

A new family is one file and one line per model type in ``FAMILIES``; the conformance tests walk
this table.
"""

from __future__ import annotations

import importlib

from kvloom.core.errors import UnsupportedModelError
from kvloom.models.families.base import ModelFamily
from kvloom.models.families.refused import REFUSED

# transformers model_type -> module:class; imported on use.
FAMILIES = {
    "apertus": "kvloom.models.families.plain:Plain",
    "arcee": "kvloom.models.families.plain:Plain",
    "axk1": "kvloom.models.families.deepseek:DeepSeek",
    "cohere": "kvloom.models.families.plain:Plain",
    "cohere2": "kvloom.models.families.alternating:Alternating",
    "deepseek_v2": "kvloom.models.families.deepseek:DeepSeek",
    "deepseek_v3": "kvloom.models.families.deepseek:DeepSeek",
    "ernie4_5": "kvloom.models.families.plain:Plain",
    "exaone4": "kvloom.models.families.alternating:Alternating",
    "falcon": "kvloom.models.families.falcon:Falcon",
    "gemma": "kvloom.models.families.plain:Plain",
    "gemma2": "kvloom.models.families.alternating:Alternating",
    "gemma3": "kvloom.models.families.gemma3:Gemma3",
    "gemma3_text": "kvloom.models.families.gemma3:Gemma3Text",
    "gemma4": "kvloom.models.families.gemma4:Gemma4",
    "gemma4_text": "kvloom.models.families.gemma4:Gemma4Text",
    "glm": "kvloom.models.families.plain:Plain",
    "glm4": "kvloom.models.families.plain:Plain",
    "glm4_moe_lite": "kvloom.models.families.deepseek:DeepSeek",
    "gpt2": "kvloom.models.families.plain:Plain",
    "gpt_bigcode": "kvloom.models.families.gpt_bigcode:GptBigCode",
    "gpt_neox": "kvloom.models.families.plain:Plain",
    "gpt_oss": "kvloom.models.families.gpt_oss:GptOss",
    "granite": "kvloom.models.families.plain:Plain",
    "granitemoe": "kvloom.models.families.plain:Plain",
    "helium": "kvloom.models.families.plain:Plain",
    "llama": "kvloom.models.families.llama:Llama",
    "minicpm3": "kvloom.models.families.deepseek:DeepSeek",
    "ministral": "kvloom.models.families.alternating:Alternating",
    "mistral": "kvloom.models.families.windowed:Windowed",
    "mixtral": "kvloom.models.families.windowed:Windowed",
    "olmo": "kvloom.models.families.plain:Plain",
    "olmo2": "kvloom.models.families.plain:Plain",
    "olmo3": "kvloom.models.families.alternating:Alternating",
    "olmoe": "kvloom.models.families.plain:Plain",
    "phi": "kvloom.models.families.plain:Plain",
    "phi3": "kvloom.models.families.windowed:Windowed",
    "phimoe": "kvloom.models.families.phimoe:Phimoe",
    "qwen2": "kvloom.models.families.alternating:Alternating",
    "qwen2_moe": "kvloom.models.families.alternating:Alternating",
    "qwen3": "kvloom.models.families.alternating:Alternating",
    "qwen3_moe": "kvloom.models.families.windowed:Windowed",
    "seed_oss": "kvloom.models.families.plain:Plain",
    "smollm3": "kvloom.models.families.alternating:Alternating",
    "starcoder2": "kvloom.models.families.windowed:Windowed",
    "youtu": "kvloom.models.families.deepseek:DeepSeek",
}
GENERIC = "kvloom.models.families.generic:Generic"


def find_family(model_type: str, *, allow_unverified: bool) -> ModelFamily:
    """The family of ``model_type``; the generic one for unlisted types under ``allow_unverified``.

    Raises:
        UnsupportedModelError: the type is known to be served wrongly, or it is not listed and
            unverified models are not allowed.
    """
    if model_type in REFUSED:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be served: {REFUSED[model_type]}; use a model of another type, "
            f"verified: {', '.join(sorted(FAMILIES))}"
        )
    path = FAMILIES.get(model_type)
    if path is None:
        if not allow_unverified:
            raise UnsupportedModelError(
                f"model type {model_type!r} is not verified: kvloom has not compared its answers with transformers' "
                f"own; verified: {', '.join(sorted(FAMILIES))}; to run it all the same, pass --allow-unverified"
            )
        path = GENERIC
    module, name = path.split(":")
    family: ModelFamily = getattr(importlib.import_module(module), name)()
    return family
