"""What a request changes in its logits before a token is drawn: bias, penalties, masks.

All of it is sparse but the grammar mask: only the logits of tokens named by the request, or present
in its text, are read and written, through flat (row, token) indices that cover the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


@dataclass(slots=True)
class LogitBias:
    """``logits[row, token] += value`` for E entries: row, token [E] int64, value [E] float32."""

    row: Tensor
    token: Tensor
    value: Tensor

    def apply(self, x: Tensor) -> None:
        """Add to x [N, V] float32, in place. A (row, token) pair occurs at most once."""
        x[self.row, self.token] = x[self.row, self.token] + self.value


@dataclass(slots=True)
class Penalties:
    """Repetition, presence and frequency penalties of P rows.

    As in vLLM: repetition (CTRL, Keskar et al. 2019: a positive logit is divided, a negative one
    multiplied) looks at prompt and output; frequency and presence (OpenAI) at the output only.
    Order: repetition, frequency, presence.

    rows: [P] int64, the batch row of each. repetition, presence, frequency: [P] float32.
    seen_row, seen_token: [E] int64, prompt and output tokens with repeats; seen_row counts from 0 to P.
    counts: [P, V] int32, how often each token is in the output.
    """

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seen_row: Tensor
    seen_token: Tensor
    counts: Tensor

    def apply(self, x: Tensor) -> None:
        """Penalise x [N, V] float32 in place."""
        row, token = self.rows[self.seen_row], self.seen_token
        value = x[row, token]
        repetition = self.repetition[self.seen_row]
        value = torch.where(value > 0, value / repetition, value * repetition)
        count = self.counts[self.seen_row, token].to(torch.float32)
        value = value - self.frequency[self.seen_row] * count
        value = value - self.presence[self.seen_row] * (count > 0)
        # A token seen twice is written twice with one and the same value.
        x[row, token] = value


@dataclass(slots=True)
class ForbiddenTokens:
    """Tokens that end a sequence, forbidden while it is shorter than ``min_tokens``.

    rows: [P] int64 batch rows; entry, token: [E] int64, entry counting from 0 to P.
    """

    rows: Tensor
    entry: Tensor
    token: Tensor

    def apply(self, x: Tensor, *, yielding: bool) -> None:
        """Mask in x [N, V] in place.

        With ``yielding`` a row keeps its end tokens where nothing else is left: a grammar that is
        complete wins over ``min_tokens``.
        """
        row = self.rows[self.entry]
        if not yielding:
            x[row, self.token] = NEGATIVE_INFINITY
            return
        before = x[row, self.token]
        x[row, self.token] = NEGATIVE_INFINITY
        alive = x[self.rows].amax(-1) != NEGATIVE_INFINITY
        x[row, self.token] = torch.where(alive[self.entry], NEGATIVE_INFINITY, before)


def apply_bitmask(x: Tensor, bitmask: Tensor) -> None:
    """Forbid, in place, the tokens whose bit is 0.

    Args:
        x: [N, V] float32.
        bitmask: [N, ceil(V / 32)] int32, token t at bit t % 32 of word t // 32; an unconstrained row is all ones.
    """
    vocab_size = x.shape[-1]
    if bitmask.device.type == "cpu":
        rows = (bitmask != -1).any(-1).nonzero()[:, 0]
        if not rows.numel():
            return
        words = bitmask[rows].contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
        allowed = np.unpackbits(words, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)
        index = rows.to(x.device)
        forbidden = torch.from_numpy(~allowed).to(x.device)
        if len(rows) == x.shape[0]:
            x.masked_fill_(forbidden, NEGATIVE_INFINITY)
        else:
            for i, row in enumerate(index):
                x[row].masked_fill_(forbidden[i], NEGATIVE_INFINITY)
        return
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    allowed_bits = ((bitmask[:, :, None] >> bits) & 1).view(bitmask.shape[0], -1)[:, :vocab_size]
    x.masked_fill_(allowed_bits == 0, NEGATIVE_INFINITY)
