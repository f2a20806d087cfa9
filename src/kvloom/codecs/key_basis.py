"""The directions of a head's keys, ordered by what errors along them cost.

An error e of a key changes a query's logit by q·e, whose square is on average eᵀ W e with W = E[q qᵀ]
over the queries that read the head. Queries weigh by how far their attention follows a logit that
errs: by Σ p (1 − p) over the keys that would be coded, p the attention they get. With C the keys'
covariance and R = W^½ let::

    R C R = U diag(p) Uᵀ,  p descending        A = Uᵀ R        y = A (k − mean)

Then the coordinates y are uncorrelated with variances p, and an error costs the sum of its squares in
them: p says how many bits each coordinate deserves. W is shrunk towards a multiple of the identity, so
that no direction is thought to be free.
"""

from __future__ import annotations

import torch

SHRINK = 0.1  # share of the identity in W
FLOOR = 1e-4  # least eigenvalue, relative to the mean one


def key_basis(covariance: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 [H, d, d] and p float64 [H, d] from the keys' covariance C and W, float64 [H, d, d] each.

    Each head's A is scaled so that the sum of p is the trace of C.
    """
    identity = torch.eye(covariance.shape[-1], dtype=torch.float64)
    weight = (1 - SHRINK) * weight + SHRINK * _mean_diagonal(weight) * identity
    values, vectors = torch.linalg.eigh(weight)
    values = _floored(values)
    root = vectors * values.sqrt().unsqueeze(-2) @ vectors.mT
    values, vectors = torch.linalg.eigh(root @ covariance @ root)
    values, vectors = _floored(values).flip(-1), vectors.flip(-1)
    basis = _signed(vectors.mT @ root)
    unit = _mean_diagonal(covariance) / values.mean(dim=-1)[:, None, None]
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    return basis * unit.sqrt(), values * unit.squeeze(-1)


def _mean_diagonal(x: torch.Tensor) -> torch.Tensor:
    """[H, 1, 1] of [H, d, d]."""
    return x.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]


def _floored(values: torch.Tensor) -> torch.Tensor:
    """Eigenvalues [H, d], none below FLOOR of their mean; all 1 where they vanish."""
    mean = values.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, torch.maximum(values, FLOOR * mean), torch.ones_like(values))


def _signed(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose largest element is positive: eigenvectors come with either sign."""
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    return torch.where(largest < 0, -rows, rows)
