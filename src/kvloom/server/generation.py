"""One API request at work: its engine requests, and the text of each choice as it grows.

::

    engine ── SequenceOutput ──► Generation._pump ── TextStream ──► Choice (pending text) ──► reader

The pump always keeps up with the engine. A reader that is slower finds the text of several steps
joined into one delta, so what waits for it never exceeds the answer itself. Text is made on the
event loop; the engine's thread only computes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from kvloom.core.errors import EngineError, EngineStoppedError
from kvloom.core.messages import EngineRequest, SequenceOutput, SequenceUsage, TokenLogprob
from kvloom.core.request import SamplingParams
from kvloom.engine.text import TextStream
from kvloom.server.interface import ServingEngine
from kvloom.server.metrics import ServerMetrics


@dataclass(slots=True)
class Delta:
    """What a choice gained since it was last read.

    ``offsets``: per logprob, where its token's text begins in the choice's text.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def empty(self) -> bool:
        return not self.text and self.finish_reason is None


class Choice:
    """One sequence of one prompt as the client sees it. ``index`` counts through the whole request."""

    def __init__(self, index: int, request: EngineRequest, stream: TextStream) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.usage = SequenceUsage()
        self.last_token_time: float | None = None
        self._stream = stream
        self._pending = Delta()
        self._num_offsets = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def absorb(self, output: SequenceOutput) -> bool:
        """Take one step's tokens. True if a stop string ended the text, so that the engine should stop too."""
        params = self.request.params
        self.usage = output.usage
        token_ids = output.token_ids
        stopping = output.stop_token_id is not None and token_ids[-1:] == (output.stop_token_id,)
        shown = token_ids[:-1] if stopping and not params.include_stop_str_in_output else token_ids
        delta = self._stream.push(shown)
        text, stopped = delta.text, delta.stopped
        used = delta.num_tokens_used if stopped is not None else len(token_ids)
        self.num_tokens += used
        self._pending.token_ids.extend(token_ids[:used])
        if output.logprobs is not None:
            self._pending.logprobs.extend(output.logprobs[:used])
            self._pending.offsets.extend(self._new_offsets(used))
        reason: str | None = output.finish_reason
        if stopped is not None:
            reason, self._pending.stop_reason = "stop", stopped
        elif reason is not None:
            last = self._stream.finish()
            text += last.text
            if last.stopped is not None:
                reason, self._pending.stop_reason = "stop", last.stopped
            elif output.stop_token_id in params.stop_token_ids:
                self._pending.stop_reason = output.stop_token_id
        self._pending.text += text
        self.finish_reason = self._pending.finish_reason = reason
        return stopped is not None and output.finish_reason is None

    def _new_offsets(self, used: int) -> list[int]:
        known = self._stream.text_offsets
        offsets = known[self._num_offsets : self._num_offsets + used]
        self._num_offsets += len(offsets)
        # A stop token has no text of its own: it stands where the last token does.
        return offsets + (known[-1:] or [0]) * (used - len(offsets))

    def take(self) -> Delta:
        """What was gained since the last call."""
        if self._pending.empty:  # logprobs of tokens whose text is still held back wait for it
            return Delta()
        taken, self._pending = self._pending, Delta()
        return taken


