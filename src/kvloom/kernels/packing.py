"""Weights of linear layers packed for the native kernels (csrc/linear.h).

A packed matrix is cut into panels of output channels, each ``[inner/P][panel][P]``, read front to back
once per step. float32 weights whose every value is a bfloat16 (checkpoints that were loaded as float32)
are kept as bfloat16: half the bytes, the same products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom import _cpu
from kvloom.core.pages import huge_memory

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType in csrc/types.h
_ALIGNMENT = 64
_MAPPING = 64 * 2**20  # bytes of address space taken at a time


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer ``[outputs, inner]`` in panels, and what keeps its memory alive."""

    native: _cpu.Linear
    panels: torch.Tensor  # uint8
    bias: torch.Tensor | None  # float32, padded to whole panels
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.panels.numel() + (0 if self.bias is None else 4 * self.bias.numel())


def smallest_exact(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as bfloat16 where that loses nothing, else as it is."""
    if weight.dtype != torch.float32:
        return weight
    half = weight.bfloat16()
    return half if torch.equal(half.float(), weight) else weight


class Packer:
    """Packs a model's matrices for one variant of the kernels, one after the other on huge pages."""

    def __init__(self, variant: str) -> None:
        self._panel = _cpu.panel_width(variant)
        self._room = torch.empty(0, dtype=torch.uint8)  # what is left of the mapping in use

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Pack ``weight`` [outputs, inner] (float32, float16 or bfloat16) and ``bias`` [outputs].

        Raises:
            ValueError: bfloat16 weights with an odd inner dimension, which cannot lie in pairs.
        """
        weight = smallest_exact(weight.detach()).contiguous()
        outputs, inner = weight.shape
        if weight.dtype == torch.bfloat16 and inner % 2:
            raise ValueError(f"bfloat16 weights have {inner} inputs; pairs need an even number")
        padded = -(-outputs // self._panel) * self._panel
        panels = self._take(padded * inner * weight.dtype.itemsize)
        _cpu.pack_weights(weight.data_ptr(), DTYPE_CODES[weight.dtype], outputs, inner, self._panel, panels.data_ptr())
        full_bias = None
        if bias is not None:
            full_bias = torch.zeros(padded, dtype=torch.float32)
            full_bias[:outputs] = bias.detach().float()
        native = _cpu.Linear(
            panels.data_ptr(),
            DTYPE_CODES[weight.dtype],
            outputs,
            inner,
            0 if full_bias is None else full_bias.data_ptr(),
        )
        return PackedLinear(native, panels, full_bias, weight.dtype)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, biases: Sequence[torch.Tensor] | None) -> PackedLinear:
        """Pack two matrices [outputs, inner] whose outputs are multiplied: a panel of gates, one of ups, and so on."""
        weight = _interleave(gate.detach(), up.detach(), self._panel)
        bias = None if biases is None else _interleave(biases[0].detach(), biases[1].detach(), self._panel)
        return self.linear(weight, bias)

    def _take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] that starts on a cache line, right after the matrix before where it fits."""
        if num_bytes > len(self._room):
            # What is never touched of it takes no memory.
            self._room = torch.frombuffer(huge_memory(max(num_bytes, _MAPPING)), dtype=torch.uint8)
        taken = self._room[:num_bytes]
        self._room = self._room[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken


def _interleave(first: torch.Tensor, second: torch.Tensor, panel: int) -> torch.Tensor:
    count = -(-first.shape[0] // panel)
    pair = first.new_zeros(2, count * panel, *first.shape[1:])
    pair[0, : first.shape[0]] = first
    pair[1, : first.shape[0]] = second
    return pair.unflatten(1, (count, panel)).transpose(0, 1).reshape(2 * count * panel, *first.shape[1:])
