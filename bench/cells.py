"""What is measured: a cell is a phase, a number of sequences and their context.

::

    8x4096  decode:8x4096    decode steps of 8 sequences, each after its own prompt of 4096 tokens
    32x1024/960              the same, the first 960 tokens being the same ones in all 32
    prefill:8x512            8 prompts of 512 tokens, from nothing cached to one token each
    served:32x128            32 prompts of 128 tokens and their answers, over HTTP and without

Standard library only: workers of other engines import this file in environments of their own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Phase = Literal["decode", "prefill", "served"]
PHASES: tuple[Phase, ...] = get_args(Phase)

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SETS: dict[str, str] = {
    "table": "1x512,1x4096,8x512,8x4096,32x1024/960,32x64,prefill:8x512,prefill:8x4096",
    "context": ",".join(f"{batch}x{context}" for batch in (1, 8) for context in CONTEXTS),
    "batch": ",".join(f"{batch}x512" for batch in BATCHES),
    "served": "served:32x128",
    "codecs": "8x4096,1x8192,prefill:8x4096",
    "quick": "1x128,4x128/96,prefill:2x128,served:4x32",
}
SETS["all"] = ",".join(SETS[name] for name in ("table", "context", "batch", "served"))

_CELL = re.compile(r"(?:(\w+):)?(\d+)x(\d+)(?:/(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``context`` counts a prompt's tokens, the ``shared`` first ones being equal in all ``sequences``."""

    phase: Phase
    sequences: int
    context: int
    shared: int = 0

    @property
    def name(self) -> str:
        shared = f"/{self.shared}" if self.shared else ""
        return f"{self.phase}:{self.sequences}x{self.context}{shared}"

    def within(self, limit: int, new_tokens: int) -> Cell:
        """The cell with prompts short enough that ``new_tokens`` more stay within the model's ``limit``."""
        return replace(self, context=min(self.context, limit - new_tokens))


def parse_cells(text: str) -> list[Cell]:
    """Cells and names of sets, separated by commas; each cell once, in the order given.

    Raises:
        ValueError: neither a cell nor the name of a set.
    """
    found: dict[Cell, None] = {}
    for part in filter(None, text.split(",")):
        if part in SETS:
            found.update(dict.fromkeys(parse_cells(SETS[part])))
            continue
        match = _CELL.fullmatch(part)
        asked = (match.group(1) or "decode") if match else ""
        phase = next((phase for phase in PHASES if phase == asked), None)
        if match is None or phase is None:
            raise ValueError(
                f"{part!r} is no cell such as 8x512, 32x1024/960 or prefill:8x512, and no set: {list(SETS)}"
            )
        sequences, context, shared = (int(number or 0) for number in match.groups()[1:])
        if sequences < 1 or context < 2 or shared >= context or (shared and phase != "decode"):
            raise ValueError(f"{part!r}: at least 1 sequence and 2 tokens, and a shared part shorter than the context")
        found[Cell(phase=phase, sequences=sequences, context=context, shared=shared)] = None
    return list(found)


def make_prompts(cell: Cell, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts, the same ones for every engine that is given the same seed."""
    source = random.Random(f"{cell.name} {seed}")
    tokens: Sequence[int] = range(vocab_size)
    prefix = source.choices(tokens, k=cell.shared)
    return [prefix + source.choices(tokens, k=cell.context - cell.shared) for _ in range(cell.sequences)]
