"""Prometheus metrics: what the engine's snapshot says at scrape, and what the server saw itself.

Three families of names, all in ``docs/server.md``: the published ``kv_cache_*`` and
``prefix_cache_hit_rate``; ``kvloom_*`` in Prometheus style (base units, ratios 0 to 1, counters
ending ``_total``); and ``vllm:*``, the names that existing dashboards and autoscalers read.
Each application has a registry of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from kvloom import __version__
from kvloom.core.stats import CacheSnapshot, EngineInfo, EngineSnapshot
from kvloom.server.histogram import REQUEST_BUCKETS, TOKEN_BUCKETS, LatencyHistogram
from kvloom.server.interface import ServingEngine

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
Family = Any  # prometheus_client ships no types


class ServerMetrics:
    """What the server measures itself: latencies as clients meet them, answers, errors, disconnects."""

    def __init__(self) -> None:
        self.time_to_first_token = LatencyHistogram(REQUEST_BUCKETS)
        self.inter_token = LatencyHistogram(TOKEN_BUCKETS)
        self.queue_time = LatencyHistogram(REQUEST_BUCKETS)
        self.end_to_end = LatencyHistogram(REQUEST_BUCKETS)
        self.errors: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str]] = Counter()
        self.disconnects = 0

    def count_error(self, kind: str) -> None:
        self.errors[kind] += 1

    def count_response(self, route: str, status: int) -> None:
        self.responses[route, str(status)] += 1

    def families(self, labels: Mapping[str, str]) -> Iterator[Family]:
        """The server's own metrics; ``labels`` go on the vLLM names."""
        for histogram, ours, theirs, text in (
            (self.time_to_first_token, "time_to_first_token", "time_to_first_token", "From arrival to first token."),
            (self.inter_token, "inter_token", "inter_token_latency", "Between two tokens of one sequence."),
            (self.queue_time, "queue", "request_queue_time", "From arrival to first admission."),
            (self.end_to_end, "end_to_end", "e2e_request_latency", "From arrival to last token."),
        ):
            yield _histogram(f"kvloom_{ours}_seconds", text, {}, histogram)
            yield _histogram(f"vllm:{theirs}_seconds", text, labels, histogram)
        yield _counters("kvloom_http_errors", "Answers that carried an error, by its code.", "kind", self.errors)
        answers = CounterMetricFamily(
            "kvloom_http_responses", "Answers by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(self.responses.items()):
            answers.add_metric([route, status], count)
        yield answers
        yield _counter("kvloom_client_disconnects", "Clients that left before their answer ended.", self.disconnects)


class Collector:
    """Reads the engine's snapshot when Prometheus scrapes.

    Args:
        engine: gives None while it loads.
        model_name: the label on vLLM's names; None takes the engine's name of the model.
    """

    def __init__(
        self, metrics: ServerMetrics, engine: Callable[[], ServingEngine | None], model_name: str | None
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        engine = self._engine()
        ready = engine is not None and engine.ready and engine.failed is None
        yield _gauge("kvloom_ready", "1 once requests are served.", float(ready))
        if engine is None:
            yield from self._metrics.families({"model_name": self._model_name or "", "engine": "0"})
            return
        info, snapshot = engine.info, engine.snapshot()
        labels = {"model_name": self._model_name or info.model, "engine": "0"}
        yield from published_families(snapshot)
        yield from kvloom_families(snapshot, info)
        yield from vllm_families(snapshot, info, labels)
        yield from self._metrics.families(labels)


def render_metrics(collector: Collector) -> tuple[bytes, str]:
    """The metrics page and its content type.

    Always Prometheus's text format, whatever the scraper offers: the library's OpenMetrics writer
    turns ``vllm:`` into ``vllm_``, which no dashboard looks for.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry), TEXT_FORMAT


def published_families(snapshot: EngineSnapshot) -> Iterator[Family]:
    """The names that articles on KV caches publish. Blocks are bytes in units of one default span."""
    cache = snapshot.cache
    yield _gauge("kv_cache_usage_percent", "Referenced share of the KV cache, 0 to 100.", 100.0 * cache.usage)
    yield _gauge("kv_cache_total_blocks", "The KV cache in blocks.", cache.arena_bytes / cache.block_bytes)
    yield _gauge("kv_cache_used_blocks", "Referenced blocks.", cache.used_bytes / cache.block_bytes)
    yield _gauge(
        "prefix_cache_hit_rate",
        "Share of looked-up prompt tokens found in the prefix cache, last 1,000 requests, 0 to 1.",
        snapshot.prefix_hit_rate,
    )


def kvloom_families(snapshot: EngineSnapshot, info: EngineInfo) -> Iterator[Family]:
    """The engine in Prometheus style."""
    yield _gauge(
        "kvloom_info",
        "What this engine is; always 1.",
        1,
        {
            "version": __version__,
            "model": info.model,
            "model_type": info.model_type,
            "device": info.device,
            "dtype": info.dtype,
            "kernels": info.kernels,
            "kernel_variant": info.kernel_variant,
            "pipeline": info.pipeline,
            "codec": info.codec,
            "sink_tokens": str(info.sink_tokens),
            "recent_tokens": str(info.recent_tokens),
            "protect_layers": ",".join(map(str, info.protect_layers)),
            "deterministic": str(info.deterministic).lower(),
        },
    )
    yield _gauge("kvloom_kv_cache_bits_per_value", "Bits of an encoded value, side data included.", info.bits_per_value)
    yield from _cache_families(snapshot.cache)
    yield _gauge("kvloom_requests_running", "Requests being computed.", snapshot.running)
    yield _gauge("kvloom_requests_waiting", "Requests in the queue.", snapshot.waiting)
    yield _counter("kvloom_requests", "Requests accepted.", snapshot.requests)
    yield _counters("kvloom_sequences_finished", "Sequences ended, by reason.", "reason", snapshot.finished)
    yield _counter("kvloom_cancellations", "Requests cancelled by their client.", snapshot.cancellations)
    yield _counter("kvloom_preemptions", "Times a sequence gave up its memory.", snapshot.preemptions)
    yield _counters("kvloom_errors", "Requests that ended in an error, by kind.", "kind", snapshot.errors)
    yield _counters("kvloom_fallbacks", "Times less ran than was asked for, by kind.", "kind", snapshot.fallbacks)
    yield _counter("kvloom_prompt_tokens", "Prompt tokens of accepted requests.", snapshot.prompt_tokens)
    yield _counter("kvloom_generated_tokens", "Tokens generated.", snapshot.generated_tokens)
    yield _counter("kvloom_computed_tokens", "Tokens that ran through the model.", snapshot.computed_tokens)
    yield _counter("kvloom_prefix_queried_tokens", "Prompt tokens looked up.", snapshot.prefix_queried_tokens)
    yield _counter("kvloom_prefix_hit_tokens", "Prompt tokens found.", snapshot.prefix_hit_tokens)
    yield _counter(
        "kvloom_prefix_recovered_tokens", "Tokens found again after a preemption.", snapshot.prefix_recovered_tokens
    )
    yield _counters("kvloom_prefix_missed_tokens", "Looked-up tokens not found, by reason.", "reason", snapshot.misses)
    yield _gauge("kvloom_prefix_hit_ratio", "Token-weighted, last 1,000 requests.", snapshot.prefix_hit_rate)
    yield _counter("kvloom_evicted_spans", "Cached spans dropped for room.", snapshot.evicted_spans)
    yield _counter("kvloom_steps", "Model steps.", snapshot.steps)


def _cache_families(cache: CacheSnapshot) -> Iterator[Family]:
    yield _gauge("kvloom_kv_cache_usage_ratio", "Referenced share of the arena, 0 to 1.", cache.usage)
    yield _gauge("kvloom_kv_cache_waste_ratio", "Allocated bytes that hold no token, 0 to 1.", cache.waste)
    yield _gauge("kvloom_kv_cache_arena_bytes", "The arena.", cache.arena_bytes)
    parts = GaugeMetricFamily(
        "kvloom_kv_cache_bytes", "The arena's bytes by state; they add up to the arena.", labels=["state"]
    )
    for state, size in (
        ("used", cache.used_bytes),
        ("cached", cache.cached_bytes),
        ("free", cache.free_bytes),
        ("overhead", cache.overhead_bytes),
    ):
        parts.add_metric([state], size)
    yield parts
    yield _gauge("kvloom_kv_cache_token_bytes", "Used bytes that hold tokens.", cache.token_bytes)
    yield _gauge("kvloom_kv_cache_stranded_bytes", "Free bytes bound to one format.", cache.stranded_bytes)
    yield _gauge("kvloom_kv_cache_reserve_bytes", "Kept from admission.", cache.reserve_bytes)
    spans = GaugeMetricFamily("kvloom_kv_cache_spans", "Spans by state.", labels=["state"])
    spans.add_metric(["used"], cache.used_spans)
    spans.add_metric(["cached"], cache.cached_spans)
    yield spans


def vllm_families(snapshot: EngineSnapshot, info: EngineInfo, labels: Mapping[str, str]) -> Iterator[Family]:
    """The names of vLLM's dashboards, with its meanings: cached but unreferenced spans count as free."""
    cache = snapshot.cache
    yield _gauge("vllm:kv_cache_usage_perc", "Referenced share of the KV cache, 0 to 1.", cache.usage, labels)
    yield _counter("vllm:prefix_cache_queries", "Tokens looked up.", snapshot.prefix_queried_tokens, labels)
    yield _counter("vllm:prefix_cache_hits", "Tokens found.", snapshot.prefix_hit_tokens, labels)
    yield _gauge("vllm:num_requests_running", "Requests being computed.", snapshot.running, labels)
    yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", snapshot.waiting, labels)
    yield _counter("vllm:num_preemptions", "Preemptions.", snapshot.preemptions, labels)
    yield _counter("vllm:prompt_tokens", "Prompt tokens.", snapshot.prompt_tokens, labels)
    yield _counter("vllm:generation_tokens", "Generated tokens.", snapshot.generated_tokens, labels)
    yield _counters("vllm:request_success", "Requests ended.", "finished_reason", snapshot.finished, labels)
    settings = {
        **labels,
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(cache.arena_bytes // cache.block_bytes),
        "cache_dtype": info.dtype if info.codec == "raw" else info.codec,
    }
    yield _gauge("vllm:cache_config_info", "The cache's settings; always 1.", 1, settings)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    labels = labels or {}
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    labels = labels or {}
    family = CounterMetricFamily(name, text, labels=list(labels))  # adds _total to the sample's name
    family.add_metric(list(labels.values()), value)
    return family


def _counters(
    name: str, text: str, label: str, values: Mapping[str, int], labels: Mapping[str, str] | None = None
) -> Family:
    labels = labels or {}
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for key, value in sorted(values.items()):
        family.add_metric([*labels.values(), key], value)
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: LatencyHistogram) -> Family:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets=histogram.buckets(), sum_value=histogram.sum)
    return family
