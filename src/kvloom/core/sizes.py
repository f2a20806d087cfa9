"""Exact byte geometry of the cache: blocks, spans, slabs and the memory plan. No torch.

The planner predicts with these functions and the engine allocates with them, so both agree to the
byte. Formulas are derived in ``docs/sizing.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvloom.core.block_sizes import SERVED_BLOCK_BYTES
from kvloom.core.errors import CapacityError, ConfigError
from kvloom.core.layout import KVLayout, LayerGroup
from kvloom.core.storage import Encoding, StorageGroup, storage_groups

ALIGNMENT = 64  # bytes; every block, span and slab starts on a cache line
MIN_SLAB_BYTES = 256 * 1024
MAX_SLAB_WASTE = 0.01
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# Bytes of one plane's block under a codec that the engine has: (dim, block_size) -> bytes.
CODEC_BLOCK_BYTES: Mapping[str, Callable[[int, int], int]] = {
    "bfloat16": lambda dim, block_size: 2 * dim * block_size,
    "float16": lambda dim, block_size: 2 * dim * block_size,
    "float32": lambda dim, block_size: 4 * dim * block_size,
    **SERVED_BLOCK_BYTES,
}

_SIZE_UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def parse_bytes(text: str) -> int:
    """Bytes from ``2GiB``, ``500MB`` or a plain number of bytes.

    Raises:
        ConfigError: not a positive size in a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2) not in _SIZE_UNITS:
        raise ConfigError(f"cannot read {text!r} as a size; write for example 2GiB, 500MB or 1073741824")
    value = int(float(match.group(1)) * _SIZE_UNITS[match.group(2)])
    if value <= 0:
        raise ConfigError(f"size {text!r} is {value} bytes; it must be positive")
    return value


def format_bytes(value: float) -> str:
    """A size for people: ``1.50 GiB``, ``720.0 KiB``, ``23 B``."""
    for unit, digits in (("TiB", 2), ("GiB", 2), ("MiB", 1), ("KiB", 1)):
        if abs(value) >= _SIZE_UNITS[unit]:
            return f"{value / _SIZE_UNITS[unit]:.{digits}f} {unit}"
    return f"{int(value)} B"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneGeometry:
    """Where one plane stands within a block: bytes from the block's start, and its length."""

    name: str
    dim: int
    codec: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanGeometry:
    """Byte geometry of one group's span in one format (one choice of codec per plane)."""

    block_size: int
    num_layers: int
    num_heads: int
    planes: tuple[PlaneGeometry, ...]
    block_bytes: int
    span_bytes: int

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer of the span to the next."""
        return self.num_heads * self.block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token fills, span padding left out (exact: padding is per block)."""
        return self.num_layers * self.num_heads * sum(plane.num_bytes for plane in self.planes) // self.block_size


def span_geometry(group: LayerGroup, block_size: int, codecs: Mapping[str, str]) -> SpanGeometry:
    """The span of ``group`` with the codec that ``codecs`` names for each plane.

    Raises:
        ConfigError: the block size is not a power of two from 8 to 256, a plane has no codec, or
            the codec is unknown.
    """
    check_block_size(block_size)
    planes: list[PlaneGeometry] = []
    offset = 0
    for plane in group.planes:
        codec = codecs.get(plane.name)
        if codec is None or codec not in CODEC_BLOCK_BYTES:
            known = ", ".join(sorted(CODEC_BLOCK_BYTES))
            raise ConfigError(f"plane {plane.name!r} asks for codec {codec!r}; known: {known}")
        num_bytes = CODEC_BLOCK_BYTES[codec](plane.dim, block_size)
        planes.append(PlaneGeometry(name=plane.name, dim=plane.dim, codec=codec, offset=offset, num_bytes=num_bytes))
        offset += round_up(num_bytes, ALIGNMENT)
    return SpanGeometry(
        block_size=block_size,
        num_layers=group.num_layers,
        num_heads=group.num_heads,
        planes=tuple(planes),
        block_bytes=offset,
        span_bytes=offset * group.num_heads * group.num_layers,
    )


def check_block_size(block_size: int) -> None:
    """Raise ConfigError unless ``block_size`` is a power of two from 8 to 256."""
    if block_size not in BLOCK_SIZES:
        allowed = ", ".join(str(size) for size in BLOCK_SIZES)
        raise ConfigError(f"block_size is {block_size}; it must be one of {allowed}")


