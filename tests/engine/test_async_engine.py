"""The engine behind asyncio: streams, cancellation, a bounded queue, draining, failure."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvloom.core.errors import EngineError, EngineStoppedError, QueueFullError, RequestError
from kvloom.core.messages import EngineRequest, SequenceOutput
from kvloom.core.request import SamplingParams
from kvloom.engine.async_engine import AsyncEngine
from tests.engine.tiny import make_engine, prompt_of


def request(name: str, length: int = 20, **params: Any) -> EngineRequest:
    params.setdefault("max_tokens", 8)
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(prompt_of(1, length)), params=SamplingParams(temperature=0, **params)
    )


async def collect(stream: Any) -> list[SequenceOutput]:
    return [output async for output in stream]


async def settled(engine: AsyncEngine) -> Any:
    """The snapshot once nothing runs or waits."""
    for _ in range(500):
        snapshot = engine.snapshot()
        if not snapshot.running and not snapshot.waiting and engine._inbox.empty():
            return snapshot
        await asyncio.sleep(0.02)
    raise AssertionError(f"the engine did not settle: {engine.snapshot()}")


def serve(body: Any, **settings: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine("llama", **settings))
        await engine.start()
        try:
            await body(engine)
        finally:
            await engine.stop()

    asyncio.run(main())


def test_streams_end_with_every_sequence() -> None:
    async def body(engine: AsyncEngine) -> None:
        streams = [await engine.submit(request(f"r{i}", length=10 + i, n=1 + i % 3)) for i in range(6)]
        for i, outputs in enumerate(await asyncio.gather(*(collect(stream) for stream in streams))):
            ended = [output.index for output in outputs if output.finish_reason is not None]
            assert sorted(ended) == list(range(1 + i % 3))
            assert sum(len(output.token_ids) for output in outputs) == 8 * (1 + i % 3)
        snapshot = await settled(engine)
        assert snapshot.cache.used_bytes == 0 and snapshot.generated_tokens == 8 * 12

    serve(body)


def test_aborting_frees_at_once_and_twice_does_no_harm() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit(request("x", max_tokens=400))
        await anext(stream)
        engine.abort("x")
        engine.abort("x")
        engine.abort("never heard of")
        snapshot = await settled(engine)
        assert snapshot.cache.used_bytes == 0 and snapshot.cancellations == 1

    serve(body)


def test_an_id_used_again_gets_nothing_of_the_request_before() -> None:
    async def body(engine: AsyncEngine) -> None:
        expected = [o.token_ids for o in await collect(await engine.submit(request("alone", 30, max_tokens=6)))]
        for _ in range(5):
            first = await engine.submit(request("x", 20, max_tokens=200))
            await anext(first)
            time.sleep(0.02)  # outputs gather for a loop that is busy
            engine.abort("x")
            again = await engine.submit(request("x", 30, max_tokens=6))
            assert [o.token_ids for o in await collect(again)] == expected
        await settled(engine)
        assert not engine._sources and not engine._streams

    serve(body)


def test_leaving_a_generation_aborts_it() -> None:
    async def body(engine: AsyncEngine) -> None:
        outputs = engine.generate(request("x", max_tokens=400))
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        assert (await settled(engine)).cache.used_bytes == 0

    serve(body)


def test_a_sequence_ended_by_its_reader_counts_as_stopped() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit(request("x", max_tokens=400, n=2))
        ended: list[SequenceOutput] = []
        for index in (0, 1):
            await anext(stream)
            engine.abort_sequence("x", index)
        async for output in stream:
            if output.finish_reason is not None:
                ended.append(output)
        assert [output.finish_reason for output in ended] == ["stop", "stop"]
        assert (await settled(engine)).cancellations == 0

    serve(body)


def test_the_queue_is_bounded_and_the_engine_lives_on() -> None:
    async def body(engine: AsyncEngine) -> None:
        accepted, refused = [], 0
        for i in range(50):
            try:
                accepted.append(await engine.submit(request(f"r{i}")))
            except QueueFullError as error:
                assert error.retry_after_s >= 1
                refused += 1
        assert refused and len(accepted) >= 4
        await asyncio.gather(*(collect(stream) for stream in accepted))
        await collect(await engine.submit(request("after")))
        assert (await settled(engine)).cache.used_bytes == 0

    serve(body, max_waiting=4, max_sequences=2)


def test_refusals_come_before_the_stream() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="context is 512"):
            await engine.submit(request("x", length=600))
        first = await engine.submit(request("same"))
        with pytest.raises(RequestError, match="in use"):
            await engine.submit(request("same"))
        await collect(first)

    serve(body)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit(request("x", max_tokens=30))
        draining = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError):
            await engine.submit(request("y"))
        assert len(await collect(stream)) == 30
        assert await draining is True

    serve(body)


def test_stopping_ends_open_requests_with_an_error() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine("llama"))
        await engine.start()
        stream = await engine.submit(request("x", max_tokens=450))
        await engine.stop()
        with pytest.raises(EngineStoppedError, match="send it again"):
            await collect(stream)
        assert not engine.ready

    asyncio.run(main())


def test_an_engine_that_keeps_failing_says_so_to_everyone(monkeypatch: Any) -> None:
    inner = make_engine("llama")
    monkeypatch.setattr(inner.runner, "forward", lambda *_: 1 / 0)

    async def main() -> None:
        engine = AsyncEngine(inner)
        await engine.start()
        for i in range(2):
            outputs = await collect(await engine.submit(request(f"r{i}")))
            assert outputs[-1].finish_reason == "error"
        with pytest.raises(EngineError, match="failed"):
            await collect(await engine.submit(request("r2")))
        assert engine.failed is not None and not engine.ready
        with pytest.raises(EngineStoppedError, match="restart"):
            await engine.submit(request("r3"))
        await engine.stop()

    asyncio.run(main())
