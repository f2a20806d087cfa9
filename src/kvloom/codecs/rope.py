"""Rotary position embedding as a table, for codecs that store keys without it.

A pair of channels (a, b) at position t turns by the angle t · f; ``style`` says which channels form
pairs: "half" (i, i + r/2), as in most checkpoints, or "interleaved" (2i, 2i + 1). Channels beyond the
rotary width r are left alone. Tables may carry a factor (YaRN's attention scaling): it is undone too.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvloom.core.errors import CodecError

Style = Literal["half", "interleaved"]


class RopeTable:
    """cos and sin, float32 [positions, r / 2] each, of every position that can occur."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, style: Style = "half") -> None:
        if cos.ndim != 2 or cos.shape != sin.shape:
            raise CodecError(f"RoPE tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)}; both must be [P, r/2]")
        self.cos = cos.to(torch.float32)
        self.sin = sin.to(torch.float32)
        self.style = style

    @classmethod
    def from_frequencies(
        cls, frequencies: torch.Tensor, positions: int, *, factor: float = 1.0, style: Style = "half"
    ) -> RopeTable:
        """From inverse frequencies [r / 2], for positions 0 … positions - 1."""
        angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequencies.to(torch.float64).cpu()
        return cls((angles.cos() * factor).float(), (angles.sin() * factor).float(), style)

    @classmethod
    def identity(cls, positions: int) -> RopeTable:
        """For a model without rotary positions."""
        return cls(torch.zeros(positions, 0), torch.zeros(positions, 0))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE applied to float32 [N, heads, T, dim]; ``positions`` int64 [N, T]."""
        cos, sin = self._at(positions, x)
        return self._turn(x, cos, sin)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of ``rotate``."""
        cos, sin = self._at(positions, x)
        square = cos * cos + sin * sin
        return self._turn(x, cos / square, -sin / square)

    def _at(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = int(positions.max()) if positions.numel() else 0
        if last >= self.cos.shape[0]:
            raise CodecError(
                f"position {last} is beyond the {self.cos.shape[0]} positions of the RoPE table; build it for the "
                "engine's max_model_len"
            )
        index = positions.to(self.cos.device)
        return self.cos[index].unsqueeze(1).to(x.device), self.sin[index].unsqueeze(1).to(x.device)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        r = 2 * cos.shape[-1]
        if r > x.shape[-1]:
            raise CodecError(f"the RoPE table turns {r} channels but the plane has {x.shape[-1]}")
        turned, rest = x[..., :r], x[..., r:]
        if self.style == "half":
            a, b = turned[..., : r // 2], turned[..., r // 2 :]
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
        new_a, new_b = a * cos - b * sin, b * cos + a * sin
        joined = (
            torch.cat([new_a, new_b], dim=-1)
            if self.style == "half"
            else torch.stack([new_a, new_b], dim=-1).flatten(-2)
        )
        return torch.cat([joined, rest], dim=-1)
