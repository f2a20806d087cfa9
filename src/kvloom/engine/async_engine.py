"""The engine behind asyncio: one thread steps it, streams of outputs reach the event loop.

The loop and the engine's thread exchange plain messages only. Requests are checked, and grammars
compiled, in a worker thread; then they enter the engine's inbox. Outputs are handed over once per
step, with one call into the loop, and wait in each request's stream until its reader takes them: a
slow reader holds its own outputs (at most ``max_model_len`` tokens), never anybody else's.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvloom.core.config import EngineConfig
from kvloom.core.errors import EngineError, EngineStoppedError, QueueFullError, RequestError
from kvloom.core.messages import EngineRequest, SequenceOutput
from kvloom.core.stats import EngineInfo, EngineSnapshot
from kvloom.engine.engine import Engine, PreparedRequest


class OutputStream:
    """One request's outputs, in order; iteration ends when all its sequences have finished."""

    def __init__(self, num_sequences: int) -> None:
        self._unread = num_sequences  # sequences whose end the reader has not seen
        self._open = num_sequences  # sequences whose end has not arrived
        self._outputs: deque[SequenceOutput] = deque()
        self._arrived = asyncio.Event()
        self._failure: EngineError | None = None

    @property
    def complete(self) -> bool:
        """Whether every sequence's end has arrived, read or not."""
        return self._open <= 0

    def push(self, output: SequenceOutput) -> None:
        self._outputs.append(output)
        self._open -= output.finish_reason is not None
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        while not self._outputs:
            if self._unread <= 0:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        if output.finish_reason is not None:
            self._unread -= 1
        return output


class AsyncEngine:
    """Drives an ``Engine`` from asyncio.

    ``ready`` is True from ``start`` until ``stop`` or a failure; ``failed`` names the failure.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], Sequence[SequenceOutput]]] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # the loop's: who still reads
        self._sources: dict[str, OutputStream] = {}  # the engine's thread's: whom an id stands for
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepted = 0  # requests accepted; written by the loop's thread only
        self._stopping = False
        self._draining = False
        self._snapshot = engine.snapshot()
        self.info: EngineInfo = engine.info
        self.tokenizer: Any = engine.loaded.tokenizer
        self.generation_defaults: dict[str, Any] = dict(engine.loaded.generation_defaults)
        self.failed: str | None = None

    @classmethod
    def create(cls, config: EngineConfig) -> AsyncEngine:
        """Load everything; blocks for seconds to minutes, so call it in a thread."""
        return cls(Engine(config))

    @property
    def ready(self) -> bool:
        return self._thread is not None and self.failed is None and not self._stopping

    @property
    def accepting(self) -> bool:
        return self.ready and not self._draining

    async def start(self) -> None:
        """Start the engine's thread, delivering to the running event loop."""
        assert self._thread is None, "start may be called once"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kvloom-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: EngineRequest) -> OutputStream:
        """Check and enqueue a request.

        Raises:
            RequestError, ContextLengthError: it can never run.
            QueueFullError: too many wait.
            EngineStoppedError: the engine is draining, stopped or failed.
        """
        self._check_accepting()
        # Checked before the costly part too, so that a flood is turned away cheaply.
        self._check_queue()
        # Only grammars take long to prepare; a thread hop for every request would cost more.
        if request.params.grammar is not None:
            prepared = await asyncio.to_thread(self._engine.prepare, request)
        else:
            prepared = self._engine.prepare(request)
        self._check_accepting()
        self._check_queue()
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        stream = OutputStream(request.params.n)
        self._streams[request.request_id] = stream
        self._accepted += 1
        self._inbox.put(lambda: self._add(prepared, stream))
        return stream

    def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        """``submit`` and iterate in one call; errors come at the first step of the iteration."""

        async def outputs() -> AsyncIterator[SequenceOutput]:
            stream = await self.submit(request)
            try:
                async for output in stream:
                    yield output
            finally:
                self.abort(request.request_id)

        return outputs()

    def abort(self, request_id: str) -> None:
        """Cancel a request: its memory is free before the next step. Unknown or finished ids are ignored."""
        if self._streams.pop(request_id, None) is not None:
            self._inbox.put(lambda: self._engine.abort(request_id))

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one of a request's sequences whose reader has seen enough (a stop string)."""
        if request_id in self._streams:
            self._inbox.put(lambda: self._engine.abort(request_id, index))

    def snapshot(self) -> EngineSnapshot:
        """The engine after its last step or command."""
        return self._snapshot

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing new and wait for what runs; False if ``timeout_s`` passed first."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._streams and self.failed is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def stop(self) -> None:
        """Stop stepping. Requests still open end with EngineStoppedError."""
        self._stopping = True
        if self._thread is not None:
            self._inbox.put(lambda: ())
            await asyncio.to_thread(self._thread.join)
        self._engine.close()
        self._fail_streams(EngineStoppedError("the server stopped before this request was done; send it again"))

    # -- checks on the event loop --------------------------------------------------------------------

    def _check_accepting(self) -> None:
        if self.failed is not None:
            raise EngineStoppedError(f"the engine failed: {self.failed}; restart the server")
        if not self.accepting:
            raise EngineStoppedError("the server is starting or stopping; try again later")

    def _check_queue(self) -> None:
        limit = self._engine.config.max_waiting
        waiting = self._accepted - self._engine.left_queue
        if waiting >= limit:
            raise QueueFullError(
                f"{waiting} requests wait already, the limit is {limit}; try again later", retry_after_s=1
            )

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                outputs: list[tuple[OutputStream, SequenceOutput]] = []
                while True:
                    try:
                        command = self._inbox.get(block=not self._engine.has_work and not outputs, timeout=1.0)
                    except queue.Empty:
                        break
                    outputs += self._addressed(command())
                    if self._stopping:
                        break
                if self._engine.has_work and not self._stopping:
                    outputs += self._addressed(self._engine.step())
                self._snapshot = self._engine.snapshot()
                if outputs:
                    self._call_loop(functools.partial(self._deliver, outputs))
        except BaseException as error:  # a panic in Rust (tokenizers, llguidance) is no Exception
            self.failed = f"{type(error).__name__}: {error}"
            failure = EngineError(f"the engine failed: {error}; restart the server")
            self._call_loop(lambda: self._fail_streams(failure))

    def _addressed(self, outputs: Sequence[SequenceOutput]) -> list[tuple[OutputStream, SequenceOutput]]:
        """Outputs with the stream they are for: a cancelled request's id may be in use again when they arrive."""
        found = [(self._sources[output.request_id], output) for output in outputs if output.request_id in self._sources]
        for output in outputs:
            if output.finish_reason is not None and not self._engine.holds(output.request_id):
                self._sources.pop(output.request_id, None)
        return found

    def _add(self, prepared: PreparedRequest, stream: OutputStream) -> Sequence[SequenceOutput]:
        self._sources[prepared.request.request_id] = stream
        try:
            self._engine.add(prepared)
        except RequestError as error:
            # The loop checked already; only a race could bring it here, and it must not end the engine.
            request = prepared.request
            self._engine.left_queue += 1
            return [
                SequenceOutput(request_id=request.request_id, index=index, finish_reason="error", error=error.message)
                for index in range(request.params.n)
            ]
        return ()

    def _call_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop is closed: nobody is left to read.
            self._stopping = True

    def _deliver(self, outputs: Sequence[tuple[OutputStream, SequenceOutput]]) -> None:
        for stream, output in outputs:
            if self._streams.get(output.request_id) is not stream:
                continue  # its reader is gone
            stream.push(output)
            if stream.complete:
                del self._streams[output.request_id]

    def _fail_streams(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
