"""What travels through the model as the keyword argument ``kv``: the store and this step's tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from kvloom.core.layout import KVLayout
from kvloom.core.storage import StorageGroup
from kvloom.kernels.ops import BlockFormat, KernelBackend, QueryBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStore:
    """The arena and how to read it; one per engine.

    ``arena`` is uint8 [arena_bytes] on the model's device; ``formats[g]`` describes the blocks of
    ``storage[g]``, which are the layout's groups in order and then the encoded ones. ``faults``
    counts what encoding met and hid, by kind.
    """

    layout: KVLayout
    arena: torch.Tensor
    formats: tuple[BlockFormat, ...]
    storage: tuple[StorageGroup, ...]
    backend: KernelBackend
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeTask:
    """Full blocks that this pass encodes in every layer of one group: raw span n into encoded span n.

    All int64 [N] on the arena's device; offsets in bytes, ``first_positions`` of each block's first token.
    """

    raw_offsets: torch.Tensor
    encoded_offsets: torch.Tensor
    first_positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBatch:
    """One forward pass: which tokens, and where each sequence's spans are.

    ``tables[g]`` is int64 [S, max_blocks] on the arena's device: arena byte offsets of the spans of
    storage group g, negative where a sequence holds none. The last ``num_padding`` rows of the pass
    belong to no sequence: nothing is stored for them and their attention output is zero.
    ``encode[g]`` is what to encode into the encoded storage group g; absent where that is nothing.
    ``last_block`` is the last query's block, of all sequences.
    """

    store: KVStore
    queries: QueryBatch
    tables: tuple[torch.Tensor, ...]
    num_padding: int = 0
    encode: dict[int, EncodeTask] = field(default_factory=dict)
    last_block: int = 0
