"""kvloom: a KV cache that is paged, shared, and planned to the byte, in an engine that serves it.

``LLM`` loads on first use, so that importing kvloom (the planner, ``--help``) does not bring torch.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvloom.core.request import SamplingParams

if TYPE_CHECKING:
    from kvloom.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

try:
    __version__ = version("kvloom")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from kvloom.llm import LLM

        return LLM
    raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
