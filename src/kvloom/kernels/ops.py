"""Signatures of the cache kernels, the formats they read, and the choice of a backend.

A kernel attends over a run of blocks of one format and returns output and log-sum-exp; partial
results of several runs merge (``merge_partials``), and a model's sink logit enters once, at the
last merge. So mixed formats in one sequence, split reading and shared prefixes need no new kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from kvloom.core.errors import ConfigError

Order = Literal["token", "channel"]


class BlockCoder(Protocol):
    """What kernels need of a codec (``codecs.base.PlaneCodec``): one plane's full blocks to bytes and back."""

    name: str
    num_bytes: int

    def encode(self, rows: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        """uint8 [N, heads, num_bytes] from rows [N, heads, block_size, dim]."""
        ...

    def decode(self, data: torch.Tensor, *, layer: int, first_position: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [N, heads, block_size, dim] from uint8 [N, heads, num_bytes]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneFormat:
    """How one plane's block of ``block_size`` tokens × ``dim`` channels lies in memory.

    Element (t, d) stands, in elements from the plane's start, at::

        order "token",   pack P:  (t // P) * (dim * P)        + d * P + t % P     [token/P][dim][P]
        order "channel", pack P:  (d // P) * (block_size * P) + t * P + d % P     [dim/P][token][P]

    ``offset`` is in bytes from the block's start. With ``codec`` the block is that codec's bytes
    instead, ``dtype`` is uint8, and order and pack say nothing.
    """

    name: str
    dim: int
    dtype: torch.dtype
    offset: int
    order: Order = "token"
    pack: int = 1
    codec: BlockCoder | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """The blocks of one layer group in one format.

    The block of (layer i, head h) starts ``i * layer_bytes + h * block_bytes`` after its span's
    arena offset. ``planes`` are (k, v) for ordinary layers and (latent, rope) for MLA. ``layers[i]``
    is the model's layer i of the group, which codecs may ask for.
    """

    block_size: int
    num_heads: int
    block_bytes: int
    layer_bytes: int
    planes: tuple[PlaneFormat, ...]
    layers: tuple[int, ...] = ()

    @property
    def is_encoded(self) -> bool:
        return any(plane.codec is not None for plane in self.planes)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryBatch:
    """Which query tokens belong to which sequence, and where they stand.

    Tokens are packed: sequence s owns rows ``query_start[s] : query_start[s + 1]`` of every
    ``[T, …]`` tensor, at positions ``first_position[s], first_position[s] + 1, …``. The arrays are
    on the host (numpy, int32, contiguous), the tensors hold the same on the arena's device.
    """

    query_start_host: np.ndarray  # int32 [S + 1]
    first_position_host: np.ndarray  # int32 [S]
    query_start: torch.Tensor  # int32 [S + 1]
    first_position: torch.Tensor  # int32 [S]
    positions: torch.Tensor  # int64 [T], position of each query token
    sequence_of: torch.Tensor  # int64 [T], row of the block table of each query token

    @property
    def num_sequences(self) -> int:
        return int(self.first_position_host.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_host[-1])

    @classmethod
    def build(
        cls, lengths: Sequence[int] | np.ndarray, first_positions: Sequence[int] | np.ndarray, device: torch.device
    ) -> QueryBatch:
        """From each sequence's number of query tokens and the position of its first one."""
        counts = np.asarray(lengths, dtype=np.int32)
        first = np.ascontiguousarray(first_positions, dtype=np.int32)
        start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=start[1:])
        rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        positions = np.arange(start[-1], dtype=np.int64) - start[:-1][rows] + first[rows]
        return cls(
            query_start_host=start,
            first_position_host=first,
            query_start=torch.from_numpy(start).to(device),
            first_position=torch.from_numpy(first).to(device),
            positions=torch.from_numpy(positions).to(device),
            sequence_of=torch.from_numpy(rows).to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRange:
    """Which blocks a run covers, by absolute block and by lag behind the query's own block.

    A query at position p, in block b = p // block_size, reads from this run the keys of blocks j
    with ``first_block <= j``, ``j < end_block`` and ``min_lag <= b - j <= max_lag`` (None: no
    bound), causality and window applied on top. All bounds are intervals, so each query still
    reads one contiguous range. The default covers everything.

    With s sink blocks and r recent blocks, raw sinks are ``KeyRange(end_block=s, min_lag=r + 1)``,
    encoded blocks ``KeyRange(first_block=s, min_lag=r + 1)``, raw recents ``KeyRange(max_lag=r)``.
    """

    first_block: int = 0
    end_block: int | None = None
    min_lag: int = 0
    max_lag: int | None = None

    def bounds(self, position: int, block_size: int, window: int | None) -> tuple[int, int]:
        """Key positions ``[low, high)`` that a query at ``position`` reads; empty if low >= high."""
        block = position // block_size
        low = self.first_block * block_size
        high = position + 1
        if window is not None:
            low = max(low, position - window + 1)
        if self.max_lag is not None:
            low = max(low, (block - self.max_lag) * block_size)
        if self.end_block is not None:
            high = min(high, self.end_block * block_size)
        if self.min_lag > 0:
            high = min(high, (block - self.min_lag + 1) * block_size)
        return low, high


EVERY_KEY = KeyRange()


class KernelBackend(Protocol):
    """What every backend offers. Tensors live on the arena's device.

    ``arena`` is uint8 [arena_bytes]; ``tables`` is int64 [S, max_blocks], the arena offset of each
    block's span, negative where the sequence holds none (a passed window); ``layer_offset`` is the
    layer's byte offset within a span.
    """

    name: str
    variant: str  # instruction set or device flavour in use; empty where there is only one
    fallbacks: Mapping[str, int]  # calls that ran on the reference backend instead, by reason

    def plane_order(self, plane: str, dtype: torch.dtype, dim: int, block_size: int) -> tuple[Order, int]:
        """The inner layout (order, pack) in which this backend wants a plane stored."""
        ...

    def unsupported(self, fmt: BlockFormat, num_query_heads: int) -> str | None:
        """Why this backend cannot read ``fmt``, or None if it can."""
        ...

    def write(
        self,
        values: Sequence[torch.Tensor],
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
    ) -> None:
        """Store each plane's new rows, ``[T, num_heads, dim]`` each, at their positions."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        keys: KeyRange = EVERY_KEY,
        want_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention of ``q`` [T, num_query_heads, k_dim] over the cached blocks.

        Query head h reads KV head ``h // (num_query_heads // num_heads)``. Logits are
        ``q·k * scale``, then ``softcap * tanh(logit / softcap)``; ``sinks`` [num_query_heads] are
        logits that take part in the softmax denominator only.

        Returns:
            Output [T, num_query_heads, v_dim] in q's dtype, and None; with ``want_lse`` the output
            is float32 and comes with log-sum-exp [T, num_query_heads] float32 (natural log; -inf,
            and output 0, for a query without keys).
        """
        ...

    def encode(
        self,
        arena: torch.Tensor,
        raw: BlockFormat,
        encoded: BlockFormat,
        index: int,
        raw_offsets: torch.Tensor,
        encoded_offsets: torch.Tensor,
        first_positions: torch.Tensor,
    ) -> int:
        """Encode full blocks of layer ``index`` of their group, all heads, from their raw copies as stored.

        Offsets are int64 [N], in bytes, of spans in the arena: raw span n becomes encoded span n, whose
        bytes are a function of the raw ones alone. ``first_positions`` int64 [N] are of the blocks' first
        tokens.

        Returns:
            How many encoded numbers were not finite; they are stored as 0.
        """
        ...

    def attend_latent(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
        *,
        scale: float,
        keys: KeyRange = EVERY_KEY,
        want_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention in the absorbed form of MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1).

        ``fmt`` has planes (latent, rope) and one head, which all query heads read. Logits are
        ``(q_latent·latent + q_rope·rope) * scale`` and the output is the weighted mean of latents:
        the caller has multiplied the key half of the up-projection into ``q_latent`` [T,
        num_query_heads, latent_dim] and multiplies the output by its value half. ``q_rope`` is
        [T, num_query_heads, rope_dim], of the same dtype.

        Returns:
            Output [T, num_query_heads, latent_dim] and log-sum-exp, as ``attend`` returns them.
        """
        ...


def merge_partials(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Merge partial attentions over disjoint keys.

    Args:
        parts: (output [T, H, D] float32, log-sum-exp [T, H] float32) of each run.
        sinks: [H] logits that enter the denominator once, or None.
        dtype: of the result.

    Returns:
        [T, H, D]: sum_i exp(lse_i - m) out_i / (sum_i exp(lse_i - m) + exp(sink - m)).
    """
    lse = torch.stack([part[1] for part in parts])  # [N, T, H]
    top = lse.amax(dim=0)
    if sinks is not None:
        top = torch.maximum(top, sinks.float())
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    weights = torch.exp(lse - top)
    total = weights.sum(dim=0)
    if sinks is not None:
        total = total + torch.exp(sinks.float() - top)
    out = sum(weight.unsqueeze(-1) * part[0] for weight, part in zip(weights, parts, strict=True))
    assert isinstance(out, torch.Tensor)
    return (out / total.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).to(dtype)


# name -> module:function that makes the backend (deterministic, num_threads); imported on use.
BACKENDS = {
    "reference": "kvloom.kernels.reference:make",
    "cpu": "kvloom.kernels.cpu:make",
}


def choose_backend(choice: str, device: torch.device, *, deterministic: bool, num_threads: int) -> KernelBackend:
    """The backend that ``--kernels`` names; ``auto`` is ``cpu`` on CPUs and ``reference`` elsewhere.

    Raises:
        ConfigError: the backend does not exist, or cannot run on ``device``.
    """
    name = ("cpu" if device.type == "cpu" else "reference") if choice == "auto" else choice
    if name not in BACKENDS:
        raise ConfigError(f"kernels is {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise ConfigError(f"kernels 'cpu' cannot run on device {device.type!r}; use --kernels reference")
    module, function = BACKENDS[name].split(":")
    backend: KernelBackend = getattr(importlib.import_module(module), function)(
        deterministic=deterministic, num_threads=num_threads
    )
    return backend
