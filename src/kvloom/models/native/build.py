"""From a loaded transformers model to its native step, checked, or to the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvloom.core.layout import KVLayout
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.ops import KernelBackend
from kvloom.models.native.check import TOLERANCE, verify
from kvloom.models.native.model import NativeModel, NoNativeStepError


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A native model that passed its check, and how far its logits were from transformers' (absolute)."""

    model: NativeModel
    difference: float


def build_native_step(model: Any, model_type: str, layout: KVLayout, backend: KernelBackend) -> NativeStep | str:
    """The native step of ``model``, or why there is none.

    Copies the weights: until ``model`` is dropped they are in memory twice.
    """
    if not isinstance(backend, CpuBackend):
        return f"kernels {backend.name!r} have no native step"
    if next(model.parameters()).device.type != "cpu":
        return "the model is not on the CPU"
    try:
        native = NativeModel(model, model_type, layout, backend)
    except NoNativeStepError as error:
        return str(error)
    exact = NativeModel(model, model_type, layout, backend, pairs=False) if native.pairs else native
    try:
        verdict = verify(native, exact, model, layout, backend)
    except ValueError as error:  # a cache layout that the kernels do not read
        return str(error)
    if not verdict.passed:
        return (
            f"its logits differed from transformers' by {verdict.error:.2g} of the largest (at most {TOLERANCE:g} is "
            f"rounding; in bfloat16 pairs: {verdict.pairs_error})"
        )
    return NativeStep(native, verdict.difference)
