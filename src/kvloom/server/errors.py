"""Every error leaves the server in OpenAI's shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvloom.core.errors import (
    EngineError,
    EngineStoppedError,
    KvloomError,
    NotFoundError,
    QueueFullError,
    RequestError,
)
from kvloom.server.jsontext import dump_json

logger = logging.getLogger("kvloom.server")

LOADING_RETRY_S = 5
CLIENT_GONE_STATUS = 499  # nginx's number; seen by metrics only, for nobody is left to read it


class ClientGone(Exception):
    """The client closed the connection, or stopped reading from it."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error as HTTP sees it. ``kind`` is the metric label."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.code or self.type

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(dump_json(self.body()), self.status, headers=dict(self.headers), media_type="application/json")


def describe(error: Exception) -> ErrorAnswer:
    """What the client is told about ``error``; nothing of an unexpected one but that it happened."""
    if isinstance(error, QueueFullError):
        return ErrorAnswer(
            429,
            error.message,
            error.error_type,
            error.param,
            error.code,
            {"Retry-After": str(max(1, round(error.retry_after_s)))},
        )
    if isinstance(error, RequestError):
        headers = {"WWW-Authenticate": "Bearer"} if error.http_status == 401 else {}
        return ErrorAnswer(error.http_status, error.message, error.error_type, error.param, error.code, headers)
    if isinstance(error, EngineStoppedError):
        return ErrorAnswer(
            503, str(error), "unavailable_error", None, "engine_stopped", {"Retry-After": str(LOADING_RETRY_S)}
        )
    if isinstance(error, EngineError):
        return ErrorAnswer(500, str(error), "server_error", None, "engine_error")
    if isinstance(error, KvloomError):
        return ErrorAnswer(500, str(error), "server_error", None, type(error).__name__)
    if isinstance(error, HTTPException):
        return _describe_http(error)
    return ErrorAnswer(500, "internal error; the server's log names the cause", "server_error", None, "internal_error")


def _describe_http(error: HTTPException) -> ErrorAnswer:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return ErrorAnswer(404, "no such route", NotFoundError.error_type, None, "not_found", headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        return ErrorAnswer(
            405,
            f"wrong method for this route; use {allowed}",
            "invalid_request_error",
            None,
            "method_not_allowed",
            headers,
        )
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ErrorAnswer(error.status_code, str(error.detail), kind, None, None, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer what routes raise on purpose in OpenAI's shape, and count it. The edge answers the rest."""

    async def answer(request: Request, error: Exception) -> Response:
        told = describe(error)
        request.app.state.serving.metrics.count_error(told.kind)
        if told.status >= 500:
            logger.error("%s %s: %s", request.method, request.url.path, error)
        return told.response()

    async def nobody(request: Request, error: Exception) -> Response:
        request.app.state.serving.metrics.disconnects += 1
        return Response(status_code=CLIENT_GONE_STATUS)

    for kind in (KvloomError, HTTPException):
        app.add_exception_handler(kind, answer)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, nobody)
