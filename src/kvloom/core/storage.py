"""Storage groups: which blocks of a layer group a sequence keeps, and in which format. No torch.

A layer group whose blocks are encoded has two: its raw blocks and its encoded ones. With s sink
blocks, r recent blocks and a last computed query in block b, a sequence of n tokens keeps::

    block   0 …… s - 1 | s ……………… b - r - 1 | b - r …… b        b = (n - 1) // block_size
            raw sinks  | encoded            | raw recents

so that after every commit each block is kept in exactly one format. Blocks are encoded in the pass
whose last query is the first to read them so; their raw copies leave at its commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.core.errors import ConfigError
from kvloom.core.layout import KVLayout, LayerGroup


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Most blocks of a windowed group that a sequence holds while it computes ``chunk`` tokens.

    The first query of a chunk at position s sees keys from s - window + 1, the last one stands at
    s + chunk - 1: window - 1 + chunk tokens, on one more block than they fill when unaligned.
    """
    return -(-(window - 1 + chunk) // block_size) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """What is encoded: plane formats of keys and values, and what stays raw.

    ``key`` encodes ``k`` and ``latent`` planes, ``value`` encodes ``v``; "raw" leaves a plane as it
    is. Windowed groups, rope planes and ``layers`` stay raw. ``sink_tokens`` and ``recent_tokens``
    are rounded up to whole blocks.
    """

    name: str
    key: str
    value: str
    sink_tokens: int = 0
    recent_tokens: int = 0
    layers: tuple[int, ...] = ()

    def sink_blocks(self, block_size: int) -> int:
        return -(-self.sink_tokens // block_size)

    def recent_blocks(self, block_size: int) -> int:
        return -(-self.recent_tokens // block_size)

    def plane_codec(self, plane: str, raw: str) -> str:
        """The format of ``plane`` in an encoded block; ``raw`` names the raw one."""
        name = self.value if plane == "v" else self.key
        return raw if plane == "rope" or name == "raw" else name


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageGroup:
    """Spans of one format of one layer group.

    ``home`` is the layer group's index in the layout. ``sinks`` and ``recents`` are in blocks, and
    None where nothing of the group is encoded. ``twin`` is the storage group of the same layers'
    blocks in the other format.
    """

    group: LayerGroup
    home: int
    block_size: int
    encoded: bool = False
    sinks: int = 0
    recents: int | None = None
    twin: int | None = None

    @property
    def name(self) -> str:
        return f"{self.group.name}.encoded" if self.encoded else self.group.name

    @property
    def window(self) -> int | None:
        return self.group.window

    @property
    def grows(self) -> bool:
        """Whether every further block is kept for good (not in windows, nor in raw copies of encoded groups)."""
        return self.encoded or (self.window is None and self.recents is None)

    def num_encoded(self, num_tokens: int) -> int:
        """Blocks before this one are encoded, sinks excepted, once ``num_tokens`` are computed."""
        assert self.recents is not None
        return max(0, (num_tokens - 1) // self.block_size - self.recents)

    def extent(self, num_tokens: int) -> int:
        """Blocks from the sequence's start that have, or had, an entry when ``num_tokens`` are reserved."""
        if not self.encoded:
            return -(-num_tokens // self.block_size)
        return self.num_encoded(num_tokens)

    def first_kept(self, num_tokens: int) -> int:
        """First block after the sinks that is kept once ``num_tokens`` are computed."""
        if self.encoded:
            return self.sinks
        if self.recents is not None:
            return self.num_encoded(num_tokens)
        if self.window is not None:
            # The next query, at position num_tokens, sees keys from num_tokens - window + 1.
            return max(0, num_tokens - self.window + 1) // self.block_size
        return 0

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` holds while it computes ``chunk`` of them; 0: at rest."""
        blocks = -(-num_tokens // self.block_size)
        if self.encoded:
            return max(0, self.num_encoded(num_tokens) - self.sinks)
        chunk = min(chunk, num_tokens)
        if self.recents is not None:
            # From block b - r of the last query before the chunk to the chunk's end.
            return min(blocks, self.sinks + self.recents + 1 + -(-chunk // self.block_size))
        if self.window is not None:
            return min(blocks, window_blocks(self.window, max(1, chunk), self.block_size))
        return blocks

    def most_new_blocks(self, num_computed: int, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence takes on the way from ``num_computed`` to ``num_tokens`` tokens."""
        if self.encoded:
            return max(0, self.num_encoded(num_tokens) - max(self.sinks, self.num_encoded(num_computed)))
        blocks = -(-num_tokens // self.block_size) - -(-num_computed // self.block_size)
        if self.recents is not None:
            return min(blocks, self.sinks + self.recents + 1 + -(-chunk // self.block_size))
        if self.window is not None:
            return min(blocks, window_blocks(self.window, chunk, self.block_size))
        return blocks


def storage_groups(layout: KVLayout, block_size: int, encoding: Encoding | None) -> tuple[StorageGroup, ...]:
    """One raw storage group per layer group, in order, then the encoded ones.

    Expects ``encoding.layers`` to be groups of their own (``split_layers``).
    """
    encoded = [] if encoding is None else [i for i, group in enumerate(layout.groups) if is_encoded(group, encoding)]
    if encoding is None or not encoded:
        return tuple(
            StorageGroup(group=group, home=home, block_size=block_size) for home, group in enumerate(layout.groups)
        )
    sinks, recents = encoding.sink_blocks(block_size), encoding.recent_blocks(block_size)
    count = len(layout.groups)
    twin_of = {home: count + place for place, home in enumerate(encoded)}
    found = [
        StorageGroup(
            group=group,
            home=home,
            block_size=block_size,
            sinks=sinks if home in twin_of else 0,
            recents=recents if home in twin_of else None,
            twin=twin_of.get(home),
        )
        for home, group in enumerate(layout.groups)
    ]
    found += [
        StorageGroup(
            group=layout.groups[home],
            home=home,
            block_size=block_size,
            encoded=True,
            sinks=sinks,
            recents=recents,
            twin=home,
        )
        for home in encoded
    ]
    return tuple(found)


def is_encoded(group: LayerGroup, encoding: Encoding) -> bool:
    """Whether blocks of ``group`` are encoded: full attention, not protected, and some plane has a codec."""
    if group.window is not None or set(group.layers) <= set(encoding.layers):
        return False
    return any(encoding.plane_codec(plane.name, "raw") != "raw" for plane in group.planes)


def split_layers(layout: KVLayout, layers: Sequence[int]) -> KVLayout:
    """``layout`` with the full-attention layers among ``layers`` in groups of their own, which stay raw.

    A layer that shares another's planes stands for that one.

    Raises:
        ConfigError: a layer that the model does not have.
    """
    for layer in layers:
        if not 0 <= layer < layout.num_layers:
            raise ConfigError(
                f"protect_layers names layer {layer}, but the model has layers 0 to {layout.num_layers - 1}"
            )
    kept = {layout.groups[group].layers[index] for group, index in (layout.homes[layer] for layer in layers)}
    groups: list[LayerGroup] = []
    for group in layout.groups:
        parts = [
            (group.name, tuple(layer for layer in group.layers if layer not in kept)),
            (f"{group.name}.protected", tuple(layer for layer in group.layers if layer in kept)),
        ]
        if group.window is not None or not parts[0][1]:
            parts = [(group.name, group.layers)]
        groups += [
            LayerGroup(name=name, layers=part, planes=group.planes, num_heads=group.num_heads, window=group.window)
            for name, part in parts
            if part
        ]
    place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    homes = tuple(place[layout.groups[group].layers[index]] for group, index in layout.homes)
    return KVLayout(groups=tuple(groups), homes=homes, shared=layout.shared)


def protected_homes(layout: KVLayout, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers that store what ``layers`` read, ascending and each once."""
    return tuple(sorted({layout.groups[group].layers[index] for group, index in (layout.homes[i] for i in layers)}))


def raw_tokens(sinks: int, recents: int) -> list[str]:
    """Which tokens of an encoded cache stay raw, in words."""
    first = [f"first {sinks} tokens"] * bool(sinks)
    return [*first, f"last {recents} tokens and the open block" if recents else "the open block"]
