"""The numerical check at load: a native step answers as the model's own transformers code, or is not used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import KernelBackend
from kvloom.models.native.model import NativeModel
from kvloom.models.paged import PagedRunner
from kvloom.models.upcast import in_float32

# max |difference| over max |logit|. Rounding stays below 2e-5 on the models measured; a wrong norm, angle or
# scale is off by 1e-2 and more.
TOLERANCE = 1e-3
# The same between products of bfloat16 pairs and of float32: activations are rounded to 8 bits per layer.
PAIRS_TOLERANCE = 0.1
BLOCK_SIZE = 16
_FIRST, _SECOND, _DECODES = 37, 9, 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Largest differences between the native step's logits and transformers', relative and absolute.

    ``pairs_error`` is the relative difference that rounding to bfloat16 pairs makes, None where the
    step does not multiply in pairs.
    """

    error: float
    difference: float
    pairs_error: float | None

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE and (self.pairs_error is None or self.pairs_error <= PAIRS_TOLERANCE)


def verify(native: NativeModel, exact: NativeModel, model: Any, layout: KVLayout, backend: KernelBackend) -> Verdict:
    """Compare on a short batch: two prompts, one in chunks, then single tokens, all in float32 with a float32 cache.

    Args:
        native: the step that will serve.
        exact: the same with float32 products; may be ``native`` itself.
        model: transformers' model with our attention; computed in float32 from its stored weights.
        layout: of the cache.
        backend: the native kernels; transformers' side reads its cache with the reference backend.
    """
    exact.set_embedding_scale(exact.exact_embedding_scale)
    got = _logits(exact, layout, backend, exact.vocab_size)
    exact.set_embedding_scale(exact.embedding_scale)
    with in_float32(model):
        expected = _logits(model, layout, "reference", exact.vocab_size)
    pairs_error = None
    if native is not exact:
        pairs_error = _relative(_logits(native, layout, backend, exact.vocab_size), got)
    difference = (got - expected).abs().max().item()
    return Verdict(error=_relative(got, expected), difference=difference, pairs_error=pairs_error)


def _logits(model: Any, layout: KVLayout, backend: KernelBackend | str, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return [int(x) for x in torch.randint(0, vocab_size, (count,), generator=generator)]

    runner = PagedRunner(model, layout, backend=backend, block_size=BLOCK_SIZE, max_tokens=128, dtype=torch.float32)
    steps = [{"a": tokens(_FIRST - 5)}, {"a": tokens(5), "b": tokens(_SECOND)}]
    steps += [{"a": tokens(1), "b": tokens(1)} for _ in range(_DECODES)]
    return torch.cat([rows for step in steps for rows in runner.step(step, rows=4).values()]).float()


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
