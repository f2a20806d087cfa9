"""How many bytes a sequence holds: by the arithmetic alone, and as four engines really count.

*ideal*      every query's keys and values once, nothing rounded: min(context, window) tokens.
*kvloom*     whole spans of the paged arena: the same :mod:`kvloom.core.sizes` that the engine allocates with.
*vllm*       blocks of 16 in groups of equally many layers (hybrid KV cache manager, vLLM 0.2x to 0.3x).
*llama.cpp*  cells padded to 256; windowed layers hold window + batch cells (PR 13194).

Derivations: ``docs/sizing.md``. Engines change these rules between releases, so each says its version.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.planner.accounting.base import Accounting, GroupBytes, SequenceBytes
from kvloom.planner.accounting.curve import Segment, segment_at, segments
from kvloom.planner.accounting.ideal import Ideal
from kvloom.planner.accounting.kvloom import Kvloom
from kvloom.planner.accounting.llama_cpp import LlamaCpp
from kvloom.planner.accounting.vllm import Vllm

__all__ = [
    "ACCOUNTINGS",
    "DEFAULT_CHUNK",
    "Accounting",
    "GroupBytes",
    "Ideal",
    "Kvloom",
    "LlamaCpp",
    "Segment",
    "SequenceBytes",
    "Vllm",
    "segment_at",
    "segments",
]

ACCOUNTINGS: Mapping[str, type[Accounting]] = {
    "ideal": Ideal,
    "kvloom": Kvloom,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
}

DEFAULT_CHUNK: Mapping[str, int] = {"ideal": 512, "kvloom": 512, "vllm": 2048, "llama.cpp": 2048}
