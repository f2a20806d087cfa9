"""Native attention over encoded blocks equals attention over the decoded ones, in every variant of the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvloom import _cpu
from kvloom.codecs import make_codec
from kvloom.codecs.base import BlockCodec
from kvloom.codecs.kernel_layout import KernelLayout, for_kernels
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import QueryBatch
from tests.codecs.world import LAYER, calibration

PAIRS = [
    *[
        (name, name)
        for name in (
            "fp8",
            "fp8_e5m2",
            "int8",
            "int4",
            "turboquant4",
            "turboquant3",
            "turboquant2",
            "loom4",
            "loom3",
            "loom2",
        )
    ],
    ("kivi2.key", "kivi2.value"),
    ("kivi4.key", "kivi4.value"),
    ("q8_0", "q4_0"),
    ("q4_0", "q8_0"),
    ("kvarn4.key", "kvarn2.value"),
    ("turboquant3", "int8"),
    ("fp8", "int4"),
]
HEADS, QUERY_HEADS = 3, 9


@dataclass
class World:
    """Sequences of whole encoded blocks in an arena, and what they decode to [sequences, heads, tokens, dim]."""

    fmt: _cpu.Format
    arena: torch.Tensor
    tables: torch.Tensor
    key: KernelLayout
    value: KernelLayout
    keys: torch.Tensor
    values: torch.Tensor


def layout_of(name: str, plane: str, dim: int, size: int) -> KernelLayout:
    codec = make_codec(name, plane, dim, size, calibration(dim, HEADS) if name.startswith("loom") else None, None)
    assert isinstance(codec, BlockCodec)
    found = for_kernels(codec)
    assert found is not None
    return found


def make_world(names: tuple[str, str], dim: int, size: int, sequences: int, blocks: int) -> World:
    generator = torch.Generator().manual_seed(1)
    key, value = layout_of(names[0], "k", dim, size), layout_of(names[1], "v", dim, size)
    value_at = -(-key.num_bytes // 64) * 64
    block_bytes = value_at + -(-value.num_bytes // 64) * 64
    count = sequences * blocks
    rows = [torch.randn(count, HEADS, size, dim, generator=generator) for _ in range(2)]
    encoded = [codec.encode(x, layer=LAYER) for codec, x in zip((key, value), rows, strict=True)]
    memory = torch.full((count * HEADS * block_bytes + 64,), 0xFF, dtype=torch.uint8)
    arena = memory[-memory.data_ptr() % 64 :][: count * HEADS * block_bytes]
    view = arena.view(count, HEADS, block_bytes)
    view[:, :, : key.num_bytes] = encoded[0]
    view[:, :, value_at : value_at + value.num_bytes] = encoded[1]
    fmt = _cpu.Format(0, size, HEADS, dim, dim, 0, value_at, block_bytes, HEADS * block_bytes)
    for is_value, codec, start in ((False, key, 0), (True, value, value_at)):
        codes = codec.native
        fields = (codes.token_scale, codes.token_offset, codes.channel_scale, codes.channel_offset)
        for part in codes.parts:
            places = [at + start for at in part.codes]
            fmt.add_part(is_value, part.bits, part.channels, list(part.levels), places)
        fmt.set_codes(
            is_value,
            codes.exponent_bits,
            codes.center,
            codes.token_groups,
            *(at if at < 0 else at + start for at in fields),
        )

    def decoded(codec: KernelLayout, data: torch.Tensor) -> torch.Tensor:
        x = codec.decode(data, layer=LAYER)
        mean = codec.removed_mean(LAYER)
        if mean is not None:
            x = x - mean.unsqueeze(1)
        return x.view(sequences, blocks, HEADS, size, dim).transpose(1, 2).flatten(2, 3)

    tables = (torch.arange(count, dtype=torch.int64) * HEADS * block_bytes).view(sequences, blocks)
    return World(fmt, arena, tables, key, value, decoded(key, encoded[0]), decoded(value, encoded[1]))


def turn_queries(world: World, q: torch.Tensor) -> torch.Tensor:
    native = world.key.native
    turned = q
    if native.query_turns is not None:
        turned = torch.einsum("thgd,hde->thge", q.unflatten(1, (HEADS, -1)), native.query_turns(LAYER)).flatten(1, 2)
    elif native.turn is not None:
        turned = q @ native.turn
    return turned.contiguous()


def attend_turned(
    backend: CpuBackend, world: World, turned: torch.Tensor, rows: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over all blocks, each sequence's queries standing behind its last block; outputs are not turned back."""
    sequences, blocks = world.tables.shape
    batch = QueryBatch.build([rows] * sequences, [length] * sequences, torch.device("cpu"))
    out, lse = torch.empty_like(turned), torch.empty(turned.shape[:2])
    backend._kernels.attend(
        world.fmt, backend.native_batch(world.arena, world.tables, batch), 0,
        turned.data_ptr(), 0, turned.stride(0), turned.stride(1), QUERY_HEADS,
        out.data_ptr(), 0, lse.data_ptr(), turned.shape[-1] ** -0.5, 0.0, 0, -1, 0, blocks, 1, -1,
    )  # fmt: skip
    return out, lse


