"""RoPE tables: both pairings, partial widths, and factors are undone exactly."""

from __future__ import annotations

import pytest
import torch

from kvloom.codecs.rope import RopeTable, Style
from kvloom.core.errors import CodecError

from .world import gaussian

POSITIONS = torch.tensor([[0, 1, 2, 3], [100, 101, 102, 103]])


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_undone(style: Style, width: int, factor: float) -> None:
    table = RopeTable.from_frequencies(0.5 ** torch.arange(width // 2), 200, factor=factor, style=style)
    x = gaussian(2, 3, 4, 32)
    turned = table.rotate(x, POSITIONS)
    assert torch.allclose(table.unrotate(turned, POSITIONS), x, atol=1e-5)
    assert torch.equal(turned[..., width:], x[..., width:])
    scaled = x[..., :width].norm(dim=-1) * factor
    assert torch.allclose(turned[..., :width].norm(dim=-1), scaled, atol=1e-4)


def test_as_transformers_does() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    frequencies = 0.7 ** torch.arange(16, dtype=torch.float64)
    table = RopeTable.from_frequencies(frequencies, 200)
    x = gaussian(2, 3, 4, 32)
    angles = POSITIONS.double().unsqueeze(-1) * frequencies
    both = torch.cat([angles, angles], dim=-1)
    want, _ = apply_rotary_pos_emb(x, x, both.cos().float(), both.sin().float())
    assert torch.allclose(table.rotate(x, POSITIONS), want, atol=1e-5)


def test_limits() -> None:
    x = gaussian(1, 1, 4, 32)
    assert torch.equal(RopeTable.identity(200).unrotate(x, POSITIONS[:1]), x)
    with pytest.raises(CodecError, match="position 103 is beyond the 50"):
        RopeTable.identity(50).rotate(x, POSITIONS[1:])
    with pytest.raises(CodecError, match="turns 64 channels but the plane has 32"):
        RopeTable.from_frequencies(torch.ones(32), 200).rotate(x, POSITIONS[:1])
    with pytest.raises(CodecError, match="both must be"):
        RopeTable(torch.zeros(3, 2), torch.zeros(3, 1))
