from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvloom import _cpu
from kvloom.kernels.cpu import CpuBackend


@pytest.fixture(scope="session", params=_cpu.variant_names())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    """The native backend in each variant that this CPU has."""
    return CpuBackend(isa=request.param, num_threads=2)


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The reference works on small tensors: handing them to threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
