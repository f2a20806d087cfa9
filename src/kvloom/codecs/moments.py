"""First and second moments of one layer's vectors, summed window by window: what key bases are made from."""

from __future__ import annotations

import torch


class Moments:
    """Sums over tokens in float64; H KV heads, Hq query heads, each KV head read by Hq / H consecutive ones.

    Sums need no more memory for many long windows than for one.
    """

    def __init__(self, heads: int, key_dim: int, value_dim: int) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        self.tokens = 0
        self.asked = 0  # queries of each KV head
        self._keys, self._key_products = zeros(heads, key_dim), zeros(heads, key_dim, key_dim)
        self._values, self._value_squares = zeros(heads, value_dim), zeros(heads, value_dim)
        self._query_products = zeros(heads, key_dim, key_dim)
        self._weights, self._weighted_products = zeros(heads), zeros(heads, key_dim, key_dim)

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor | None = None,
        query_weights: torch.Tensor | None = None,
    ) -> None:
        """Keys and values [T, H, d], queries [T, Hq, d] and their weights [T, Hq], of any float dtype."""
        by_head = keys.double().transpose(0, 1)  # [H, T, d]
        self.tokens += keys.shape[0]
        self._keys += by_head.sum(dim=1)
        self._key_products += by_head.mT @ by_head
        self._values += values.double().sum(dim=0)
        self._value_squares += values.double().square().sum(dim=0)
        if queries is None:
            return
        tokens, heads = keys.shape[:2]
        asking = queries.double().reshape(tokens, heads, -1, keys.shape[2]).transpose(0, 1).flatten(1, 2)
        self.asked += asking.shape[1]
        self._query_products += asking.mT @ asking
        if query_weights is not None:
            weights = query_weights.double().reshape(tokens, heads, -1).transpose(0, 1).flatten(1, 2)
            self._weights += weights.sum(dim=1)
            self._weighted_products += (asking * weights.unsqueeze(-1)).mT @ asking

    def finite(self) -> bool:
        """Whether everything that was added is."""
        sums = (self._key_products, self._value_squares, self._query_products, self._weighted_products)
        return all(bool(torch.isfinite(one).all()) for one in sums)

    @property
    def key_mean(self) -> torch.Tensor:
        """[H, d]"""
        return self._keys / self.tokens

    @property
    def key_covariance(self) -> torch.Tensor:
        """[H, d, d] about the mean."""
        mean = self.key_mean
        return self._key_products / self.tokens - mean.unsqueeze(-1) * mean.unsqueeze(-2)

    @property
    def value_mean(self) -> torch.Tensor:
        """[H, d]"""
        return self._values / self.tokens

    @property
    def value_variance(self) -> torch.Tensor:
        """[H, d] about the mean."""
        return (self._value_squares / self.tokens - self.value_mean.square()).clamp_min(0.0)

    @property
    def query_square(self) -> torch.Tensor | None:
        """[H, d] mean square of the queries that read each head, None without queries."""
        return self._query_products.diagonal(dim1=1, dim2=2) / self.asked if self.asked else None

    @property
    def query_products(self) -> torch.Tensor:
        """[H, d, d]: the weighted mean of q qᵀ; unweighted where no query weighs anything, 1 without queries."""
        if not self.asked:
            return torch.eye(self._keys.shape[1], dtype=torch.float64).expand_as(self._query_products)
        heard = (self._weights > 0)[:, None, None]
        safe = torch.where(self._weights > 0, self._weights, torch.ones_like(self._weights))[:, None, None]
        return torch.where(heard, self._weighted_products / safe, self._query_products / self.asked)
