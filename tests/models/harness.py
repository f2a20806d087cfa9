"""Parity checks as assertions, and what tests need around ``kvloom.models.parity``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.core.errors import KvloomError
from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import BACKENDS, KernelBackend, choose_backend
from kvloom.models.paged import PagedRunner
from kvloom.models.parity import (
    TOLERANCE,
    Case,
    difference,
    eager_of,
    longest_window,
    random_ids,
    run_case,
    thorough_cases,
    tokens_of,
)

__all__ = [
    "TOLERANCE",
    "PagedRunner",
    "backend_or_skip",
    "backends",
    "check_parity",
    "difference",
    "eager_logits",
    "paged",
    "random_ids",
]


def backends() -> list[Any]:
    """pytest parameters: every kernel backend of the table, skipped visibly where it is not built."""
    return [pytest.param(name, id=name) for name in BACKENDS]


def backend_or_skip(name: str, device: str = "cpu") -> KernelBackend:
    try:
        return choose_backend(name, torch.device(device), deterministic=False, num_threads=1)
    except (ImportError, KvloomError) as error:
        pytest.skip(f"kernels {name!r} are not available here: {error}")


def paged(model: Any) -> Any:
    """Give a model made by hand our attention, as the loader does."""
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval().requires_grad_(False)


def eager_logits(eager: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, vocab] by transformers' eager attention, one sequence at a time."""
    return eager_of(eager)(ids, range(len(ids)))


def check_parity(
    model: Any,
    eager: Any,
    layout: KVLayout,
    *,
    backend: KernelBackend | str = "reference",
    block_size: int = 16,
    tolerance: float = TOLERANCE,
    cases: Sequence[Case] | None = None,
) -> float:
    """Run every case (the thorough ones if None are given); the largest difference found.

    Raises:
        AssertionError: a case's logits differ from eager's by more than ``tolerance``.
    """
    if cases is None:
        cases = thorough_cases(longest_window(layout), block_size, model.config.get_text_config().vocab_size)
    worst = 0.0
    for case in cases:
        runner = PagedRunner(
            model, layout, backend=backend, block_size=block_size, max_tokens=tokens_of(case, block_size)
        )
        check = run_case(runner, case, eager_of(eager))
        assert check.error <= tolerance, f"{case.name}: {check.where}: {check.error:.2e} > {tolerance:.0e}"
        worst = max(worst, check.error)
    return worst
