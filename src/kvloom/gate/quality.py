"""What a codec costs: an engine with it against an exact one, on the same text, token by token.

Both run teacher-forced through their own path (``engine/scoring.py``), prefill chunks and all, so what
is measured is what is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.errors import CodecError
from kvloom.engine.engine import Engine
from kvloom.engine.scoring import teacher_forced
from kvloom.gate.needle import Haystack
from kvloom.models.loader import LoadedModel
from kvloom.models.native.model import NativeModel

CHUNK = 512
AT_ONCE = 4  # settings measured beside one exact run; each has a cache of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A codec and what stays raw; None: as the codec has it by default."""

    codec: str
    sink_tokens: int | None = None
    recent_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One setting against the exact cache, over every position of every window.

    ``kl_*`` in nats per token, exact from approximate; ``top1`` is the share of positions where both
    have the same likeliest token; ``perplexity_change`` is relative. ``bits`` are per encoded value
    with side data; ``kept_bits`` per value of a whole window's cache, raw tokens and block padding included.
    Of ``needles`` facts told once, so many were found again with the codec and with the exact cache.
    """

    setting: Setting
    sink_tokens: int
    recent_tokens: int
    bits: float
    kept_bits: float
    tokens: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    top1: float
    perplexity: float
    exact_perplexity: float
    needles: int = 0
    needles_found: int = 0
    exact_needles_found: int = 0

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.exact_perplexity - 1.0


class _Tally:
    """Per position: KL divergence, agreement, and both negative log-likelihoods."""

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []
        self.nll: list[torch.Tensor] = []

    def add(self, exact: torch.Tensor, found: torch.Tensor, following: torch.Tensor) -> None:
        """``exact`` and ``found`` are log-probabilities [n, vocab]; ``following`` int64 [n or n - 1]."""
        self.kl.append((exact.exp() * (exact - found)).sum(dim=-1))
        self.same.append(exact.argmax(dim=-1) == found.argmax(dim=-1))
        rows = torch.arange(len(following))
        self.nll.append(-found[rows, following])


def measure(
    config: EngineConfig,
    settings: Sequence[Setting],
    windows: Sequence[np.ndarray],
    loaded: LoadedModel | None = None,
    haystacks: Sequence[Haystack] = (),
) -> Iterable[Loss]:
    """Each setting's loss over ``windows`` (int32 [T] each) and ``haystacks`` against ``config`` with codec raw.

    The exact engine and a few others read each window in step, so no window's logits are kept.
    """
    exact = Engine(_with(config, Setting(codec="raw")), loaded)
    for start in range(0, len(settings), AT_ONCE):
        yield from _measure(exact, config, settings[start : start + AT_ONCE], windows, haystacks)


def _with(config: EngineConfig, setting: Setting) -> EngineConfig:
    pipeline: PipelineConfig = replace(
        config.pipeline,
        codec=setting.codec,
        sink_tokens=setting.sink_tokens,
        recent_tokens=setting.recent_tokens,
        prefix_cache=False,
        codec_guard="off",  # what is measured is the codec in every layer
    )
    return replace(config, pipeline=pipeline)


def _measure(
    exact: Engine,
    config: EngineConfig,
    settings: Sequence[Setting],
    windows: Sequence[np.ndarray],
    haystacks: Sequence[Haystack],
) -> list[Loss]:
    engines = [_engine_like(exact, _with(config, setting)) for setting in settings]
    tallies = [_Tally() for _ in engines]
    exact_nll: list[torch.Tensor] = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.from_numpy(window.astype(np.int64))
            start = 0
            readers = [teacher_forced(engine, window, CHUNK) for engine in (exact, *engines)]
            for sure, *others in zip(*readers, strict=True):
                following = ids[start + 1 : start + 1 + len(sure)]
                sure = sure.log_softmax(dim=-1)
                exact_nll.append(-sure[torch.arange(len(following)), following])
                for tally, found in zip(tallies, others, strict=True):
                    tally.add(sure, found.log_softmax(dim=-1), following)
                start += len(sure)
        found = [_needles_found(engine, haystacks) for engine in (exact, *engines)]
    perplexity = float(torch.cat(exact_nll).double().mean().exp())
    asked = sum(len(haystack.answers) for haystack in haystacks)
    longest = max(len(window) for window in windows)
    return [
        replace(
            _loss(setting, engine, tally, longest, perplexity),
            needles=asked,
            needles_found=needles,
            exact_needles_found=found[0],
        )
        for setting, engine, tally, needles in zip(settings, engines, tallies, found[1:], strict=True)
    ]


def _needles_found(engine: Engine, haystacks: Sequence[Haystack]) -> int:
    total = 0
    for haystack in haystacks:
        parts = list(teacher_forced(engine, haystack.ids, CHUNK, first_wanted=haystack.first_wanted))
        total += haystack.found(torch.cat(parts))
    return total


def _loss(setting: Setting, engine: Engine, tally: _Tally, longest: int, exact_perplexity: float) -> Loss:
    kl = torch.cat(tally.kl).double().clamp_min(0.0)
    info, plan = engine.info, engine.plan
    kept = sum(
        item.most_blocks(longest, 0) * span.span_bytes for item, span in zip(plan.storage, plan.spans, strict=True)
    )
    values = sum(group.elements_per_token for group in plan.layout.groups) * longest
    return Loss(
        setting=setting,
        sink_tokens=info.sink_tokens,
        recent_tokens=info.recent_tokens,
        bits=info.bits_per_value,
        kept_bits=8 * kept / values,
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_median=float(kl.median()),
        kl_p99=float(kl.quantile(0.99)),
        top1=float(torch.cat(tally.same).double().mean()),
        perplexity=float(torch.cat(tally.nll).double().mean().exp()),
        exact_perplexity=exact_perplexity,
    )


def _engine_like(exact: Engine, config: EngineConfig) -> Engine:
    """An engine for ``config``, on the exact one's weights where they tell all that the codec must know."""
    try:
        return Engine(config, exact.loaded)
    except CodecError:
        if not isinstance(exact.loaded.model, NativeModel):
            raise
        return Engine(config)  # perhaps it was only for want of what a native model no longer tells
