"""What a codec is: a plane's block of rows to bytes and back. Called when spans are sealed and read.

A codec object belongs to one plane (``k``, ``v`` or ``latent``) of one width and block size. It is
immutable and its encoding a pure function of rows, calibration and codec version: no randomness, no
dependence on the batch (see ``numbers``).

Numbers that are not finite: NaN and ±Inf are encoded as 0 and finite values clamped to ±65504, so
that what is decoded is always finite and one bad element never spoils other rows. That hides the
fault, so whoever encodes counts it (``kernels.ops.KernelBackend.encode``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from kvloom.codecs.calibration import Calibration
from kvloom.codecs.hadamard import Rotation
from kvloom.codecs.layout import BlockLayout, Field
from kvloom.codecs.numbers import finite
from kvloom.codecs.rope import RopeTable
from kvloom.core.errors import CodecError

PLANES = ("k", "v", "latent")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpec:
    """What ``make_codec`` hands to a codec's maker.

    ``name`` is the plane format's name as in ``core/codec_sizes``. ``rope`` is only needed by codecs
    that take the rotary positions off keys.
    """

    name: str
    plane: str
    dim: int
    block_size: int
    calibration: Calibration | None = None
    rope: RopeTable | None = None


class PlaneCodec(Protocol):
    """A plane's block of rows to bytes and back.

    ``num_bytes`` is per (layer, head) block and equals ``core.codec_sizes.block_bytes(name, dim,
    block_size)``. With ``token_local`` every row is self-contained, so tokens can be moved as bytes.
    ``identity`` tells apart codecs whose bytes mean different things (version, calibration); it
    belongs into the prefix cache's namespace.
    """

    name: str
    dim: int
    block_size: int
    num_bytes: int
    token_local: bool
    layout: BlockLayout
    identity: str

    def encode(self, rows: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        """uint8 [N, heads, num_bytes] from rows [N, heads, block_size, dim] of any float dtype.

        ``layer`` is the model's layer, which calibrated codecs look up. ``first_position`` int64 [N]
        is the position of each block's first token; only codecs that undo RoPE need it.
        """
        ...

    def decode(self, data: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [N, heads, block_size, dim] from uint8 [N, heads, num_bytes]."""
        ...


class BlockCodec(ABC):
    """The plumbing that all codecs share: checks, finite float32 rows, fields to bytes.

    A subclass passes its fields to ``__init__`` and maps rows to fields and back. ``rotation``, where
    set, is what codes are taken after; ``codes`` of a rotated plane are read with rotated queries.
    """

    version: ClassVar[int] = 1  # raise it when the same rows would give bytes that mean something else
    token_local: bool = True
    uses_calibration: ClassVar[bool] = False
    uses_rope: ClassVar[bool] = False
    native_method: ClassVar[str | None] = None  # of kernels.coded.METHODS that makes the same bytes

    def __init__(self, spec: CodecSpec, fields: Sequence[Field], rotation: Rotation | None = None) -> None:
        self.name = spec.name
        self.plane = spec.plane
        self.dim = spec.dim
        self.block_size = spec.block_size
        self.layout = BlockLayout.build(fields)
        self.num_bytes = self.layout.num_bytes
        self.rotation = rotation
        self.identity = f"{spec.name}/{self.version}"
        if self.uses_calibration and spec.calibration is not None:
            self.identity += f"/{spec.calibration.digest}"

    def encode(self, rows: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        if rows.ndim != 4 or tuple(rows.shape[2:]) != (self.block_size, self.dim):
            raise CodecError(
                f"codec {self.name} got rows of shape {tuple(rows.shape)}; it encodes full blocks "
                f"[N, heads, {self.block_size}, {self.dim}]"
            )
        self._check_positions(rows.shape[0], first_position)
        return self.layout.join(self._encode(finite(rows), layer, first_position))

    def decode(self, data: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        if data.dtype != torch.uint8 or data.ndim != 3 or data.shape[2] != self.num_bytes:
            raise CodecError(
                f"codec {self.name} got {data.dtype} of shape {tuple(data.shape)}; it decodes uint8 "
                f"[N, heads, {self.num_bytes}]"
            )
        self._check_positions(data.shape[0], first_position)
        return self._decode(self.layout.split(data), layer, first_position)

    def removed_mean(self, layer: int) -> torch.Tensor | None:
        """float32 [heads, dim] that ``decode`` adds to every row, or None. See docs/codecs.md."""
        return None

    @abstractmethod
    def _encode(
        self, x: torch.Tensor, layer: int, first_position: torch.Tensor | None
    ) -> Mapping[str, torch.Tensor]: ...

    @abstractmethod
    def _decode(
        self, fields: dict[str, torch.Tensor], layer: int, first_position: torch.Tensor | None
    ) -> torch.Tensor: ...

    def _check_positions(self, blocks: int, first_position: torch.Tensor | None) -> None:
        if not self.uses_rope:
            return
        if first_position is None or tuple(first_position.shape) != (blocks,):
            found = "none" if first_position is None else f"shape {tuple(first_position.shape)}"
            raise CodecError(
                f"codec {self.name} takes rotary positions off keys and needs first_position [{blocks}]; got {found}"
            )


def require_multiple_of_8(spec: CodecSpec) -> None:
    """Raise CodecError unless rows of packed codes fill whole bytes."""
    if spec.dim % 8:
        raise CodecError(
            f"codec {spec.name} packs codes in planes and needs a head dimension that is a multiple of 8; the plane "
            f"{spec.plane!r} has {spec.dim}. Use int8 or fp8 for it"
        )


def require_calibration(spec: CodecSpec, why: str) -> Calibration:
    """The spec's calibration; raise CodecError if there is none."""
    if spec.calibration is None:
        raise CodecError(
            f"codec {spec.name} needs a calibration file ({why}). Make one with kvloom calibrate, or use a codec "
            "without one, such as turboquant4 or int4"
        )
    return spec.calibration
