"""Model families: which architectures kvloom serves, one file per family.

A new family is one file and one line per model type in ``FAMILIES``; the conformance tests walk
this table.
"""

from __future__ import annotations

import importlib

from kvloom.core.errors import UnsupportedModelError
from kvloom.models.families.base import ModelFamily

# transformers model_type -> module:class; imported on use.
FAMILIES = {
    "gemma3": "kvloom.models.families.gemma3:Gemma3",
    "gemma3_text": "kvloom.models.families.gemma3:Gemma3Text",
    "llama": "kvloom.models.families.llama:Llama",
}
GENERIC = "kvloom.models.families.generic:Generic"


def find_family(model_type: str, *, allow_unverified: bool) -> ModelFamily:
    """The family of ``model_type``; the generic one for unlisted types under ``allow_unverified``.

    Raises:
        UnsupportedModelError: the type is not listed, and unverified models are not allowed.
    """
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
