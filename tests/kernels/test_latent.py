"""Latent attention: the reference against a direct computation, the native kernels against the reference.

Tolerances are test_cpu_attend's. The direct computation is in float64 over float64 or float32
queries and exactly widened stored values: the reference computes in its queries' precision, so
float64 agrees to 1e-12, and a sum of 576 products in float32 to 1e-5.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import _cpu
from kvloom.core.layout import LayerSpec, group_layers
from kvloom.core.sizes import span_geometry
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import BlockFormat, KernelBackend, KeyRange, PlaneFormat, QueryBatch, merge_partials
from kvloom.kernels.reference import ReferenceBackend

from .test_cpu_attend import DTYPES, MIX, OUTPUT_ROUNDING, REFERENCE, tolerance
from .world import World, assert_close, batch_of, make_world

V3 = (512, 64)  # kv_lora_rank, qk_rope_head_dim
DIMS = (V3, (32, 16), (72, 8), (264, 40), (16, 256))


def make_format(
    backend: KernelBackend, dtype: torch.dtype, dims: tuple[int, int], *, block_size: int = 32
) -> BlockFormat:
    planes = []
    offset = 0
    for name, dim in zip(("latent", "rope"), dims, strict=True):
        order, pack = backend.plane_order(name, dtype, dim, block_size)
        planes.append(PlaneFormat(name=name, dim=dim, dtype=dtype, offset=offset, order=order, pack=pack))
        offset += -(-dim * block_size * dtype.itemsize // 64) * 64
    return BlockFormat(block_size=block_size, num_heads=1, block_bytes=offset, layer_bytes=offset, planes=tuple(planes))


def make_queries(
    batch: QueryBatch, heads: int, fmt: BlockFormat, dtype: torch.dtype, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latent, rope = (
        torch.randn(batch.num_tokens, heads, plane.dim, generator=generator, dtype=torch.float64).to(dtype)
        for plane in fmt.planes
    )
    return latent, rope


def scale_of(fmt: BlockFormat) -> float:
    return float(sum(plane.dim for plane in fmt.planes)) ** -0.5


def attend(backend: KernelBackend, world: World, batch: QueryBatch, q: tuple[torch.Tensor, torch.Tensor], **options):
    return backend.attend_latent(*q, world.arena, *world.where, batch, scale=scale_of(world.fmt), **options)


def direct(
    world: World, batch: QueryBatch, q: tuple[torch.Tensor, torch.Tensor], keys: KeyRange
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the definition says, token by token, in float64, from what was written (World calls the planes k and v)."""
    stored = [plane.dtype for plane in world.fmt.planes]
    latents, ropes = (rows[:, 0].to(dtype).double() for rows, dtype in zip((world.k, world.v), stored, strict=True))
    out = torch.zeros(*q[0].shape, dtype=torch.float64)
    lse = torch.full(q[0].shape[:2], float("-inf"), dtype=torch.float64)
    for token, (sequence, position) in enumerate(
        zip(batch.sequence_of.tolist(), batch.positions.tolist(), strict=True)
    ):
        low, high = keys.bounds(position, world.fmt.block_size, None)
        if low >= high:
            continue
        latent, rope = (rows[world.rows(sequence)][low:high] for rows in (latents, ropes))
        logits = (q[0][token].double() @ latent.T + q[1][token].double() @ rope.T) * scale_of(world.fmt)
        lse[token] = logits.logsumexp(dim=-1)
        out[token] = logits.softmax(dim=-1) @ latent
    return out, lse


def compare(backend: CpuBackend, world: World, batch: QueryBatch, q, **options) -> None:
    """Output, and output with log-sum-exp, equal the reference's on the same bytes; nothing fell back."""
    before = dict(backend.fallbacks)
    allowed = tolerance(backend, world.fmt.planes[0].dtype, q[0].dtype)
    expected, expected_lse = attend(REFERENCE, world, batch, q, want_lse=True, **options)
    found, lse = attend(backend, world, batch, q, want_lse=True, **options)
    assert expected_lse is not None and lse is not None
    assert_close(found, expected, allowed)
    keyless = torch.isneginf(expected_lse)
    assert torch.equal(torch.isneginf(lse), keyless)
    assert_close(lse[~keyless], expected_lse[~keyless], 1e-5 if allowed < 1e-4 else 2.0**-9)
    out, nothing = attend(backend, world, batch, q, **options)
    assert nothing is None
    assert_close(out, expected.to(q[0].dtype), allowed + OUTPUT_ROUNDING[q[0].dtype])
    assert dict(backend.fallbacks) == before


