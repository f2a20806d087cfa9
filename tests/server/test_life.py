"""A server's life from outside: loading, serving, draining, and the second Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvloom.core.errors import ConfigError
from kvloom.server.launch import bind
from tests.server.conftest import eventually

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def served(load: float, step: float, drain: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.served", str(load), str(step), str(drain)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def status(url: str, route: str = "/health") -> int:
    try:
        return httpx.get(url + route, timeout=5).status_code
    except httpx.TransportError:
        return 0


def test_health_while_loading_and_ctrl_c_during_it() -> None:
    with served(60, 0, 5) as (process, url):
        eventually(lambda: status(url) == 503, 20)
        assert "loading" in httpx.get(url + "/health").text
        assert httpx.post(url + CHAT, json={"messages": HI}).status_code == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_a_model_that_cannot_be_loaded() -> None:
    with served(-1, 0, 5) as (process, _):
        assert process.wait(30) == 2
        assert process.stdout is not None
        assert "refused: the model is missing a shard" in process.stdout.read()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_draining_ends_what_runs_and_refuses_the_rest(sig: int) -> None:
    with served(0, 0.15, 30) as (process, url):
        eventually(lambda: status(url) == 200, 20)
        answers: list[httpx.Response] = []
        body = {"messages": HI}
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url + CHAT, json=body, timeout=30)))
        thread.start()
        time.sleep(0.3)
        process.send_signal(sig)
        eventually(lambda: status(url) == 503)
        refused = httpx.post(url + CHAT, json={"messages": HI})
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        thread.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["choices"][0]["message"]["content"] == "Hello, world"
        assert process.wait(10) == 0


def test_drain_timeout_ends_requests_with_an_error() -> None:
    with served(0, 1.0, 0.5) as (process, url):
        eventually(lambda: status(url) == 200, 20)
        with httpx.stream("POST", url + CHAT, json={"messages": HI, "stream": True}, timeout=30) as answer:
            process.send_signal(signal.SIGINT)
            text = answer.read().decode()
        assert '"code":"engine_stopped"' in text
        assert process.wait(10) == 0


def test_second_signal_stops_at_once() -> None:
    with served(0, 10.0, 60) as (process, url):
        eventually(lambda: status(url) == 200, 20)
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", url + CHAT, json={"messages": HI, "stream": True}, timeout=30) as answer,
        ):
            process.send_signal(signal.SIGINT)
            eventually(lambda: status(url) == 503)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert process.wait(10) == 130
            assert time.monotonic() - began < 2
            answer.read()


def test_port_in_use() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
        bind("127.0.0.1", port)
    first.close()
    bind("127.0.0.1", port).close()


def test_impossible_hosts() -> None:
    for host in ("no.such.host.invalid", "8.8.8.8", "a" * 300):
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(host, 0)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    assert listener.family == socket.AF_INET6
    listener.close()
