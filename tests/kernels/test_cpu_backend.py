"""Choice of the variant, fallbacks, threads and linkage."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvloom import _cpu
from kvloom.core.errors import ConfigError
from kvloom.kernels.cpu import ISA_VARIABLE, CpuBackend, find_gomp_parallel, make
from kvloom.kernels.ops import BlockFormat, PlaneFormat, choose_backend
from kvloom.kernels.reference import ReferenceBackend

from .world import assert_close, batch_of, make_format, make_world, random_queries

REFERENCE = ReferenceBackend()


def test_the_registry_makes_it() -> None:
    backend = choose_backend("auto", torch.device("cpu"), deterministic=True, num_threads=1)
    assert isinstance(backend, CpuBackend)
    assert backend.num_threads == 1
    assert make(deterministic=False, num_threads=0).num_threads == torch.get_num_threads()


def test_the_fastest_variant_is_the_default_and_any_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    names = _cpu.variant_names()
    assert names[0] == "portable"
    assert CpuBackend().variant == names[-1]
    for name in names:
        monkeypatch.setenv(ISA_VARIABLE, name)
        assert CpuBackend().variant == name
    assert CpuBackend(isa="portable").variant == "portable"


def test_a_variant_this_cpu_lacks_is_refused_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "neon9")
    with pytest.raises(ConfigError, match=rf"neon9.*{', '.join(_cpu.variant_names())}"):
        CpuBackend()


def test_the_layout_does_not_depend_on_the_variant() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        formats = {make_format(CpuBackend(isa=isa), dtype, heads=1, k_dim=64) for isa in _cpu.variant_names()}
        assert len(formats) == 1


def with_planes(fmt: BlockFormat, *planes: PlaneFormat) -> BlockFormat:
    return replace(fmt, planes=planes)


def test_unsupported_formats_say_why() -> None:
    backend = CpuBackend()
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=64)
    k, v = fmt.planes
    assert backend.unsupported(fmt, 6) is None
    assert "multiple of 2 KV heads" in str(backend.unsupported(fmt, 5))
    assert "planes are key, v" in str(backend.unsupported(with_planes(fmt, replace(k, name="key"), v), 2))
    assert "token/1, not channel/2" in str(
        backend.unsupported(with_planes(fmt, replace(k, order="token", pack=1), v), 2)
    )
    assert "dim 60" in str(backend.unsupported(make_format(backend, torch.bfloat16, heads=2, k_dim=60), 2))
    assert "dim 264" in str(backend.unsupported(make_format(backend, torch.bfloat16, heads=2, k_dim=64, v_dim=264), 2))
    assert "float64" in str(backend.unsupported(make_format(backend, torch.float64, heads=2, k_dim=64), 2))
    assert "block size 4" in str(
        backend.unsupported(make_format(backend, torch.float32, heads=2, k_dim=64, block_size=4), 2)
    )
    assert not backend.fallbacks


def test_what_is_not_native_falls_back_and_is_counted() -> None:
    backend = CpuBackend()
    batch = batch_of([5, 1], [15, 9])
    cases = [
        (make_format(backend, torch.bfloat16, heads=1, k_dim=60), 60, torch.bfloat16),  # dim
        (make_format(backend, torch.float64, heads=1, k_dim=64), 64, torch.float64),  # storage
        (make_format(backend, torch.float32, heads=1, k_dim=64), 64, torch.float64),  # queries
        (make_format(REFERENCE, torch.bfloat16, heads=1, k_dim=64), 64, torch.bfloat16),  # layout
    ]
    for fmt, dim, dtype in cases:
        backend.fallbacks.clear()
        world = make_world(backend, fmt, [20, 10])
        q = random_queries(batch, 2, dim, dtype)
        found, _ = backend.attend(q, world.arena, *world.where, batch, scale=0.1)
        expected, _ = REFERENCE.attend(q, world.arena, *world.where, batch, scale=0.1)
        assert torch.equal(found, expected)
        assert sum(count for reason, count in backend.fallbacks.items() if reason.startswith("attend: ")) == 1


def test_the_extension_links_no_openmp_runtime() -> None:
    library = Path(_cpu.__file__).read_bytes()
    names = re.findall(rb"lib[a-z0-9]*omp[0-9]*[-.\w]*\.so", library)
    assert not names, names


def test_torchs_threads_are_shared() -> None:
    """With an OpenMP build of torch on Linux, its runtime is found, and loading us adds none."""
    if "OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux":
        pytest.skip("torch is not built with OpenMP")
    assert find_gomp_parallel() != 0
    assert CpuBackend().shares_torch_threads
    code = (
        "import torch, re\n"
        "runtimes = lambda: set(re.findall(r'/\\S*lib\\w*omp\\S*so\\S*', open('/proc/self/maps').read()))\n"
        "torch.ones(300, 300) @ torch.ones(300, 300); before = runtimes()\n"
        "from kvloom.kernels.cpu import CpuBackend; CpuBackend(); assert runtimes() == before, runtimes()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("pool", [None, 0])
def test_concurrent_calls_are_safe(pool: int | None) -> None:
    backend = CpuBackend(num_threads=2, gomp_parallel=pool)
    fmt = make_format(backend, torch.bfloat16, heads=2, k_dim=64)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(12):
                lengths = [400 + 50 * seed + turn, 30]
                world = make_world(backend, fmt, lengths, seed=seed)
                batch = batch_of([60, 1], [lengths[0] - 60, 29])
                q = random_queries(batch, 6, 64, torch.bfloat16, seed=seed)
                found, _ = backend.attend(q, world.arena, *world.where, batch, scale=0.1)
                expected, _ = REFERENCE.attend(q, world.arena, *world.where, batch, scale=0.1)
                assert_close(found, expected, 2.0**-7)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
