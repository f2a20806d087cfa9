"""A scriptable engine and a byte tokenizer: what the server is tested against when no model is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvloom.core.errors import ContextLengthError, EngineStoppedError, QueueFullError
from kvloom.core.messages import EngineRequest, SequenceOutput, SequenceUsage, TokenLogprob
from kvloom.core.stats import CacheSnapshot, EngineInfo, EngineSnapshot

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('Conversation must start with a user turn') }}{% endif %}"
    + CHATML
)
EOS = 258


def byte_tokenizer(chat_template: str | None = CHATML) -> Any:
    """One token per UTF-8 byte (ids 0 to 255 in the alphabet's order), and three special tokens."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@dataclass
class Step:
    """What one sequence produces in one step; ``finish`` ends it."""

    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    stop_token_id: int | None = None
    error: str | None = None


Script = Callable[[EngineRequest, int], Iterator[Step]]


@dataclass
class FakeEngine:
    """Answers every sequence with ``reply``, a token per step, unless ``script`` says otherwise.

    ``hold`` keeps every request queued while it is cleared. ``fail`` is raised by ``submit``.
    """

    tokenizer: Any
    reply: str = "Hello, world"
    script: Script | None = None
    step_seconds: float = 0.0
    max_waiting: int = 1000
    max_model_len: int = 256
    model: str = "fake/model"
    fail: Exception | None = None
    cached_tokens: int = 3
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    snapshot_value: EngineSnapshot = field(default_factory=EngineSnapshot)

    def __post_init__(self) -> None:
        self.ready = True
        self.failed: str | None = None
        self.requests: list[EngineRequest] = []
        self.live: dict[str, set[int]] = {}
        self.aborted: list[str] = []
        self.aborted_sequences: list[tuple[str, int]] = []
        self.stopped = False
        self.draining = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.info = EngineInfo(
            model=self.model,
            model_type="fake",
            max_model_len=self.max_model_len,
            vocab_size=259,
            predicted_bytes_per_token=1024,
            actual_bytes_per_token=1024,
            predicted_arena_bytes=2**20,
            actual_arena_bytes=2**20,
            slab_bytes=2**18,
            num_slabs=4,
            sequences_at_max_len=4,
            groups=({"name": "full", "layers": 2, "window": None, "spans": 32},),
        )

    async def start(self) -> None:
        pass

    def snapshot(self) -> EngineSnapshot:
        return self.snapshot_value

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.live:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def stop(self) -> None:
        self.stopped = True
        self.hold.set()

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def abort_sequence(self, request_id: str, index: int) -> None:
        self.aborted_sequences.append((request_id, index))
        self.live.get(request_id, set()).discard(index)

    async def submit(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        if self.stopped or self.draining:
            raise EngineStoppedError("the server is stopping")
        if self.fail is not None:
            raise self.fail
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ContextLengthError("too long")
        if len(self.live) >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests wait already", retry_after_s=2)
        self.requests.append(request)
        self.live[request.request_id] = set(range(request.params.n))
        return self._outputs(request)

    async def _outputs(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        await self.hold.wait()
        steps = {index: (self.script or self._reply)(request, index) for index in range(request.params.n)}
        scored = request.params.prompt_logprobs is not None
        while steps:
            await asyncio.sleep(self.step_seconds)
            if self.stopped:
                raise EngineStoppedError("the server stopped before this request was done; send it again")
            for index in list(steps):
                step = next(steps[index])
                if request.request_id in self.live and index not in self.live[request.request_id]:
                    step = Step(finish="stop")  # the server ended this sequence
                if step.finish is not None:
                    del steps[index]
                if not steps:
                    self.live.pop(request.request_id, None)
                yield self._output(request, index, step, scored)
                scored = False

    def _reply(self, request: EngineRequest, index: int) -> Iterator[Step]:
        ids = self.tokenizer.backend_tokenizer.encode(self.reply, add_special_tokens=False).ids
        limit = request.params.max_tokens or self.max_model_len - len(request.prompt_token_ids)
        for count, token_id in enumerate(ids[:limit], 1):
            yield Step((token_id,), finish="length" if count == limit else None)
        yield Step((EOS,), finish="stop", stop_token_id=EOS)

    def _output(self, request: EngineRequest, index: int, step: Step, scored: bool) -> SequenceOutput:
        params = request.params
        return SequenceOutput(
            request_id=request.request_id,
            index=index,
            token_ids=step.token_ids,
            logprobs=None if params.logprobs is None else tuple(map(scoring(params.logprobs), step.token_ids)),
            prompt_logprobs=(None, *map(scoring(params.prompt_logprobs or 0), request.prompt_token_ids[1:]))
            if scored
            else None,
            finish_reason=step.finish,  # type: ignore[arg-type]
            stop_token_id=step.stop_token_id,
            error=step.error,
            usage=SequenceUsage(
                cached_tokens=self.cached_tokens,
                computed_tokens=len(request.prompt_token_ids) - self.cached_tokens,
                stored_tokens=len(request.prompt_token_ids),
                recovered_tokens=2,
                approximations=("codec int8",),
                num_preemptions=1,
            ),
            queue_seconds=0.25,
        )


def scoring(top: int) -> Callable[[int], TokenLogprob]:
    return lambda token_id: TokenLogprob(
        token_id=token_id,
        logprob=-0.5,
        top=tuple(((token_id + rank) % 256, -0.5 - rank) for rank in range(top)),
    )


def known_snapshot() -> EngineSnapshot:
    """A snapshot whose every number is different, for checking where each one goes."""
    return EngineSnapshot(
        cache=CacheSnapshot(
            arena_bytes=1000_000,
            used_bytes=250_000,
            cached_bytes=100_000,
            free_bytes=630_000,
            overhead_bytes=20_000,
            stranded_bytes=30_000,
            token_bytes=240_000,
            reserve_bytes=50_000,
            used_spans=25,
            cached_spans=10,
            block_bytes=10_000,
            block_size=32,
        ),
        running=3,
        waiting=4,
        requests=21,
        finished={"stop": 7, "length": 5, "abort": 2, "error": 1},
        cancellations=2,
        preemptions=6,
        prompt_tokens=1234,
        generated_tokens=567,
        computed_tokens=1500,
        prefix_queried_tokens=1200,
        prefix_hit_tokens=300,
        prefix_recovered_tokens=64,
        prefix_hit_rate=0.25,
        evicted_spans=8,
        misses={"never_seen": 800, "evicted": 100},
        fallbacks={"softcap": 9},
        errors={"sampling": 1},
        steps=99,
    )
