"""What a request changes in its logits before a token is drawn: bias, penalties, masks.

All but the grammar mask is sparse: only logits of tokens that the request names, or that its text
holds, are read and written. Entries are sorted by row, so that a run of rows is a run of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


@dataclass(kw_only=True, slots=True)
class Entries:
    """E distinct (row, token) pairs of a batch of N rows, sorted by row.

    row, token: [E] int64. starts: N + 1 positions; row r owns entries starts[r] to starts[r + 1].
    """

    row: Tensor
    token: Tensor
    starts: tuple[int, ...]

    @classmethod
    def build(cls, row: NDArray[np.int64], token: NDArray[np.int64], count: int, device: torch.device | str) -> Entries:
        return cls(
            row=torch.from_numpy(row).to(device),
            token=torch.from_numpy(token).to(device),
            starts=tuple(np.searchsorted(row, np.arange(count + 1)).tolist()),
        )

    def run(self, first: int, last: int) -> slice:
        """The entries of rows first to last (exclusive)."""
        return slice(self.starts[first], self.starts[last])


@dataclass(kw_only=True, slots=True)
class LogitBias:
    """``logit += value``; value [E] float32."""

    entries: Entries
    value: Tensor

    def apply(self, x: Tensor, first: int) -> None:
        """Add to x [R, V] float32, the batch's rows from ``first`` on, in place."""
        run = self.entries.run(first, first + len(x))
        at = (self.entries.row[run] - first, self.entries.token[run])
        x[at] = x[at] + self.value[run]


@dataclass(kw_only=True, slots=True)
class Penalties:
    """Repetition, presence and frequency penalties.

    As in vLLM: repetition (CTRL, Keskar et al. 2019: a positive logit is divided, a negative one
    multiplied) looks at prompt and output, and comes first; frequency (times the token's count) and
    presence (once), as OpenAI defines them, look at the output only.

    repetition, subtract: [E] float32, per token in the text.
    """

    entries: Entries
    repetition: Tensor
    subtract: Tensor

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        prompts: Sequence[NDArray[np.integer]],
        outputs: Sequence[NDArray[np.integer]],
        factors: NDArray[np.float32],
        *,
        count: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> Penalties:
        """Count tokens, all rows in one sort.

        Args:
            rows: P batch rows, ascending. prompts, outputs: their token ids; ids outside the vocabulary are ignored.
            factors: [P, 3] repetition, presence, frequency.
            count: rows of the batch.
        """
        texts = [ids for pair in zip(prompts, outputs, strict=True) for ids in pair]
        tokens = np.concatenate(texts).astype(np.int64)
        text = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])  # 2 * position in rows + in output
        # One number per token, whose order is by row, then token, then prompt before output.
        bits = vocab_size.bit_length()
        key = ((text >> 1) << bits | tokens) << 1 | (text & 1)
        key = np.sort(key[(tokens >= 0) & (tokens < vocab_size)])
        place = key >> 1
        first = np.flatnonzero(np.diff(place, prepend=-1))
        found = np.add.reduceat(key & 1, first) if len(first) else first
        owner, token = place[first] >> bits, place[first] & ((1 << bits) - 1)
        repetition, presence, frequency = np.take(factors.T, owner, axis=1)
        repetition = np.clip(repetition, 1e-30, 1e30)  # beyond, float32 logits would become infinite
        return cls(
            entries=Entries.build(np.asarray(rows, dtype=np.int64)[owner], token, count, device),
            repetition=torch.from_numpy(repetition).to(device),
            subtract=torch.from_numpy(frequency * found.astype(np.float32) + presence * (found > 0)).to(device),
        )

    def apply(self, x: Tensor, first: int) -> None:
        """Penalise x [R, V] float32, the batch's rows from ``first`` on, in place."""
        run = self.entries.run(first, first + len(x))
        at = (self.entries.row[run] - first, self.entries.token[run])
        value, repetition = x[at], self.repetition[run]
        x[at] = torch.where(value > 0, value / repetition, value * repetition) - self.subtract[run]


@dataclass(kw_only=True, slots=True)
class ForbiddenTokens:
    """Tokens that end a sequence, forbidden while it is shorter than ``min_tokens``."""

    entries: Entries

    def apply(self, x: Tensor, first: int, *, yielding: bool) -> None:
        """Mask in x [R, V] float32, the batch's rows from ``first`` on, in place.

        With ``yielding`` a row keeps its end tokens where nothing else is left: a grammar that is
        complete wins over ``min_tokens``.
        """
        run = self.entries.run(first, first + len(x))
        row = self.entries.row[run] - first
        at = (row, self.entries.token[run])
        before = x[at]
        x[at] = NEGATIVE_INFINITY
        if yielding and len(row):
            alive = x.amax(-1) != NEGATIVE_INFINITY
            x[at] = torch.where(alive[row], NEGATIVE_INFINITY, before)


def apply_bitmask(x: Tensor, bitmask: Tensor) -> None:
    """Forbid, in place, the tokens whose bit is 0.

    Args:
        x: [R, V] float32.
        bitmask: [R, ceil(V / 32)] int32 on any device, token t at bit t % 32 of word t // 32; an
            unconstrained row is all ones.
    """
    vocab_size = x.shape[-1]
    if bitmask.device.type == "cpu":
        constrained = (bitmask != -1).any(-1).nonzero()[:, 0]
        for row in constrained.tolist():
            words = bitmask[row].numpy().astype("<i4", copy=False).view(np.uint8)
            allowed = np.unpackbits(words, count=vocab_size, bitorder="little").view(np.bool_)
            x[row].masked_fill_(torch.from_numpy(~allowed).to(x.device), NEGATIVE_INFINITY)
        return
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    allowed_bits = ((bitmask[:, :, None] >> bits) & 1).view(len(bitmask), -1)[:, :vocab_size]
    x.masked_fill_(allowed_bits == 0, NEGATIVE_INFINITY)
