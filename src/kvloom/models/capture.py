"""What a model's layers hand to attention while it reads tokens: queries, keys and values after RoPE.

The model's own code runs, through the attention that it was loaded with; in the engine's arena's place
stands a backend that keeps every row it is given and attends densely. So windows, soft caps, sinks,
shared layers and latents are seen as the engine sees them, nothing of the model is switched over and
back, and gradients flow where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvloom.attention.batch import KVBatch
from kvloom.attention.scratch import scratch_store
from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import EVERY_KEY, BlockFormat, KeyRange, Order, QueryBatch

BLOCK_SIZE = 8  # of the formats that no row is ever stored in


@dataclass(slots=True)
class LayerVectors:
    """What one storing layer was given for T tokens, H KV heads.

    ``keys`` are the first plane, [T, H, k_dim] (of MLA the latent, H = 1), ``values`` the second,
    [T, H, v_dim] (of MLA the rotated part of the key). ``queries`` has one [T, heads, k_dim] for each
    layer that reads these keys: the layer itself first, then those that share its planes; head h reads
    KV head ``h // (heads // H)``. Logits are ``queries·keys * scale``, then capped by ``softcap``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: list[torch.Tensor] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None


@torch.no_grad()
def capture(model: Any, layout: KVLayout, tokens: torch.Tensor) -> dict[int, LayerVectors]:
    """Each storing layer's vectors while ``model`` reads ``tokens`` (int64 [T], on its device) from position 0.

    ``model`` is as the loader returns it. Raises whatever the model's own code raises.
    """
    batch, seen = capturing_batch(model, layout, len(tokens))
    model(
        input_ids=tokens.unsqueeze(0),
        position_ids=batch.queries.positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=torch.zeros(1, dtype=torch.int64, device=tokens.device),
        kv=batch,
    )
    return seen


def capturing_batch(
    model: Any, layout: KVLayout, num_tokens: int, *, retain_grad: bool = False
) -> tuple[KVBatch, dict[int, LayerVectors]]:
    """A batch to hand to one forward pass as ``kv``, and what will then have been seen, by storing layer.

    With ``retain_grad`` keys and values keep their gradient: run the pass and the loss backward.
    """
    parameter = next(model.parameters())
    backend = CapturingBackend(retain_grad=retain_grad)
    store, offsets = scratch_store(
        layout,
        backend,
        num_spans=[1] * len(layout.groups),
        block_size=BLOCK_SIZE,
        dtype=parameter.dtype,
        device=parameter.device,
    )
    batch = KVBatch(
        store=store,
        queries=QueryBatch.build([num_tokens], [0], parameter.device),
        tables=tuple(torch.tensor([row], dtype=torch.int64, device=parameter.device) for row in offsets),
    )
    return batch, backend.seen


class CapturingBackend:
    """Keeps rows and attends over them densely. Signatures are documented on ``ops.KernelBackend``.

    For one sequence from position 0, in one pass, without codecs.
    """

    name = "capture"
    variant = ""

    def __init__(self, *, retain_grad: bool) -> None:
        self.seen: dict[int, LayerVectors] = {}
        self.fallbacks: Mapping[str, int] = {}
        self._retain_grad = retain_grad

    def plane_order(self, plane: str, dtype: torch.dtype, dim: int, block_size: int) -> tuple[Order, int]:
        return "token", 1

    def unsupported(self, fmt: BlockFormat, num_query_heads: int) -> str | None:
        return None

    def write(
        self,
        values: Sequence[torch.Tensor],
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
    ) -> None:
        first, second = values
        if self._retain_grad:
            first.retain_grad()
            second.retain_grad()
        self.seen[fmt.layers[layer_offset // fmt.layer_bytes]] = LayerVectors(keys=first, values=second)

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
        layer = self._read(fmt, layer_offset, q, scale)
        layer.softcap = softcap
        logits = _products(q, layer.keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return _attention(logits, layer.values, window, sinks).to(q.dtype), None

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
        layer = self._read(fmt, layer_offset, q_latent, scale)
        logits = (_products(q_latent, layer.keys) + _products(q_rope, layer.values)) * scale
        return _attention(logits, layer.keys, None, None).to(q_latent.dtype), None

    def encode(self, *_: Any) -> int:
        raise AssertionError("nothing of a capture is encoded")

    def _read(self, fmt: BlockFormat, layer_offset: int, q: torch.Tensor, scale: float) -> LayerVectors:
        layer = self.seen[fmt.layers[layer_offset // fmt.layer_bytes]]
        layer.queries.append(q)
        layer.scale = scale
        return layer


def _products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [H, heads / H, T, T]: queries [T, heads, d] times keys [T, H, d]."""
    grouped = q.float().reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
    return torch.einsum("thgd,shd->hgts", grouped, keys.float())


def _attention(
    logits: torch.Tensor, values: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """float32 [T, heads, d]: causal softmax of ``logits`` [H, heads / H, T, T] over ``values`` [T, H, d]."""
    count = logits.shape[-1]
    at = torch.arange(count, device=logits.device)
    lag = at[:, None] - at[None, :]
    logits = logits.masked_fill((lag < 0) | (lag >= (window or count)), float("-inf"))
    if sinks is not None:
        column = sinks.float().view(*logits.shape[:2], 1, 1).expand(-1, -1, count, 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :count]
    return torch.einsum("hgts,shd->thgd", weights, values.float()).flatten(1, 2)
