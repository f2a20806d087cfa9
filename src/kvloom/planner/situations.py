"""The situations users meet, and what each wants of a pipeline."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from kvloom.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """``max_kl`` is the loss accepted by default (nats per token against the exact cache).

    ``aim`` is what ranks the pipelines that meet it: ``bytes`` (least), ``speed`` (most tokens per
    second at the largest batch), ``reuse`` (most conversations held) or ``quality``.
    """

    name: str
    max_kl: float
    aim: str
    tiers: tuple[str, ...]
    press: bool
    rule: str


_ALL = (
    Situation(
        name="long-context",
        max_kl=0.02,
        aim="bytes",
        tiers=(),
        press=True,
        rule="one very long request: quantisation and footprint first; every decoded token reads the whole cache",
    ),
    Situation(
        name="throughput",
        max_kl=0.02,
        aim="speed",
        tiers=(),
        press=False,
        rule="throughput: paging and reuse across requests first, then fewer bytes so that more sequences run at once",
    ),
    Situation(
        name="chat-rag",
        max_kl=0.005,
        aim="reuse",
        tiers=("host", "disk"),
        press=False,
        rule="multi-turn and RAG: tiers and prefix reuse first; a turn that finds its history skips its prefill",
    ),
    Situation(
        name="edge",
        max_kl=0.05,
        aim="bytes",
        tiers=(),
        press=True,
        rule="small devices: strong quantisation, on models whose heads are few already (GQA, MLA)",
    ),
    Situation(
        name="accuracy",
        max_kl=0.001,
        aim="quality",
        tiers=(),
        press=False,
        rule="accuracy first: lossless or high-fidelity codecs; dropping tokens comes last",
    ),
)

SITUATIONS: Mapping[str, Situation] = {situation.name: situation for situation in _ALL}


def find_situation(name: str) -> Situation:
    """The situation called ``name``.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    if name in SITUATIONS:
        return SITUATIONS[name]
    near = difflib.get_close_matches(name, list(SITUATIONS), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--situation is {name!r}{hint} It must be one of {', '.join(SITUATIONS)}")
