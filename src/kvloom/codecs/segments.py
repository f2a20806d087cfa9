"""Transformed rows as integer codes of unequal widths under one scale: the core of loom's keys.

A row y [d], whose first coordinates matter most, is cut into consecutive segments, each with codes of
its own width. Rows come in grid units, so that with the codebooks' integer levels c::

    s₀ = √(Σ (y / unit)² / d)               unit: grid units per standard deviation of the segment
    for m in TRIES:  c = nearest levels to y / (m · s₀)
                     a = Σᵢ wᵢ Σ y c,  b = Σᵢ wᵢ Σ c²        wᵢ: what an error in segment i weighs
    keep the c of the largest a² / b (the first one, if equal);  scale = a / b;  ŷ = scale · c

For given codes a / b is the scale of least weighted error, and what it leaves is Σ w y² − a² / b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.codecs.codebook import sphere_codebook
from kvloom.codecs.layout import Field
from kvloom.codecs.numbers import half_nearest, square_root, tree_sum
from kvloom.codecs.packing import code_fields, pack, unpack

NAMES = "abc"
TRIES = (0.75, 0.85, 0.95, 1.05, 1.18, 1.32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Coordinates ``start`` … ``stop`` − 1, in codes of ``bits`` bits; their planes are ``codes``.0 and so on."""

    codes: str
    start: int
    stop: int
    bits: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(dim: int, quarters: Sequence[int]) -> tuple[Segment, ...]:
    """Segments from the bits of each quarter of ``dim``.

    Where a quarter is no multiple of 16 there is one segment, of the mean width.
    """
    if dim % 64:
        return (Segment(codes=f"{NAMES[0]}.codes", start=0, stop=dim, bits=sum(quarters) // 4),)
    found: list[Segment] = []
    for index, bits in enumerate(quarters):
        start, stop = index * dim // 4, (index + 1) * dim // 4
        if found and found[-1].bits == bits:
            start = found.pop().start
        found.append(Segment(codes=f"{NAMES[len(found)]}.codes", start=start, stop=stop, bits=bits))
    return tuple(found)


class SegmentCodes:
    """Rows [..., dim] to the fields of ``segments`` and back."""

    def __init__(self, segments: Sequence[Segment], dim: int) -> None:
        self.segments = tuple(segments)
        self.books = tuple(sphere_codebook(segment.bits, dim) for segment in segments)
        self.units = torch.cat(
            [torch.full((segment.size,), book.stretch) for segment, book in zip(self.segments, self.books, strict=True)]
        )

    def fields(self, rows: int) -> list[Field]:
        """Those of ``rows`` rows: every segment's planes, then ``scale``."""
        planes = [field for one in self.segments for field in code_fields(one.codes, one.bits, rows, one.size)]
        return [*planes, Field(name="scale", dtype=torch.float16, shape=(rows,))]

    def encode(self, y: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of float32 y [..., dim]; ``weights`` float32 [..., segments] broadcast over y's rows."""
        z = y / self.units.to(y.device)
        first = square_root(tree_sum(z * z) / y.shape[-1])
        first = torch.where(first > 0, first, torch.ones_like(first)).unsqueeze(-1)
        best = scale = torch.zeros_like(y[..., 0])
        chosen: torch.Tensor | None = None
        for factor in TRIES:
            codes, levels = self._nearest(y / (first * factor))
            product, square = self._weighted(y * levels, weights), self._weighted(levels * levels, weights)
            found = product * product / square
            if chosen is None:
                chosen, best, scale = codes, found, product / square
                continue
            better = found > best
            chosen = torch.where(better.unsqueeze(-1), codes, chosen)
            best, scale = torch.where(better, found, best), torch.where(better, product / square, scale)
        assert chosen is not None
        packed = {"scale": half_nearest(scale)}
        for one in self.segments:
            packed |= pack(one.codes, chosen[..., one.start : one.stop], one.bits)
        return packed

    def decode(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [..., dim]."""
        levels = [
            book.decode(unpack(one.codes, fields, one.bits))
            for one, book in zip(self.segments, self.books, strict=True)
        ]
        return torch.cat(levels, dim=-1) * fields["scale"].to(torch.float32).unsqueeze(-1)

    def _nearest(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 codes and float32 levels of z [..., dim], in grid units."""
        parts = [
            book.nearest(z[..., one.start : one.stop].contiguous())
            for one, book in zip(self.segments, self.books, strict=True)
        ]
        levels = [book.decode(codes) for codes, book in zip(parts, self.books, strict=True)]
        return torch.cat(parts, dim=-1), torch.cat(levels, dim=-1)

    def _weighted(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Σᵢ wᵢ Σ x over segment i: [...]."""
        total: torch.Tensor | None = None
        for index, one in enumerate(self.segments):
            part = weights[..., index] * tree_sum(x[..., one.start : one.stop])
            total = part if total is None else total + part
        assert total is not None
        return total
