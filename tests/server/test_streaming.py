"""Server-sent events: their order, their text, errors within, and readers that are slow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import client_for
from tests.server.fake import EOS, FakeEngine, Step

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


async def events(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(route, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "[DONE]" else json.loads(line) for line in (line[6:] for line in lines)]


async def test_order_of_chat_events(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.002
    first, *middle, last, done = await events(client, CHAT, {"messages": HI})
    assert done == "[DONE]"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(one["choices"][0]["delta"]["content"] for one in middle) == "Hello, world"
    assert len(middle) > 3
    assert last["choices"][0]["finish_reason"] == "stop"
    assert len({one["id"] for one in (first, *middle, last)}) == 1
    assert {one["object"] for one in (first, *middle, last)} == {"chat.completion.chunk"}
    assert all("usage" not in one for one in (first, *middle, last))


async def test_usage_chunk(client: httpx.AsyncClient) -> None:
    *chunks, usage, done = await events(client, CHAT, {"messages": HI, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 13
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["usage"]["kvloom"]["preemptions"] == 1
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_usage_in_every_chunk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.002
    body = {"prompt": "a", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, _ = await events(client, PLAIN, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 13


async def test_streamed_and_whole_answers_agree(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = "Grüße, 世界 \U0001f600!"
    for options in ({}, {"stop": ["界"]}, {"max_tokens": 3}, {"max_tokens": 9}, {"n": 3}, {"echo": True}):
        for route, body in ((PLAIN, {"prompt": "a"}), (CHAT, {"messages": HI})):
            if "echo" in options and route == CHAT:
                continue
            engine.step_seconds = 0.0005
            whole = (await client.post(route, json={**body, **options})).json()
            *chunks, _ = await events(client, route, {**body, **options})
            texts: dict[int, str] = {}
            finished: dict[int, str] = {}
            for chunk in chunks:
                (choice,) = chunk["choices"]
                part = choice["text"] if route == PLAIN else choice["delta"].get("content", "")
                texts[choice["index"]] = texts.get(choice["index"], "") + part
                assert choice["index"] not in finished, "nothing after the finish reason"
                if choice["finish_reason"]:
                    finished[choice["index"]] = choice["finish_reason"]
            for choice in whole["choices"]:
                text = choice["text"] if route == PLAIN else choice["message"]["content"]
                assert texts[choice["index"]] == text
                assert finished[choice["index"]] == choice["finish_reason"]


async def test_streamed_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply, engine.step_seconds = "aé!", 0.001
    *chunks, _ = await events(client, CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1})
    content = [one for c in chunks if c["choices"][0]["logprobs"] for one in c["choices"][0]["logprobs"]["content"]]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "aé!<|im_end|>"
    *chunks, _ = await events(client, PLAIN, {"prompt": "ab", "logprobs": 1, "echo": True})
    rows = [c["choices"][0]["logprobs"] for c in chunks]
    assert [token for row in rows for token in row["tokens"]][:3] == ["a", "b", "a"]
    assert [offset for row in rows for offset in row["text_offset"]][:4] == [0, 1, 2, 3]
    assert chunks[0]["choices"][0]["text"].startswith("ab")


async def test_error_after_the_start_is_an_event_and_the_last(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.002
    engine.script = lambda request, index: iter([Step((64,)), Step((65,)), Step(finish="error", error="it broke")])
    *before, last = await events(client, CHAT, {"messages": HI})
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in before) == "ab"
    assert last["error"]["message"] == "it broke"
    assert last["error"]["code"] == "engine_error"
    assert engine.live == {}


async def test_unexpected_error_in_a_stream_tells_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def script(request: Any, index: int) -> Any:
        yield Step((64,))
        raise ZeroDivisionError("a secret")

    engine.script = script
    *_, last = await events(client, CHAT, {"messages": HI})
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(last)


async def test_engine_that_ends_without_a_reason(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    class Short(FakeEngine):
        async def _outputs(self, request: Any) -> Any:
            yield self._output(request, 0, Step((64,)), False)

    async with client_for(Short(engine.tokenizer)) as other:
        *_, last = await events(other, CHAT, {"messages": HI})
        assert "without saying why" in last["error"]["message"]
        assert (await other.post(CHAT, json={"messages": HI})).status_code == 500


async def test_text_held_back_comes_with_the_end(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Half a character at the limit, and the beginning of a stop string that never came."""
    engine.reply = "ab\U0001f600"
    *chunks, _ = await events(client, PLAIN, {"prompt": "x", "max_tokens": 4, "stop": ["bc"]})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith("ab")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_outputs_join_while_the_reader_is_slow(engine: FakeEngine) -> None:
    """What waits for a slow reader is the answer's text, in one delta, however many steps made it."""
    from kvloom.core.messages import EngineRequest
    from kvloom.core.request import SamplingParams
    from kvloom.server.generation import Generation
    from kvloom.server.metrics import ServerMetrics

    engine.script = lambda request, index: iter([Step((64,))] * 5000 + [Step((EOS,), finish="length")])
    request = EngineRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=5001))
    deltas: list[str] = []
    async with await Generation.start(engine, [request], ServerMetrics()) as generation:
        async for gained in generation.updates():
            deltas += [delta.text for _, delta in gained]
            await asyncio.sleep(0.05)
    assert "".join(deltas) == "a" * 5000
    assert len(deltas) < 20


async def test_many_streams_at_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.001
    answers = await asyncio.gather(*(events(client, CHAT, {"messages": HI, "n": 2}) for _ in range(50)))
    for *chunks, done in answers:
        assert done == "[DONE]"
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"][0]["index"] == 1)
        assert text == "Hello, world"
    assert engine.live == {}
    assert engine.aborted == []
