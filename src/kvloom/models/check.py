"""``kvloom models check``: the parity check on a user's own model.

The model is loaded once, in float32; transformers' eager attention and ours run on the same weights
in turn. What would take too long is left out, and said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvloom.attention.interface import ATTENTION_NAME
from kvloom.core.config import EngineConfig
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import choose_backend
from kvloom.models.loader import load_model
from kvloom.models.paged import PagedRunner
from kvloom.models.parity import TOLERANCE, Check, Eager, eager_of, quick_cases, run_case, tokens_of

BLOCK_SIZE = 32
MIN_LENGTH = 2 * BLOCK_SIZE + 64  # of the longest sequence in the cases, beside a window
ROWS = 16  # logit rows compared per chunk: a whole prompt's would take gigabytes with a large vocabulary
MAX_EAGER_BYTES = 2 * 2**30  # of one layer's attention scores, which eager holds in full
_PROBE_TOKENS = 256  # enough that the time per pass does not drown the time per token


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the check found. ``notes`` say what was left out, and what the loader warned of."""

    model: str
    model_type: str
    verified_type: bool
    layout: tuple[str, ...]
    kernels: str
    transformers: str
    tolerance: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.error <= self.tolerance for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def check_model(
    model: str,
    *,
    device: str = "cpu",
    kernels: str = "auto",
    cache_dir: str | None = None,
    max_seconds: float = 600.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Compare ``model``'s logits through our attention with eager's, in about ``max_seconds`` at most.

    Raises:
        KvloomError: it cannot be loaded, or is known to be wrong.
    """
    import transformers

    started = time.monotonic()
    progress(f"loading {model} in float32")
    loaded = load_model(
        EngineConfig(
            model=model, device=device, dtype="float32", kernels=kernels, cache_dir=cache_dir, allow_unverified=True
        )
    )
    parameter = next(loaded.model.parameters())
    backend = choose_backend(kernels, parameter.device, deterministic=False, num_threads=torch.get_num_threads())
    if loaded.max_model_len < MIN_LENGTH:
        raise UnsupportedModelError(
            f"{loaded.name} has positions for {loaded.max_model_len} tokens; the check needs {MIN_LENGTH}"
        )
    eager = _switched(loaded.model)
    seconds_per_token = _measure(eager, min(_PROBE_TOKENS, loaded.max_model_len))
    most = min(_tokens_in(max_seconds, seconds_per_token), loaded.max_model_len - MIN_LENGTH)
    heads = max(loaded.num_query_heads)
    most = min(most, int((MAX_EAGER_BYTES / (4 * heads)) ** 0.5) - MIN_LENGTH)
    window, left_out = _window_to_pass(loaded.layout, most, seconds_per_token)
    checks: list[Check] = []
    for case in quick_cases(window, BLOCK_SIZE, loaded.vocab_size):
        progress(f"{case.name}: {sum(len(ids) for ids in case.ids.values())} tokens")
        runner = PagedRunner(
            loaded.model,
            loaded.layout,
            backend=backend,
            block_size=BLOCK_SIZE,
            max_tokens=tokens_of(case, BLOCK_SIZE),
        )
        checks.append(run_case(runner, case, eager, rows=ROWS))
    fallbacks = [f"native kernels lack this, the reference computed it: {reason}" for reason in backend.fallbacks]
    return Verdict(
        model=loaded.name,
        model_type=loaded.model_type,
        verified_type=loaded.verified,
        layout=tuple(
            f"{group.name}: {group.num_layers} layers × {group.num_heads} KV heads × "
            + " + ".join(f"{plane.name} {plane.dim}" for plane in group.planes)
            for group in loaded.layout.groups
        ),
        kernels=f"{backend.name} {backend.variant}".strip(),
        transformers=transformers.__version__,
        tolerance=TOLERANCE,
        checks=tuple(checks),
        notes=(*loaded.warnings, *left_out, *fallbacks),
        seconds=time.monotonic() - started,
    )


def _switched(model: Any) -> Eager:
    """Eager attention on a model that has ours otherwise."""
    own = eager_of(model)

    def eager(ids: Any, positions: Any) -> torch.Tensor:
        model.set_attn_implementation("eager")
        try:
            return own(ids, positions)
        finally:
            model.set_attn_implementation(ATTENTION_NAME)

    return eager


def _measure(eager: Eager, num_tokens: int) -> float:
    """Seconds per token of an eager pass; a short one before it, as first passes are slow."""
    ids = [0] * num_tokens
    eager(ids[:8], [0])
    started = time.monotonic()
    eager(ids, [0])
    return max((time.monotonic() - started) / num_tokens, 1e-6)


def _tokens_in(seconds: float, seconds_per_token: float) -> int:
    """The longest window that the cases can pass in ``seconds``.

    They compute about 7 windows and 500 tokens, twice (eager and ours), and 30 steps of two tokens,
    each of which reads all weights for itself and takes as long as a dozen tokens in a batch.
    """
    return int(((seconds / seconds_per_token - 30 * 12) / 2 - 500) / 7)


def _window_to_pass(layout: KVLayout, most: int, seconds_per_token: float) -> tuple[int, list[str]]:
    """The longest of the layout's windows up to ``most`` tokens, and a note on each longer one."""
    windows = sorted({group.window for group in layout.groups if group.window is not None})
    notes = [
        f"a window of {window} tokens was not passed: within the time, memory and length given, {max(most, 0)} can be "
        f"({seconds_per_token * 1000:.2f} ms per token); its masks were compared at load"
        for window in windows
        if window > most
    ]
    return max([window for window in windows if window <= most], default=0), notes
