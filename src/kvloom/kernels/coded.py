"""What the native kernels must know of a plane of integer codes (csrc/coded.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvloom.kernels.ops import BlockCoder, PlaneFormat


@dataclass(frozen=True, slots=True)
class CodedPart:
    """Consecutive channels' codes of one width; ``codes`` are the places of their planes, low bits first."""

    bits: int
    channels: int
    levels: tuple[int, ...]
    codes: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class CodedPlane:
    """One plane's codes and what undoes them: ``value = (level + center) * scale + offset``.

    With ``exponent_bits`` the codes are floats of 8 bits, which have no levels. Places are bytes from
    the plane's start, -1 where a plane has no such field; all numbers are float16. Scales and offsets
    belong to tokens ([block_size, token_groups], each for dim / token_groups channels) or to the
    block's channels ([dim]). Values have one part.

    ``turn`` float32 [dim, dim] is the rotation: coded rows are ``row @ turn``, so queries are
    multiplied by it before, outputs by its transpose after. ``query_turns`` gives, for a layer of the
    model, float32 [heads, dim, dim] that queries are multiplied by instead, each KV head having its own.
    """

    parts: tuple[CodedPart, ...]
    exponent_bits: int = 0
    center: float = 0.0
    token_groups: int = 1
    token_scale: int = -1
    token_offset: int = -1
    channel_scale: int = -1
    channel_offset: int = -1
    turn: torch.Tensor | None = None
    query_turns: Callable[[int], torch.Tensor] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class NativeEncoder:
    """How native code makes a plane's codes (csrc/encode_plane.h).

    ``method`` is one of ``METHODS``. With ``rotated`` rows are multiplied by ``signs`` float32 [dim]
    (None: all +1) and transformed by a Hadamard matrix first. ``stretch`` and ``edges`` are, per part,
    grid units per standard deviation and where the next code begins (for ``unit`` and ``segments``).
    ``transforms`` float32 [heads, dim, dim] and ``weights`` float32 [heads, parts] of a layer of the
    model are what ``segments`` multiplies rows with and how it weighs errors.
    """

    method: str
    rotated: bool = False
    signs: torch.Tensor | None = None
    stretch: tuple[float, ...] = ()
    edges: tuple[tuple[float, ...], ...] = ()
    transforms: Callable[[int], torch.Tensor] | None = None
    weights: Callable[[int], torch.Tensor] | None = None


# As csrc/types.h numbers them.
METHODS = ("raw", "absmax", "small_float", "affine", "unit", "q8_0", "q4_0", "kvarn", "segments")


def native_encoder(plane: PlaneFormat) -> NativeEncoder | None:
    """How the plane's bytes are made natively, None where they are not."""
    found = getattr(plane.codec, "native_encoder", None)
    return found if isinstance(found, NativeEncoder) else None


def native_codes(plane: PlaneFormat) -> CodedPlane | None:
    """How the plane's bytes are read natively, None where they are not."""
    found = getattr(plane.codec, "native", None)
    return found if isinstance(found, CodedPlane) else None


def query_turns(plane: PlaneFormat, layers: Sequence[int]) -> torch.Tensor | None:
    """float32 [layers, heads, dim, dim] that queries are multiplied by, where each KV head has its own matrix."""
    codes = native_codes(plane)
    if codes is None or codes.query_turns is None:
        return None
    return torch.stack([codes.query_turns(layer) for layer in layers])


def removed_mean(codec: BlockCoder | None, layer: int) -> torch.Tensor | None:
    """float32 [heads, dim] that ``codec`` took off the keys of the model's ``layer``, or None."""
    removed = getattr(codec, "removed_mean", None)
    mean: torch.Tensor | None = None if removed is None else removed(layer)
    return mean


def removed_means(plane: PlaneFormat, layers: Sequence[int]) -> torch.Tensor | None:
    """float32 [layers, heads, dim] that the plane's codec took off the rows of each of ``layers``, or None."""
    means = [removed_mean(plane.codec, layer) for layer in layers]
    found = [mean for mean in means if mean is not None]
    return torch.stack(found).float().contiguous() if found else None
