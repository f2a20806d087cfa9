"""Answers that a client may walk away from: server-sent events, and whole documents.

Both watch the connection while they work. When the client leaves, the generation's block is left
at once and its engine requests are cancelled, queued ones included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvloom.core.errors import KvloomError
from kvloom.server.errors import ClientGone, describe
from kvloom.server.generation import Generation
from kvloom.server.jsontext import dump_json
from kvloom.server.metrics import ServerMetrics
from kvloom.server.rendering import ChatRenderer, CompletionRenderer

logger = logging.getLogger("kvloom.server")
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
PIECE_BYTES = 64 * 1024


async def unless_gone(work: Awaitable[Result], *watchers: Awaitable[None]) -> Result:
    """``work``'s result, unless a watcher ends first, which cancels ``work``.

    Raises:
        ClientGone: one did.
    """
    task = asyncio.ensure_future(work)
    every: list[asyncio.Future[Any]] = [task, *map(asyncio.ensure_future, watchers)]
    try:
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in every:
            one.cancel()
        await asyncio.gather(*every, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A generation as server-sent events, ended by ``data: [DONE]``.

    The status line goes out at once, the first event with the first token: a client that measures
    its time to first token measures just that. Each event carries whatever was gained since the
    last one was written, so a slow reader gets fewer, longer events. An error after the start is an
    event of its own, and the last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        renderer: ChatRenderer | CompletionRenderer,
        *,
        metrics: ServerMetrics,
        final_usage: bool,
        continuous_usage: bool,
        stall_timeout: float,
    ) -> None:
        super().__init__(status_code=200, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._renderer = renderer
        self._metrics = metrics
        self._final_usage = final_usage
        self._continuous_usage = continuous_usage
        self._stall_timeout = stall_timeout
        self._writing_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            try:
                await unless_gone(self._send_all(send), _disconnected(receive), self._stalled())
            except ClientGone:
                self._metrics.disconnects += 1

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for gained in self._generation.updates():
                events = [
                    self._event(chunk)
                    for choice, delta in gained
                    for chunk in self._renderer.chunks(self._generation, choice, delta)
                ]
                await self._write(send, b"".join(events), more=True)
            last = DONE
            if self._final_usage:
                last = _data(dump_json(self._renderer.usage_chunk(self._generation))) + DONE
        except Exception as error:
            told = describe(error)
            self._metrics.count_error(told.kind)
            if not isinstance(error, KvloomError):
                logger.exception("unexpected error in a stream", exc_info=error)
            last = _data(dump_json(told.body()))
        await self._write(send, last, more=False)

    def _event(self, chunk: dict[str, object]) -> bytes:
        if self._continuous_usage:
            chunk = {**chunk, "usage": self._renderer.usage_chunk(self._generation)["usage"]}
        elif self._final_usage:
            chunk = {**chunk, "usage": None}
        return _data(dump_json(chunk))

    async def _write(self, send: Send, body: bytes, *, more: bool) -> None:
        """Send, which waits while the socket's buffer is full.

        In pieces, because a message that has begun to be sent is buffered whole.
        """
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            message: Message = {
                "type": "http.response.body",
                "body": piece,
                "more_body": more or start + len(piece) < len(body),
            }
            self._writing_since = time.monotonic()
            await send(message)
            self._writing_since = None

    async def _stalled(self) -> None:
        """Ends once a client has let a full socket be for too long.

        One watcher per stream: a timer around each of thousands of writes would cost more than they do.
        """
        while True:
            await asyncio.sleep(self._stall_timeout / 4)
            since = self._writing_since
            if since is not None and time.monotonic() - since > self._stall_timeout:
                logger.warning("dropped a client that read nothing for %g s", self._stall_timeout)
                return


def _data(document: bytes) -> bytes:
    return b"data: " + document + b"\n\n"


async def whole_answer(
    generation: Generation, receive: Receive, render: Callable[[Generation], dict[str, object]]
) -> Response:
    """The finished generation as one JSON document.

    Raises:
        ClientGone: the client left before.
        EngineError: the engine failed on the request, or is stopping.
    """
    async with generation:
        await unless_gone(generation.wait(), _disconnected(receive))
        return Response(dump_json(render(generation)), media_type="application/json")
