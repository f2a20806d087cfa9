"""What an answer says besides numbers: assumptions made, mistakes avoided, targets missed."""

from __future__ import annotations

from kvloom.core.codec_sizes import CODEC_CHOICES
from kvloom.planner.architecture import Architecture
from kvloom.planner.formats import CacheFormat
from kvloom.planner.question import Question
from kvloom.planner.roofline import prefill_seconds
from kvloom.planner.setting import Setting
from kvloom.planner.workload import Workload


def say_format(
    form: CacheFormat, question: Question, architecture: Architecture, assumptions: list[str], warnings: list[str]
) -> None:
    """Say how values are stored."""
    assumptions.append(f"raw values are {form.raw_dtype} ({form.element_bytes} bytes each)")
    if form.lossless:
        return
    assumptions.append(
        f"codec {form.codec.name}: first {form.sink_tokens} and last {form.recent_tokens} tokens raw, side data counted"
    )
    kinds = {plane.name for group in architecture.layout.groups for plane in group.planes}
    native = question.accounting in ("ideal", "kvloom")
    if native and any(group.window is not None for group in architecture.layout.groups) and not form.encode_windows:
        assumptions.append("windowed layers stay raw (--encode-windows encodes them too)")
    if native and kinds & {"rope", "index"}:
        assumptions.append("MLA: the latent is encoded; rope and indexer planes stay raw")
    if native and not form.served:
        warnings.append(
            f"codec {form.codec.name} is planned: this version of kvloom does not serve it; the bytes follow its "
            "specification"
        )


def say_traps(architecture: Architecture, assumptions: list[str]) -> None:
    """Say which common mistake this model invites, with what it would have given."""
    heads = max((layer.num_heads for layer in architecture.layers), default=0)
    if architecture.kind in ("GQA", "MQA") and heads and architecture.num_query_heads > heads:
        assumptions.append(
            f"{heads} KV {'heads are' if heads > 1 else 'head is'} counted, not {architecture.num_query_heads} query "
            f"heads (a common mistake, here {architecture.num_query_heads / heads:g} times too much)"
        )
    if architecture.expanded is not None:
        assumptions.append(
            "MLA: one latent per token and layer is counted, not expanded keys and values for every head "
            "(--what-if mha shows those)"
        )
    for layer in architecture.layers:
        if layer.planes[0].name == "k" and architecture.num_query_heads:
            guess = architecture.hidden_size / architecture.num_query_heads
            if layer.planes[0].dim != guess:
                assumptions.append(
                    f"head_dim is {layer.planes[0].dim} as configured, not hidden_size / heads = {guess:g}"
                )
            break
    if architecture.chunked:
        assumptions.append(
            "chunked windows: a chunk's layers hold up to one chunk, then start anew; its maximum is counted"
        )


def missed_targets(setting: Setting, workload: Workload | None) -> list[str]:
    """Latency targets that the hardware cannot meet, or meets only with reuse."""
    if workload is None or setting.roofline is None:
        return []
    said: list[str] = []
    if workload.target_ttft_s is not None:
        computed = workload.input_tokens - workload.shared_tokens
        whole = prefill_seconds(setting.architecture, setting.roofline, workload.input_tokens)
        reused = prefill_seconds(setting.architecture, setting.roofline, max(1, computed))
        if whole is not None and reused is not None and reused > workload.target_ttft_s:
            said.append(
                f"time to first token: {reused:.3f} s of prefill even with reuse ({whole:.3f} s without) is above the "
                f"target {workload.target_ttft_s:g} s; no cache setting reaches it"
            )
        elif whole is not None and whole > workload.target_ttft_s:
            said.append(
                f"time to first token: {whole:.3f} s of prefill without reuse misses the target "
                f"{workload.target_ttft_s:g} s, {reused:.3f} s with it meets it: keep prefix caching on"
            )
    if workload.target_tpot_s is not None:
        form = CacheFormat(codec=CODEC_CHOICES["raw"])
        step = setting.step(form, setting.tokens, 1)
        if step is not None and step.seconds > workload.target_tpot_s:
            said.append(
                f"time per token: {step.seconds * 1e3:.1f} ms at batch 1 is above the target "
                f"{workload.target_tpot_s * 1e3:g} ms, bound by {step.bound}"
            )
    return said
