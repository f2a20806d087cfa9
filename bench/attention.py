"""Decode and prefill attention against torch and against the machine's bounds.

    python bench/attention.py [--json] [--rounds N] [--only decode|prefill] [--isa NAME] [--match TEXT]
    python bench/attention.py --pools     # how threads are shared with torch, see docs/kernels.md
    python bench/attention.py --ragged    # sequences of unequal lengths against equal ones of as many tokens

Measures, in this order: read bandwidth (all threads), matrix peak (fp32 and bf16 products of torch), then per cell
ours and torch's sdpa on contiguous tensors, interleaved over several rounds; each figure is the median of the
rounds. A decode cell is one pass over all layers of the model. The bound of a cell is
max(bytes / bandwidth, operations / matrix peak), with the better of the two measured peaks.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from machine import huge_tensor, matrix_peak, measure, read_bandwidth

from kvloom.core.layout import LayerSpec, group_layers
from kvloom.core.sizes import span_geometry
from kvloom.kernels.cpu import CpuBackend, find_gomp_parallel
from kvloom.kernels.ops import BlockFormat, PlaneFormat, QueryBatch

CPU = torch.device("cpu")
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    query_heads: int
    kv_heads: int
    dim: int
    window: int | None = None


SMOLLM2 = Shape("SmolLM2-135M", 30, 9, 3, 64)
GEMMA3 = Shape("Gemma3-270M full", 3, 4, 1, 256)
GEMMA3_WINDOW = Shape("Gemma3-270M window", 15, 4, 1, 256, 512)
DECODE = ((1, 512), (1, 4096), (8, 512), (8, 4096))
PREFILL = (512, 1024, 2048, 4096)
CHUNK = 512
RAGGED = (
    (4096,) * 8,
    (8192, 8192, 6144, 4096, 3072, 2048, 768, 256),
    (32768 - 7 * 256, *(256,) * 7),
    (*(2048,) * 8, *(512,) * 24, *(64,) * 64),
)


@dataclass
class Cell:
    name: str
    ours_ms: float
    torch_ms: float
    bound_ms: float
    gb: float
    gflop: float


class Cache:
    """``sequences`` of ``tokens`` in paged spans of all layers, in scattered order, and a plain copy of one layer."""

    def __init__(self, backend: CpuBackend, shape: Shape, sequences: int, tokens: int, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        spec = LayerSpec.kv(num_heads=shape.kv_heads, k_dim=shape.dim)
        group = group_layers([spec] * shape.layers).groups[0]
        span = span_geometry(group, BLOCK_SIZE, {"k": name, "v": name})
        planes = []
        for plane in span.planes:
            order, pack = backend.plane_order(plane.name, dtype, plane.dim, BLOCK_SIZE)
            planes.append(
                PlaneFormat(name=plane.name, dim=plane.dim, dtype=dtype, offset=plane.offset, order=order, pack=pack)
            )
        self.fmt = BlockFormat(
            block_size=BLOCK_SIZE,
            num_heads=shape.kv_heads,
            block_bytes=span.block_bytes,
            layer_bytes=span.layer_bytes,
            planes=tuple(planes),
        )
        blocks = -(-tokens // BLOCK_SIZE)
        self.arena = huge_tensor(sequences * blocks * span.span_bytes)
        self.arena.view(dtype).fill_(0.5)
        self.tables = (torch.randperm(sequences * blocks) * span.span_bytes).view(sequences, blocks)
        self.layers = range(shape.layers)
        # One contiguous K and V per layer for torch, so that it reads memory and not its cache.
        self.plain = [
            (
                torch.full((sequences, shape.kv_heads, tokens, shape.dim), 0.5, dtype=dtype),
                torch.full((sequences, shape.kv_heads, tokens, shape.dim), 0.5, dtype=dtype),
            )
            for _ in self.layers
        ]


def run_cell(
    backend: CpuBackend,
    shape: Shape,
    sequences: int,
    context: int,
    new_tokens: int,
    dtype: torch.dtype,
    bandwidth: float,
    peak: float,
    rounds: int,
) -> Cell:
    """``new_tokens`` of each sequence attend to ``context`` tokens, themselves included, in every layer."""
    cache = Cache(backend, shape, sequences, context, dtype)
    batch = QueryBatch.build([new_tokens] * sequences, [context - new_tokens] * sequences, CPU)
    q = torch.randn(batch.num_tokens, shape.query_heads, shape.dim).to(dtype)
    q_plain = q.view(sequences, new_tokens, shape.query_heads, shape.dim).transpose(1, 2)
    scale = shape.dim**-0.5
    # What the queries see: causal from the end, within the window.
    at = torch.arange(context - new_tokens, context)
    visible = at + 1 if shape.window is None else (at + 1).clamp_max(shape.window)
    low = 0 if shape.window is None else max(0, context - new_tokens - shape.window + 1)
    keys = torch.arange(low, context)
    mask = (keys <= at[:, None]) & (keys > at[:, None] - (shape.window or context))
    mask_or_none = None if new_tokens == 1 else mask

    def ours() -> None:
        for layer in cache.layers:
            backend.attend(
                q, cache.arena, cache.fmt, layer * cache.fmt.layer_bytes, cache.tables, batch, scale=scale,
                window=shape.window,
            )  # fmt: skip

    def torchs() -> None:
        for k, v in cache.plain:
            torch.nn.functional.scaled_dot_product_attention(
                q_plain, k[:, :, low:], v[:, :, low:], attn_mask=mask_or_none, scale=scale, enable_gqa=True
            )

    ours_ms, torch_ms = measure([ours, torchs], rounds)
    tokens_read = context - low
    num_bytes = shape.layers * sequences * tokens_read * shape.kv_heads * shape.dim * 2 * dtype.itemsize
    operations = shape.layers * sequences * int(visible.sum()) * shape.query_heads * shape.dim * 4
    return Cell(
        name=f"{shape.name}, {sequences} × {context}" + (f", chunk {new_tokens}" if new_tokens > 1 else ""),
        ours_ms=ours_ms,
        torch_ms=torch_ms,
        bound_ms=max(num_bytes / bandwidth / 1e6, operations / peak / 1e6),
        gb=num_bytes / 1e9,
        gflop=operations / 1e9,
    )


def compare_pools(rounds: int) -> dict[str, float]:
    """Milliseconds of a decode-like step (per layer two of torch's products, then our attention) by thread pool."""
    pools = {"shared with torch": find_gomp_parallel(), "own": 0}
    try:
        path = subprocess.check_output(["gcc", "-print-file-name=libgomp.so.1"], text=True).strip()
        pools["second libgomp"] = ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
    except OSError:
        print("no compiler's libgomp on this system", file=sys.stderr)
    shape = SMOLLM2
    backends = {name: CpuBackend(gomp_parallel=entry) for name, entry in pools.items()}
    cache = Cache(next(iter(backends.values())), shape, 8, 512, torch.bfloat16)
    batch = QueryBatch.build([1] * 8, [511] * 8, CPU)
    q = torch.randn(8, shape.query_heads, shape.dim).to(torch.bfloat16)
    x = torch.randn(8, 576)
    up = [torch.randn(1536, 576) for _ in cache.layers]
    down = [torch.randn(576, 1536) for _ in cache.layers]

    def step(backend: CpuBackend) -> None:
        for layer in cache.layers:
            torch.nn.functional.linear(torch.nn.functional.linear(x, up[layer]), down[layer])
            offset = layer * cache.fmt.layer_bytes
            backend.attend(q, cache.arena, cache.fmt, offset, cache.tables, batch, scale=0.125)

    times = measure([functools.partial(step, backend) for backend in backends.values()], rounds)
    return dict(zip(backends, times, strict=True))


COLUMNS = (("ours ms", 9), ("torch ms", 9), ("ratio", 6), ("bound ms", 9), ("reached", 8), ("GB/s", 6), ("GFLOP/s", 8))
HEADER = f"{'cell':42} " + " ".join(f"{title:>{width}}" for title, width in COLUMNS)


def compare_ragged(rounds: int) -> dict[str, float]:
    """Milliseconds of decode attention in all layers of SmolLM2, in bf16, over batches of as many cached tokens."""
    backend = CpuBackend()
    cache = Cache(backend, SMOLLM2, 1, max(sum(lengths) for lengths in RAGGED), torch.bfloat16)
    every = cache.tables.flatten()

    def job(lengths: tuple[int, ...]) -> Callable[[], None]:
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
        for row, part in enumerate(every[: sum(blocks)].split(blocks)):
            tables[row, : len(part)] = part
        batch = QueryBatch.build([1] * len(lengths), [length - 1 for length in lengths], CPU)
        q = torch.randn(batch.num_tokens, SMOLLM2.query_heads, SMOLLM2.dim).bfloat16()

        def run() -> None:
            for layer in cache.layers:
                backend.attend(
                    q, cache.arena, cache.fmt, layer * cache.fmt.layer_bytes, tables, batch, scale=SMOLLM2.dim**-0.5
                )

        return run

    names = [
        ", ".join(f"{lengths.count(length)} × {length}" for length in sorted(set(lengths), reverse=True))
        for lengths in RAGGED
    ]
    return dict(zip(names, measure([job(lengths) for lengths in RAGGED], rounds), strict=True))


def show(cell: Cell) -> None:
    print(
        f"{cell.name:42} {cell.ours_ms:9.2f} {cell.torch_ms:9.2f} {cell.torch_ms / cell.ours_ms:6.2f} "
        f"{cell.bound_ms:9.2f} {cell.bound_ms / cell.ours_ms:8.0%} {cell.gb / cell.ours_ms * 1e3:6.1f} "
        f"{cell.gflop / cell.ours_ms * 1e3:8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, the table on stderr")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--isa", help="variant to use (default: the fastest)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--match", default="", help="only cells whose name contains this")
    parser.add_argument("--pools", action="store_true", help="compare thread pools instead")
    parser.add_argument("--ragged", action="store_true", help="compare batches of unequal lengths instead")
    options = parser.parse_args()
    if options.pools or options.ragged:
        result = compare_pools(options.rounds) if options.pools else compare_ragged(options.rounds)
        width = max(map(len, result))
        print(json.dumps(result) if options.json else "\n".join(f"{k:{width}} {v:8.2f} ms" for k, v in result.items()))
        return
    output, sys.stdout = sys.stdout, sys.stderr if options.json else sys.stdout

    torch.manual_seed(0)
    backend = CpuBackend(isa=options.isa)
    dtype = getattr(torch, options.dtype)
    bandwidth = read_bandwidth(options.rounds)
    peaks = {str(t).removeprefix("torch."): matrix_peak(t, options.rounds) for t in (torch.float32, torch.bfloat16)}
    peak = max(peaks.values())
    print(
        f"variant {backend.variant}, {backend.num_threads} threads, shared with torch: {backend.shares_torch_threads}\n"
        f"read bandwidth {bandwidth:.1f} GB/s, matrix peak "
        + ", ".join(f"{name} {value:.0f} GFLOP/s" for name, value in peaks.items()),
        flush=True,
    )
    jobs = []
    for shape in (SMOLLM2, GEMMA3, GEMMA3_WINDOW):
        if options.only != "prefill":
            jobs += [(shape, sequences, context, 1) for sequences, context in DECODE]
        if options.only != "decode":
            jobs += [(shape, 1, context, CHUNK) for context in PREFILL]
    cells = []
    print(HEADER)
    for shape, sequences, context, new_tokens in jobs:
        if options.match not in f"{shape.name}, {sequences} × {context}":
            continue
        rounds = options.rounds if new_tokens == 1 else math.ceil(options.rounds / 2)
        cells.append(run_cell(backend, shape, sequences, context, new_tokens, dtype, bandwidth, peak, rounds))
        show(cells[-1])
    if options.json:
        machine = {"variant": backend.variant, "threads": backend.num_threads, "dtype": options.dtype}
        machine |= {"bandwidth_gb_s": bandwidth, "peak_gflop_s": peaks}
        print(json.dumps({"machine": machine, "cells": [asdict(cell) for cell in cells]}, indent=1), file=output)


if __name__ == "__main__":
    main()
