"""The outermost layer: a request id on every answer, the count of answers, and the last resort.

Being outermost it also sees what the inner layers refuse, and what they let fall.
"""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.server.errors import describe
from kvloom.server.metrics import ServerMetrics
from kvloom.server.rendering import new_id

logger = logging.getLogger("kvloom.server")

_SANE = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class EdgeMiddleware:
    """Echoes a client's ``X-Request-Id`` if it is short and plain, else makes one; counts answers."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE.fullmatch(given) else new_id("req")
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                route = getattr(scope.get("route"), "path", "other")  # bounded, unlike the path itself
                self._metrics.count_response(route, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("unexpected error at %s %s, request %s", scope["method"], scope["path"], request_id)
            if started:
                raise  # the server cuts the connection, so that nobody takes half an answer for a whole one
            told = describe(error)
            self._metrics.count_error(told.kind)
            await told.response()(scope, receive, send_with_id)
