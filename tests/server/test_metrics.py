"""Every metric's arithmetic: from a known snapshot, and from requests with known histories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvloom.server.config import ServerConfig
from kvloom.server.histogram import LatencyHistogram
from tests.server.conftest import client_for
from tests.server.fake import FakeEngine, Step, known_snapshot

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


class Page:
    """A parsed metrics page: ``page["name", {"label": "value"}]``."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, dict[str, str]]) -> float:
        name, labels = (key, {}) if isinstance(key, str) else key
        return self.samples[name, frozenset(labels.items())]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for sample, labels in self.samples if sample == name]


async def scrape(client: httpx.AsyncClient) -> Page:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return Page(answer.text)


async def test_published_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.snapshot_value = known_snapshot()
    page = await scrape(client)
    assert page["kv_cache_usage_percent"] == 25.0
    assert page["kv_cache_total_blocks"] == 100
    assert page["kv_cache_used_blocks"] == 25
    assert page["prefix_cache_hit_rate"] == 0.25
    # usage = used / total, also when bytes do not divide into blocks
    assert page["kv_cache_usage_percent"] == pytest.approx(
        100 * page["kv_cache_used_blocks"] / page["kv_cache_total_blocks"]
    )


async def test_kvloom_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.snapshot_value = known_snapshot()
    page = await scrape(client)
    assert page["kvloom_ready"] == 1
    assert page["kvloom_kv_cache_usage_ratio"] == 0.25
    assert page["kvloom_kv_cache_waste_ratio"] == pytest.approx(1 - 240_000 / (250_000 + 20_000 + 30_000))
    assert page["kvloom_kv_cache_arena_bytes"] == 1_000_000
    states = {labels["state"]: page["kvloom_kv_cache_bytes", labels] for labels in page.labels("kvloom_kv_cache_bytes")}
    assert states == {"used": 250_000, "cached": 100_000, "free": 630_000, "overhead": 20_000}
    assert sum(states.values()) == page["kvloom_kv_cache_arena_bytes"]
    assert page["kvloom_kv_cache_token_bytes"] == 240_000
    assert page["kvloom_kv_cache_stranded_bytes"] == 30_000
    assert page["kvloom_kv_cache_reserve_bytes"] == 50_000
    assert page["kvloom_kv_cache_spans", {"state": "used"}] == 25
    assert page["kvloom_kv_cache_spans", {"state": "cached"}] == 10
    assert page["kvloom_requests_running"] == 3
    assert page["kvloom_requests_waiting"] == 4
    assert page["kvloom_requests_total"] == 21
    for reason, count in (("stop", 7), ("length", 5), ("abort", 2), ("error", 1)):
        assert page["kvloom_sequences_finished_total", {"reason": reason}] == count
    assert page["kvloom_cancellations_total"] == 2
    assert page["kvloom_preemptions_total"] == 6
    assert page["kvloom_prompt_tokens_total"] == 1234
    assert page["kvloom_generated_tokens_total"] == 567
    assert page["kvloom_computed_tokens_total"] == 1500
    assert page["kvloom_prefix_queried_tokens_total"] == 1200
    assert page["kvloom_prefix_hit_tokens_total"] == 300
    assert page["kvloom_prefix_recovered_tokens_total"] == 64
    assert page["kvloom_prefix_missed_tokens_total", {"reason": "never_seen"}] == 800
    assert page["kvloom_prefix_missed_tokens_total", {"reason": "evicted"}] == 100
    assert page["kvloom_prefix_hit_ratio"] == 0.25
    assert page["kvloom_evicted_spans_total"] == 8
    assert page["kvloom_fallbacks_total", {"kind": "softcap"}] == 9
    assert page["kvloom_errors_total", {"kind": "sampling"}] == 1
    assert page["kvloom_steps_total"] == 99
    (info,) = page.labels("kvloom_info")
    assert (info["model"], info["dtype"], info["pipeline"]) == ("fake/model", "bfloat16", "accuracy")
    assert (info["codec"], info["sink_tokens"], info["protect_layers"]) == ("raw", "0", "")
    assert page["kvloom_kv_cache_bits_per_value"] == 16.0


async def test_vllm_names(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, snapshot_value=known_snapshot())
    async with client_for(engine, ServerConfig(served_model_names=("chat",))) as client:
        page = await scrape(client)
    labels = {"model_name": "chat", "engine": "0"}
    for name, value in {
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 1200,
        "prefix_cache_hits_total": 300,
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "num_preemptions_total": 6,
        "prompt_tokens_total": 1234,
        "generation_tokens_total": 567,
    }.items():
        assert page[f"vllm:{name}", labels] == value
    assert page["vllm:request_success_total", {**labels, "finished_reason": "stop"}] == 7
    (config,) = page.labels("vllm:cache_config_info")
    assert config == {**labels, "block_size": "32", "num_gpu_blocks": "100", "cache_dtype": "bfloat16"}


# What Prometheus 3 sends.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2"
)


