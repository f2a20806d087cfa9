"""Log-probabilities of tokens, from the raw logits: before bias, penalties, masks and temperature.

That is what vLLM's default (``raw_logprobs``) and OpenAI's API mean: how likely the model found a
token, not how likely the sampler made it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvloom.core.messages import TokenLogprob

_CHUNK_ELEMENTS = 1 << 22  # prompt logits are worked through in pieces of this size


def top_tokens(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best tokens per row, best first, the lower id first among equals.

    Args:
        x: [R, V] float32 without NaN.

    Returns:
        ids [R, count] int64 and values [R, count].
    """
    vocab_size = x.shape[-1]
    count = min(count, vocab_size)
    if count == 0:
        empty = torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
        return empty, empty.to(x.dtype)
    # topk breaks ties as it likes: look one further, and sort the rows with a tie at the border whole.
    values, ids = torch.topk(x, min(count + 1, vocab_size), dim=-1)
    order = ids.argsort(-1)
    values, ids = values.gather(-1, order), ids.gather(-1, order)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if ids.shape[-1] > count:
        tied = (values[:, count - 1] == values[:, count]).nonzero()[:, 0]
        values, ids = values[:, :count].clone(), ids[:, :count].clone()
        if tied.numel():
            sorted_values, order = torch.sort(x[tied], dim=-1, descending=True, stable=True)
            values[tied], ids[tied] = sorted_values[:, :count], order[:, :count]
    return ids, values


def token_logprobs(logits: Tensor, token_ids: Tensor, top: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of one token per row, and of the row's best.

    Args:
        logits: [R, V] raw, any float dtype; computed in float32.
        token_ids: [R] int64.
        top: R counts of best tokens wanted (0: only the chosen token).

    Returns:
        R entries. A log-probability of NaN or -inf passes through.
    """
    if not top:
        return []
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    chosen = logprobs.gather(-1, token_ids.to(torch.int64)[:, None])[:, 0].tolist()
    best_ids, best_values = top_tokens(logprobs, max(top))
    id_rows, value_rows = best_ids.tolist(), best_values.tolist()
    return [
        TokenLogprob(
            token_id=token,
            logprob=logprob,
            top=tuple(zip(id_rows[i][:count], value_rows[i][:count], strict=True)),
        )
        for i, (token, logprob, count) in enumerate(zip(token_ids.tolist(), chosen, top, strict=True))
    ]


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int] | np.ndarray, top: int) -> list[TokenLogprob]:
    """Log-probabilities of prompt tokens, for any run of positions of one prompt.

    The whole answer for a prompt of T tokens is ``(None, *prompt_logprobs(logits[:T - 1], prompt[1:], k))``;
    a chunk of it is the rows and next tokens of that chunk.

    Args:
        logits: [P, V] raw logits at P consecutive prompt positions.
        next_token_ids: P ids, the token after each position.
        top: best tokens wanted per position.
    """
    ids = torch.as_tensor(np.asarray(next_token_ids, dtype=np.int64), device=logits.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    found: list[TokenLogprob] = []
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        found += token_logprobs(logits[start : start + len(part)], part, [top] * len(part))
    return found
