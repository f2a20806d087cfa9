"""Reading a request's body: never more than the limit, whatever the headers say."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from kvloom.core.errors import BodyTooLargeError, RequestError
from kvloom.core.sizes import format_bytes
from kvloom.server.jsontext import parse_json_object

# A client that is still sending does not read our answer, and closing on it resets the connection
# before the answer arrives. So a body somewhat over the limit is read to its end and thrown away.
DISCARD_BYTES = 64 * 1024 * 1024


async def read_json_object(request: Request, limit: int) -> tuple[dict[str, Any], int]:
    """The JSON object in the request's body, and the body's size in bytes.

    Raises:
        BodyTooLargeError: the body is longer than ``limit`` bytes.
        RequestError: it is empty or no JSON object.
    """
    body = await read_body(request, limit)
    if not body:
        raise RequestError("the body is empty; send a JSON object")
    return parse_json_object(body), len(body)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes held in memory."""
    declared = _declared_length(request)
    waits_for_go = "expect" in request.headers
    if declared is not None and declared > limit and (waits_for_go or declared > DISCARD_BYTES):
        raise _too_large(f"{declared} bytes", limit)
    body = bytearray()
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received <= limit:
            body += chunk
        else:
            body.clear()
        if received > max(limit, DISCARD_BYTES):
            raise _too_large(f"more than {received} bytes", limit)
    if received > limit:
        raise _too_large(f"{received} bytes", limit)
    return bytes(body)


def _declared_length(request: Request) -> int | None:
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _too_large(size: str, limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {size} but this server takes at most {limit} ({format_bytes(limit)}); "
        "send less, or start the server with a larger --max-body-bytes",
        code="body_too_large",
    )
