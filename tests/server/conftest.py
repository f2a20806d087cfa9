"""Fixtures: a byte tokenizer, a fake engine over it, and clients with and without a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from kvloom.server.app import create_app
from kvloom.server.config import ServerConfig
from tests.server.fake import FakeEngine, byte_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def engine(tokenizer: Any) -> FakeEngine:
    return FakeEngine(tokenizer)


def client_for(engine: FakeEngine | None, config: ServerConfig | None = None) -> httpx.AsyncClient:
    """A client that calls the application directly, without a socket."""
    transport = httpx.ASGITransport(app=create_app(engine, config), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client


@contextlib.contextmanager
def running(engine: Any, config: ServerConfig | None = None, send_buffer: int | None = None) -> Iterator[str]:
    """A real server in a thread; yields its address. ``send_buffer`` makes the kernel's part of a socket small."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, config), log_config=None, lifespan="off", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what another thread brings about; fails if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
