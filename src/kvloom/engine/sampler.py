"""One token per row from a step's logits.

The order is vLLM's: raw log-probabilities are taken first; then logit_bias, repetition, frequency
and presence penalties, the grammar mask, min_tokens; greedy rows take the best token; the others
go on through temperature, min_p, top_k, top_p and a draw. A row's token is a pure function of its
own logits, parameters, seed and step (`draw` says how), so neighbours and batch size never matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvloom.core.errors import EngineError
from kvloom.core.messages import TokenLogprob
from kvloom.core.request import SamplingParams
from kvloom.engine import draw
from kvloom.engine.logprobs import token_logprobs
from kvloom.engine.penalties import (
    NEGATIVE_INFINITY,
    Entries,
    ForbiddenTokens,
    LogitBias,
    Penalties,
    apply_bitmask,
)
from kvloom.engine.truncation import draw_truncated

# Below this a draw would differ from greedy only between equal logits; vLLM draws the same line.
GREEDY_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30  # float32 holds this and its inverse
_CHUNK_ELEMENTS = 1 << 20  # on a CPU rows are worked through in pieces that stay in its caches

FAILED_TOKEN = -1
_OK, _NOT_FINITE, _NOTHING_ALLOWED = 0, 1, 2
_FAILURES = {
    _NOT_FINITE: "the model's logits hold NaN or +inf; the weights or the cache are damaged, or the dtype overflows",
    _NOTHING_ALLOWED: "no token is allowed: the grammar, or -inf logits, exclude the whole vocabulary",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRow:
    """What one row of the batch needs.

    Attributes:
        seed: 64 bits, signed, resolved by the engine; ``n`` sequences of a request get different ones
            (`draw.sequence_seed`).
        step: tokens generated so far.
        prompt_token_ids, output_token_ids: 1-D integer arrays; read only when penalties ask for them.
    """

    params: SamplingParams
    seed: int
    step: int
    prompt_token_ids: NDArray[np.integer]
    output_token_ids: NDArray[np.integer]

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE


@dataclass(kw_only=True, slots=True)
class SamplingBatch:
    """Per-row parameters as tensors on the logits' device; N rows.

    Every tensor may be overwritten in place by a version that lives across steps; the tuples hold
    what the host must know to choose what runs.
    """

    vocab_size: int
    seed: Tensor  # [N] int64
    step: Tensor  # [N] int64
    inverse_temperature: Tensor  # [N] float32, 1 for greedy rows
    min_p: Tensor  # [N] float32
    top_k: tuple[int, ...]  # vocab_size when off
    top_p: tuple[float, ...]
    greedy: tuple[bool, ...]
    use_min_p: bool
    logprobs: tuple[int | None, ...]
    bias: LogitBias | None
    penalties: Penalties | None
    forbidden: ForbiddenTokens | None

    def __len__(self) -> int:
        return len(self.greedy)

    @classmethod
    def build(
        cls,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> SamplingBatch:
        """Collect ``rows``.

        Args:
            vocab_size: width of the logits; token ids beyond it are ignored.
            eos_token_ids: the model's end tokens, which min_tokens forbids with ``stop_token_ids``.
        """
        temperatures = [1.0 if r.greedy else min(r.params.temperature, _MAX_TEMPERATURE) for r in rows]
        params = [r.params for r in rows]

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            vocab_size=vocab_size,
            seed=tensor([r.seed for r in rows], torch.int64),
            step=tensor([r.step for r in rows], torch.int64),
            inverse_temperature=tensor([1.0 / t for t in temperatures], torch.float32),
            min_p=tensor([p.min_p for p in params], torch.float32),
            top_k=tuple(min(p.top_k, vocab_size) or vocab_size for p in params),
            top_p=tuple(p.top_p for p in params),
            greedy=tuple(r.greedy for r in rows),
            use_min_p=any(p.min_p > 0 and not r.greedy for p, r in zip(params, rows, strict=True)),
            logprobs=tuple(p.logprobs for p in params),
            bias=_build_bias(rows, vocab_size, device),
            penalties=_build_penalties(rows, vocab_size, device),
            forbidden=_build_forbidden(rows, vocab_size, device, eos_token_ids),
        )


@dataclass(kw_only=True, slots=True)
class SamplerOutput:
    """Tokens of one step.

    Attributes:
        token_ids: [N] int64 on the logits' device; FAILED_TOKEN (-1) in rows that failed.
        status: [N] int8, 0 where a token was found.
    """

    token_ids: Tensor
    status: Tensor
    _logprobs: dict[int, TokenLogprob] = field(default_factory=dict)

    def errors(self) -> dict[int, EngineError]:
        """Rows that failed, and why; the other rows are not affected. Waits for the device."""
        codes = self.status.tolist()
        return {row: EngineError(_FAILURES[code]) for row, code in enumerate(codes) if code != _OK}

    def logprobs(self) -> list[TokenLogprob | None]:
        """N entries; None for a row that did not ask or failed."""
        return [self._logprobs.get(row) for row in range(len(self.token_ids))]


def takes_best(params: SamplingParams, step: int) -> bool:
    """Whether a row's token is just the place of its largest logit, with nothing to change or to report."""
    return (
        params.temperature < GREEDY_TEMPERATURE
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and step >= params.min_tokens
    )


