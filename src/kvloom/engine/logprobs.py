"""Log-probabilities of tokens, from the raw logits: before bias, penalties, masks and temperature.

That is what vLLM's default (``raw_logprobs``) and OpenAI's API mean: how likely the model found a
token, not how likely the sampler made it. The normaliser is summed in integers (see `draw`), so a
row's values do not depend on the batch it is computed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvloom.core.messages import TokenLogprob
from kvloom.engine.draw import Scale
from kvloom.engine.truncation import top_values

_CHUNK_ELEMENTS = 1 << 20


def top_tokens(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best tokens per row, best first, the lower id first among equals.

    Args:
        x: [R, V] float32 without NaN.

    Returns:
        ids [R, count] int64 and values [R, count] float32.
    """
    count = min(count, x.shape[-1])
    if count == 0:
        return torch.empty(len(x), 0, dtype=torch.int64, device=x.device), x[:, :0]
    if x.device.type != "cpu":
        values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
        return ids[:, :count], values[:, :count]
    rows = x.numpy()
    found = np.empty((len(rows), count), dtype=np.int64)
    lowest = top_values(x, count)[:, -1].numpy()
    for i, row in enumerate(rows):
        candidates = np.flatnonzero(row >= lowest[i])
        found[i] = candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    best = torch.from_numpy(found)
    return best, x.gather(-1, best)


def log_normaliser(x: Tensor) -> Tensor:
    """log(sum(exp(x))) per row: [R, V] float32 -> [R, 1] float64."""
    scale = Scale.plain(x)
    total = scale.weights(x).sum(-1, keepdim=True)
    return scale.maximum.to(torch.float64) + (total.to(torch.float64) * 2.0**-scale.shift).log()


def token_logprobs(logits: Tensor, token_ids: Tensor, top: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of one token per row, and of the row's best.

    Args:
        logits: [R, V] raw, any float dtype; computed in float32. Rows must not hold NaN.
        token_ids: [R] int64.
        top: R counts of best tokens wanted (0: only the chosen token).

    Returns:
        R entries. A logit of -inf has the log-probability -inf.
    """
    found: list[TokenLogprob] = []
    step = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for start in range(0, len(top), step):
        part = slice(start, start + step)
        found += _token_logprobs(logits[part].to(torch.float32), token_ids[part], top[part])
    return found


def _token_logprobs(x: Tensor, token_ids: Tensor, top: Sequence[int]) -> list[TokenLogprob]:
    normaliser = log_normaliser(x)
    chosen = (x.gather(-1, token_ids[:, None]) - normaliser)[:, 0].tolist()
    ids, values = top_tokens(x, max(top))
    id_rows, logprob_rows = ids.tolist(), (values - normaliser).tolist()
    return [
        TokenLogprob(
            token_id=token,
            logprob=logprob,
            top=tuple(zip(id_rows[i][:count], logprob_rows[i][:count], strict=True)),
        )
        for i, (token, logprob, count) in enumerate(zip(token_ids.tolist(), chosen, top, strict=True))
    ]


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of prompt tokens, for any run of positions of one prompt.

    The whole answer for a prompt of T tokens is ``(None, *prompt_logprobs(logits[:T - 1], prompt[1:], k))``;
    a chunk of it is the rows and next tokens of that chunk.

    Args:
        logits: [P, V] raw logits at P consecutive prompt positions.
        next_token_ids: P ids, the token after each position.
        top: best tokens wanted per position.
    """
    ids = torch.tensor(next_token_ids, dtype=torch.int64, device=logits.device)
    return token_logprobs(logits, ids, [top] * len(ids))
