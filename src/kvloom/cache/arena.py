"""The arena: one byte buffer on the model's device, aligned, on huge pages and prefaulted where it can be."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch

from kvloom.core.errors import CapacityError
from kvloom.core.pages import huge_memory
from kvloom.core.sizes import format_bytes

POISON = 0xFF  # every float dtype reads 0xFF… as NaN


def allocate_arena(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor of ``num_bytes`` on ``device``, zeroed, starting on a huge page on Linux CPUs.

    Raises:
        CapacityError: the device cannot give that much.
    """
    try:
        if device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return _map_anonymous(num_bytes)
    except (OSError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
        raise CapacityError(
            f"cannot allocate a KV cache of {format_bytes(num_bytes)} ({num_bytes} bytes) on {device}: {error}; "
            "lower --kv-cache-memory"
        ) from error


def _map_anonymous(num_bytes: int) -> torch.Tensor:
    arena = torch.frombuffer(huge_memory(num_bytes), dtype=torch.uint8)  # keeps the mapping alive
    _prefault(arena)
    return arena


def _prefault(arena: torch.Tensor) -> None:
    """Touch every page now, so that no request pays for it and memory that is not there fails at start."""
    populate_write = 23  # MADV_POPULATE_WRITE, Linux 5.14
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = arena.data_ptr(), arena.numel()
        page = mmap.PAGESIZE
        whole_pages = length // page * page
        if whole_pages and libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(whole_pages), populate_write) == 0:
            return
    arena.zero_()


def poison(arena: torch.Tensor, offset: int, num_bytes: int) -> None:
    """Fill freed bytes with a pattern that reads as NaN, so that a stale read shows (debug mode)."""
    arena[offset : offset + num_bytes] = POISON


def free_device_bytes(device: torch.device) -> int:
    """Bytes free on ``device`` now: what this process may still take on CPUs, the driver's figure on GPUs."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        free = _available_bytes()
        left = control_group_bytes(Path("/sys/fs/cgroup"))
        return free if left is None else min(free, left)
    return 4 * 2**30  # no figure to be had on this device; the allocation itself will tell


def _available_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def control_group_bytes(directory: Path) -> int | None:
    """What a container's memory limit leaves; None without one. The machine's own figure knows nothing of it.

    Clean pages of files count as used there, but the kernel drops them when memory is asked for.
    """
    try:
        limit = (directory / "memory.max").read_text().strip()
        used = int((directory / "memory.current").read_text())
        if not limit.isdigit():
            return None
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - max(0, used - int(statistics.get("inactive_file", "0"))))
    except (OSError, ValueError):
        return None