# --- The reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [KeyRange(), KeyRange(end_block=2, min_lag=1), KeyRange(first_block=1), KeyRange(max_lag=1)], ids=str
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_the_reference_is_the_definition(stored: torch.dtype, deterministic: bool, keys: KeyRange) -> None:
    reference = ReferenceBackend(deterministic=deterministic)
    lengths, firsts = [9, 1, 0, 20], [0, 70, 3, 41]
    for layout in (reference, CpuBackend()):  # it reads any inner layout
        fmt = make_format(layout, stored, (32, 16), block_size=16)
        world = make_world(reference, fmt, [count + first for count, first in zip(lengths, firsts, strict=True)])
        batch = batch_of(lengths, firsts)
        for queries, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            q = make_queries(batch, 5, fmt, queries)
            expected, expected_lse = direct(world, batch, q, keys)
            out, lse = attend(reference, world, batch, q, keys=keys, want_lse=True)
            assert lse is not None
            assert_close(out, expected.float(), 1e-5)
            assert torch.allclose(lse, expected_lse.float(), atol=1e-5)
            out, _ = attend(reference, world, batch, q, keys=keys)
            assert_close(out, expected.to(queries), allowed)


def test_576_values_per_token_and_layer() -> None:
    """DeepSeek V3's shapes: 1,152 bytes in bfloat16, where keys and values of 128 heads would take 81,920."""
    layer = LayerSpec.mla(latent_dim=512, rope_dim=64)
    expanded = LayerSpec.kv(num_heads=128, k_dim=128 + 64, v_dim=128)
    for spec, elements in ((layer, 576), (expanded, 40_960)):
        layout = group_layers([spec] * 61)
        assert layout.groups[0].elements_per_token == 61 * elements
        codecs = {plane.name: "bfloat16" for plane in spec.planes}
        span = span_geometry(layout.groups[0], 32, codecs)
        assert span.token_bytes == 61 * 2 * elements
        assert span.span_bytes == 32 * span.token_bytes  # no padding


def test_planes_may_have_codecs_of_their_own() -> None:
    """The rope plane stays raw where the latent is encoded."""
    group = group_layers([LayerSpec.mla(latent_dim=512, rope_dim=64)] * 2).groups[0]
    span = span_geometry(group, 16, {"latent": "bfloat16", "rope": "float32"})
    assert [(plane.name, plane.codec, plane.num_bytes) for plane in span.planes] == [
        ("latent", "bfloat16", 16 * 512 * 2),
        ("rope", "float32", 16 * 64 * 4),
    ]
    assert span.token_bytes == 2 * (512 * 2 + 64 * 4)


# --- The native kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims_and_heads(backend: CpuBackend, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Over a mix of prefill, chunks and decode."""
    lengths = [first + count for count, first in zip(*MIX, strict=True)]
    batch = batch_of(*MIX)
    fmt = make_format(backend, dtype, dims)
    world = make_world(backend, fmt, lengths)
    for heads in (1, 3, 16) if dims == V3 else (1, 4, 20):
        compare(backend, world, batch, make_queries(batch, heads, fmt, dtype))


