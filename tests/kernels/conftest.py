from __future__ import annotations

import pytest

from kvloom import _cpu
from kvloom.kernels.cpu import CpuBackend


@pytest.fixture(scope="session", params=_cpu.variant_names())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    """The native backend in each variant that this CPU has."""
    return CpuBackend(isa=request.param, num_threads=2)
