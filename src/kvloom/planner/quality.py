"""Measured quality losses, shipped as data: which model, which text, how, and what else is known.

A number holds for the model and text it was measured on. For any other family the planner shows it
as an order of magnitude and says "not measured for this family".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvloom.core.storage import raw_tokens

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


UNMEASURED = Quality(
    kl_mean=None,
    top1_percent=None,
    perplexity_change_percent=None,
    model=None,
    text=None,
    protection="",
    measured_for_this_model=False,
)


@lru_cache(maxsize=1)
def _data() -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(_read("quality.json"))
    for table in data["tables"]:
        if "record" in table:
            table["rows"] = _recorded(table["record"], table["of"])
    return data


def _read(name: str) -> str:
    return files("kvloom.planner").joinpath("data").joinpath(name).read_text(encoding="utf-8")


def _recorded(name: str, of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of what ``kvloom gate quality --record`` keeps, of runs with what ``of`` says: ``{"window": 1024, …}``."""
    rows = []
    for line in _read(name).splitlines():
        entry = json.loads(line)
        run, loss = entry["run"], entry["loss"]
        if any(run[key] != value for key, value in of.items()):
            continue
        rows.append(
            {
                "label": run["setting"]["codec"],
                "codec": run["setting"]["codec"],
                "sink_tokens": loss["sink_tokens"],
                "recent_tokens": loss["recent_tokens"],
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
    codec: str, *, sink_tokens: int, recent_tokens: int, block_size: int, model: str, long: bool = False
) -> Quality:
    """The measured loss of ``codec`` in this engine under a protection, or under the nearest weaker one measured.

    The engine protects whole blocks of ``block_size`` tokens, and the block that is being filled. A row measured with
    *more* protection, or with larger blocks, is never used: it would flatter. ``long`` prefers the 4,096-token tables,
    where the protected share is smaller. Of rows with equal protection this engine's own counts.
    """
    found = _nearest(
        [table for table in tables() if table.get("of", {}).get("block_size", 0) <= block_size],
        codec,
        sink_tokens=-(-sink_tokens // block_size) * block_size,
        recent_tokens=-(-recent_tokens // block_size) * block_size,
        long=long,
    )
    return _quality(found, model, long)


def loss_elsewhere(codec: str, *, model: str, long: bool = False) -> Quality:
    """The measured loss of ``codec`` in engines that encode every token, the newest too."""
    others = [table for table in tables() if "record" not in table]
    return _quality(_nearest(others, codec, sink_tokens=0, recent_tokens=0, long=long), model, long)


def _quality(found: tuple[Mapping[str, Any], Mapping[str, Any]] | None, model: str, long: bool) -> Quality:
    if found is None:
        return UNMEASURED
    table, row = found
    kept = (row["sink_tokens"], row["recent_tokens"])
    if "record" in table:
        raw = " and ".join(raw_tokens(*kept))
    else:
        raw = "first {} and last {} tokens".format(*kept) if any(kept) else "nothing"
    return Quality(
        kl_mean=row["kl_mean"],
        top1_percent=row["top1_percent"],
        perplexity_change_percent=row["perplexity_change_percent"],
        model=table["model"],
        text=table["text"],
        protection=f"{raw} raw",
        measured_for_this_model=any(_plain(name) in _plain(model) for name in table["model_names"]),
        short_text=long and table["window"] == SHORT,
    )


def _nearest(
    found: Sequence[Mapping[str, Any]], codec: str, *, sink_tokens: int, recent_tokens: int, long: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The table and row of ``codec`` with the most protection, up to the one given."""
    for window in (LONG, SHORT) if long else (SHORT, LONG):
        rows = [
            (table, row)
            for table in found
            if table["window"] == window
            for row in table["rows"]
            if row.get("codec") == codec and row["sink_tokens"] <= sink_tokens and row["recent_tokens"] <= recent_tokens
        ]
        if rows:
            return max(rows, key=lambda pair: (pair[1]["recent_tokens"], pair[1]["sink_tokens"], "record" in pair[0]))
    return None


def _plain(name: str) -> str:
    """Letters and digits: hub ids, presets and GGUF headers write ``SmolLM2-135M``, ``Smollm2 135M``."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def known_results(model: str, model_type: str) -> list[dict[str, str]]:
    """Published results that concern this model or its family."""
    wanted = _plain(model)
    return [item for item in _data()["known"] if _plain(item["matches"]) in wanted or item["matches"] == model_type]
