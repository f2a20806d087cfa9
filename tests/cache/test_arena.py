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


def test_the_arena_lies_on_huge_pages_where_the_kernel_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text(encoding="ascii"):
        pytest.skip("this kernel has no transparent huge pages")
    arena = allocate_arena(8 << 20, torch.device("cpu"))
    start, huge, inside = arena.data_ptr(), 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low < start + arena.numel() and start < high
        elif inside and first == "AnonHugePages:":
            huge += int(line.split()[1]) << 10
    assert huge >= arena.numel() // 2  # the kernel may have run out of them for some
