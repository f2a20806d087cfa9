"""What is free: a container's limit counts, and pages that the kernel would drop do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvloom.cache.arena import allocate_arena, control_group_bytes, free_device_bytes


def group(directory: Path, limit: str, used: int, inactive: int) -> Path:
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\n")
    return directory


def test_a_container_limit_bounds_what_is_free(tmp_path: Path) -> None:
    assert control_group_bytes(tmp_path / "none") is None
    assert control_group_bytes(group(tmp_path, "max", 10, 0)) is None
    assert control_group_bytes(group(tmp_path, "1000", 300, 100)) == 800
    assert control_group_bytes(group(tmp_path, "1000", 1200, 0)) == 0
    assert free_device_bytes(torch.device("cpu")) > 0


def test_the_arena_starts_zeroed_and_aligned() -> None:
    arena = allocate_arena(3 * 4096 + 64, torch.device("cpu"))
    assert arena.numel() == 3 * 4096 + 64 and arena.data_ptr() % (2 << 20) == 0
    assert int(arena.sum()) == 0


def test_the_arena_asks_for_huge_pages_where_the_kernel_gives_them() -> None:
    setting, maps = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/self/smaps")
    if not setting.exists() or not maps.exists() or "[never]" in setting.read_text(encoding="ascii"):
        pytest.skip("this kernel has no transparent huge pages")
    arena = allocate_arena(8 << 20, torch.device("cpu"))
    found, inside = [], False
    for line in maps.read_text(encoding="utf-8").splitlines():
        first, *others = line.split()
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= arena.data_ptr() < high
            permissions = others[0]
        elif inside and first == "VmFlags:":
            found.append((permissions, others))
    ((permissions, flags),) = found
    assert permissions == "rw-p"  # shared mappings get none, whatever is asked
    assert "hg" in flags
