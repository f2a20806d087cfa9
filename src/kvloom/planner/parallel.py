"""One device's share of a model: tensor, pipeline and data parallelism.

KV heads are divided among tensor-parallel ranks; with more ranks than heads each rank keeps a whole
head and heads are *replicated* (divisor min(tp, heads)). MLA's latent is one head: every rank holds
it whole. What does not divide is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kvloom.core.errors import ConfigError
from kvloom.core.layout import LayerSpec
from kvloom.planner.architecture import Architecture, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Degrees of tensor, pipeline and data parallelism."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


def replicas_per_head(num_heads: int, tp: int) -> int:
    """How often each KV head is stored: 1 while tp divides the heads, tp / heads beyond.

    Raises:
        ConfigError: neither divides the other.
    """
    if num_heads % tp == 0:
        return 1
    if tp % num_heads == 0:
        return tp // num_heads
    allowed = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
    raise ConfigError(
        f"tp {tp} cannot divide {num_heads} KV heads evenly; use a divisor ({allowed}) or a multiple of {num_heads}"
    )


def stages(architecture: Architecture, parallel: Parallel) -> tuple[Architecture, ...]:
    """What one rank of each pipeline stage holds.

    Layers are dealt to stages in order, the first stages taking one more when they do not divide.

    Raises:
        ConfigError: heads that tp cannot divide, more stages than layers, or a stage boundary
            between a layer and the one whose cache it reads.
    """
    if architecture.num_query_heads and architecture.num_query_heads % parallel.tp:
        raise ConfigError(
            f"tp {parallel.tp} does not divide the model's {architecture.num_query_heads} query heads; use one of "
            + ", ".join(
                str(n)
                for n in range(1, architecture.num_query_heads + 1)
                if architecture.num_query_heads % n == 0 and n <= 128
            )
        )
    if parallel.pp > architecture.num_layers:
        raise ConfigError(
            f"pp {parallel.pp} is more than the model's {architecture.num_layers} layers; use at most that many"
        )
    sharded = [_shard_layer(layer, parallel.tp) for layer in architecture.layers]
    states = tuple(_shard_state(state, parallel.tp) for state in architecture.states)
    result: list[Architecture] = []
    for start, end in _stage_bounds(architecture.num_layers, parallel.pp):
        chosen = [i for i, position in enumerate(architecture.positions) if start <= position < end]
        renumber = {old: new for new, old in enumerate(chosen)}
        layers: list[LayerSpec] = []
        for old in chosen:
            layer = sharded[old]
            if layer.shares_with is not None:
                if layer.shares_with not in renumber:
                    raise ConfigError(
                        f"pp {parallel.pp} separates layer {old} from layer {layer.shares_with}, whose cache it reads; "
                        "use pp 1"
                    )
                layer = replace(layer, shares_with=renumber[layer.shares_with])
            layers.append(layer)
        result.append(
            replace(
                architecture,
                layers=tuple(layers),
                positions=tuple(architecture.positions[old] for old in chosen),
                num_layers=end - start,
                states=tuple(
                    replace(state, layers=kept)
                    for state in states
                    if (kept := tuple(layer for layer in state.layers if start <= layer < end))
                ),
                chunked=frozenset(renumber[old] for old in architecture.chunked if old in renumber),
            )
        )
    return tuple(result)


def _stage_bounds(num_layers: int, pp: int) -> list[tuple[int, int]]:
    base, extra = divmod(num_layers, pp)
    bounds: list[tuple[int, int]] = []
    start = 0
    for stage in range(pp):
        end = start + base + (1 if stage < extra else 0)
        bounds.append((start, end))
        start = end
    return bounds


def _shard_layer(layer: LayerSpec, tp: int) -> LayerSpec:
    replicas_per_head(layer.num_heads, tp)
    return replace(layer, num_heads=layer.num_heads // min(tp, layer.num_heads))


def _shard_state(state: RecurrentState, tp: int) -> RecurrentState:
    """Cut a state where its parts divide; else every rank keeps it whole."""
    if state.shards % tp:
        return state
    return replace(state, elements=state.elements // tp, shards=state.shards // tp)


def batch_per_replica(batch: int, dp: int) -> int:
    """Sequences on the fullest data-parallel replica."""
    return ceil(batch / dp)
