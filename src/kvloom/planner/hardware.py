"""Devices: memory, bandwidth, compute; from a table of data sheets, as given, or this machine.

Memory is what the driver reports (an "80 GB" card shows 81,559 MiB), not the name on the box.
Bandwidth and dense 16-bit tensor throughput are the vendors' peak figures.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvloom.core.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device. ``bandwidth`` in bytes/s and ``flops`` in 16-bit FLOP/s; None when not known."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    flops: float | None
    is_cpu: bool = False
    source: str = "data sheet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Equal devices."""

    device: Device
    count: int = 1


# name -> (MiB as reported, GB/s, dense bf16/fp16 TFLOP/s)
_TABLE: Mapping[str, tuple[int, float, float]] = {
    "b200": (183359, 8000, 2250),
    "h200": (143771, 4800, 989),
    "h100": (81559, 3350, 989),
    "h100-pcie": (81559, 2000, 756),
    "gh200": (97871, 4000, 989),
    "a100-80": (81920, 2039, 312),
    "a100-40": (40960, 1555, 312),
    "l40s": (46068, 864, 362),
    "l4": (23034, 300, 121),
    "a10g": (23028, 600, 70),
    "a6000": (49140, 768, 155),
    "v100-32": (32768, 900, 125),
    "t4": (15360, 320, 65),
    "rtx5090": (32607, 1792, 210),
    "rtx4090": (24564, 1008, 165),
    "rtx3090": (24576, 936, 71),
    "mi300x": (196592, 5300, 1307),
    "mi325x": (262128, 6000, 1307),
}


def device_names() -> list[str]:
    """Known device names, and ``this``."""
    return [*_TABLE, "this"]


def parse_device(text: str) -> Hardware:
    """The hardware that ``h200`` or ``h200:8`` or ``this`` names.

    Raises:
        ConfigError: an unknown device, or a count that is no positive number.
    """
    name, _, count = text.partition(":")
    name = name.strip().lower()
    number = 1
    if count:
        if not count.isdigit() or int(count) < 1:
            raise ConfigError(f"--device is {text!r}; after the colon stands a number of devices, at least 1")
        number = int(count)
    if name == "this":
        if number != 1:
            raise ConfigError(f"--device is {text!r}; this machine is one device")
        return Hardware(device=this_machine())
    if name not in _TABLE:
        near = difflib.get_close_matches(name, list(_TABLE), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(
            f"--device: {name!r} is unknown{hint} Known: {', '.join(device_names())}. For others give --memory, "
            "--bandwidth and --tflops"
        )
    memory, bandwidth, tflops = _TABLE[name]
    return Hardware(
        device=Device(name=name, memory_bytes=memory * MIB, bandwidth=bandwidth * 1e9, flops=tflops * 1e12),
        count=number,
    )


def this_machine(*, measure: bool = True) -> Device:
    """This machine: free memory from the kernel; bandwidth and compute from a brief measurement."""
    if not measure:
        return Device(
            name="this machine",
            memory_bytes=available_memory(),
            bandwidth=None,
            flops=None,
            is_cpu=True,
            source="memory free now",
        )
    bandwidth, flops = _measure()
    return Device(
        name="this machine",
        memory_bytes=available_memory(),
        bandwidth=bandwidth,
        flops=flops,
        is_cpu=True,
        source="memory free now; one core's reading and all cores' float32 products measured just now",
    )


def available_memory() -> int:
    """Bytes that are free for new use, within this process's control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        return free  # no /proc on this system: free pages are all there is to know
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit.isdigit():
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        return free  # no control group limit
    return free


def _measure() -> tuple[float, float]:
    """(bytes/s that one core reads, float32 FLOP/s of one core × cores), the best of many short runs.

    Products of 64 × 64 stay on one core in every BLAS; larger ones would wait for threads that a busy
    machine does not run, and measure the waiting.
    """
    import numpy

    data = numpy.ones(16 * 2**20, dtype=numpy.float32)
    side = 64
    matrix = numpy.ones((side, side), dtype=numpy.float32)
    result = numpy.empty_like(matrix)
    data.sum()
    bandwidth = flops = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        bandwidth = max(bandwidth, data.nbytes / (time.perf_counter() - start))
    for _ in range(200):
        start = time.perf_counter()
        numpy.matmul(matrix, matrix, out=result)
        flops = max(flops, 2 * side**3 / (time.perf_counter() - start))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return bandwidth, flops * cores
