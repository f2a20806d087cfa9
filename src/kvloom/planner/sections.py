"""The answer as titled tables and lines: one structure for terminal, pipe and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.core.sizes import format_bytes

Document = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A title, and under it a table, plain lines, or both."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


def sections(document: Document) -> list[Section]:
    """All sections that the document has material for."""
    built = [_sizes(document), _groups(document), _devices(document), _fit(document)]
    if document.get("what_if"):
        built.append(_what_if(document["what_if"]))
    if document["choices"]:
        built += [_choices(document), _handover(document["handover"])]
    if document.get("replay"):
        built += [_replay(document["replay"]), _allocators(document["replay"]["allocators"])]
    for title, key in (("Assumptions", "assumptions"), ("Warnings", "warnings")):
        if document[key]:
            built.append(Section(title=title, lines=tuple(document[key])))
    return built


def exact(value: float | None) -> str:
    """Bytes exactly and in binary units: ``40.00 GiB (42,949,672,960 B)``."""
    if value is None:
        return "unknown"
    if isinstance(value, float) and not value.is_integer():
        return f"{format_bytes(value)} ({value:,.1f} B)"
    return f"{format_bytes(value)} ({int(value):,} B)"


def _sizes(document: Document) -> Section:
    architecture = document["architecture"]
    rows = [
        ("architecture", f"{architecture['model_type']}, {architecture['kind']}"),
        (
            "heads",
            (
                f"{architecture['query_heads']} query heads over one latent; "
                if architecture["kind"] == "MLA"
                else f"{architecture['query_heads']} query, {architecture['kv_heads']} KV; "
            )
            + f"{architecture['attention_layers']} of {architecture['layers']} layers attend"
            + (f", {architecture['shared_layers']} of them store nothing" if architecture["shared_layers"] else ""),
        ),
        ("cache", f"{document['codec']} codec, {document['dtype']} raw, accounting {document['accounting']}"),
        ("per token", exact(document["bytes_per_token"])),
        ("fixed", exact(document["fixed_bytes"])),
        (f"one sequence of {document['tokens']:,}", exact(document["bytes_per_sequence"])),
        (f"{document['batch']:,} sequence{'s' if document['batch'] != 1 else ''}", exact(document["bytes_total"])),
    ]
    for name, value in document["accountings"].items():
        if name != document["accounting"]:
            rows.append((f"as {name} counts", f"{exact(value['bytes_total'])}, {value['version']}"))
    rows.append(("weights", exact(document["weights_bytes"])))
    crossing = document["cache_outweighs_weights"]
    if crossing is not None:
        if crossing["context_at_batch_1"] is not None:
            rows.append(("cache outweighs weights", f"from {crossing['context_at_batch_1']:,} tokens at batch 1"))
        if crossing["batch_at_context"] is not None:
            rows.append(("", f"from batch {crossing['batch_at_context']:,} at {document['tokens']:,} tokens each"))
    lines = tuple(
        f"bytes = {_fixed(part['fixed_bytes'])} + {_slope(part['bytes_per_token'])} × context"
        f"   for context {part['from_tokens'] + 1:,} to {_end(part['to_tokens'])}"
        for part in document["curve"]
    )
    return Section(title=f"Sizes of {document['model']}", columns=("", ""), rows=tuple(rows), lines=lines)


def _fixed(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _slope(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _end(value: int | None) -> str:
    return "…" if value is None else f"{value:,}"


def _groups(document: Document) -> Section:
    rows = []
    for group in document["groups"]:
        planes = group.get("planes", {})
        codecs = group.get("codecs", {})
        rows.append(
            (
                group["name"],
                str(len(group["layers"])),
                str(group.get("kv_heads", "")),
                " ".join(f"{name}:{dim}" for name, dim in planes.items()),
                " ".join(dict.fromkeys(codecs.values())),
                "" if group["window"] is None else f"{group['window']:,}" + (" chunk" if group.get("chunked") else ""),
                f"{group['stored_tokens']:,}" if "stored_tokens" in group else "per request",
                _slope(group["bytes_per_token"]),
                exact(group["bytes_per_sequence"]),
            )
        )
    return Section(
        title="Layer groups",
        columns=(
            "group",
            "layers",
            "KV heads",
            "planes",
            "stored as",
            "window",
            "slots",
            "B/token now",
            "one sequence",
        ),
        rows=tuple(rows),
    )


def _devices(document: Document) -> Section:
    device = document["per_device"]
    rows = [
        ("cache", exact(device["cache_bytes"]), f"{device['cache_accounting']} accounting"),
        ("weights", exact(device["weights_bytes"]), "divided by tp × pp"),
        ("activations", exact(device["activation_bytes_estimate"]), "estimate"),
        ("runtime", exact(device["overhead_bytes_estimate"]), "estimate"),
        ("total", exact(device["total_bytes"]), ""),
    ]
    title = f"Per device (tp {device['tp']} × pp {device['pp']} × dp {device['dp']} = {device['devices']})"
    return Section(title=title, columns=("", "bytes", "note"), rows=tuple(rows))


def _fit(document: Document) -> Section:
    fit = document["fit"]
    name = f"{fit['count']} × {fit['device']}" if fit["count"] > 1 else fit["device"]
    verdict = {True: "fits", False: "does not fit", None: "unknown"}[fit["fits"]]
    rows = [
        ("verdict", verdict if fit["asked"] else f"{verdict} (not asked: exit status stays 0)"),
        ("memory", f"{exact(fit['memory_bytes'])} a device, {100 * fit['utilisation']:g} % of it used"),
        ("left for the cache", exact(fit["available_for_cache_bytes"])),
        (
            f"longest context at batch {document['batch']:,}",
            _count(fit["longest_context"], fit["fits"])
            + (f" (model's own limit {limit:,})" if (limit := fit["longest_context_model_limit"]) else ""),
        ),
        (f"largest batch at {document['tokens']:,} tokens", _count(fit["largest_batch"], fit["fits"])),
    ]
    if fit["concurrency"] is not None:
        rows.append(("concurrency", f"{fit['concurrency']:.2f} × {document['tokens']:,} tokens"))
    if fit.get("vllm_pool_tokens") is not None:
        rows.append(("vLLM's pool", f"{fit['vllm_pool_tokens']:,} tokens"))
    decode = fit.get("decode")
    if decode:
        rows.append(
            (
                "decode step",
                f"{decode['seconds'] * 1e3:.3f} ms, {decode['tokens_per_second']:,.1f} tokens/s, bound by "
                f"{decode['bound']}",
            )
        )
        rows.append(
            ("prefill", f"{fit['prefill']['seconds']:.3f} s, {fit['prefill']['tokens_per_second']:,.0f} tokens/s")
        )
        even = fit["break_even"]
        rows.append(("load beats recompute", f"above {even['bandwidth_bytes_per_second'] / 1e9:.3f} GB/s"))
        for store in even["stores"]:
            winner = "load" if store["load_wins"] else "recompute"
            least = "" if store["minimum_tokens"] is None else f", pays from {store['minimum_tokens']:,} tokens"
            rows.append((f"  {store['store']}", f"{store['load_seconds']:.3f} s: {winner}{least}"))
    elif fit.get("speed_note"):
        rows.append(("speed", fit["speed_note"]))
    if fit.get("cost"):
        cost = fit["cost"]
        rows.append(("cost per million output tokens", f"{cost['per_million_output_tokens']:.4f}"))
        rows.append(("cost per million input tokens", f"{cost['per_million_input_tokens']:.4f}"))
    return Section(title=f"Fit on {name} ({fit['device_source']})", columns=("", ""), rows=tuple(rows))


def _count(value: int | None, fits: bool | None) -> str:
    if value is None:
        return "unknown" if fits is None else "no limit (the cache does not grow)"
    return f"{value:,}"


def _what_if(report: Mapping[str, Any]) -> Section:
    rows = (
        ("as published", exact(report["as_published_bytes_per_sequence"])),
        (report["asked"], exact(report["bytes_per_sequence"])),
        ("times as published", f"{report['times_as_published']:.3f}"),
    )
    return Section(title="What if", columns=("", "one sequence"), rows=rows, lines=(report["note"],))


def _choices(document: Document) -> Section:
    rows = []
    for choice in document["choices"]:
        quality = choice["quality"]
        loss = "?" if quality["kl_mean"] is None else f"{quality['kl_mean']:.3g}"
        speed = "" if choice["tokens_per_second"] is None else f"{choice['tokens_per_second']:,.0f}"
        rows.append(
            (
                str(choice["rank"]),
                choice["name"],
                exact(choice["bytes_per_sequence"]).split(" (")[0],
                f"{choice['times_smaller']:.2f}",
                "" if choice["largest_batch"] is None else f"{choice['largest_batch']:,}",
                f"{speed} @{choice['at_batch']}" if speed else "",
                loss,
                quality["note"],
                ("*" if choice["pareto"] else "") + ("" if choice["accepted"] else " not accepted"),
                "now" if choice["served_by_this_version"] else "planned",
            )
        )
    situation = document["situation"]
    best = document["choices"][0]
    lines = [
        situation["rule"],
        f"accepted loss: KL {situation['accepted_kl']:g} nats a token; * = no other is better in bytes, loss and speed",
        f"first choice {best['name']}: " + "; ".join(best["reasons"] or ["stored exactly, nothing to lose"]),
    ]
    lines += [f"known: {item['result']} ({item['source']})" for item in document.get("known_results", [])]
    return Section(
        title=f"Pipelines for {situation['name']}",
        columns=(
            "#",
            "pipeline",
            "one sequence",
            "× smaller",
            "max batch",
            "tokens/s",
            "KL",
            "measured",
            "Pareto",
            "served",
        ),
        rows=tuple(rows),
        lines=tuple(lines),
    )


def _handover(report: Mapping[str, Any]) -> Section:
    lines = ["kvloom YAML:", *("  " + line for line in report["kvloom_yaml"].splitlines())]
    now = report["kvloom_yaml_served_now"]
    if now is not None and now != report["kvloom_yaml"]:
        lines += ["best that this version of kvloom serves:", *("  " + line for line in now.splitlines())]
    for engine, launch in report["engines"].items():
        lines.append(f"{engine}: {launch['command']}")
        for name, text in launch["files"].items():
            lines += [f"  {name}:", *("    " + line for line in text.splitlines())]
        lines += [f"  cannot express: {item}" for item in launch["cannot_express"]]
        lines += [f"  note: {item}" for item in launch["notes"]]
    return Section(title="Hand over", lines=tuple(lines))


def _replay(report: Mapping[str, Any]) -> Section:
    def share(value: float | None) -> str:
        return "no hashes in this trace" if value is None else f"{100 * value:.1f} % of prompt tokens"

    rows = [
        ("requests", f"{report['requests']:,}" + (f", {report['rejected']:,} too large" if report["rejected"] else "")),
        ("unlimited cache", share(report["unlimited_hit_rate"])),
        ("planned cache", share(report["hit_rate"])),
    ]
    rows += [(f"  from {name}", share(value)) for name, value in report["hit_rate_by_tier"].items()]
    rows += [
        ("capacity", "unlimited" if report["capacity_bytes"] is None else exact(report["capacity_bytes"])),
        ("peak in use", f"{exact(report['peak_pinned_bytes'])}, {report['peak_running']} requests at once"),
        ("peak held", exact(report["peak_held_bytes"])),
        ("mean wait", f"{report['mean_wait_seconds']:.3f} s"),
        ("timing", report["timing"]),
    ]
    return Section(
        title=f"Replay of {report['trace']} ({report['format']})",
        columns=("", ""),
        rows=tuple(rows),
        lines=tuple(report["simplifications"]),
    )


def _allocators(report: Mapping[str, Any]) -> Section:
    def percent(value: float) -> str:
        return f"{100 * value:.1f}"

    rows = tuple(
        (
            result["name"],
            percent(result["stored"]),
            percent(result["reserved"]),
            percent(result["internal"]),
            percent(result["rounding"]),
            percent(result["free"]),
            percent(result["waste_of_allocated"]),
            f"{result['mean_running']:.1f}",
        )
        for result in report["results"]
    )
    return Section(
        title=f"Allocators on the same requests and {exact(report['memory_bytes'])}",
        columns=(
            "allocator",
            "tokens %",
            "reserved %",
            "never used %",
            "rounding %",
            "free %",
            "waste of allocated %",
            "running",
        ),
        rows=rows,
        lines=(report["load"],) if rows else ("not compared: this model's cache does not grow with the context",),
    )
