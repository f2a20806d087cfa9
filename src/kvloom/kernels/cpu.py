"""The native CPU backend: kernels of ``kvloom._cpu`` on the arena's blocks (see docs/kernels.md).

A query row's arithmetic is fixed by its query, its position and its keys alone, whatever else is in
the call and however many threads work on it; ``deterministic`` therefore changes nothing here but
what happens in a fallback. What the native code cannot read falls back to the reference backend on
the same bytes, and is counted in ``CpuBackend.fallbacks``.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from kvloom import _cpu
from kvloom.core.errors import ConfigError
from kvloom.kernels.coded import METHODS, native_codes, native_encoder, removed_mean, removed_means
from kvloom.kernels.decoded import DecodedBlocks, decoded_format
from kvloom.kernels.ops import EVERY_KEY, BlockFormat, KeyRange, Order, PlaneFormat, QueryBatch
from kvloom.kernels.packing import DTYPE_CODES
from kvloom.kernels.reference import ReferenceBackend

ISA_VARIABLE = "KVLOOM_CPU_ISA"

# Least and most channels of a plane; between them, multiples of 8.
_DIMS = {
    "k": (_cpu.MIN_DIM, _cpu.MAX_DIM),
    "v": (_cpu.MIN_DIM, _cpu.MAX_DIM),
    "latent": (_cpu.MIN_DIM, _cpu.MAX_LATENT_DIM),
    "rope": (8, _cpu.MAX_DIM),
}
_OWN_POOL = 0
_KEPT_BATCHES = 4  # a step has one per layer group
_Shared = tuple[torch.Tensor, torch.Tensor, QueryBatch]


def make(*, deterministic: bool, num_threads: int) -> CpuBackend:
    """The native backend with ``num_threads`` threads (0: as many as torch uses)."""
    return CpuBackend(deterministic=deterministic, num_threads=num_threads)


def find_gomp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded, 0 if there is none.

    Only libraries already mapped into this process are looked at: loading a second runtime is what
    sharing avoids.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return _OWN_POOL
    paths = re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*)$", maps, flags=re.MULTILINE)
    mapped = dict.fromkeys(paths)
    for path in sorted(mapped, key=lambda path: "torch" not in path):  # torch's own first
        try:
            function = ctypes.CDLL(path, mode=os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or _OWN_POOL
    return _OWN_POOL


def choose_variant(name: str | None) -> str:
    """The variant that ``name`` asks for, else the environment, else the fastest this CPU has.

    Raises:
        ConfigError: this CPU or build lacks it.
    """
    available = _cpu.variant_names()
    asked = name or os.environ.get(ISA_VARIABLE) or available[-1]
    if asked not in available:
        raise ConfigError(f"{ISA_VARIABLE} is {asked!r}; this CPU has {', '.join(available)}")
    return asked


class CpuBackend:
    """See the module; signatures are documented on ``ops.KernelBackend``.

    Args:
        deterministic: passed to the reference backend that takes what the native code cannot.
        num_threads: threads of a call, 0 for torch's number. Keep it equal to torch's: the shared
            pool is rebuilt whenever the number changes from one call to the next.
        isa: portable, avx2, avx512 or avx512bf16; None: ``KVLOOM_CPU_ISA``, else the fastest.
        gomp_parallel: address of the OpenMP entry to run threads with, 0 for our own pool; None:
            torch's, if found.
    """

    name = "cpu"

    def __init__(
        self,
        *,
        deterministic: bool = False,
        num_threads: int = 0,
        isa: str | None = None,
        gomp_parallel: int | None = None,
    ) -> None:
        self.variant = choose_variant(isa)
        self.num_threads = num_threads if num_threads > 0 else torch.get_num_threads()
        self.shares_torch_threads = gomp_parallel is None
        if gomp_parallel is None:
            gomp_parallel = find_gomp_parallel()
            self.shares_torch_threads = gomp_parallel != _OWN_POOL
        self.gomp_parallel = gomp_parallel
        self._width = _cpu.vector_lanes(self.variant)
        self.fallbacks: Counter[str] = Counter()
        self._kernels = _cpu.Kernels(self.variant, self.num_threads, gomp_parallel)
        self._reference = ReferenceBackend(deterministic=deterministic)
        self._raw_formats: dict[int, tuple[BlockFormat, BlockFormat]] = {}  # of encoded ones that are decoded first
        self._decoded: tuple[_Decoding, DecodedBlocks] | None = None
        # By identity: hashing a format takes longer than a small call. The format is kept, so its id stays its own.
        self._formats: dict[tuple[int, int], tuple[BlockFormat, str | None, _cpu.Format | None]] = {}
        self._encoders: dict[tuple[int, int], tuple[BlockFormat, BlockFormat, _BlockEncoder | None]] = {}
        # The same for what all layers of a step share.
        self._batches: dict[tuple[int, int, int], tuple[_Shared, _cpu.Batch]] = {}

    def plane_order(self, plane: str, dtype: torch.dtype, dim: int, block_size: int) -> tuple[Order, int]:
        """K channel-major and V token-major, bf16 in pairs: the same on every CPU, so bytes can move.

        A rope plane lies as K does, a latent as V: outputs are sums of latents (csrc/latent.h).
        """
        if plane not in _DIMS or dtype not in DTYPE_CODES or not _dim_supported(plane, dim):
            return self._reference.plane_order(plane, dtype, dim, block_size)
        return ("channel" if plane in ("k", "rope") else "token"), (2 if dtype == torch.bfloat16 else 1)

    def unsupported(self, fmt: BlockFormat, num_query_heads: int) -> str | None:
        return self._lookup(fmt, num_query_heads)[0]

    def write(
        self,
        values: Sequence[torch.Tensor],
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
    ) -> None:
        reason, native = self._lookup(fmt, fmt.num_heads)
        if native is None:
            self.fallbacks[f"write: {reason}"] += 1
            return self._reference.write(values, arena, fmt, layer_offset, tables, batch)
        k, v = _key_first(
            [
                _rows(
                    rows if rows.dtype in DTYPE_CODES else rows.to(plane.dtype),
                    batch.num_tokens,
                    fmt.num_heads,
                    plane.dim,
                )
                for plane, rows in zip(fmt.planes, values, strict=True)
            ],
            fmt,
        )
        self._kernels.write(
            native, self._batch(arena, tables, batch), layer_offset,
            k.data_ptr(), DTYPE_CODES[k.dtype], k.stride(0), k.stride(1),
            v.data_ptr(), DTYPE_CODES[v.dtype], v.stride(0), v.stride(1),
        )  # fmt: skip

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
        encoder = self.block_encoder(raw, encoded)
        if encoder is None:
            self.fallbacks[f"encode: {self._encode_reason(raw, encoded)}"] += 1
            return self._reference.encode(arena, raw, encoded, index, raw_offsets, encoded_offsets, first_positions)
        bad: int = self._kernels.encode(
            encoder, self.encode_task(raw_offsets, encoded_offsets), index, arena.data_ptr(), arena.numel()
        )
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
        reason = self.unread(fmt, num_query_heads, capped=bool(softcap))
        if reason is None and q.dtype not in DTYPE_CODES:
            reason = f"queries are {q.dtype}"
        native = self._lookup(fmt, num_query_heads)[1] if reason is None else None
        if native is None and q.dtype in DTYPE_CODES and self.decodes(fmt, num_query_heads):
            self.fallbacks[f"decode: {reason}"] += 1
            blocks = self.decoded_blocks(fmt, tables, batch, keys, window)
            blocks.fill(arena, layer_offset)
            return self.attend(
                q, blocks.arena, blocks.format, 0, blocks.tables, batch, scale=scale, window=window, softcap=softcap,
                sinks=sinks, keys=keys, want_lse=want_lse,
            )  # fmt: skip
        if native is None:
            self.fallbacks[f"attend: {reason}"] += 1
            return self._reference.attend(
                q, arena, fmt, layer_offset, tables, batch, scale=scale, window=window, softcap=softcap, sinks=sinks,
                keys=keys, want_lse=want_lse,
            )  # fmt: skip
        plain, dtype = q, q.dtype
        coded = any(plane.codec is not None for plane in fmt.planes)
        if coded:
            q = _turned_queries(q.float(), fmt.planes[0], fmt.layers[layer_offset // fmt.layer_bytes])
        q = _rows(q, batch.num_tokens, num_query_heads, fmt.planes[0].dim)
        out = torch.empty(num_tokens, num_query_heads, fmt.planes[1].dim, dtype=torch.float32 if want_lse else q.dtype)
        lse = torch.empty(num_tokens, num_query_heads, dtype=torch.float32) if want_lse else None
        if sinks is not None:
            if sinks.shape != (num_query_heads,):
                raise ValueError(f"sinks are {tuple(sinks.shape)}; expected ({num_query_heads},)")
            sinks = sinks.to(torch.float32).contiguous()
        self._kernels.attend(
            native, self._batch(arena, tables, batch), layer_offset,
            q.data_ptr(), DTYPE_CODES[q.dtype], q.stride(0), q.stride(1), num_query_heads,
            out.data_ptr(), DTYPE_CODES[out.dtype], 0 if lse is None else lse.data_ptr(),
            scale, softcap or 0.0, 0 if sinks is None else sinks.data_ptr(),
            -1 if window is None else window,
            keys.first_block, -1 if keys.end_block is None else keys.end_block,
            keys.min_lag, -1 if keys.max_lag is None else keys.max_lag,
        )  # fmt: skip
        if coded:
            out = _turned_back(out, fmt.planes[1])
            if lse is not None:
                _add_mean(lse, plain, fmt, layer_offset, scale)
            elif out.dtype != dtype:
                out = out.to(dtype)
        return out, lse

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
        num_tokens, num_query_heads, latent_dim = q_latent.shape
        reason, native = self._lookup(fmt, num_query_heads)
        known = q_latent.dtype in DTYPE_CODES and q_rope.dtype == q_latent.dtype
        if not known:
            reason, native = f"queries are {q_latent.dtype} and {q_rope.dtype}", None
        if native is None and known and self.decodes(fmt, num_query_heads):
            self.fallbacks[f"decode: {reason}"] += 1
            blocks = self.decoded_blocks(fmt, tables, batch, keys)
            blocks.fill(arena, layer_offset)
            return self.attend_latent(
                q_latent, q_rope, blocks.arena, blocks.format, 0, blocks.tables, batch, scale=scale, keys=keys,
                want_lse=want_lse,
            )  # fmt: skip
        if native is None:
            self.fallbacks[f"attend_latent: {reason}"] += 1
            return self._reference.attend_latent(
                q_latent, q_rope, arena, fmt, layer_offset, tables, batch, scale=scale, keys=keys, want_lse=want_lse
            )
        latent, rope = (
            _rows(q, batch.num_tokens, num_query_heads, plane.dim)
            for q, plane in zip((q_latent, q_rope), fmt.planes, strict=True)
        )
        out = torch.empty(num_tokens, num_query_heads, latent_dim, dtype=torch.float32 if want_lse else q_latent.dtype)
        lse = torch.empty(num_tokens, num_query_heads, dtype=torch.float32) if want_lse else None
        self._kernels.attend_latent(
            native, self._batch(arena, tables, batch), layer_offset, DTYPE_CODES[latent.dtype],
            latent.data_ptr(), latent.stride(0), latent.stride(1),
            rope.data_ptr(), rope.stride(0), rope.stride(1), num_query_heads,
            out.data_ptr(), DTYPE_CODES[out.dtype], 0 if lse is None else lse.data_ptr(), scale,
            keys.first_block, -1 if keys.end_block is None else keys.end_block,
            keys.min_lag, -1 if keys.max_lag is None else keys.max_lag,
        )  # fmt: skip
        return out, lse

    def unread(self, fmt: BlockFormat, num_query_heads: int, *, capped: bool) -> str | None:
        """Why blocks of ``fmt`` are not read natively as they lie, or None. ``capped``: logits have a softcap."""
        reason = self._lookup(fmt, num_query_heads)[0]
        if reason is None and capped and _removes_mean(fmt):
            reason = "a softcap needs the keys' mean in every logit"
        return reason

    def decodes(self, fmt: BlockFormat, num_query_heads: int) -> bool:
        """Whether the blocks of an encoded ``fmt``, decoded by PyTorch, can be read natively."""
        return fmt.is_encoded and self._lookup(self._raw_format(fmt), num_query_heads)[0] is None

    def decoded_blocks(
        self,
        fmt: BlockFormat,
        tables: torch.Tensor,
        batch: QueryBatch,
        keys: KeyRange = EVERY_KEY,
        window: int | None = None,
    ) -> DecodedBlocks:
        """What ``batch`` reads of encoded blocks, to be decoded layer by layer; the last one asked for is kept."""
        asked = _Decoding(fmt, tables, batch, keys, window)
        before = self._decoded
        if before is not None and before[0].same(asked):
            return before[1]
        memory = None if before is None else before[1].arena
        blocks = DecodedBlocks(fmt, self._raw_format(fmt), tables, batch, keys, window, memory)
        self._decoded = (asked, blocks)
        return blocks

    def _raw_format(self, fmt: BlockFormat) -> BlockFormat:
        found = self._raw_formats.get(id(fmt))
        if found is None or found[0] is not fmt:
            found = self._raw_formats[id(fmt)] = (fmt, decoded_format(fmt, self.plane_order))
        return found[1]

    def native_format(self, fmt: BlockFormat, num_query_heads: int) -> _cpu.Format:
        """``fmt`` as native code takes it.

        Raises:
            ValueError: it is not read natively; ``unsupported`` says so beforehand.
        """
        reason, native = self._lookup(fmt, num_query_heads)
        if native is None:
            raise ValueError(f"no native kernel: {reason}")
        return native

    def block_encoder(self, raw: BlockFormat, encoded: BlockFormat) -> _cpu.BlockEncoder | None:
        """What makes blocks of ``encoded`` from those of ``raw``, None where native code cannot."""
        key = (id(raw), id(encoded))
        found = self._encoders.get(key)
        if found is None or found[0] is not raw or found[1] is not encoded:
            made = None
            if self._encode_reason(raw, encoded) is None:
                made = _BlockEncoder(
                    self.native_format(raw, raw.num_heads), self.native_format(encoded, raw.num_heads), encoded
                )
            found = self._encoders[key] = (raw, encoded, made)
        return None if found[2] is None else found[2].native

    def _encode_reason(self, raw: BlockFormat, encoded: BlockFormat) -> str | None:
        """Why native code does not encode blocks of ``raw`` as ``encoded``, or None."""
        for fmt in (raw, encoded):
            reason = self._lookup(fmt, fmt.num_heads)[0]
            if reason is not None:
                return reason
        for source, plane in zip(raw.planes, encoded.planes, strict=True):
            if plane.codec is None:
                if (source.dtype, source.order, source.pack) != (plane.dtype, plane.order, plane.pack):
                    return f"plane {plane.name} is raw in both and lies differently"
            elif native_encoder(plane) is None:
                return f"plane {plane.name} under codec {plane.codec.name} has no native encoder"
        return None

    @staticmethod
    def encode_task(raw_offsets: torch.Tensor, encoded_offsets: torch.Tensor) -> _cpu.EncodeTask:
        """Spans to encode by address: int64 [N] each, contiguous, alive while it is used."""
        if not raw_offsets.is_contiguous() or not encoded_offsets.is_contiguous():
            raise ValueError("offsets of spans to encode must be contiguous")
        return _cpu.EncodeTask(raw_offsets.data_ptr(), encoded_offsets.data_ptr(), len(raw_offsets))

    def native_batch(self, arena: torch.Tensor, tables: torch.Tensor, batch: QueryBatch) -> _cpu.Batch:
        """A call's arena, tables and query tokens by address; the arguments must stay alive while it is used."""
        return self._batch(arena, tables, batch)

    def _lookup(self, fmt: BlockFormat, num_query_heads: int) -> tuple[str | None, _cpu.Format | None]:
        """Why ``fmt`` is not read natively, or None and its native description."""
        key = (id(fmt), num_query_heads)
        found = self._formats.get(key)
        if found is None or found[0] is not fmt:
            reason = self._reason(fmt, num_query_heads)
            native = None
            if reason is None:
                k, v = _key_first(fmt.planes, fmt)
                raw = [plane.dtype for plane in (k, v) if plane.codec is None]
                native = _cpu.Format(
                    DTYPE_CODES[raw[0] if raw else torch.float32], fmt.block_size, fmt.num_heads, k.dim, v.dim,
                    k.offset, v.offset, fmt.block_bytes, fmt.layer_bytes,
                )  # fmt: skip
                for is_value, plane in ((False, k), (True, v)):
                    if plane.codec is not None:
                        _set_codes(native, is_value, plane)
            found = self._formats[key] = (fmt, reason, native)
        return found[1], found[2]

    def _batch(self, arena: torch.Tensor, tables: torch.Tensor, batch: QueryBatch) -> _cpu.Batch:
        key = (id(arena), id(tables), id(batch))
        found = self._batches.get(key)
        if found is None:
            found = ((arena, tables, batch), _make_batch(arena, tables, batch))
            if len(self._batches) >= _KEPT_BATCHES:
                self._batches = {}
            self._batches[key] = found
        return found[1]

    def _reason(self, fmt: BlockFormat, num_query_heads: int) -> str | None:
        names = tuple(plane.name for plane in fmt.planes)
        if names not in (("k", "v"), ("latent", "rope")):
            return f"planes are {', '.join(names)}; native kernels read k, v or latent, rope"
        if names == ("latent", "rope") and fmt.num_heads != 1:
            return f"{fmt.num_heads} heads have a latent each; native kernels read one that all share"
        if fmt.num_heads < 1 or num_query_heads % fmt.num_heads:
            return f"{num_query_heads} query heads are not a multiple of {fmt.num_heads} KV heads"
        if fmt.block_size < 8 or _cpu.CHUNK % fmt.block_size:
            return f"block size {fmt.block_size} is not a power of two from 8 to {_cpu.CHUNK}"
        coded = any(plane.codec is not None for plane in fmt.planes)
        if coded and names != ("k", "v"):
            return "encoded latents are not read natively"
        if not coded and fmt.planes[0].dtype != fmt.planes[1].dtype:
            stored = " and ".join(f"{plane.name} is stored as {plane.dtype}" for plane in fmt.planes)
            return f"{stored}, not alike"
        if fmt.block_bytes % 4 or fmt.layer_bytes % 4:
            return "blocks are not aligned to 4 bytes"
        for plane in fmt.planes:
            if plane.codec is not None:
                reason = _coded_reason(plane, fmt.block_size, self._width)
                if reason is not None:
                    return reason
                continue
            if plane.dtype not in DTYPE_CODES:
                return f"plane {plane.name} is stored as {plane.dtype}"
            if not _dim_supported(plane.name, plane.dim):
                least, most = _DIMS[plane.name]
                return f"plane {plane.name} has dim {plane.dim}; supported: multiples of 8, {least} to {most}"
            wanted = self.plane_order(plane.name, plane.dtype, plane.dim, fmt.block_size)
            if (plane.order, plane.pack) != wanted:
                return f"plane {plane.name} is laid out as {plane.order}/{plane.pack}, not {wanted[0]}/{wanted[1]}"
            if plane.offset % 4:
                return f"plane {plane.name} is not aligned to 4 bytes"
        return None


