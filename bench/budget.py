"""Bytes of arena with which an engine of ours holds the largest cell, in the format that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.core.config import EngineConfig
from kvloom.core.layout import KVLayout
from kvloom.core.sizes import DTYPE_BYTES, MemoryPlan, plan_memory
from kvloom.core.storage import Encoding, split_layers
from kvloom.engine.pipeline import resolve_encoding

ROOM = 1.25  # for half-filled blocks, and for what earlier rounds left cached
LEAST_ROOM = 256 << 20
UNBOUNDED = 1 << 50
PROMPT_GROUPS = 8  # in which the prompts of a decode cell are computed where they are encoded


def cache_budget(config: EngineConfig, layout: KVLayout, dtype: str, loads: Sequence[tuple[int, int]]) -> int:
    """Arena bytes for each of ``loads``, (sequences, tokens of each), held at once.

    The whole arena is resident from the start, so a smaller format shows in the process's memory only if the arena
    is made for it. Encoded blocks leave raw copies in the prefix cache; there is room for those of one group of
    prompts, so that they do not push out prompts that are encoded already. Prompts of a decode cell are all computed
    before any sequence starts, so blocks that windows have passed lie in the prefix cache beside those that they need:
    there is room for them too, or the one would push out the other.
    """
    encoding = resolve_encoding(config.pipeline, layout, dtype)
    plan = _plan(config, layout, dtype, encoding)
    needed = max(plan.slabs_for(sequences, tokens) * plan.slab_bytes for sequences, tokens in loads)
    copies = 0
    if encoding is not None:
        raw = _plan(config, layout, dtype, None)
        copies = max(raw.slabs_for(group_size(sequences), tokens) * raw.slab_bytes for sequences, tokens in loads)
    windowed = sum(group.elements_per_token for group in layout.groups if group.window is not None)
    passed = max(windowed * DTYPE_BYTES[dtype] * sequences * tokens for sequences, tokens in loads)
    return int(ROOM * (needed + passed)) + copies + LEAST_ROOM


def group_size(sequences: int) -> int:
    """Prompts of a decode cell that are computed together where they are encoded."""
    return max(1, sequences // PROMPT_GROUPS)


def _plan(config: EngineConfig, layout: KVLayout, dtype: str, encoding: Encoding | None) -> MemoryPlan:
    if encoding is not None and encoding.layers:
        layout = split_layers(layout, encoding.layers)
    return plan_memory(
        layout,
        budget_bytes=UNBOUNDED,
        block_size=config.pipeline.block_size,
        codecs={plane.name: dtype for group in layout.groups for plane in group.planes},
        max_model_len=config.pipeline.block_size,
        max_batch_tokens=config.max_batch_tokens,
        encoding=encoding,
    )
