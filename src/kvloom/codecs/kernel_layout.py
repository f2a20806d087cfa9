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

from collections.abc import Sequence

import torch

from kvloom.codecs.base import BlockCodec
from kvloom.codecs.codebook import sphere_codebook
from kvloom.codecs.packing import pack, plane_widths, unpack
from kvloom.kernels.coded import CodedPlane, NativeEncoder

_EXPONENT_BITS = {"fp8": 4, "fp8_e5m2": 5}
_FIELDS = {"codes", "codes.0", "codes.1", "scale", "minimum"} | {
    f"{owner}_{what}" for owner in ("token", "channel") for what in ("scale", "minimum")
}


class KernelLayout:
    """A codec whose bytes lie as the native kernels read them; made by ``for_kernels``.

    A ``PlaneCodec`` like the one inside; ``native`` describes the bytes.
    """

    def __init__(self, codec: BlockCodec, bits: int, levels: Sequence[int], center: float) -> None:
        self._codec = codec
        self._bits = bits
        self.name = codec.name
        self.dim = codec.dim
        self.block_size = codec.block_size
        self.num_bytes = codec.num_bytes
        self.token_local = codec.token_local
        self.layout = codec.layout
        self.identity = f"{codec.identity}/kernels"
        self.rotation = codec.rotation
        self._keys = codec.plane != "v"
        self.native = self._describe(levels, center)
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
        if self._bits == 8:
            return fields | {"codes": self._pairs(fields["codes"]).reshape(fields["codes"].shape)}
        codes = unpack("codes", fields, self._bits)
        shift = 0
        for index, width in enumerate(plane_widths(self._bits)):
            part = self._pairs((codes >> shift) & ((1 << width) - 1))
            per_byte = 8 // width
            rows = part.reshape(*part.shape[:2], -1, per_byte, *part.shape[3:])
            packed = rows[:, :, :, 0].clone()
            for slot in range(1, per_byte):
                packed |= rows[:, :, :, slot] << (slot * width)
            name = f"codes.{index}"
            fields[name] = packed.reshape(fields[name].shape)
            shift += width
        return fields

    def _unpack(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.native.exponent_bits:
            return fields | {"codes": self._turned(fields["codes"], self.dim, self.block_size)}
        if self._bits == 8:
            return fields | {"codes": self._plain(fields["codes"].flatten(2))}
        total: torch.Tensor | None = None
        shift = 0
        for index, width in enumerate(plane_widths(self._bits)):
            per_byte = 8 // width
            units = self.block_size if self._keys else self.dim
            packed = fields[f"codes.{index}"].reshape(*fields["codes.0"].shape[:2], -1, 1, units, 2)
            slots = torch.cat([(packed >> (slot * width)) & ((1 << width) - 1) for slot in range(per_byte)], dim=3)
            part = self._plain(slots.flatten(2)) << shift
            total = part if total is None else total | part
            shift += width
        assert total is not None
        return fields | pack("codes", total, self._bits)

    def _turned(self, codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Floats of keys by channel, in a tensor of the shape they came in; those of values stay."""
        if not self._keys:
            return codes
        return codes.reshape(*codes.shape[:2], rows, columns).transpose(2, 3).reshape(codes.shape)

    def _pairs(self, codes: torch.Tensor) -> torch.Tensor:
        """[N, heads, pairs, units, 2] from [N, heads, block_size, dim]."""
        n, heads = codes.shape[:2]
        if self._keys:
            return codes.reshape(n, heads, self.block_size, self.dim // 2, 2).transpose(2, 3).contiguous()
        return codes.reshape(n, heads, self.block_size // 2, 2, self.dim).transpose(3, 4).contiguous()

    def _plain(self, flat: torch.Tensor) -> torch.Tensor:
        """[N, heads, block_size, dim] from the elements of ``_pairs``, flat."""
        n, heads = flat.shape[:2]
        if self._keys:
            pairs = flat.reshape(n, heads, self.dim // 2, self.block_size, 2).transpose(2, 3)
        else:
            pairs = flat.reshape(n, heads, self.block_size // 2, self.dim, 2).transpose(3, 4)
        return pairs.reshape(n, heads, self.block_size, self.dim)

    def _describe_encoder(self) -> NativeEncoder | None:
        method, rotation = self._codec.native_method, self.rotation
        if method is None:
            return None
        book = sphere_codebook(self._bits, self.dim) if method == "unit" else None
        return NativeEncoder(
            method=method,
            rotated=rotation is not None,
            signs=rotation.signs if rotation is not None and rotation.signed else None,
            stretch=1.0 if book is None else book.stretch,
            edges=() if book is None else book.edges,
        )

    def _describe(self, levels: Sequence[int], center: float) -> CodedPlane:
        offsets = {field.name: field.offset for field in self.layout.fields}
        shapes = {field.name: field.shape for field in self.layout.fields}
        # A codec with one kind of scales calls them "scale"; they belong to channels where their number says so.
        by_channel = "scale" in shapes and shapes["scale"] == (self.dim,) and not self.token_local
        owner = "channel" if by_channel else "token"
        found = {
            (field if "_" in field else f"{owner}_{field}").replace("minimum", "offset"): offset
            for field, offset in offsets.items()
            if not field.startswith("codes")
        }
        groups = 1 if by_channel or "scale" not in shapes or len(shapes["scale"]) == 1 else shapes["scale"][1]
        turn = None if self.rotation is None else self.rotation.forward(torch.eye(self.dim))
        return CodedPlane(
            bits=self._bits,
            exponent_bits=_EXPONENT_BITS.get(self.name, 0),
            levels=tuple(levels),
            center=center,
            codes=tuple(offset for name, offset in offsets.items() if name.startswith("codes")),
            token_groups=groups,
            token_scale=found.get("token_scale", -1),
            token_offset=found.get("token_offset", -1),
            channel_scale=found.get("channel_scale", -1),
            channel_offset=found.get("channel_offset", -1),
            turn=turn,
        )


def for_kernels(codec: BlockCodec) -> KernelLayout | None:
    """``codec`` in the order that native kernels read, or None if they do not read its kind of codes."""
    names = {field.name for field in codec.layout.fields}
    codes = [field for field in codec.layout.fields if field.name.startswith("codes")]
    if not names <= _FIELDS or not codes:
        return None
    bits = sum(field.bits for field in codes) or 8
    if bits not in (2, 3, 4, 8) or codes[0].shape[-1] * 8 != codec.dim * (codes[0].bits or 8):
        return None  # rows padded to whole groups
    if any(
        len(field.shape) == 2 and codec.dim % field.shape[1]
        for field in codec.layout.fields
        if field.bits == 0 and field not in codes
    ):
        return None  # groups of unequal width
    pairs = (codec.dim if codec.plane != "v" else codec.block_size) // 2
    if bits != 8 and any(pairs % (8 // width) for width in plane_widths(bits)):
        return None  # fewer pairs than a byte holds
    center = 0.0
    if codec.name.startswith(("turboquant", "loom")):
        levels: Sequence[int] = sphere_codebook(bits, codec.dim).levels
    elif codec.name == "q4_0":
        levels = range(-8, 8)
    elif bits == 8:
        levels = ()
    else:
        # Codes from 0 up, read around their middle: sums of levels stay small beside those of offsets.
        center = float(1 << (bits - 1))
        levels = range(-int(center), int(center))
    return KernelLayout(codec, bits, levels, center)
