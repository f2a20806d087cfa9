"""How a planned cache is kept: codecs per plane, protected tokens and layers, block size."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.core.codec_sizes import CodecChoice, block_bytes, is_served
from kvloom.core.layout import LayerGroup, Plane
from kvloom.core.sizes import DTYPE_BYTES
from kvloom.planner.architecture import Architecture

# Planes that always stay raw: rotary parts and indexer keys are small and position-sensitive.
ALWAYS_RAW = frozenset({"rope", "index"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """The planned format of a cache.

    ``dtype`` is the raw element. ``sink_tokens`` first and ``recent_tokens`` last tokens stay raw,
    as do ``protect_layers`` and, unless ``encode_windows``, windowed groups. ``chunk`` is how many
    tokens one step computes at most: windowed groups hold it beside their window.
    """

    codec: CodecChoice
    dtype: str = "bfloat16"
    sink_tokens: int = 0
    recent_tokens: int = 0
    protect_layers: frozenset[int] = frozenset()
    encode_windows: bool = False
    block_size: int = 32
    chunk: int = 512

    @property
    def element_bytes(self) -> int:
        """Bytes of one raw value."""
        return DTYPE_BYTES[self.raw_dtype]

    @property
    def raw_dtype(self) -> str:
        """The dtype of raw values: the codec's own when it names one."""
        return self.codec.name if self.codec.name in DTYPE_BYTES else self.dtype

    @property
    def lossless(self) -> bool:
        """Whether the codec stores values unchanged."""
        return self.codec.name == "raw" or self.codec.name in DTYPE_BYTES

    @property
    def served(self) -> bool:
        """Whether this version's engine can hold this format."""
        return self.lossless or (is_served(self.codec.key) and is_served(self.codec.value))

    def codec_of(self, plane: Plane, *, encoded: bool) -> str:
        """The plane format of ``plane`` in an encoded or raw block."""
        if not encoded or self.lossless or plane.name in ALWAYS_RAW:
            return self.raw_dtype
        name = self.codec.value if plane.name == "v" else self.codec.key
        return self.raw_dtype if name == "raw" else name

    def plane_block_bytes(self, plane: Plane, tokens: int, *, encoded: bool) -> int:
        """Bytes of one head's block of ``tokens`` tokens of ``plane``, side data included."""
        return block_bytes(self.codec_of(plane, encoded=encoded), plane.dim, tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGroup:
    """A layer group, or the part of one that is encoded or protected alike."""

    group: LayerGroup
    encoded: bool

    @property
    def name(self) -> str:
        return self.group.name


def planned_groups(architecture: Architecture, form: CacheFormat) -> tuple[PlannedGroup, ...]:
    """The layer groups under ``form``; protected layers split off as groups of their own."""
    result: list[PlannedGroup] = []
    for group in architecture.layout.groups:
        wants = not form.lossless and (group.window is None or form.encode_windows)
        kept = tuple(i for i in group.layers if architecture.positions[i] in form.protect_layers)
        rest = tuple(i for i in group.layers if i not in kept)
        if not wants or not kept:
            result.append(PlannedGroup(group=group, encoded=wants))
            continue
        if rest:
            result.append(PlannedGroup(group=_part(group, rest, group.name), encoded=True))
        result.append(PlannedGroup(group=_part(group, kept, f"{group.name}.protected"), encoded=False))
    return tuple(result)


def _part(group: LayerGroup, layers: tuple[int, ...], name: str) -> LayerGroup:
    return LayerGroup(name=name, layers=layers, planes=group.planes, num_heads=group.num_heads, window=group.window)
