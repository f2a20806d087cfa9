"""The same codes in the order that native kernels read: pairs of channels (keys) or of tokens (values) together.

A plane of codes of ``w`` bits, 8 / w = n to a byte, lies as

==========  =========================  ==========================================================
keys        [dim/2/n][token][2] bytes  bits i of a byte: channel pair i of n consecutive ones
values      [token/2/n][dim][2] bytes  bits i of a byte: token pair i of n consecutive ones
fp8 keys    [dim][token] bytes
fp8 values  [token][dim] bytes
==========  =========================  ==========================================================

and everything else as the codec lays it out. Sizes do not change, only places (csrc/coded.h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.codecs.base import BlockCodec
from kvloom.codecs.codebook import Codebook, sphere_codebook
from kvloom.codecs.loom import LoomKeys
from kvloom.codecs.packing import pack, plane_widths, unpack
from kvloom.kernels.coded import CodedPart, CodedPlane, NativeEncoder

_EXPONENT_BITS = {"fp8": 4, "fp8_e5m2": 5}
_NUMBERS = {"scale", "minimum"} | {f"{owner}_{what}" for owner in ("token", "channel") for what in ("scale", "minimum")}
_EDGES = 15  # of four bits


@dataclass(frozen=True, slots=True)
class _Part:
    """Codes of ``channels`` consecutive channels in the fields ``codes``.0 and so on (8 bits: ``codes``)."""

    codes: str
    bits: int
    channels: int
    levels: Sequence[int]
    book: Codebook | None = None


class KernelLayout:
    """A codec whose bytes lie as the native kernels read them; made by ``for_kernels``.

    A ``PlaneCodec`` like the one inside; ``native`` describes the bytes, ``native_encoder`` how they
    are made.
    """

    def __init__(self, codec: BlockCodec, parts: Sequence[_Part], center: float) -> None:
        self._codec = codec
        self._parts = tuple(parts)
        self.name = codec.name
        self.dim = codec.dim
        self.block_size = codec.block_size
        self.num_bytes = codec.num_bytes
        self.token_local = codec.token_local
        self.layout = codec.layout
        self.identity = f"{codec.identity}/kernels"
        self.rotation = codec.rotation
        self._keys = codec.plane != "v"
        self.native = self._describe(center)
        self.native_encoder = self._describe_encoder()

    def removed_mean(self, layer: int) -> torch.Tensor | None:
        return self._codec.removed_mean(layer)

    def encode(self, rows: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        """As the codec's ``encode``, in the kernels' order."""
        data = self._codec.encode(rows, layer=layer, first_position=first_position)
        return self.layout.join(self._pack(self.layout.split(data)))

    def decode(self, data: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        """As the codec's ``decode``, from the kernels' order."""
        plain = self.layout.join(self._unpack(self.layout.split(data)))
        return self._codec.decode(plain, layer=layer, first_position=first_position)

    def _pack(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.native.exponent_bits:
            return fields | {"codes": self._turned(fields["codes"], self.block_size, self.dim)}
        for part in self._parts:
            if part.bits == 8:
                return fields | {"codes": self._pairs(fields["codes"]).reshape(fields["codes"].shape)}
            codes = unpack(part.codes, fields, part.bits)
            shift = 0
            for index, width in enumerate(plane_widths(part.bits)):
                pairs = self._pairs((codes >> shift) & ((1 << width) - 1))
                per_byte = 8 // width
                rows = pairs.reshape(*pairs.shape[:2], -1, per_byte, *pairs.shape[3:])
                packed = rows[:, :, :, 0].clone()
                for slot in range(1, per_byte):
                    packed |= rows[:, :, :, slot] << (slot * width)
                name = f"{part.codes}.{index}"
                fields[name] = packed.reshape(fields[name].shape)
                shift += width
        return fields

    def _unpack(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.native.exponent_bits:
            return fields | {"codes": self._turned(fields["codes"], self.dim, self.block_size)}
        for part in self._parts:
            if part.bits == 8:
                return fields | {"codes": self._plain(fields["codes"].flatten(2), part.channels)}
            total: torch.Tensor | None = None
            shift = 0
            for index, width in enumerate(plane_widths(part.bits)):
                per_byte = 8 // width
                units = self.block_size if self._keys else self.dim
                name = f"{part.codes}.{index}"
                packed = fields[name].reshape(*fields[name].shape[:2], -1, 1, units, 2)
                slots = torch.cat([(packed >> (slot * width)) & ((1 << width) - 1) for slot in range(per_byte)], dim=3)
                codes = self._plain(slots.flatten(2), part.channels) << shift
                total = codes if total is None else total | codes
                shift += width
            assert total is not None
            fields |= pack(part.codes, total, part.bits)
        return fields

    def _turned(self, codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Floats of keys by channel, in a tensor of the shape they came in; those of values stay."""
        if not self._keys:
            return codes
        return codes.reshape(*codes.shape[:2], rows, columns).transpose(2, 3).reshape(codes.shape)

    def _pairs(self, codes: torch.Tensor) -> torch.Tensor:
        """[N, heads, pairs, units, 2] from [N, heads, block_size, channels]."""
        n, heads, _, channels = codes.shape
        if self._keys:
            return codes.reshape(n, heads, self.block_size, channels // 2, 2).transpose(2, 3).contiguous()
        return codes.reshape(n, heads, self.block_size // 2, 2, channels).transpose(3, 4).contiguous()

    def _plain(self, flat: torch.Tensor, channels: int) -> torch.Tensor:
        """[N, heads, block_size, channels] from the elements of ``_pairs``, flat."""
        n, heads = flat.shape[:2]
        if self._keys:
            pairs = flat.reshape(n, heads, channels // 2, self.block_size, 2).transpose(2, 3)
        else:
            pairs = flat.reshape(n, heads, self.block_size // 2, channels, 2).transpose(3, 4)
        return pairs.reshape(n, heads, self.block_size, channels)

    def _describe_encoder(self) -> NativeEncoder | None:
        codec, rotation = self._codec, self.rotation
        if codec.native_method is None:
            return None
        books = [part.book for part in self._parts if part.book is not None]
        learnt = codec if isinstance(codec, LoomKeys) else None
        return NativeEncoder(
            method=codec.native_method,
            rotated=rotation is not None,
            signs=rotation.signs if rotation is not None and rotation.signed else None,
            stretch=tuple(book.stretch for book in books),
            edges=tuple((*book.edges, *[math.inf] * (_EDGES - len(book.edges))) for book in books),
            transforms=None if learnt is None else learnt.forward_transform,
            weights=None if learnt is None else learnt.error_weights,
        )

    def _describe(self, center: float) -> CodedPlane:
        offsets = {field.name: field.offset for field in self.layout.fields}
        shapes = {field.name: field.shape for field in self.layout.fields}
        # A codec with one kind of scales calls them "scale"; they belong to channels where their number says so.
        by_channel = "scale" in shapes and shapes["scale"] == (self.dim,) and not self.token_local
        owner = "channel" if by_channel else "token"
        found = {
            (field if "_" in field else f"{owner}_{field}").replace("minimum", "offset"): offset
            for field, offset in offsets.items()
            if field in _NUMBERS
        }
        groups = 1 if by_channel or "scale" not in shapes or len(shapes["scale"]) == 1 else shapes["scale"][1]
        turn = None if self.rotation is None else self.rotation.forward(torch.eye(self.dim))
        return CodedPlane(
            parts=tuple(
                CodedPart(
                    bits=part.bits,
                    channels=part.channels,
                    levels=tuple(part.levels),
                    codes=tuple(at for name, at in offsets.items() if name.startswith(part.codes)),
                )
                for part in self._parts
            ),
            exponent_bits=_EXPONENT_BITS.get(self.name, 0),
            center=center,
            token_groups=groups,
            token_scale=found.get("token_scale", -1),
            token_offset=found.get("token_offset", -1),
            channel_scale=found.get("channel_scale", -1),
            channel_offset=found.get("channel_offset", -1),
            turn=turn,
            query_turns=self._codec.query_turns if isinstance(self._codec, LoomKeys) else None,
        )


def for_kernels(codec: BlockCodec) -> KernelLayout | None:
    """``codec`` in the order that native kernels read, or None if they do not read its kind of codes."""
    fields = {field.name: field for field in codec.layout.fields}
    numbers = [field for name, field in fields.items() if name in _NUMBERS]
    if len(numbers) + sum("codes" in name for name in fields) != len(fields):
        return None
    if any(len(field.shape) == 2 and codec.dim % field.shape[1] for field in numbers):
        return None  # groups of unequal width
    center = 0.0
    if isinstance(codec, LoomKeys):
        parts = [
            _Part(one.codes, one.bits, one.size, book.levels, book)
            for one, book in zip(codec.segments, codec.codes.books, strict=True)
        ]
    else:
        codes = [field for name, field in fields.items() if name.startswith("codes")]
        if not codes:
            return None
        bits = sum(field.bits for field in codes) or 8
        if bits not in (2, 3, 4, 8) or codes[0].shape[-1] * 8 != codec.dim * (codes[0].bits or 8):
            return None  # rows padded to whole groups
        book = sphere_codebook(bits, codec.dim) if codec.native_method == "unit" else None
        levels: Sequence[int] = ()
        if book is not None:
            levels = book.levels
        elif codec.name == "q4_0":
            levels = range(-8, 8)
        elif bits != 8:
            # Codes from 0 up, read around their middle: sums of levels stay small beside those of offsets.
            center = float(1 << (bits - 1))
            levels = range(-int(center), int(center))
        parts = [_Part("codes", bits, codec.dim, levels, book)]
    for part in parts:
        pairs = (part.channels if codec.plane != "v" else codec.block_size) // 2
        if part.bits != 8 and any(pairs % (8 // width) for width in plane_widths(part.bits)):
            return None  # fewer pairs than a byte holds
    return KernelLayout(codec, parts, center)
