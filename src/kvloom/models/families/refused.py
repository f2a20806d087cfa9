"""Model types that are known to be wrong through our attention, and why; ``--allow-unverified`` changes nothing.

``tests/models/test_refused.py`` shows for each what would happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CHUNKS = (
    "it attends in chunks of attention_chunk_size tokens, which its code states only in masks, and scales its queries "
    "by a position that it reads off transformers' cache"
)
_DROPPED = (
    "transformers' layers of this type do not pass keyword arguments on to their attention, so the paged cache cannot "
    "reach it"
)
_INDEXER = (
    "an indexer chooses the keys that each query sees; its own keys are not in the cache, and its choice reaches "
    "attention only as a mask"
)
_OWN = "transformers' code for it computes attention without the attention interface, so the paged cache is never asked"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "bloom": _OWN + "; it also adds position biases (alibi) to its logits",
        "deepseek_v32": _INDEXER,
        "doge": "its layers add a learned mask to the logits of every key, which the kernels do not compute",
        "glm_moe_dsa": _INDEXER,
        "gpt_neo": _OWN,
        "llama4": _CHUNKS,
        "llama4_text": _CHUNKS,
        "mpt": _OWN + "; it also adds position biases (alibi) to its logits",
        "nemotron": _DROPPED,
        "stablelm": _DROPPED,
        "xglm": _OWN,
    }
)