def attend(
    backend: CpuBackend, world: World, q: torch.Tensor, rows: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend_turned(backend, world, turn_queries(world, q), rows, length)
    turn = world.value.native.turn
    return (out if turn is None else out @ turn.T), lse


def expected(world: World, q: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, dim = world.tables.shape[0], q.shape[-1]
    grouped = q.double().view(sequences, rows, HEADS, QUERY_HEADS // HEADS, dim).permute(0, 2, 3, 1, 4)
    logits = torch.einsum("shgrd,shtd->shgrt", grouped, world.keys.double()) * dim**-0.5
    out = torch.einsum("shgrt,shtd->shgrd", logits.softmax(-1), world.values.double())
    lse = logits.logsumexp(-1).permute(0, 3, 1, 2).flatten(2)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape), lse.reshape(q.shape[:2])


@pytest.mark.parametrize("variant", _cpu.variant_names())
@pytest.mark.parametrize("names", PAIRS)
def test_equals_attention_over_decoded_blocks(names: tuple[str, str], variant: str) -> None:
    backend = CpuBackend(num_threads=2, isa=variant)
    for dim, size, rows in ((64, 16, 1), (64, 16, 7), (64, 32, 1), (64, 32, 7), (128, 64, 23), (256, 32, 2)):
        world = make_world(names, dim, size, sequences=2, blocks=512 // size)
        q = torch.randn(2 * rows, QUERY_HEADS, dim, generator=torch.Generator().manual_seed(2))
        out, lse = attend(backend, world, q, rows, 512)
        right, right_lse = expected(world, q, rows)
        # Weights are rounded to 15 bits of the largest: far below what any of these codecs loses.
        assert float((out - right).abs().max() / right.abs().max()) < 1e-3
        assert float((lse - right_lse).abs().max()) < 1e-3


@pytest.mark.parametrize("rows", [1, 3])  # times the heads of a group: few enough for registers, and more
@pytest.mark.parametrize(
    "names",
    [
        ("int8", "int8"),
        ("fp8", "fp8"),
        ("q8_0", "q4_0"),
        ("int4", "int4"),
        ("loom3", "turboquant3"),
        ("kivi2.key", "kivi2.value"),
        ("kvarn4.key", "kvarn4.value"),
    ],
)
def test_bits_do_not_depend_on_batch_threads_or_sharing(names: tuple[str, str], rows: int) -> None:
    world = make_world(names, 64, 32, sequences=4, blocks=24)
    world.tables[2:, :16] = world.tables[1, :16]  # two prefixes in common, then apart
    q = torch.randn(4 * rows, QUERY_HEADS, 64, generator=torch.Generator().manual_seed(3))
    turned = turn_queries(world, q)
    together = attend_turned(CpuBackend(num_threads=2), world, turned, rows, 24 * 32)
    for at in range(4):
        own = slice(at * rows, (at + 1) * rows)
        alone = World(**(world.__dict__ | {"tables": world.tables[at : at + 1].contiguous()}))
        out, lse = attend_turned(CpuBackend(num_threads=1), alone, turned[own].contiguous(), rows, 24 * 32)
        assert torch.equal(out, together[0][own])
        assert torch.equal(lse, together[1][own])


@pytest.mark.parametrize("variant", _cpu.variant_names())
@pytest.mark.parametrize("names", [("int8", "int8"), ("turboquant4", "turboquant4"), ("kivi2.key", "kivi2.value")])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(names: tuple[str, str], variant: str, number: float) -> None:
    """One element of one query: its row's outputs are NaN, whichever lane of whichever vector it is in."""
    backend = CpuBackend(num_threads=1, isa=variant)
    world = make_world(names, 64, 32, sequences=1, blocks=2)
    for rows in (1, 3):
        for element in (0, 10, 33, 63):
            q = torch.randn(rows, QUERY_HEADS, 64, generator=torch.Generator().manual_seed(4))
            right, _ = attend_turned(backend, world, q, rows, 64)
            q[0, 4, element] = number
            out, _ = attend_turned(backend, world, q, rows, 64)
            assert bool(out[0, 4].isnan().all())
            out[0, 4] = right[0, 4]
            assert torch.equal(out, right)
