"""What the planner knows about a model: what each layer keeps, and how many weights it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloom.core.layout import KVLayout, LayerSpec, group_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentState:
    """State that a recurrent layer keeps per *request*, however long the context.

    ``elements`` counts values in one layer. ``element_bytes`` None means the cache's dtype.
    ``shards`` is into how many equal parts tensor parallelism may cut it.
    """

    name: str
    layers: tuple[int, ...]
    elements: int
    element_bytes: int | None = None
    shards: int = 1

    def bytes_per_request(self, cache_element_bytes: int) -> int:
        """Bytes over all layers for one request."""
        return len(self.layers) * self.elements * (self.element_bytes or cache_element_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Weight counts.

    ``total`` is what is stored. ``embedding`` is the input table, of which a token reads one row.
    ``expert`` is one routed expert over all its layers; a token uses ``top_k`` of ``num_experts``.
    """

    total: int
    embedding: int = 0
    expert: int = 0
    num_experts: int = 0
    top_k: int = 0
    tied: bool = False

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with (the input lookup multiplies nothing)."""
        lookup = 0 if self.tied else self.embedding  # tied: the same table is the output projection
        return self.total - lookup - self.expert * (self.num_experts - self.top_k)

    def read_per_step(self, num_tokens: int) -> float:
        """Parameters expected to be read for a step of ``num_tokens``, routing taken as uniform.

        Each expert is missed by one token with probability 1 - k/E, so a step reads
        E·(1 - (1 - k/E)^tokens) experts of each layer.
        """
        lookup = 0 if self.tied else self.embedding
        dense = self.total - lookup - self.expert * self.num_experts
        if not self.num_experts:
            return float(dense)
        touched = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)
        return dense + self.expert * touched


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder as the planner sees it.

    ``layers`` holds one entry per *attention* layer, ``positions`` its index among all
    ``num_layers`` blocks (a hybrid has blocks without attention). ``chunked`` names the entries of
    ``layers`` whose window is a chunk: it fills up and starts anew instead of sliding.
    ``score_dim`` is query heads × mean of key and value width, per attention layer: what the
    attention products cost.
    """

    model_type: str
    kind: str
    layers: tuple[LayerSpec, ...]
    positions: tuple[int, ...]
    num_layers: int
    num_query_heads: int
    score_dim: float
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    max_positions: int | None
    parameters: Parameters | None
    states: tuple[RecurrentState, ...] = ()
    chunked: frozenset[int] = frozenset()
    expanded: LayerSpec | None = None  # MLA only: what a cache of expanded keys and values would hold
    notes: tuple[str, ...] = field(default=())

    @property
    def layout(self) -> KVLayout:
        """The layer groups; empty for a purely recurrent model."""
        if not self.layers:
            return KVLayout(groups=(), homes=())
        return group_layers(self.layers)

    def state_bytes(self, cache_element_bytes: int) -> int:
        """Recurrent bytes per request."""
        return sum(state.bytes_per_request(cache_element_bytes) for state in self.states)