@pytest.mark.parametrize("heads", [128, 129, 130])
def test_as_many_heads_as_v3(backend: CpuBackend, heads: int) -> None:
    """129 and 130 heads take two tiles; the second row of a pair of tiles may have another width."""
    fmt = make_format(backend, torch.bfloat16, V3)
    world = make_world(backend, fmt, [300, 40])
    batch = batch_of([1, 3], [299, 37])
    compare(backend, world, batch, make_queries(batch, heads, fmt, torch.float32))


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("queries", DTYPES, ids=str)
def test_storage_and_query_types(backend: CpuBackend, stored: torch.dtype, queries: torch.dtype) -> None:
    fmt = make_format(backend, stored, (72, 24), block_size=16)
    world = make_world(backend, fmt, [77, 20], dtype=queries)
    batch = batch_of([20, 1], [57, 19])
    compare(backend, world, batch, make_queries(batch, 4, fmt, queries))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_written_is_what_lies_there(backend: CpuBackend, dtype: torch.dtype) -> None:
    fmt = make_format(backend, dtype, (40, 24), block_size=8)
    world = make_world(backend, fmt, [21, 8])
    for sequence in range(2):
        latent, rope = REFERENCE.gather(
            world.arena, fmt, world.layer_offset, world.tables[sequence], 0, world.lengths[sequence]
        )
        assert torch.equal(latent, world.k[world.rows(sequence)])
        assert torch.equal(rope, world.v[world.rows(sequence)])
    assert not backend.fallbacks


def test_strided_queries(backend: CpuBackend) -> None:
    """Head-major products and parts of a wider query are read in place."""
    fmt = make_format(backend, torch.float32, (64, 16))
    world = make_world(backend, fmt, [60])
    batch = batch_of([9], [51])
    latent, rope = make_queries(batch, 4, fmt, torch.float32)
    head_first = latent.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([latent, rope], dim=-1)[..., 64:]
    assert not head_first.is_contiguous() and not wide.is_contiguous()
    compare(backend, world, batch, (head_first, wide))
    expected, _ = attend(backend, world, batch, (latent, rope))
    assert torch.equal(attend(backend, world, batch, (head_first, wide))[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_not_yet_written_never_reach_a_result(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Odd ends leave a token's pair partner unwritten; it holds NaN here."""
    fmt = make_format(backend, dtype, (32, 8), block_size=8)
    for length in range(1, 20):
        world = make_world(backend, fmt, [length])
        batch = batch_of([1], [length - 1])
        compare(backend, world, batch, make_queries(batch, 3, fmt, dtype))


def test_absent_entries(backend: CpuBackend) -> None:
    """Blocks outside the range are never looked up; one that is needed and absent is an error."""
    fmt = make_format(backend, torch.float32, (32, 16), block_size=16)
    world = make_world(backend, fmt, [64])
    batch = batch_of([1], [63])
    q = make_queries(batch, 2, fmt, torch.float32)
    world.forget_before(0, 32)
    compare(backend, world, batch, q, keys=KeyRange(first_block=2))
    with pytest.raises(ValueError, match="block 0 of sequence 0"):
        attend(backend, world, batch, q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partials_over_key_ranges_merge_to_the_whole(backend: CpuBackend, dtype: torch.dtype) -> None:
    fmt = make_format(backend, dtype, (128, 32), block_size=16)
    world = make_world(backend, fmt, [600, 90])
    batch = batch_of([100, 1], [500, 89])
    q = make_queries(batch, 6, fmt, dtype)
    parts = []
    for keys in (KeyRange(end_block=2, min_lag=4), KeyRange(first_block=2, min_lag=4), KeyRange(max_lag=3)):
        out, lse = attend(backend, world, batch, q, keys=keys, want_lse=True)
        assert lse is not None
        parts.append((out, lse))
    whole, _ = attend(backend, world, batch, q)
    merged = merge_partials(parts, None, dtype)
    assert_close(merged, whole, tolerance(backend, dtype, dtype) + OUTPUT_ROUNDING[dtype])


def test_queries_without_keys(backend: CpuBackend) -> None:
    fmt = make_format(backend, torch.bfloat16, (32, 16), block_size=16)
    world = make_world(backend, fmt, [40])
    batch = batch_of([40], [0])
    q = make_queries(batch, 2, fmt, torch.bfloat16)
    out, lse = attend(backend, world, batch, q, keys=KeyRange(min_lag=2), want_lse=True)
    assert lse is not None
    assert torch.isneginf(lse[:32]).all() and (out[:32] == 0).all()
    assert torch.isfinite(lse[32:]).all()
    nobody = batch_of([], [])
    empty = (q[0][:0], q[1][:0])
    out, _ = backend.attend_latent(*empty, world.arena, *world.where[:2], world.tables[:0], nobody, scale=0.2)
    assert out.shape == (0, 2, 32)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ragged_batches(backend: CpuBackend, data: st.DataObject) -> None:
    sequences = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 600)), min_size=1, max_size=5))
    dtype = data.draw(st.sampled_from(DTYPES))
    fmt = make_format(
        backend,
        dtype,
        data.draw(st.sampled_from([(16, 8), (64, 16), (104, 24), (256, 32)])),
        block_size=data.draw(st.sampled_from([8, 16, 32, 64, 128, 256])),
    )
    keys = data.draw(
        st.builds(
            KeyRange,
            first_block=st.integers(0, 3),
            end_block=st.none() | st.integers(1, 40),
            min_lag=st.integers(0, 2),
            max_lag=st.none() | st.integers(2, 6),
        )
    )
    world = make_world(backend, fmt, [sum(pair) for pair in sequences])
    batch = batch_of([count for count, _ in sequences], [first for _, first in sequences])
    heads = data.draw(st.sampled_from([1, 2, 7, 16, 40]))
    compare(backend, world, batch, make_queries(batch, heads, fmt, dtype), keys=keys)


