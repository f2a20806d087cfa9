"""Plain snapshots of what the engine did and holds; metrics and logs read nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSnapshot:
    """Bytes and spans of the arena at one moment.

    ``used_bytes + cached_bytes + free_bytes + overhead_bytes == arena_bytes`` always holds, where
    used spans are referenced by a live sequence, cached ones only by the prefix cache (reusable at
    once), and overhead is what no span can use (slab remainders).
    Of the used bytes, ``token_bytes`` hold tokens (each span counted once, however shared).
    ``stranded_bytes``: free runs in slabs that belong to one format, part of ``free_bytes``.
    """

    arena_bytes: int = 0
    used_bytes: int = 0
    cached_bytes: int = 0
    free_bytes: int = 0
    overhead_bytes: int = 0
    stranded_bytes: int = 0
    token_bytes: int = 0
    reserve_bytes: int = 0
    used_spans: int = 0
    cached_spans: int = 0
    block_bytes: int = 1  # one token block in every group: the unit of *_blocks metrics
    block_size: int = 32

    @property
    def usage(self) -> float:
        """Referenced share of the arena, 0 to 1; reusable spans count as free."""
        return self.used_bytes / self.arena_bytes if self.arena_bytes else 0.0

    @property
    def waste(self) -> float:
        """Share of allocated bytes that hold no token: open spans' empty rows, slab remainders, stranded runs."""
        allocated = self.used_bytes + self.overhead_bytes + self.stranded_bytes
        return 1.0 - self.token_bytes / allocated if self.token_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSnapshot:
    """The engine at one moment. Counters only grow; token counters count tokens.

    ``prefix_hit_rate``: share of looked-up prompt tokens found in the prefix cache over the last
    1,000 requests. ``prefix_recovered_tokens``: found again after a preemption, kept apart from
    hits. ``misses``: looked-up tokens not found, by reason. ``fallbacks``: times something slower
    or smaller ran than asked for, by kind. ``errors``: requests ended by an error, by kind.
    """

    cache: CacheSnapshot = field(default_factory=CacheSnapshot)
    running: int = 0
    waiting: int = 0
    requests: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    cancellations: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_recovered_tokens: int = 0
    prefix_hit_rate: float = 0.0
    evicted_spans: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What does not change while the engine lives: for the start-up print, ``/v1/models`` and labels."""

    model: str = ""
    model_type: str = ""
    verified: bool = True
    max_model_len: int = 0
    vocab_size: int = 0
    device: str = "cpu"
    dtype: str = "bfloat16"
    kernels: str = "reference"
    kernel_variant: str = ""
    step: str = "transformers"  # what computes a forward pass, and why not natively
    weight_bytes: int = 0  # that every step reads; 0 where unknown
    block_size: int = 32
    pipeline: str = "accuracy"
    codec: str = "raw"
    sink_tokens: int = 0  # first and last tokens that stay raw, in whole blocks
    recent_tokens: int = 0
    protect_layers: tuple[int, ...] = ()
    guarded_layers: tuple[int, ...] = ()  # those of protect_layers that the codec guard added
    bits_per_value: float = 16.0  # of what is encoded, side data included; of raw values where nothing is
    deterministic: bool = False
    rounding_noise: float = 0.0
    predicted_bytes_per_token: int = 0
    actual_bytes_per_token: int = 0
    predicted_arena_bytes: int = 0
    actual_arena_bytes: int = 0
    slab_bytes: int = 0
    num_slabs: int = 0
    sequences_at_max_len: int = 0
    groups: tuple[Mapping[str, int | str | None], ...] = ()