def take_best(logits: Tensor, best: tuple[Tensor, Tensor] | None = None) -> SamplerOutput:
    """The token of the largest logit of every row of ``logits`` [N, V]: what `sample` gives rows that `takes_best`.

    ``best``, where it is known: first places [N] int64 and values [N] float32 of the largest, NaN counting as largest.
    """
    places, values = _best(logits) if best is None else best
    return _output(places, values)


def sample(logits: Tensor, batch: SamplingBatch, grammar_bitmask: Tensor | None = None) -> SamplerOutput:
    """Choose a token for every row.

    Args:
        logits: [N, V] bfloat16, float16 or float32; left as they are. Computed in float32.
        grammar_bitmask: [N, ceil(V / 32)] int32, all ones in unconstrained rows, or None.

    Raises:
        EngineError: the shapes contradict each other. Trouble in one row is reported in the output.
    """
    _check_shapes(logits, batch, grammar_bitmask)
    token_ids = torch.empty(len(batch), dtype=torch.int64, device=logits.device)
    maximum = torch.empty(len(batch), dtype=torch.float32, device=logits.device)
    editing = grammar_bitmask is not None or batch.bias or batch.penalties or batch.forbidden
    chunk = max(1, _CHUNK_ELEMENTS // batch.vocab_size) if logits.device.type == "cpu" else max(1, len(batch))
    for first in range(0, len(batch), chunk):
        part = slice(first, first + chunk)
        x = logits[part]
        if editing:
            x = x.to(torch.float32, copy=True)
            _edit(x, first, batch, None if grammar_bitmask is None else grammar_bitmask[part])
        token_ids[part], maximum[part] = _choose(x, first, batch)
    output = _output(token_ids, maximum)
    asked = [row for row, top in enumerate(batch.logprobs) if top is not None]
    if asked:
        failed = output.errors()
        asked = [row for row in asked if row not in failed]
        index = _index(asked, logits.device)
        found = token_logprobs(logits[index], token_ids[index], [batch.logprobs[row] or 0 for row in asked])
        output._logprobs = dict(zip(asked, found, strict=True))
    return output


def _output(token_ids: Tensor, maximum: Tensor) -> SamplerOutput:
    """``token_ids`` [N] with what each row's largest logit says of it."""
    trouble = torch.where(maximum == NEGATIVE_INFINITY, _NOTHING_ALLOWED, _NOT_FINITE)
    status = torch.where(maximum.isfinite(), _OK, trouble).to(torch.int8)
    return SamplerOutput(token_ids=token_ids.masked_fill(status != _OK, FAILED_TOKEN), status=status)


def _edit(x: Tensor, first: int, batch: SamplingBatch, grammar_bitmask: Tensor | None) -> None:
    if batch.bias is not None:
        batch.bias.apply(x, first)
    if batch.penalties is not None:
        batch.penalties.apply(x, first)
    if grammar_bitmask is not None:
        apply_bitmask(x, grammar_bitmask)
    if batch.forbidden is not None:
        batch.forbidden.apply(x, first, yielding=grammar_bitmask is not None)


def _choose(x: Tensor, first: int, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 and largest logits [R] of x [R, V], the batch's rows from ``first`` on."""
    greedy = batch.greedy[first : first + len(x)]
    if not any(greedy):
        return _draw(x, range(first, first + len(x)), batch)
    tokens, values = _best(x)
    if all(greedy):
        return tokens, values
    drawn = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
    index = _index(drawn, x.device)
    tokens[index], values[index] = _draw(x[index], [first + i for i in drawn], batch)
    return tokens, values


def _best(x: Tensor) -> tuple[Tensor, Tensor]:
    """First places [R] int64 and values [R] float32 of the largest of x [R, V]; NaN counts as largest."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        # torch looks for places one element after the other there: five times as long.
        places = torch.from_numpy(x.numpy().argmax(-1))
        return places, x.gather(-1, places[:, None])[:, 0]
    best = x.max(-1)
    return best.indices, best.values.to(torch.float32)


def _draw(x: Tensor, rows: Sequence[int], batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 and largest logits [R] float32 of x [R, V], the batch's ``rows``."""
    x = x.to(torch.float32)
    index = _index(rows, x.device)
    maximum = x.amax(-1, keepdim=True)
    scale = draw.Scale(
        maximum=maximum,
        inverse_temperature=batch.inverse_temperature[index][:, None],
        min_p=batch.min_p[index][:, None] if batch.use_min_p else None,
        shift=draw.weight_shift(batch.vocab_size),
    )
    u = draw.uniform(batch.seed[index], batch.step[index])
    top_k, top_p = [batch.top_k[row] for row in rows], [batch.top_p[row] for row in rows]
    cut = [i for i in range(len(rows)) if top_k[i] < batch.vocab_size or top_p[i] < 1.0]
    if len(cut) == len(rows):
        return draw_truncated(x, scale, top_k, top_p, u), maximum[:, 0]
    if not cut:
        return draw.inverse_cdf(scale.weights(x), u), maximum[:, 0]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=x.device)
    some = _index(cut, x.device)
    tokens[some] = draw_truncated(x[some], scale[some], [top_k[i] for i in cut], [top_p[i] for i in cut], u[some])
    others = _index([i for i in range(len(rows)) if i not in cut], x.device)
    tokens[others] = draw.inverse_cdf(scale[others].weights(x[others]), u[others])
    return tokens, maximum[:, 0]


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int64, device=device)