async def test_types_and_format(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.snapshot_value = known_snapshot()
    page = await scrape(client)
    for name, family in page.families.items():
        assert family.documentation, name
        kinds = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert all(sample.endswith("_total") for sample in kinds)
    assert page.families["kv_cache_usage_percent"].type == "gauge"
    assert page.families["vllm:time_to_first_token_seconds"].type == "histogram"
    answer = await client.get("/metrics", headers={"Accept": ACCEPT})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert set(Page(answer.text).families) == set(page.families)


async def test_an_empty_engine_divides_by_nothing(client: httpx.AsyncClient) -> None:
    page = await scrape(client)
    assert page["kv_cache_usage_percent"] == 0
    assert page["kvloom_kv_cache_waste_ratio"] == 0


async def test_latencies_of_a_known_history(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrival at 100, tokens at 102, 102.5 and two at 104.5; the end with the last."""
    import kvloom.server.generation
    import kvloom.server.routes

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    for module in (kvloom.server.generation, kvloom.server.routes):
        monkeypatch.setattr(module, "time", clock)

    def script(request: Any, index: int) -> Any:
        for now, step in (
            (102.0, Step((64,))),
            (102.5, Step((65,))),
            (104.5, Step((66, 67), finish="length")),
        ):
            clock.now = now
            yield step

    engine.script = script
    body = {"prompt": "a", "max_tokens": 4}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    page = await scrape(client)
    labels = {"model_name": "fake/model", "engine": "0"}
    for ours, theirs, count, total in (
        ("time_to_first_token", "time_to_first_token", 1, 2.0),
        ("inter_token", "inter_token_latency", 3, 0.5 + 1.0 + 1.0),
        ("queue", "request_queue_time", 1, 0.25),
        ("end_to_end", "e2e_request_latency", 1, 4.5),
    ):
        for name, extra in ((f"kvloom_{ours}_seconds", {}), (f"vllm:{theirs}_seconds", labels)):
            assert page[f"{name}_count", extra] == count
            assert page[f"{name}_sum", extra] == pytest.approx(total)
            assert page[f"{name}_bucket", {**extra, "le": "+Inf"}] == count
    assert page["kvloom_inter_token_seconds_bucket", {"le": "0.5"}] == 1
    assert page["kvloom_inter_token_seconds_bucket", {"le": "1.0"}] == 3
    assert page["kvloom_time_to_first_token_seconds_bucket", {"le": "1.5"}] == 0
    assert page["kvloom_time_to_first_token_seconds_bucket", {"le": "2.0"}] == 1


async def test_answers_and_errors_are_counted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/chat/completions", json={"messages": HI})
    await client.post("/v1/chat/completions", json={"messages": []})
    await client.post("/v1/chat/completions", json={"messages": HI, "temprature": 1})
    await client.post("/v1/completions", json={"prompt": "a" * 500})
    for index in range(3):
        await client.get(f"/unknown/{index}")
    engine.max_waiting = 0
    await client.post("/v1/completions", json={"prompt": "a"})
    engine.max_waiting, engine.fail = 10, RuntimeError("x")
    await client.post("/v1/completions", json={"prompt": "a"})
    engine.fail = None
    engine.script = lambda request, index: iter([Step((64,)), Step(finish="error", error="x")])
    await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    page = await scrape(client)
    chat = "/v1/chat/completions"
    assert page["kvloom_http_responses_total", {"route": chat, "status": "200"}] == 1
    assert page["kvloom_http_responses_total", {"route": chat, "status": "400"}] == 2
    assert page["kvloom_http_responses_total", {"route": "other", "status": "404"}] == 3
    assert page["kvloom_http_responses_total", {"route": "/v1/completions", "status": "429"}] == 1
    assert page["kvloom_http_responses_total", {"route": "/v1/completions", "status": "500"}] == 1
    for kind, count in {
        "invalid_request_error": 1,
        "unknown_parameter": 1,
        "context_length_exceeded": 1,
        "not_found": 3,
        "queue_full": 1,
        "internal_error": 1,
        "engine_error": 1,  # within a stream that had begun with 200
    }.items():
        assert page["kvloom_http_errors_total", {"kind": kind}] == count


async def test_two_applications_share_no_numbers(tokenizer: Any) -> None:
    async with client_for(FakeEngine(tokenizer)) as one, client_for(FakeEngine(tokenizer)) as two:
        await one.post("/v1/completions", json={"prompt": "a"})
        assert (await scrape(one))["kvloom_end_to_end_seconds_count"] == 1
        assert (await scrape(two))["kvloom_end_to_end_seconds_count"] == 0


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    histogram = LatencyHistogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(seconds)
    histogram.observe(1.5, 2)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert (histogram.count, histogram.sum) == (7, 10.5)


async def test_every_metric_is_documented_and_every_documented_one_exists(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.snapshot_value = known_snapshot()
    await client.get("/nothing")
    page = await scrape(client)
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text[text.index("## Metrics") :]
    names = [name for row in table.splitlines() if row.startswith("| `") for name in row.split("|")[1].split(", ")]
    documented = {re.sub(r"\{.*\}", "", name.strip(" `")) for name in names}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name, _ in page.samples}
    assert documented == shown
