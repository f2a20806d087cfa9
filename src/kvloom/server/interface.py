"""What the server asks of an engine. ``engine.async_engine.AsyncEngine`` is one; tests script another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from kvloom.core.messages import EngineRequest, SequenceOutput
from kvloom.core.stats import EngineInfo, EngineSnapshot


class ServingEngine(Protocol):
    """An engine that runs beside the event loop and exchanges plain messages with it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Sampling values that the model's authors recommend."""

    @property
    def ready(self) -> bool: ...

    @property
    def failed(self) -> str | None:
        """Why the engine can serve no more, if so."""

    async def submit(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        """Validate and enqueue; the iterator ends when every sequence has a finish reason.

        Raises:
            RequestError: the request is refused; nothing was enqueued.
            EngineStoppedError: the engine takes no more requests.
        """

    def abort(self, request_id: str) -> None:
        """End a request and free its memory at once; unknown ids are ignored."""

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one of a request's sequences; unknown ones are ignored."""

    def snapshot(self) -> EngineSnapshot: ...

    async def start(self) -> None:
        """Begin to serve, delivering to the running event loop."""

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the running ones; False if ``timeout_s`` seconds passed first."""

    async def stop(self) -> None:
        """Stop computing; requests still open end with EngineStoppedError."""