def _check_shapes(logits: Tensor, batch: SamplingBatch, grammar_bitmask: Tensor | None) -> None:
    expected = (len(batch), batch.vocab_size)
    if tuple(logits.shape) != expected:
        raise EngineError(f"logits have shape {tuple(logits.shape)}; the sampling batch expects {expected}")
    words = (len(batch), -(-batch.vocab_size // 32))
    if grammar_bitmask is not None and (tuple(grammar_bitmask.shape) != words or grammar_bitmask.dtype != torch.int32):
        raise EngineError(
            f"the grammar bitmask is {grammar_bitmask.dtype} of shape {tuple(grammar_bitmask.shape)}; "
            f"it must be torch.int32 of shape {words}"
        )


def _build_bias(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> LogitBias | None:
    found = [
        (row, token, value)
        for row, r in enumerate(rows)
        for token, value in r.params.logit_bias.items()
        if 0 <= token < vocab_size
    ]
    if not found:
        return None
    row, token, value = zip(*found, strict=True)
    return LogitBias(
        entries=Entries.build(np.array(row), np.array(token), len(rows), device),
        value=torch.tensor(value, dtype=torch.float32, device=device),
    )


def _build_penalties(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> Penalties | None:
    def factors(p: SamplingParams) -> tuple[float, float, float]:
        return p.repetition_penalty, p.presence_penalty, p.frequency_penalty

    wanted = [row for row, r in enumerate(rows) if factors(r.params) != (1.0, 0.0, 0.0)]
    if not wanted:
        return None
    chosen = [rows[row] for row in wanted]
    nothing = np.zeros(0, dtype=np.int64)
    return Penalties.build(
        wanted,
        [r.prompt_token_ids if r.params.repetition_penalty != 1.0 else nothing for r in chosen],
        [r.output_token_ids for r in chosen],
        np.array([factors(r.params) for r in chosen]).clip(-1e30, 1e30).astype(np.float32),
        count=len(rows),
        vocab_size=vocab_size,
        device=device,
    )


def _build_forbidden(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str, eos_token_ids: Sequence[int]
) -> ForbiddenTokens | None:
    found: list[tuple[int, int]] = []
    for row, r in enumerate(rows):
        if r.step < r.params.min_tokens:
            ends = set(r.params.stop_token_ids)
            if not r.params.ignore_eos:
                ends.update(eos_token_ids)
            found += [(row, token) for token in sorted(ends) if 0 <= token < vocab_size]
    if not found:
        return None
    row_ids, tokens = zip(*found, strict=True)
    return ForbiddenTokens(entries=Entries.build(np.array(row_ids), np.array(tokens), len(rows), device))