@dataclass(frozen=True, eq=False, slots=True)
class _Decoding:
    """What ``decoded_blocks`` was asked for."""

    fmt: BlockFormat
    tables: torch.Tensor
    batch: QueryBatch
    keys: KeyRange
    window: int | None

    def same(self, other: _Decoding) -> bool:
        """Objects by identity: they are not changed while a pass runs."""
        alike = self.fmt is other.fmt and self.tables is other.tables and self.batch is other.batch
        return alike and (self.keys, self.window) == (other.keys, other.window)


class _BlockEncoder:
    """A native encoder and the tensors that it holds by address."""

    def __init__(self, raw: _cpu.Format, coded: _cpu.Format, encoded: BlockFormat) -> None:
        self.native = _cpu.BlockEncoder(raw, coded)
        self._kept: list[torch.Tensor] = []
        for is_value, plane in enumerate(encoded.planes):
            encoder = native_encoder(plane)
            if encoder is None:
                continue
            self.native.set_plane(
                bool(is_value),
                METHODS.index(encoder.method),
                encoder.rotated,
                self._address(encoder.signs),
                self._address(removed_means(plane, encoded.layers)),
                self._address(torch.tensor(encoder.stretch)),
                self._address(torch.tensor(encoder.edges)),
                self._address(_by_layer(encoder.transforms, encoded.layers)),
                self._address(_by_layer(encoder.weights, encoded.layers)),
            )

    def _address(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()


def _by_layer(of_layer: Callable[[int], torch.Tensor] | None, layers: Sequence[int]) -> torch.Tensor | None:
    return None if of_layer is None else torch.stack([of_layer(layer) for layer in layers])


def _coded_reason(plane: PlaneFormat, block_size: int, width: int) -> str | None:
    """Why a vector of ``width`` lanes cannot read an encoded plane, or None."""
    assert plane.codec is not None
    codes, what = native_codes(plane), f"plane {plane.name} under codec {plane.codec.name}"
    if codes is None:
        return f"{what} has no native reading"
    if not _dim_supported("k", plane.dim):
        return f"{what} has dim {plane.dim}; supported: multiples of 8, {_DIMS['k'][0]} to {_DIMS['k'][1]}"
    keys = plane.name == "k"
    units = block_size if keys else plane.dim
    # Rows of values' codes fill whole vectors of bytes; what is read beyond keys' rows of 16 tokens is not used.
    lanes = width if codes.exponent_bits else 16 if keys else 2 * width
    if units % lanes:
        return f"{what} has {units} {'tokens a block' if keys else 'channels'}, no multiple of {lanes}"
    for part in codes.parts:
        pairs, rows = (part.channels if keys else block_size), {8: 2, 4: 4, 3: 16, 2: 8, 1: 16}[part.bits]
        if not codes.exponent_bits and pairs % rows:
            return f"{what} has {pairs} {'channels' if keys else 'tokens a block'}, no multiple of {rows}"
    # Groups of channels are columns of values, and pairs of rows of keys.
    if plane.dim % width or (plane.dim // codes.token_groups) % (2 if keys else width) or block_size % width:
        return f"{what} has groups of {plane.dim // codes.token_groups} channels, no multiple of {width}"
    return None


def _set_codes(native: _cpu.Format, is_value: bool, plane: PlaneFormat) -> None:
    codes = native_codes(plane)
    assert codes is not None

    def place(offset: int) -> int:
        return offset if offset < 0 else offset + plane.offset

    for part in codes.parts:
        native.add_part(is_value, part.bits, part.channels, list(part.levels), [place(at) for at in part.codes])
    native.set_codes(
        is_value,
        codes.exponent_bits,
        codes.center,
        codes.token_groups,
        place(codes.token_scale),
        place(codes.token_offset),
        place(codes.channel_scale),
        place(codes.channel_offset),
    )


def _turned_queries(q: torch.Tensor, plane: PlaneFormat, layer: int) -> torch.Tensor:
    """Queries [T, query heads, dim] in the directions that keys of the model's ``layer`` are coded in."""
    codes = native_codes(plane)
    if codes is None:
        return q
    if codes.query_turns is not None:
        turns = codes.query_turns(layer)  # [heads, dim, dim]
        grouped = q.unflatten(1, (len(turns), -1))
        return torch.einsum("thgd,hde->thge", grouped, turns).flatten(1, 2)
    return q if codes.turn is None else q @ codes.turn


def _turned_back(rows: torch.Tensor, plane: PlaneFormat) -> torch.Tensor:
    """Outputs back from the directions that values are coded in."""
    codes = native_codes(plane)
    return rows if codes is None or codes.turn is None else rows @ codes.turn.T


def _removes_mean(fmt: BlockFormat) -> bool:
    codec = fmt.planes[0].codec
    return codec is not None and removed_mean(codec, fmt.layers[0]) is not None


def _add_mean(lse: torch.Tensor, q: torch.Tensor, fmt: BlockFormat, layer_offset: int, scale: float) -> None:
    """What the keys' removed mean adds to every logit of a query: ``scale * q·mean``."""
    mean = removed_mean(fmt.planes[0].codec, fmt.layers[layer_offset // fmt.layer_bytes])
    if mean is None:
        return
    heads = mean.repeat_interleave(q.shape[1] // fmt.num_heads, dim=0)
    lse += scale * (q.float() * heads).sum(-1)


def _dim_supported(plane: str, dim: int) -> bool:
    least, most = _DIMS[plane]
    return dim % 8 == 0 and least <= dim <= most


_Item = TypeVar("_Item")


def _key_first(items: Sequence[_Item], fmt: BlockFormat) -> tuple[_Item, _Item]:
    """One item per plane, in the order of the native code: what lies as K does, then what lies as V."""
    first, second = items
    return (second, first) if fmt.planes[0].name == "latent" else (first, second)


def _rows(rows: torch.Tensor, num_tokens: int, num_heads: int, dim: int) -> torch.Tensor:
    """``rows`` [num_tokens, num_heads, dim], its shape checked and its last dimension contiguous."""
    if rows.shape != (num_tokens, num_heads, dim):
        raise ValueError(f"rows are {tuple(rows.shape)}; expected {(num_tokens, num_heads, dim)}")
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _make_batch(arena: torch.Tensor, tables: torch.Tensor, batch: QueryBatch) -> _cpu.Batch:
    """Addresses of a call's arena, tables and host arrays; the caller keeps these alive."""
    if tables.dtype != torch.int64 or arena.dtype != torch.uint8 or tables.shape[0] != batch.num_sequences:
        raise ValueError(
            f"tables are {tables.dtype} {tuple(tables.shape)} and the arena {arena.dtype}; "
            f"expected int64 [{batch.num_sequences}, max_blocks] and uint8"
        )
    for array in (batch.query_start_host, batch.first_position_host):
        if array.dtype != np.int32 or not array.flags.c_contiguous:
            raise ValueError("the batch's host arrays must be contiguous int32")
    if tables.stride(1) != 1 and tables.shape[1] > 1:
        raise ValueError("a sequence's row of the block table must be contiguous")
    return _cpu.Batch(
        arena.data_ptr(), arena.numel(),
        tables.data_ptr(), tables.stride(0), tables.shape[1],
        batch.query_start_host.ctypes.data, batch.first_position_host.ctypes.data, batch.num_sequences,
    )  # fmt: skip
