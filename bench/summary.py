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
