"""What the machine can do: read bandwidth and matrix peak, measured with all threads.

python -m bench.machine      # prints JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvloom.core.pages import huge_memory


def huge_tensor(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] on huge pages where the system gives them, as the engine's arena is."""
    return torch.frombuffer(huge_memory(num_bytes), dtype=torch.uint8)


def measure(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each function, called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds + 1):
        for series, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            if turn:  # the first turn warms up
                series.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(series) for series in times]


def read_bandwidth(rounds: int) -> float:
    """GB/s at which all threads together read memory."""
    data = huge_tensor(1 << 30)
    data.fill_(1)
    words = data.view(torch.int64)
    return words.numel() * 8 / measure([lambda: words.sum()], rounds)[0] / 1e6


def matrix_peak(dtype: torch.dtype, rounds: int) -> float:
    """GFLOP/s of torch's matrix product."""
    size = 512  # without bf16 instructions torch takes very long
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / measure([lambda: a @ b], rounds)[0] / 1e6


def processor() -> str:
    """The processor's name."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()


def describe(rounds: int) -> dict[str, Any]:
    """The machine as plain data; bandwidth in GB/s, peaks in GFLOP/s by dtype."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "bandwidth_gb_s": read_bandwidth(rounds),
        "peak_gflop_s": {
            str(dtype).removeprefix("torch."): matrix_peak(dtype, rounds) for dtype in (torch.float32, torch.bfloat16)
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    print(json.dumps(describe(parser.parse_args().rounds)))
