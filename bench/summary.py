"""From rounds to figures: medians, spreads, ratios and shares of the bound. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.bound import Cost, Machine, Model, bound, decode_cost, prefill_cost, split
from bench.cells import Cell

Round = Mapping[str, Any]


def cell_cost(model: Model, cell: Cell, steps: int, element_bytes: float) -> Cost:
    """What one step of the cell (decode), or all of it (prefill), needs at least."""
    if cell.phase == "prefill":
        return prefill_cost(model, sequences=cell.sequences, context=cell.context, element_bytes=element_bytes)
    # The first of ``steps`` sees context + 1 tokens, the last context + steps.
    return decode_cost(
        model,
        sequences=cell.sequences,
        context=cell.context + (steps + 1) / 2,
        shared=cell.shared,
        element_bytes=element_bytes,
    )


def summarise(
    cell: Cell, rounds: Sequence[Round], *, model: Model, machine: Machine, steps: int, element_bytes: float
) -> dict[str, Any]:
    """One engine's figures for a cell. ``seconds`` is a step's time in decode, a whole round's otherwise."""
    per_round = [r["seconds"] / r["units"] if cell.phase == "decode" else r["seconds"] for r in rounds]
    seconds = statistics.median(per_round)
    tokens = cell.sequences if cell.phase == "decode" else rounds[0]["units"]
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "spread": (max(per_round) - min(per_round)) / seconds,
        "n": len(per_round),
        "rounds": per_round,
    }
    if cell.phase != "served":
        cost = cell_cost(model, cell, steps, element_bytes)
        limit = bound(cost, machine)
        found |= {
            "bound_s": limit,
            "bound_by": "operations" if limit == cost.operations / machine.peak else "bytes",
            "reached": limit / seconds,
            "operations_ms": cost.operations / machine.peak * 1e3,
            **split(cost, machine, seconds),
        }
    for key in ("client_cpu_s", "server_cpu_s", "first_token_s"):
        if all(key in r for r in rounds):
            found[key] = statistics.median(r[key] for r in rounds)
    if all("step_ms" in r for r in rounds):
        # A step in which blocks are encoded is longer than others: the mean has them all, the median none.
        found["step_ms"] = {
            "median": statistics.median(statistics.median(r["step_ms"]) for r in rounds),
            "mean": statistics.median(statistics.fmean(r["step_ms"]) for r in rounds),
        }
    if all(r.get("parts_s") for r in rounds):
        found["parts_ms"] = parts_of(cell, rounds)
    if all(r.get("memory") for r in rounds):
        found["memory"] = most([r["memory"] for r in rounds])
    return found


def parts_of(cell: Cell, rounds: Sequence[Round]) -> dict[str, float]:
    """Milliseconds by part, as ``seconds`` counts: of the mean step in decode, of a whole round otherwise.

    ``outside`` is what the native step does not see: scheduling, bookkeeping, sampling.
    """
    per_round: list[dict[str, float]] = []
    for r in rounds:
        count = r["units"] if cell.phase == "decode" else 1
        parts = {name: 1e3 * seconds / count for name, seconds in r["parts_s"].items()}
        per_round.append({**parts, "outside": 1e3 * r["seconds"] / count - sum(parts.values())})
    return {name: statistics.median(parts[name] for parts in per_round) for name in per_round[0]}


def most(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The greatest of each figure over rounds; words as in the first."""
    found = dict(rounds[0])
    for later in rounds[1:]:
        found |= {key: max(found[key], value) for key, value in later.items() if not isinstance(value, str)}
    return found


def compare(figures: dict[str, dict[str, Any]], *, base: str, processors: int) -> None:
    """Add to every other engine how many times faster ``base`` is, and to the server what its client took.

    A client beside the server takes processor time from it: ``without_client`` is the served rate over offline's if
    that time were given back, all processors being busy.
    """
    ours = figures.get(base, {})
    if "seconds" not in ours:
        return
    for name, other in figures.items():
        if name == base or "seconds" not in other:
            continue
        if "client_cpu_s" not in other:
            other["ours_faster"] = other["seconds"] / ours["seconds"]
        else:
            other["share_of_offline"] = ours["seconds"] / other["seconds"]
            other["without_client"] = ours["seconds"] / (other["seconds"] - other["client_cpu_s"] / processors)


def compare_parts(figures: dict[str, dict[str, Any]], *, raw: str) -> None:
    """Add to every engine whose parts are known its time in attention over that of ``raw``, whose cache is not encoded.

    ``with_encoding_vs_raw`` counts encoding as attention's, which it is only there for.
    """
    base = figures[raw].get("parts_ms")
    if base is None or not base["attention"]:
        return
    for other in figures.values():
        parts = other.get("parts_ms")
        if parts is not None:
            other["attention_vs_raw"] = parts["attention"] / base["attention"]
            other["with_encoding_vs_raw"] = (parts["attention"] + parts.get("encode", 0.0)) / base["attention"]