def choose_slab_bytes(run_bytes: Sequence[int]) -> int:
    """The smallest slab that every run size fills but for less than 1 %.

    Candidates are multiples of the largest run; at 100 runs the remainder is below 1 % whatever
    the sizes, so one is always found.
    """
    if not run_bytes or min(run_bytes) <= 0:
        raise ConfigError(f"run sizes {list(run_bytes)} must be positive and at least one")
    largest = max(run_bytes)
    runs = max(1, -(-MIN_SLAB_BYTES // largest))
    while True:
        slab = runs * largest
        if all(slab % run < MAX_SLAB_WASTE * slab for run in run_bytes):
            return slab
        runs += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What the engine allocates, to the byte, and what fits into it.

    ``storage`` and ``spans`` go together: the format in which each group's spans are kept.
    ``sequences_at_max_len`` counts sequences of ``max_model_len`` tokens held at once while one
    chunk of ``max_batch_tokens`` is computed.
    """

    layout: KVLayout
    spans: tuple[SpanGeometry, ...]
    storage: tuple[StorageGroup, ...]
    slab_bytes: int
    num_slabs: int
    reserve_slabs: int
    max_model_len: int
    max_batch_tokens: int

    @property
    def block_size(self) -> int:
        return self.spans[0].block_size

    @property
    def arena_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def usable_slabs(self) -> int:
        """Slabs that admission may use."""
        return self.num_slabs - self.reserve_slabs

    def spans_per_slab(self, group: int) -> int:
        return self.slab_bytes // self.spans[group].span_bytes

    def bytes_per_token(self) -> int:
        """Bytes that one more token costs in every group while no window has passed.

        Where blocks are encoded, those of the encoded one: what stays raw is the same for any length.
        """
        return sum(
            span.token_bytes
            for group, span in zip(self.storage, self.spans, strict=True)
            if group.encoded or group.twin is None
        )

    def slabs_for(self, num_sequences: int, num_tokens: int) -> int:
        """Slabs that ``num_sequences`` of ``num_tokens`` hold, one of them in a full chunk."""
        total = 0
        for index, group in enumerate(self.storage):
            steady = group.most_blocks(num_tokens, 0)
            peak = group.most_blocks(num_tokens, self.max_batch_tokens)
            spans = num_sequences * steady + (peak - steady)
            total += -(-spans // self.spans_per_slab(index))
        return total

    def sequences_fitting(self, num_tokens: int) -> int:
        """Most sequences of ``num_tokens`` that fit at once."""
        low, high = 0, 1
        while self.slabs_for(high, num_tokens) <= self.usable_slabs:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.slabs_for(middle, num_tokens) <= self.usable_slabs else (low, middle)
        return low

    @property
    def sequences_at_max_len(self) -> int:
        return self.sequences_fitting(self.max_model_len)

    def needed_bytes(self, num_tokens: int) -> int:
        """Arena bytes with which one sequence of ``num_tokens`` fits."""
        return (self.slabs_for(1, num_tokens) + self.reserve_slabs) * self.slab_bytes


def plan_memory(
    layout: KVLayout,
    *,
    budget_bytes: int,
    block_size: int,
    codecs: Mapping[str, str],
    max_model_len: int,
    max_batch_tokens: int,
    encoding: Encoding | None = None,
    reserve_bytes: int = 0,
) -> MemoryPlan:
    """Cut ``budget_bytes`` into slabs for ``layout``.

    ``codecs`` names each plane's raw format; ``encoding`` what full blocks become (None: they stay raw).

    Raises:
        ConfigError: an impossible block size or codec.
        CapacityError: one sequence of ``max_model_len`` tokens does not fit; names the size that would.
    """
    check_block_size(block_size)
    storage = storage_groups(layout, block_size, encoding)
    spans = tuple(span_geometry(item.group, block_size, _formats(item, codecs, encoding)) for item in storage)
    slab_bytes = choose_slab_bytes([span.span_bytes for span in spans])
    plan = MemoryPlan(
        layout=layout,
        spans=spans,
        storage=storage,
        slab_bytes=slab_bytes,
        num_slabs=budget_bytes // slab_bytes,
        reserve_slabs=-(-reserve_bytes // slab_bytes),
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
    )
    needed = plan.needed_bytes(max_model_len)
    if needed > plan.arena_bytes:
        raise CapacityError(
            f"the KV cache has {format_bytes(budget_bytes)} ({budget_bytes} bytes) but one sequence of "
            f"max_model_len {max_model_len} tokens needs {format_bytes(needed)} ({needed} bytes); "
            f"give --kv-cache-memory {needed} or more, or lower --max-model-len"
        )
    return plan


def _formats(item: StorageGroup, raw: Mapping[str, str], encoding: Encoding | None) -> dict[str, str]:
    """Plane name -> the format in which ``item`` keeps it."""
    formats = {plane.name: raw[plane.name] for plane in item.group.planes if plane.name in raw}
    if item.encoded and encoding is not None:
        formats = {name: encoding.plane_codec(name, format) for name, format in formats.items()}
    return formats
