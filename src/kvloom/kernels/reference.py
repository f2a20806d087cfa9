"""The PyTorch backend: the oracle of every kernel. Runs on any torch device, reads any layout.

Written to be plainly right: it gathers a sequence's keys and values, computes logits in float32
(float64 when queries are) and masks. Each query row's arithmetic is the same whatever else is in
the batch only as far as torch's matrix products are; ``deterministic`` makes them so by attending
one query row at a time over all its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvloom.kernels.ops import EVERY_KEY, BlockFormat, KeyRange, Order, PlaneFormat, QueryBatch


def make(*, deterministic: bool, num_threads: int) -> ReferenceBackend:
    """The reference backend; torch manages its threads, so ``num_threads`` has no effect here."""
    del num_threads
    return ReferenceBackend(deterministic=deterministic)


def element_index(plane: PlaneFormat, block_size: int, device: torch.device) -> torch.Tensor:
    """[block_size, dim] int64: where element (token, channel) stands, in elements from the plane's start."""
    t = torch.arange(block_size, device=device).unsqueeze(1)
    d = torch.arange(plane.dim, device=device).unsqueeze(0)
    p = plane.pack
    if plane.order == "token":
        return (t // p) * (plane.dim * p) + d * p + t % p
    return (d // p) * (block_size * p) + t * p + d % p


def count_non_finite(rows: torch.Tensor) -> int:
    """How many elements of ``rows`` are NaN or ±Inf."""
    return int((~torch.isfinite(rows)).sum())


def _is_latent(fmt: BlockFormat) -> bool:
    return fmt.planes[0].name == "latent"


class ReferenceBackend:
    """See the module; signatures are documented on ``ops.KernelBackend``."""

    name = "reference"

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.variant = ""
        self.fallbacks: Mapping[str, int] = {}

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
        blocks = batch.positions // fmt.block_size
        offsets = tables[batch.sequence_of, blocks] + layer_offset  # [T] bytes
        within = batch.positions % fmt.block_size
        for plane, rows in zip(fmt.planes, values, strict=True):
            index = self.element_places(plane, fmt, offsets, within, arena.device)
            arena.view(plane.dtype)[index] = rows.to(plane.dtype)

    def gather(
        self,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        table: torch.Tensor,
        low: int,
        high: int,
    ) -> list[torch.Tensor]:
        """Each plane's rows at positions ``low`` to ``high`` of one sequence: [high - low, heads, dim].

        ``table`` is that sequence's row of the block table, int64 [max_blocks].
        """
        positions = torch.arange(low, high, device=arena.device)
        offsets = table[positions // fmt.block_size] + layer_offset
        within = positions % fmt.block_size
        rows: list[torch.Tensor] = []
        for plane in fmt.planes:
            if plane.codec is None:
                rows.append(arena.view(plane.dtype)[self.element_places(plane, fmt, offsets, within, arena.device)])
                continue
            size = fmt.block_size
            blocks = torch.arange(low // size, -(-high // size), device=arena.device)
            decoded = self.read_blocks(arena, plane, fmt, table[blocks], layer_offset, blocks * size)
            first = low - low // size * size
            rows.append(decoded.transpose(1, 2).flatten(0, 1)[first : first + high - low])
        return rows

    @classmethod
    def read_blocks(
        cls,
        arena: torch.Tensor,
        plane: PlaneFormat,
        fmt: BlockFormat,
        spans: torch.Tensor,
        layer_offset: int,
        first_positions: torch.Tensor,
    ) -> torch.Tensor:
        """``plane`` of whole blocks, decoded where it is encoded: [N, heads, block_size, dim].

        ``spans`` int64 [N] are arena offsets, ``first_positions`` int64 [N] of each block's first token.
        """
        offsets = spans + layer_offset
        if plane.codec is not None:
            layer = fmt.layers[layer_offset // fmt.layer_bytes]
            data = arena[cls.encoded_index(plane, fmt, offsets)]
            return plane.codec.decode(data, layer=layer, first_position=first_positions)
        size = fmt.block_size
        within = torch.arange(size, device=arena.device).repeat(len(offsets))
        places = cls.element_places(plane, fmt, offsets.repeat_interleave(size), within, arena.device)
        return arena.view(plane.dtype)[places].unflatten(0, (len(offsets), size)).transpose(1, 2)

    @staticmethod
    def encoded_index(plane: PlaneFormat, fmt: BlockFormat, offsets: torch.Tensor) -> torch.Tensor:
        """[N, heads, num_bytes]: where the encoded blocks of ``plane`` at layer offsets [N] lie in the arena."""
        assert plane.codec is not None
        heads = torch.arange(fmt.num_heads, device=offsets.device) * fmt.block_bytes
        within = torch.arange(plane.codec.num_bytes, device=offsets.device) + plane.offset
        return offsets[:, None, None] + heads[None, :, None] + within[None, None, :]

    @staticmethod
    def element_places(
        plane: PlaneFormat, fmt: BlockFormat, offsets: torch.Tensor, within: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """[N, heads, dim] element indices into the arena viewed as the plane's dtype."""
        size = plane.dtype.itemsize
        heads = torch.arange(fmt.num_heads, device=device) * (fmt.block_bytes // size)
        base = (offsets + plane.offset) // size
        element = element_index(plane, fmt.block_size, device)[within]  # [N, dim]
        return base[:, None, None] + heads[None, :, None] + element[:, None, :]

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
        size, bad = raw.block_size, 0
        within = torch.arange(size, device=arena.device).repeat(len(raw_offsets))
        from_offsets = (raw_offsets + index * raw.layer_bytes).repeat_interleave(size)
        to_offsets = encoded_offsets + index * encoded.layer_bytes
        for source, target in zip(raw.planes, encoded.planes, strict=True):
            places = self.element_places(source, raw, from_offsets, within, arena.device)
            rows = arena.view(source.dtype)[places]  # [N * size, heads, dim]
            if target.codec is None:
                places = self.element_places(target, encoded, to_offsets.repeat_interleave(size), within, arena.device)
                arena.view(target.dtype)[places] = rows
                continue
            blocks = rows.reshape(-1, size, *rows.shape[1:]).transpose(1, 2)  # [N, heads, size, dim]
            bad += count_non_finite(blocks)
            data = target.codec.encode(blocks, layer=raw.layers[index], first_position=first_positions)
            arena[self.encoded_index(target, encoded, to_offsets)] = data
        return bad

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
        num_tokens, num_query_heads, _ = q.shape
        compute = torch.float64 if q.dtype == torch.float64 else torch.float32
        v_dim = fmt.planes[0 if _is_latent(fmt) else 1].dim
        out = torch.zeros(num_tokens, num_query_heads, v_dim, dtype=compute, device=q.device)
        lse = torch.full((num_tokens, num_query_heads), float("-inf"), dtype=compute, device=q.device)
        for sequence in range(batch.num_sequences):
            start, end = (int(x) for x in batch.query_start_host[sequence : sequence + 2])
            first = int(batch.first_position_host[sequence])
            step = 1 if self.deterministic else max(1, end - start)
            held = self._decoded(arena, fmt, layer_offset, tables[sequence], keys, window, first, end - start)
            for row in range(start, end, step):
                rows = slice(row, min(row + step, end))
                position = first + row - start
                self._attend_rows(
                    q, rows, position, arena, fmt, layer_offset, tables[sequence], scale, window, softcap, sinks,
                    keys, held, out, lse,
                )  # fmt: skip
        if want_lse:
            return out.float(), lse.float()
        return out.to(q.dtype), None

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
        # One KV head, whose key is the latent beside its rope part, and whose value is the latent: _attend_rows.
        q = torch.cat([q_latent, q_rope], dim=-1)
        return self.attend(q, arena, fmt, layer_offset, tables, batch, scale=scale, keys=keys, want_lse=want_lse)

    def _decoded(
        self,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        table: torch.Tensor,
        keys: KeyRange,
        window: int | None,
        first: int,
        count: int,
    ) -> tuple[int, list[torch.Tensor]] | None:
        """What ``count`` queries from position ``first`` read of encoded blocks, decoded once: (from, rows)."""
        if not fmt.is_encoded or count == 0:
            return None
        low = max(0, keys.bounds(first, fmt.block_size, window)[0])
        high = keys.bounds(first + count - 1, fmt.block_size, window)[1]
        return (low, self.gather(arena, fmt, layer_offset, table, low, high)) if low < high else None

    def _attend_rows(
        self,
        q: torch.Tensor,
        rows: slice,
        position: int,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        table: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        keys: KeyRange,
        held: tuple[int, list[torch.Tensor]] | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        count = rows.stop - rows.start
        bounds = [keys.bounds(position + i, fmt.block_size, window) for i in range(count)]
        low = max(0, min(bound[0] for bound in bounds))
        high = max(bound[1] for bound in bounds)
        if low >= high:
            return
        if held is None:
            rows_of = self.gather(arena, fmt, layer_offset, table, low, high)
        else:
            rows_of = [x[low - held[0] : high - held[0]] for x in held[1]]
        k, v = (x.to(out.dtype) for x in rows_of)
        if _is_latent(fmt):
            k, v = torch.cat([k, v], dim=-1), k
        groups = q.shape[1] // fmt.num_heads
        queries = q[rows].to(out.dtype).view(count, fmt.num_heads, groups, -1)
        logits = torch.einsum("thgd,khd->hgtk", queries, k) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(low, high, device=q.device)
        edges = torch.tensor(bounds, device=q.device)
        visible = (at >= edges[:, :1]) & (at < edges[:, 1:])  # [count, keys]
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.to(out.dtype).view(fmt.num_heads, groups, 1, 1).expand(-1, -1, count, 1)
            logits = torch.cat([logits, column], dim=-1)
        total = torch.logsumexp(logits, dim=-1)  # [h, g, t]
        safe = torch.where(torch.isfinite(total), total, torch.zeros_like(total))
        weights = torch.exp(logits - safe.unsqueeze(-1))
        result = torch.einsum("hgtk,khd->thgd", weights[..., : high - low], v)
        out[rows] = result.reshape(count, -1, result.shape[-1])
        lse[rows] = total.permute(2, 0, 1).reshape(count, -1)
