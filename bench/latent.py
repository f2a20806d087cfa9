"""Decode attention over latents (MLA): absorbed and paged against torch's expand-then-attend, and the bounds.

    python bench/latent.py [--json] [--rounds N] [--heads N]

One layer of DeepSeek's shapes (latent 512, rope 64, keys 128 + 64, values 128; V2-Lite has 16 heads, V3 128), one new
token per sequence. Ours is all of ``attention.mla``: query half of the up-projection, attention, output half. torch
expands the cached latents by the up-projection and calls sdpa, in float32, the faster of its types on CPUs without
bf16 products. The bound is max(latent bytes / bandwidth, operations / matrix peak), both measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from attention import CPU
from machine import matrix_peak, measure, read_bandwidth

from kvloom.attention.batch import KVBatch
from kvloom.attention.mla import latent_attention
from kvloom.attention.scratch import scratch_store
from kvloom.core.layout import LayerSpec, group_layers
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import QueryBatch

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
BLOCK_SIZE = 32
CELLS = ((1, 512), (1, 4096), (8, 512), (8, 2048))  # sequences, tokens each


@dataclass
class Cell:
    name: str
    ours_ms: float
    attend_ms: float  # the kernel alone, within ours_ms
    torch_ms: float
    bound_ms: float
    mb: float
    gflop: float


def run_cell(
    backend: CpuBackend,
    heads: int,
    sequences: int,
    tokens: int,
    dtype: torch.dtype,
    bandwidth: float,
    peak: float,
    rounds: int,
) -> Cell:
    layout = group_layers([LayerSpec.mla(latent_dim=LATENT, rope_dim=ROPE)])
    blocks = -(-tokens // BLOCK_SIZE)
    store, (offsets,) = scratch_store(
        layout, backend, num_spans=[sequences * blocks], block_size=BLOCK_SIZE, dtype=dtype, device=CPU
    )
    order = torch.randperm(len(offsets))
    tables = torch.tensor(offsets)[order].view(sequences, blocks)
    latent, rope = (torch.randn(sequences * tokens, 1, dim) for dim in (LATENT, ROPE))
    past = QueryBatch.build([tokens] * sequences, [0] * sequences, CPU)
    fmt = store.formats[0]
    backend.write((latent, rope), store.arena, fmt, 0, tables, past)

    queries = QueryBatch.build([1] * sequences, [tokens - 1] * sequences, CPU)
    batch = KVBatch(store=store, queries=queries, tables=(tables,))
    projection = torch.nn.Linear(LATENT, heads * (NOPE + VALUE), bias=False)
    module: Any = SimpleNamespace(kv_b_proj=projection)
    query = torch.randn(1, heads, sequences, NOPE + ROPE)
    scale = (NOPE + ROPE) ** -0.5
    q_latent, q_rope = torch.randn(sequences, heads, LATENT), torch.randn(sequences, heads, ROPE)
    plain_latent, plain_rope = latent.view(sequences, tokens, LATENT), rope.view(sequences, 1, tokens, ROPE)

    def ours() -> torch.Tensor:
        return latent_attention(module, query, batch, fmt, 0, tables, scale)

    def attend() -> None:
        backend.attend_latent(q_latent, q_rope, store.arena, fmt, 0, tables, queries, scale=scale)

    def torchs() -> torch.Tensor:
        expanded = projection(plain_latent).view(sequences, tokens, heads, NOPE + VALUE).transpose(1, 2)
        key = torch.cat([expanded[..., :NOPE], plain_rope.expand(-1, heads, -1, -1)], dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(
            query[0].transpose(0, 1).unsqueeze(2), key, expanded[..., NOPE:], scale=scale
        )

    with torch.inference_mode():
        error = float((ours()[0] - torchs()[:, :, 0]).abs().max())
        assert error < (1e-3 if dtype == torch.float32 else 5e-2), f"the two differ by {error}"
        ours_ms, attend_ms, torch_ms = measure([ours, attend, torchs], rounds)
    num_bytes = sequences * tokens * (LATENT + ROPE) * dtype.itemsize
    weights = projection.weight.numel()
    operations = 2 * heads * sequences * tokens * (2 * LATENT + ROPE) + 2 * sequences * weights
    return Cell(
        name=f"{str(dtype).removeprefix('torch.')}, {sequences} × {tokens}",
        ours_ms=ours_ms,
        attend_ms=attend_ms,
        torch_ms=torch_ms,
        bound_ms=max((num_bytes + 4 * weights) / bandwidth / 1e6, operations / peak / 1e6),
        mb=num_bytes / 1e6,
        gflop=operations / 1e9,
    )


def show(cells: Sequence[Cell]) -> None:
    names = ("ours ms", "kernel ms", "torch ms", "ratio", "bound ms", "reached", "GFLOP/s")
    print(f"{'cell':22}" + "".join(f"{name:>10}" for name in names))
    for cell in cells:
        print(
            f"{cell.name:22}{cell.ours_ms:10.2f}{cell.attend_ms:10.2f}{cell.torch_ms:10.2f}"
            f"{cell.torch_ms / cell.ours_ms:10.1f}{cell.bound_ms:10.2f}{cell.bound_ms / cell.ours_ms:10.0%}"
            f"{cell.gflop / cell.ours_ms * 1e3:10.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, peak = read_bandwidth(args.rounds), matrix_peak(torch.float32, args.rounds)
    backend = CpuBackend()
    cells = [
        run_cell(backend, args.heads, sequences, tokens, dtype, bandwidth, peak, args.rounds)
        for dtype in (torch.bfloat16, torch.float32)
        for sequences, tokens in CELLS
    ]
    if args.json:
        print(json.dumps({"bandwidth": bandwidth, "peak": peak, "cells": [asdict(cell) for cell in cells]}))
        return
    print(f"{backend.variant}, {backend.num_threads} threads, {args.heads} heads")
    print(f"read {bandwidth:.1f} GB/s, matrix products {peak:.0f} GFLOP/s in float32")
    show(cells)


if __name__ == "__main__":
    main()