# --- Determinism --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_its_query_and_keys_alone(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Bit by bit: whole, chunks and single tokens, with neighbours in the batch, any threads, any pool."""
    length = 600
    fmt = make_format(backend, dtype, (264, 24))
    world = make_world(backend, fmt, [length, 300])
    q = make_queries(batch_of([length], [0]), 6, fmt, dtype)
    whole, _ = attend(backend, world, batch_of([length, 0], [0, 0]), q)

    def rows(start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return q[0][start : start + count], q[1][start : start + count]

    for start, count in [(0, 7), (250, 12), (512, 1), (300, 300), *((start, 1) for start in range(0, length, 37))]:
        for others in (0, 50):
            batch = batch_of([count, others], [start, 240])
            packed = tuple(torch.cat([part, part[:1].expand(others, -1, -1)]) for part in rows(start, count))
            for threads, pool in ((2, None), (3, 0)):
                other = (
                    backend
                    if pool is None
                    else CpuBackend(isa=backend.variant, num_threads=threads, gomp_parallel=pool)
                )
                out, _ = attend(other, world, batch, packed)
                assert torch.equal(out[:count], whole[start : start + count])


# --- Fallbacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((20, 16), "plane latent has dim 20; supported: multiples of 8, 16 to 512"),
        ((520, 16), "plane latent has dim 520"),
        ((32, 4), "plane rope has dim 4; supported: multiples of 8, 8 to 256"),
    ],
)
def test_what_is_not_read_natively_falls_back_and_is_counted(dims: tuple[int, int], words: str) -> None:
    backend = CpuBackend()
    fmt = make_format(backend, torch.float32, dims)
    assert words in str(backend.unsupported(fmt, 4))
    world = make_world(backend, fmt, [40])
    batch = batch_of([3], [37])
    q = make_queries(batch, 4, fmt, torch.float32)
    out, _ = attend(backend, world, batch, q)
    assert torch.equal(out, attend(REFERENCE, world, batch, q)[0])
    assert sorted(reason.split(": ")[0] for reason in backend.fallbacks) == ["attend_latent", "write"]


def test_queries_of_unlike_types_fall_back() -> None:
    backend = CpuBackend()
    fmt = make_format(backend, torch.float32, (32, 16))
    world = make_world(backend, fmt, [40])
    batch = batch_of([3], [37])
    q = make_queries(batch, 4, fmt, torch.float64)
    attend(backend, world, batch, q)
    assert list(backend.fallbacks) == ["attend_latent: queries are torch.float64 and torch.float64"]
    with pytest.raises(ValueError, match="rows are"):
        attend(backend, world, batch, (q[0].float(), q[1].float()[:, :2]))
    assert _cpu.MAX_LATENT_DIM == 512
