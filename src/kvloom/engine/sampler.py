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
from kvloom.engine.penalties import ForbiddenTokens, LogitBias, Penalties, apply_bitmask

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


def sample(logits: Tensor, batch: SamplingBatch, grammar_bitmask: Tensor | None = None) -> SamplerOutput:
    """Choose a token for every row.

    Args:
        logits: [N, V] bfloat16, float16 or float32; left as they are. Computed in float32.
        grammar_bitmask: [N, ceil(V / 32)] int32, all ones in unconstrained rows, or None.

    Raises:
        EngineError: the shapes contradict each other. Trouble in one row is reported in the output.
    """
    _check_shapes(logits, batch, grammar_bitmask)
    token_ids = torch.zeros(len(batch), dtype=torch.int64, device=logits.device)
    maximum = torch.zeros(len(batch), dtype=torch.float32, device=logits.device)
    edited = logits
    if grammar_bitmask is not None or batch.bias or batch.penalties or batch.forbidden:
        edited = logits.to(torch.float32, copy=True)
        _edit(edited, batch, grammar_bitmask)
    greedy = [row for row, is_greedy in enumerate(batch.greedy) if is_greedy]
    drawn = [row for row, is_greedy in enumerate(batch.greedy) if not is_greedy]
    if greedy:
        index = _rows_index(greedy, logits.device)
        best = _rows(edited, greedy, index).max(-1)
        token_ids[index], maximum[index] = best.indices, best.values.to(torch.float32)
    on_cpu = logits.device.type == "cpu"
    chunk = max(1, _CHUNK_ELEMENTS // batch.vocab_size) if on_cpu else max(1, len(drawn))
    for start in range(0, len(drawn), chunk):
        rows = drawn[start : start + chunk]
        index = _rows_index(rows, logits.device)
        token_ids[index], maximum[index] = _draw(_rows(edited, rows, index), rows, index, batch)
    status = torch.where(maximum.isfinite(), _OK, torch.where(maximum == -torch.inf, _NOTHING_ALLOWED, _NOT_FINITE)).to(
        torch.int8
    )
    token_ids.masked_fill_(status != _OK, FAILED_TOKEN)
    output = SamplerOutput(token_ids=token_ids, status=status)
    asked = [row for row, top in enumerate(batch.logprobs) if top is not None]
    if asked:
        index = _rows_index(asked, logits.device)
        tops = [batch.logprobs[row] or 0 for row in asked]
        found = token_logprobs(_rows(logits, asked, index), token_ids[index].clamp(min=0), tops)
        failed = output.errors()
        output._logprobs = {row: entry for row, entry in zip(asked, found, strict=True) if row not in failed}
    return output


def _edit(x: Tensor, batch: SamplingBatch, grammar_bitmask: Tensor | None) -> None:
    if batch.bias is not None:
        batch.bias.apply(x)
    if batch.penalties is not None:
        batch.penalties.apply(x)
    if grammar_bitmask is not None:
        apply_bitmask(x, grammar_bitmask)
    if batch.forbidden is not None:
        batch.forbidden.apply(x, yielding=grammar_bitmask is not None)


def _draw(x: Tensor, rows: list[int], index: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Draw for ``rows``, whose logits are x [R, V]: tokens [R] int64 and largest logits [R] float32."""
    vocab_size = batch.vocab_size
    x = x.to(torch.float32)
    maximum = x.amax(-1, keepdim=True)
    inverse = batch.inverse_temperature[index][:, None]
    min_p = batch.min_p[index][:, None] if batch.use_min_p else None
    shift = draw.weight_shift(vocab_size)
    padded = -(-vocab_size // draw.BLOCK) * draw.BLOCK
    w = draw.weights(x, maximum, inverse, min_p, shift)
    if padded != vocab_size:
        w = torch.nn.functional.pad(w, (0, padded - vocab_size))
    cut = [i for i, r in enumerate(rows) if batch.top_k[r] < vocab_size or batch.top_p[r] < 1.0]
    if cut:
        top_k = [batch.top_k[rows[i]] for i in cut]
        top_p = [batch.top_p[rows[i]] for i in cut]
        if len(cut) == len(rows):
            draw.truncate(x, w, maximum, inverse, min_p, top_k, top_p, shift)
        else:
            sub = _rows_index(cut, x.device)
            w_cut = w[sub]
            min_p_cut = None if min_p is None else min_p[sub]
            draw.truncate(x[sub], w_cut, maximum[sub], inverse[sub], min_p_cut, top_k, top_p, shift)
            w[sub] = w_cut
    u = draw.uniform(batch.seed[index], batch.step[index])
    return draw.inverse_cdf(w, u), maximum[:, 0]


def _rows_index(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _rows(x: Tensor, rows: list[int], index: Tensor) -> Tensor:
    """Rows of x, as a view where they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return x[rows[0] : rows[-1] + 1]
    return x[index]


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
    entries = [
        (row, token, value)
        for row, r in enumerate(rows)
        for token, value in r.params.logit_bias.items()
        if 0 <= token < vocab_size
    ]
    if not entries:
        return None
    row, token, value = zip(*entries, strict=True)
    return LogitBias(
        row=torch.tensor(row, device=device),
        token=torch.tensor(token, device=device),
        value=torch.tensor(value, dtype=torch.float32, device=device),
    )


def _build_penalties(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> Penalties | None:
    wanted = [
        (row, r)
        for row, r in enumerate(rows)
        if r.params.repetition_penalty != 1.0 or r.params.presence_penalty or r.params.frequency_penalty
    ]
    if not wanted:
        return None
    seen_rows: list[NDArray[np.int64]] = []
    seen_tokens: list[NDArray[np.int64]] = []
    counts = torch.zeros(len(wanted), vocab_size, dtype=torch.int32, device=device)
    for i, (_, r) in enumerate(wanted):
        output = _valid(r.output_token_ids, vocab_size)
        counts[i].index_add_(
            0, torch.from_numpy(output).to(device), torch.ones(len(output), dtype=torch.int32, device=device)
        )
        seen = output
        if r.params.repetition_penalty != 1.0:
            seen = np.concatenate([_valid(r.prompt_token_ids, vocab_size), output])
        seen_tokens.append(seen)
        seen_rows.append(np.full(len(seen), i, dtype=np.int64))

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Penalties(
        rows=torch.tensor([row for row, _ in wanted], device=device),
        repetition=column([r.params.repetition_penalty for _, r in wanted]),
        presence=column([r.params.presence_penalty for _, r in wanted]),
        frequency=column([r.params.frequency_penalty for _, r in wanted]),
        seen_row=torch.from_numpy(np.concatenate(seen_rows)).to(device),
        seen_token=torch.from_numpy(np.concatenate(seen_tokens)).to(device),
        counts=counts,
    )


def _valid(token_ids: NDArray[np.integer], vocab_size: int) -> NDArray[np.int64]:
    ids = token_ids.astype(np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _build_forbidden(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str, eos_token_ids: Sequence[int]
) -> ForbiddenTokens | None:
    short = [(row, r) for row, r in enumerate(rows) if r.step < r.params.min_tokens]
    entries: list[tuple[int, int]] = []
    for i, (_, r) in enumerate(short):
        ends = set(r.params.stop_token_ids)
        if not r.params.ignore_eos:
            ends.update(eos_token_ids)
        entries += [(i, token) for token in sorted(ends) if 0 <= token < vocab_size]
    if not entries:
        return None
    entry, token = zip(*entries, strict=True)
    return ForbiddenTokens(
        rows=torch.tensor([row for row, _ in short], device=device),
        entry=torch.tensor(entry, device=device),
        token=torch.tensor(token, device=device),
    )
