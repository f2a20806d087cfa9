"""Fixed orthogonal rotations that spread every channel over all others: signs, then a Hadamard transform.

A vector of dim = m · p (p the largest power of two in dim, m odd) is seen as m rows of p. It is
multiplied by fixed random signs, each row by the orthonormal Sylvester-Hadamard matrix of order p,
and for m > 1 the rows are mixed by the Householder reflection I − (2/m) · 1 1ᵀ, which is orthogonal
for any m. With m > 1 the spreading is weaker than a full Hadamard matrix's, but exact.

Only additions and multiplications in a fixed order: the same bits in any batch. Randomised Hadamard
transforms for caches: QuaRot (arXiv 2404.00456), llama.cpp PR 21038 (without signs).
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch

SIGNS_VERSION = "kvloom-signs-1"  # raise it when the signs change: encoded bytes would mean other values


def odd_factor(dim: int) -> tuple[int, int]:
    """(m, p) with dim = m · p, p a power of two and m odd."""
    power = dim & -dim
    return dim // power, power


@functools.cache
def _sign_bits(dim: int, stream: int) -> tuple[float, ...]:
    signs: list[float] = []
    counter = 0
    while len(signs) < dim:
        digest = hashlib.sha256(f"{SIGNS_VERSION}:{dim}:{stream}:{counter}".encode()).digest()
        signs.extend(1.0 if byte >> bit & 1 else -1.0 for byte in digest for bit in range(8))
        counter += 1
    return tuple(signs[:dim])


def fixed_signs(dim: int, stream: int = 0) -> torch.Tensor:
    """float32 [dim] of ±1, the same everywhere and for ever; ``stream`` gives independent ones."""
    return torch.tensor(_sign_bits(dim, stream), dtype=torch.float32)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Sylvester-Hadamard transform of the last axis, whose length is a power of two."""
    n = x.shape[-1]
    assert n & (n - 1) == 0
    shape = x.shape
    step = 1
    while step < n:
        pairs = x.reshape(*shape[:-1], n // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        step *= 2
    return x * (1.0 / math.sqrt(n))


class Rotation:
    """The rotation of vectors of ``dim`` channels; without ``signed`` the signs are all +1.

    A kernel need not rotate keys back: with y = R k, q·k = (R q)·y, so it rotates each query once;
    and it rotates an output once, o = Rᵀ Σ p y.
    """

    def __init__(self, dim: int, *, signed: bool = True, stream: int = 0) -> None:
        self.dim = dim
        self.signed = signed
        self.odd, self.power = odd_factor(dim)
        self.signs = fixed_signs(dim, stream) if signed else torch.ones(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """R x for float32 [..., dim]."""
        return self._mix(x * self.signs.to(x.device))

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Rᵀ y for float32 [..., dim]."""
        return self._mix(y) * self.signs.to(y.device)

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        """The symmetric part (its own inverse): Hadamard within rows, Householder across them."""
        if self.odd == 1:
            return hadamard(x)
        rows = hadamard(x.reshape(*x.shape[:-1], self.odd, self.power))
        total = rows[..., 0, :]
        for row in range(1, self.odd):
            total = total + rows[..., row, :]
        return (rows - (total * (2.0 / self.odd)).unsqueeze(-2)).reshape(x.shape)
