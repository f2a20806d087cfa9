"""What travels through the model as the keyword argument ``kv``: the store and this step's tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import BlockFormat, KernelBackend, QueryBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStore:
    """The arena and how to read it; one per engine.

    ``arena`` is uint8 [arena_bytes] on the model's device; ``formats[g]`` describes group g's blocks.
    """

    layout: KVLayout
    arena: torch.Tensor
    formats: tuple[BlockFormat, ...]
    backend: KernelBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBatch:
    """One forward pass: which tokens, and where each sequence's spans are.

    ``tables[g]`` is int64 [S, max_blocks] on the arena's device: arena byte offsets of group g's
    spans, negative where a sequence holds none. The last ``num_padding`` rows of the pass belong to
    no sequence: nothing is stored for them and their attention output is zero.
    """

    store: KVStore
    queries: QueryBatch
    tables: tuple[torch.Tensor, ...]
    num_padding: int = 0
