"""A server's life: bind, load while ``/health`` says 503, serve, drain, stop.

::

    bind ── in use? exit 2, before anything is loaded
      └─ serve HTTP ─┬─ load in a thread ── fails? stop, the error is the caller's
                     └─ ready ── first signal: drain (new requests get 503) ── stop
                              └─ second signal: gone at once
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvloom.core.errors import ConfigError
from kvloom.server.app import create_app
from kvloom.server.config import ServerConfig
from kvloom.server.interface import ServingEngine
from kvloom.server.state import Serving

logger = logging.getLogger("kvloom.server")

# After draining, connections get this long to take the rest of their answers.
FLUSH_SECONDS = 5
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    It listens at once: until then two servers could both bind the port, and the second would find
    out after loading its model.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error}; give --host 127.0.0.1 or 0.0.0.0") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what listens there, or give --port another (0: any free one)"
            ) from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; give another --port") from error
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn with our order of shutting down: drain first, and answer 503 meanwhile."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal(sig)


def http_server(app: FastAPI, config: ServerConfig, on_signal: Callable[[int], None]) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=config.access_log,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=FLUSH_SECONDS,
            timeout_keep_alive=75,  # longer than proxies keep theirs, so that they are the ones to close
            server_header=False,
            backlog=BACKLOG,
        ),
        on_signal,
    )


class Runner:
    """Runs one server until it is told to stop.

    Args:
        listener: a listening socket, from ``bind``.
        load: makes the engine; blocking, run in a thread.
        on_ready: called once requests are served.
    """

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        load: Callable[[], ServingEngine],
        on_ready: Callable[[ServingEngine, Serving, int], None],
    ) -> None:
        self._config = config
        self._listener = listener
        self._load = load
        self._on_ready = on_ready
        self._app = create_app(None, config)
        self._serving: Serving = self._app.state.serving
        self._server = http_server(self._app, config, self._on_signal)
        self._signals = 0
        self._leave = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> int:
        """Serve; returns the exit status.

        Raises:
            KvloomError: the engine could not be loaded.
        """
        self._loop = asyncio.get_running_loop()
        http = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        engine: ServingEngine | None = None
        try:
            engine = await self._loaded(http)
            if engine is None:
                return 128 + signal.SIGINT
            await engine.start()
            self._serving.attach(engine)
            self._on_ready(engine, self._serving, self._listener.getsockname()[1])
            await self._until_told(engine, http)
            logger.info(
                "draining: running requests get up to %g s, new ones 503; a second signal stops at once",
                self._config.drain_timeout,
            )
            self._serving.draining = True
            if not await engine.drain(self._config.drain_timeout):
                logger.warning("%g s are over; ending the requests that still run", self._config.drain_timeout)
            return 0
        finally:
            self._serving.draining = True
            if engine is not None:
                await engine.stop()
            self._server.should_exit = True
            await http
            self._serving.close()

    def request_stop(self) -> None:
        """Drain and stop; callable from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._leave.set)

    def _on_signal(self, sig: int) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("second signal: stopping at once")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + sig)  # a model step cannot be interrupted, and nothing on disk is half written
        self.request_stop()

    async def _loaded(self, http: asyncio.Task[None]) -> ServingEngine | None:
        """The engine; None if told to stop before it was loaded."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[ServingEngine] = loop.create_future()

        def settle(engine: ServingEngine | None, error: BaseException | None) -> None:
            if loaded.cancelled():
                return
            if engine is not None:
                loaded.set_result(engine)
            elif error is not None:
                loaded.set_exception(error)

        def work() -> None:
            engine, failure = None, None
            try:
                engine = self._load()
            except BaseException as error:  # handed to the loop, which raises it
                failure = error
            try:
                loop.call_soon_threadsafe(settle, engine, failure)
            except RuntimeError:  # the loop has closed: nobody waits for the engine any more
                return

        # A daemon: Ctrl-C must not wait for a download.
        threading.Thread(target=work, name="kvloom-load", daemon=True).start()
        leave = asyncio.create_task(self._leave.wait())
        first: set[asyncio.Future[Any]] = {loaded, leave, http}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if loaded.done():
                return loaded.result()
            if http.done():
                http.result()
            return None
        finally:
            loaded.cancel()
            leave.cancel()

    async def _until_told(self, engine: ServingEngine, http: asyncio.Task[None]) -> None:
        """Until a signal, or until the HTTP server ends by itself."""
        leave = asyncio.create_task(self._leave.wait())
        await asyncio.wait({leave, http}, return_when=asyncio.FIRST_COMPLETED)
        leave.cancel()
        if http.done():
            http.result()
