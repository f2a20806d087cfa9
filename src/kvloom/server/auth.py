"""API keys: with ``--api-key`` every route but ``/health`` is closed, and each key is a tenant."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.core.errors import AuthenticationError
from kvloom.server.errors import describe
from kvloom.server.metrics import ServerMetrics

OPEN_PATHS = frozenset({"/health"})


class ApiKeys:
    """The accepted keys, kept as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant_salt(self, authorization: str | None) -> bytes:
        """The prefix-cache salt of the caller: the digest of the key; empty when no keys are set.

        It comes from the key alone: a salt that clients choose would isolate nobody.

        Raises:
            AuthenticationError: keys are set and the header carries none of them.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("no API key given; send the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, each in constant time, so that timing tells nothing about any.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationError("the API key is wrong; ask the operator of this server for a valid one")
        return digest


class AuthMiddleware:
    """Refuses requests without a valid key and passes the tenant's salt on in the scope's state."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: ServerMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                salt = self._keys.tenant_salt(Headers(scope=scope).get("authorization"))
            except AuthenticationError as error:
                told = describe(error)
                self._metrics.count_error(told.kind)
                await told.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant_salt"] = salt
        await self._app(scope, receive, send)