class Generation:
    """All choices of one API request. Use as ``async with await Generation.start(…)``.

    Leaving the block early, by an exception or because the client left, cancels what still runs.
    """

    def __init__(self, engine: ServingEngine, requests: Sequence[EngineRequest], metrics: ServerMetrics) -> None:
        self.requests = tuple(requests)
        self.choices: list[Choice] = []
        self.prompt_logprobs: dict[str, tuple[TokenLogprob | None, ...]] = {}
        self._engine = engine
        self._metrics = metrics
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @classmethod
    async def start(
        cls, engine: ServingEngine, requests: Sequence[EngineRequest], metrics: ServerMetrics
    ) -> Generation:
        """Submit every request, or none.

        Raises:
            RequestError, EngineStoppedError: one was refused; those before it are cancelled.
        """
        generation = cls(engine, requests, metrics)
        try:
            for request in requests:
                await generation._submit(request)
        except BaseException:
            await generation.close()
            raise
        return generation

    async def _submit(self, request: EngineRequest) -> None:
        outputs = await self._engine.submit(request)
        choices = [
            Choice(
                len(self.choices) + index,
                request,
                TextStream(self._engine.tokenizer, request.params, request.prompt_token_ids),
            )
            for index in range(request.params.n)
        ]
        self.choices += choices
        self._pumps[request.request_id] = asyncio.create_task(self._pump(request, choices, outputs))

    async def _pump(
        self, request: EngineRequest, choices: Sequence[Choice], outputs: AsyncIterator[SequenceOutput]
    ) -> None:
        try:
            first = True
            async for output in outputs:
                self._observe(choices[output.index], output, first)
                first = first and not output.token_ids
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[request.request_id] = output.prompt_logprobs
                self._absorb(choices[output.index], output)
                self._changed.set()
                if all(choice.finished for choice in choices):
                    self._metrics.end_to_end.observe(time.monotonic() - request.arrival_time)
                    return
            raise EngineError("the engine ended the request without saying why; this is a bug in kvloom")
        finally:
            self._changed.set()

    def _absorb(self, choice: Choice, output: SequenceOutput) -> None:
        if choice.finished:
            return  # what was computed before the engine heard of the stop string
        if output.finish_reason == "error":
            raise EngineError(output.error or "the engine failed on this request")
        if output.finish_reason == "abort":
            raise EngineStoppedError("the server stopped before this request was done; send it again")
        if choice.absorb(output):
            self._engine.abort_sequence(output.request_id, output.index)

    def _observe(self, choice: Choice, output: SequenceOutput, first: bool) -> None:
        if not output.token_ids or choice.finished:
            return
        now = time.monotonic()
        if first:
            self._metrics.queue_time.observe(output.queue_seconds)
            self._metrics.time_to_first_token.observe(now - choice.request.arrival_time)
        if choice.last_token_time is not None:
            count = len(output.token_ids)
            self._metrics.inter_token.observe((now - choice.last_token_time) / count, count)
        choice.last_token_time = now

    @property
    def finished(self) -> bool:
        return bool(self.choices) and all(choice.finished for choice in self.choices)

    async def wait(self) -> None:
        """Until every choice is finished.

        Raises:
            EngineError: the engine failed on one of them, or is stopping.
        """
        await asyncio.gather(*self._pumps.values())

    async def updates(self) -> AsyncIterator[list[tuple[Choice, Delta]]]:
        """What the choices gained, whenever the reader is ready for it; ends when all are finished.

        Raises:
            EngineError: after what was gained before it.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Looked at before yielding: while the reader is busy the pump goes on.
            finished, failure = self.finished, self._failure()
            gained = [(choice, choice.take()) for choice in self.choices if self._may_show(choice)]
            gained = [(choice, delta) for choice, delta in gained if not delta.empty]
            if gained:
                yield gained
            if failure is not None:
                raise failure
            if finished:
                return

    def _failure(self) -> BaseException | None:
        for pump in self._pumps.values():
            if pump.done() and not pump.cancelled() and pump.exception() is not None:
                return pump.exception()
        return None

    def _may_show(self, choice: Choice) -> bool:
        # The prompt's scores belong before the first token, and may come with another sequence's output.
        request = choice.request
        return request.params.prompt_logprobs is None or request.request_id in self.prompt_logprobs

    async def close(self) -> None:
        """Cancel what still runs; its memory is free before the engine's next step."""
        for request_id, pump in self._pumps.items():
            if not pump.done():
                pump.cancel()
            if not all(choice.finished for choice in self.choices if choice.request.request_id == request_id):
                self._engine.abort(request_id)
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def engine_requests(
    prefix: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    priority: int,
    salt: bytes,
    arrival_time: float,
) -> list[EngineRequest]:
    """One engine request per prompt, their ids made from the API request's."""
    return [
        EngineRequest(
            request_id=f"{prefix}-{index}",
            prompt_token_ids=tuple(prompt),
            params=one,
            priority=priority,
            salt=salt,
            arrival_time=arrival_time,
        )
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
