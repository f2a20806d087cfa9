"""Real sockets: clients that leave, clients that dawdle, and the official client."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from kvloom.server.config import ServerConfig
from tests.server.conftest import eventually, running
from tests.server.fake import EOS, FakeEngine, Step

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def endless(request: Any, index: int) -> Iterator[Step]:
    while True:
        yield Step((64,))


def send_request(url: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A raw connection with a chat request sent and nothing read."""
    address = urlsplit(url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((address.hostname, address.port))
    data = json.dumps({"messages": HI, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_cancels_what_runs(engine: FakeEngine, stream: bool) -> None:
    engine.script, engine.step_seconds = endless, 0.002
    with running(engine) as url:
        connection = send_request(url, {"stream": stream})
        eventually(lambda: len(engine.requests) == 1)
        assert engine.aborted == []
        connection.close()
        eventually(lambda: len(engine.aborted) == 1)
        assert engine.live == {}
        metrics = httpx.get(url + "/metrics").text
        assert "kvloom_client_disconnects_total 1.0" in metrics


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_queued_cancels_too(engine: FakeEngine, stream: bool) -> None:
    engine.hold.clear()
    with running(engine) as url:
        connection = send_request(url, {"stream": stream})
        eventually(lambda: len(engine.live) == 1)
        connection.close()
        eventually(lambda: engine.live == {})
        assert len(engine.aborted) == 1


def test_cancel_storm(engine: FakeEngine) -> None:
    """Clients that give up and try again, over and over: nothing stays behind, others are served."""
    engine.script, engine.step_seconds = endless, 0.002
    with running(engine) as url:
        for _ in range(10):
            storm = [send_request(url, {"stream": index % 2 == 0, "n": 2}) for index in range(10)]
            eventually(lambda: bool(engine.live))
            for connection in storm:
                connection.close()
        eventually(lambda: engine.live == {} and len(engine.requests) == len(engine.aborted))
        engine.script = None
        answer = httpx.post(url + CHAT, json={"messages": HI})
        assert answer.status_code == 200


def test_half_a_request_and_then_nothing(engine: FakeEngine) -> None:
    with running(engine) as url:
        address = urlsplit(url)
        for data in (b"", b"POST", f"POST {CHAT} HTTP/1.1\r\nContent-Length: 100\r\nHost: x\r\n\r\n{{".encode()):
            with socket.create_connection((address.hostname, address.port)) as connection:
                connection.sendall(data)
                time.sleep(0.05)
        assert httpx.post(url + CHAT, json={"messages": HI}).status_code == 200
        assert len(engine.requests) == 1


def test_a_slow_reader_holds_up_nobody(engine: FakeEngine) -> None:
    """It reads a byte now and then while its answer overfills every buffer; the others do not notice."""
    engine.script = lambda request, index: (
        iter([Step((64,) * 100)] * 1000 + [Step((EOS,), finish="stop", stop_token_id=EOS)])
        if request.params.max_tokens == 1
        else engine._reply(request, index)
    )
    with running(engine, send_buffer=4096) as url, httpx.Client(base_url=url) as others:
        slow = send_request(url, {"stream": True, "max_tokens": 1, "n": 4}, receive_buffer=4096)
        eventually(lambda: len(engine.requests) == 1)
        received = b""
        for _ in range(10):
            received += slow.recv(1)
            began = time.monotonic()
            assert others.post(CHAT, json={"messages": HI}).status_code == 200
            assert time.monotonic() - began < 2.0
        eventually(lambda: engine.live == {}, 20)  # the engine never waited for the reader
        slow.settimeout(20)
        while not received.endswith(b"0\r\n\r\n"):
            part = slow.recv(65536)
            assert part
            received += part
        slow.close()
    assert received.count(b"a") >= 400_000
    assert b"data: [DONE]" in received
    assert engine.aborted == []


def test_a_reader_that_stalls_is_dropped(engine: FakeEngine) -> None:
    engine.script = lambda request, index: iter([Step((64,) * 100)] * 1000 + [Step(finish="length")])
    with (
        running(engine, ServerConfig(stall_timeout=0.3), send_buffer=4096) as url,
        httpx.Client(base_url=url) as others,
    ):
        stalled = send_request(url, {"stream": True, "n": 4}, receive_buffer=4096)
        eventually(lambda: "kvloom_client_disconnects_total 1.0" in others.get("/metrics").text, 20)
        stalled.close()
        assert engine.live == {}


def test_body_over_the_limit_is_answered_on_a_socket(engine: FakeEngine) -> None:
    with running(engine) as url:
        answer = httpx.post(url + CHAT, content=b"a" * 10_000_000)
        assert answer.status_code == 413
        assert "8388608" in answer.json()["error"]["message"]
        # A declared size beyond all reason is refused before it is sent.
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n".encode())
            assert b" 413 " in connection.recv(4096)
        assert httpx.get(url + "/health").status_code == 200


def test_keep_alive_connections_survive_errors(engine: FakeEngine) -> None:
    with running(engine) as url, httpx.Client(base_url=url) as client:
        for _ in range(3):
            assert client.post(CHAT, json={"messages": []}).status_code == 400
            assert client.post(CHAT, json={"messages": HI}).status_code == 200
            with client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")


def test_five_hundred_at_once_into_a_queue_of_32(engine: FakeEngine) -> None:
    engine.max_waiting, engine.step_seconds = 32, 0.003
    with running(engine) as url:
        crowd = [send_request(url, {"stream": index % 2 == 0}) for index in range(500)]
        answers = [read_answer(connection) for connection in crowd]
        assert httpx.post(url + CHAT, json={"messages": HI}).status_code == 200
    statuses = [int(answer.split(b" ", 2)[1]) for answer in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 32
    assert statuses.count(429) >= 100
    assert all(b"retry-after: 2\r\n" in answer for answer in answers if b" 429 " in answer[:20])
    assert engine.live == {}


def read_answer(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    connection.settimeout(30)
    received = b""
    while part := connection.recv(65536):
        received += part
    connection.close()
    return received


class TestOfficialClient:
    @pytest.fixture
    def client(self, engine: FakeEngine) -> Iterator[openai.OpenAI]:
        engine.step_seconds = 0.001
        with (
            running(engine, ServerConfig(api_keys=("k",))) as url,
            openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
        ):
            yield client

    def test_models(self, client: openai.OpenAI) -> None:
        (model,) = client.models.list()
        assert model.id == "fake/model"
        assert client.models.retrieve("fake/model").id == "fake/model"

    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="fake/model", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, n=2
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello, world"] * 2
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs is not None
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3

    def test_streamed_chat(self, client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(
            model="fake/model",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 13

    def test_stream_helper(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model="fake/model", messages=[{"role": "user", "content": "hi"}]) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert final.choices[0].message.content == "Hello, world"

    def test_completions(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="fake/model", prompt=["a", "b"], max_tokens=5, extra_body={"top_k": 3})
        assert [choice.text for choice in answer.choices] == ["Hello"] * 2
        stream = client.completions.create(model="fake/model", prompt="a", max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"

    def test_closing_a_stream_early(self, client: openai.OpenAI, engine: FakeEngine) -> None:
        engine.script = endless
        stream = client.chat.completions.create(
            model="fake/model", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        next(iter(stream))
        stream.close()
        eventually(lambda: engine.live == {} and len(engine.aborted) == 1)

    def test_errors(self, client: openai.OpenAI, engine: FakeEngine) -> None:
        messages: Any = [{"role": "user", "content": "a" * 300}]
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="fake/model", messages=messages, stream=True)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-9", messages=messages)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        engine.max_waiting = 0
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake/model", prompt="a")
        engine.max_waiting = 10
        engine.script = lambda request, index: iter([Step((64,)), Step(finish="error", error="it broke")])
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake/model", prompt="a")
        with pytest.raises(openai.APIError, match="it broke"):
            list(client.completions.create(model="fake/model", prompt="a", stream=True))
