"""What a model keeps per token: planes, layers and layer groups. Plain data, no torch.

A *plane* is one vector kept per token and KV head: ``k`` and ``v``, or ``latent`` and ``rope`` for
MLA. A *layer group* holds the layers that share plane shapes and window; a uniform model has one.
A *span* holds ``block_size`` tokens of every layer and head of one group::

    span  = [layer 0: [head 0: [k-block | v-block], head 1: …], layer 1: …]      contiguous
    block = all planes of one (layer, head) for block_size tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """One vector per token and KV head: its name and its number of elements."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        if self.dim <= 0:
            raise ConfigError(f"plane {self.name!r} has dim {self.dim}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What one attention layer stores.

    ``window`` is the number of most recent tokens a query sees, itself included (None: all).
    ``shares_with`` names an earlier layer whose planes this layer reads instead of storing its own.
    """

    planes: tuple[Plane, ...]
    num_heads: int
    window: int | None = None
    shares_with: int | None = None

    @classmethod
    def kv(
        cls,
        *,
        num_heads: int,
        k_dim: int,
        v_dim: int | None = None,
        window: int | None = None,
        shares_with: int | None = None,
    ) -> LayerSpec:
        """The ordinary layer: ``k`` and ``v`` planes for each KV head."""
        planes = (Plane(name="k", dim=k_dim), Plane(name="v", dim=k_dim if v_dim is None else v_dim))
        return cls(planes=planes, num_heads=num_heads, window=window, shares_with=shares_with)

    @classmethod
    def mla(cls, *, latent_dim: int, rope_dim: int) -> LayerSpec:
        """A multi-head latent attention layer: one head with a latent and a rope plane."""
        return cls(planes=(Plane(name="latent", dim=latent_dim), Plane(name="rope", dim=rope_dim)), num_heads=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers with equal planes, KV heads and window, in model order."""

    name: str
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    num_heads: int
    window: int | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def elements_per_token(self) -> int:
        """Values kept per token over all layers, heads and planes of the group."""
        return self.num_layers * self.num_heads * sum(plane.dim for plane in self.planes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """The layer groups of a model, and where each layer's blocks stand.

    ``homes[i]`` is ``(group, index within the group)`` for model layer ``i``; a layer that shares
    another's planes has that layer's home.
    """

    groups: tuple[LayerGroup, ...]
    homes: tuple[tuple[int, int], ...]
    shared: frozenset[int] = frozenset()

    @property
    def num_layers(self) -> int:
        return len(self.homes)


def group_layers(layers: Sequence[LayerSpec]) -> KVLayout:
    """Group a model's layers by planes, KV heads and window.

    Full-attention groups come before windowed ones, each kind in order of first appearance, so
    that group 0 is the one whose spans carry the longest prefixes whenever the model has one.

    Raises:
        ConfigError: no layer, or ``shares_with`` names a later or unlike layer.
    """
    if not layers:
        raise ConfigError("the model has no attention layer; kvloom needs at least one")
    members: dict[tuple[object, ...], list[int]] = {}
    owner: list[int] = []
    for index, layer in enumerate(layers):
        if layer.shares_with is None:
            owner.append(index)
            key = (layer.window is not None, layer.planes, layer.num_heads, layer.window)
            members.setdefault(key, []).append(index)
            continue
        if not 0 <= layer.shares_with < index:
            raise ConfigError(f"layer {index} shares with layer {layer.shares_with}; it must name an earlier layer")
        target = layers[owner[layer.shares_with]]
        if (layer.planes, layer.num_heads, layer.window) != (target.planes, target.num_heads, target.window):
            raise ConfigError(f"layer {index} shares with layer {layer.shares_with} but their shapes differ")
        owner.append(owner[layer.shares_with])

    ordered = sorted(members.items(), key=lambda item: bool(item[0][0]))  # stable: full groups first
    groups: list[LayerGroup] = []
    home_of: dict[int, tuple[int, int]] = {}
    for group_index, (_, indices) in enumerate(ordered):
        first = layers[indices[0]]
        kind = "full" if first.window is None else f"window{first.window}"
        taken = sum(group.name.split("#")[0] == kind for group in groups)
        groups.append(
            LayerGroup(
                name=kind if not taken else f"{kind}#{taken + 1}",
                layers=tuple(indices),
                planes=first.planes,
                num_heads=first.num_heads,
                window=first.window,
            )
        )
        for position, layer_index in enumerate(indices):
            home_of[layer_index] = (group_index, position)
    return KVLayout(
        groups=tuple(groups),
        homes=tuple(home_of[owner[index]] for index in range(len(layers))),
        shared=frozenset(index for index in range(len(layers)) if owner[index] != index),
    )
