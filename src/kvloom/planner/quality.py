"""Measured quality losses, shipped as data: which model, which text, how, and what else is known.

A number holds for the model and text it was measured on. For any other family the planner shows it
as an order of magnitude and says "not measured for this family".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvloom.core.codec_sizes import parse_codec

NOT_MEASURED = "not measured for this family"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Expected loss of one format. ``kl_mean`` in nats per token against the exact cache.

    ``short_text``: a long context was asked for, but only 1,024-token windows were measured.
    """

    kl_mean: float | None
    top1_percent: float | None
    perplexity_change_percent: float | None
    model: str | None
    text: str | None
    protection: str
    measured_for_this_model: bool
    short_text: bool = False

    @property
    def note(self) -> str:
        if self.kl_mean is None:
            return "not measured"
        return "measured on this model" if self.measured_for_this_model else NOT_MEASURED


LOSSLESS = Quality(
    kl_mean=0.0,
    top1_percent=100.0,
    perplexity_change_percent=0.0,
    model=None,
    text=None,
    protection="lossless",
    measured_for_this_model=True,
)


@lru_cache(maxsize=1)
def _data() -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(_read("quality.json"))
    for table in data["tables"]:
        if "record" in table:
            table["rows"] = _recorded(table["record"], table["window"], table["count"])
    return data


def _read(name: str) -> str:
    return files("kvloom.planner").joinpath("data").joinpath(name).read_text(encoding="utf-8")


def _recorded(name: str, window: int, count: int) -> list[dict[str, Any]]:
    """Rows of what ``kvloom gate quality --record`` keeps, for ``count`` windows of ``window`` tokens of each text."""
    rows = []
    for line in _read(name).splitlines():
        entry = json.loads(line)
        run, loss = entry["run"], entry["loss"]
        if (run["window"], run["count"]) != (window, count):
            continue
        codec, sinks, recents = (run["setting"][key] for key in ("codec", "sink_tokens", "recent_tokens"))
        own = parse_codec(codec)
        rows.append(
            {
                "label": codec,
                "codec": codec,
                "sink_tokens": own.sink_tokens if sinks is None else sinks,
                "recent_tokens": own.recent_tokens if recents is None else recents,
                "kl_mean": loss["kl_mean"],
                "kl_p99": loss["kl_p99"],
                "top1_percent": 100 * loss["top1"],
                "perplexity_change_percent": 100 * (loss["perplexity"] / loss["exact_perplexity"] - 1),
            }
        )
    return rows


def tables() -> list[dict[str, Any]]:
    """Every measured table, each with ``model``, ``text``, ``window``, ``how``, ``limits`` and ``rows``.

    Those of this engine come first; the others are of quantised copies of keys and values, without an engine.
    """
    return list(_data()["tables"])


SHORT, LONG = 1024, 4096  # windows of the tables, tokens


def expected_loss(
    codec: str, *, sink_tokens: int, recent_tokens: int, model: str, long: bool = False, elsewhere: bool = False
) -> Quality:
    """The measured loss of ``codec`` under a protection, or the nearest weaker one measured.

    ``long`` prefers the 4,096-token tables, where the protected share is smaller. A row measured
    with *more* protection than asked for is never used: it would flatter. Of rows with equal protection
    this engine's own counts; ``elsewhere``, for engines that encode the newest tokens too, none of its own does.
    """
    for window in (LONG, SHORT) if long else (SHORT, LONG):
        rows = [
            (table, row)
            for table in tables()
            if table["window"] == window and not (elsewhere and "record" in table)
            for row in table["rows"]
            if row.get("codec") == codec and row["sink_tokens"] <= sink_tokens and row["recent_tokens"] <= recent_tokens
        ]
        if rows:
            table, row = max(rows, key=lambda found: (found[1]["recent_tokens"], found[1]["sink_tokens"]))
            return Quality(
                kl_mean=row["kl_mean"],
                top1_percent=row["top1_percent"],
                perplexity_change_percent=row["perplexity_change_percent"],
                model=table["model"],
                text=table["text"],
                protection=f"first {row['sink_tokens']} and last {row['recent_tokens']} tokens raw",
                measured_for_this_model=any(_plain(name) in _plain(model) for name in table["model_names"]),
                short_text=long and window == SHORT,
            )
    return Quality(
        kl_mean=None,
        top1_percent=None,
        perplexity_change_percent=None,
        model=None,
        text=None,
        protection="",
        measured_for_this_model=False,
    )


def _plain(name: str) -> str:
    """Letters and digits: hub ids, presets and GGUF headers write ``SmolLM2-135M``, ``Smollm2 135M``."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def known_results(model: str, model_type: str) -> list[dict[str, str]]:
    """Published results that concern this model or its family."""
    wanted = model.lower()
    return [item for item in _data()["known"] if item["matches"] in wanted or item["matches"] == model_type]
