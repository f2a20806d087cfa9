"""The engine: requests in, one step at a time, outputs out. Synchronous; one thread owns it.

A step::

    scheduler.schedule → runner.forward → manager.commit (publish, pass windows)
      → sampler.sample → append, finish, fork → outputs
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvloom.attention.batch import KVStore
from kvloom.attention.coders import coder_maker
from kvloom.attention.formats import MakeCoder, block_formats
from kvloom.cache.arena import allocate_arena, free_device_bytes, poison
from kvloom.cache.keys import namespace_digest
from kvloom.cache.manager import CacheManager
from kvloom.core.config import EngineConfig, cache_bytes
from kvloom.core.errors import CapacityError, ConfigError, ContextLengthError, EngineError, QueueFullError, RequestError
from kvloom.core.messages import EngineRequest, FinishReason, SequenceOutput, SequenceUsage, TokenLogprob
from kvloom.core.sequence import Sequence, SequenceStatus
from kvloom.core.sizes import MemoryPlan, plan_memory
from kvloom.core.stats import EngineInfo, EngineSnapshot
from kvloom.core.storage import Encoding, split_layers
from kvloom.engine.draw import sequence_seed
from kvloom.engine.guard import Probe, guard_encoding
from kvloom.engine.logprobs import prompt_logprobs
from kvloom.engine.noise import SAFETY, measure_noise
from kvloom.engine.pipeline import bits_per_value, describe, resolve_encoding
from kvloom.engine.runner import ModelRunner, StepLogits
from kvloom.engine.sampler import SamplerOutput, SamplingBatch, SamplingRow, sample, take_best, takes_best
from kvloom.engine.scheduler import Chunk, Scheduler
from kvloom.kernels.ops import KernelBackend, choose_backend
from kvloom.models.calibration import find_calibration
from kvloom.models.loader import LoadedModel, auto_dtype, load_model
from kvloom.models.native.build import NativeStep, build_native_step
from kvloom.models.native.model import NativeModel
from kvloom.models.rope_table import rope_table

if TYPE_CHECKING:
    from kvloom.engine.grammar import GrammarCompiler, GrammarState

AUTO_CACHE_BYTES = 4 * 2**30
AUTO_CACHE_SHARE = 0.5
MAX_FAILED_STEPS = 3


@dataclass(slots=True)
class PreparedRequest:
    """A request found valid, with its grammar compiled; safe to make off the engine's thread."""

    request: EngineRequest
    max_len: int
    grammar: GrammarState | None


@dataclass(slots=True)
class _Record:
    """A request in the engine and its sequences."""

    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 1
    left_queue: bool = False


class Engine:
    """Owns the model, the arena and everything that plans over them.

    Args:
        config: what to build.
        loaded: a model loaded already (tests, embedding); None loads ``config.model``.

    Raises:
        ModelError, ConfigError, CapacityError: with the remedy, before anything is served.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        self.loaded = load_model(config) if loaded is None else loaded
        self.encoding = resolve_encoding(config.pipeline, self.loaded.layout, self._dtype())
        self.device: torch.device = next(self.loaded.model.parameters()).device
        self.max_model_len = self._resolve_max_model_len()
        backend = choose_backend(
            config.kernels,
            self.device,
            deterministic=config.deterministic,
            num_threads=torch.get_num_threads(),
        )
        self._backend = backend
        make_coder = self.make_coder(self.encoding)
        self.encoding, self.guarded_layers = self._guard(make_coder)
        if self.encoding is not None and self.encoding.layers:
            self.loaded = replace(self.loaded, layout=split_layers(self.loaded.layout, self.encoding.layers))
        self.step_name, self._native_difference = self._choose_step(backend)
        model = self.loaded
        self.plan = self._plan_memory()
        arena = allocate_arena(self.plan.arena_bytes, self.device)
        self.store = KVStore(
            layout=model.layout,
            arena=arena,
            formats=block_formats(self.plan, backend, make_coder),
            storage=self.plan.storage,
            backend=backend,
        )
        if isinstance(model.model, NativeModel):
            decoded = model.model.decoded_first(self.store)
            if decoded:
                self.step_name = f"native (slow: PyTorch decodes in every step, {'; '.join(decoded)})"
        self._namespace = self._make_namespace()
        on_free = (lambda offset, size: poison(arena, offset, size)) if config.debug_poison else None
        if config.debug_poison:
            poison(arena, 0, arena.numel())
        self.manager = CacheManager(
            self.plan,
            namespace=self._namespace,
            prefix_cache=config.pipeline.prefix_cache,
            copy=self._copy,
            on_free=on_free,
        )
        self.runner = ModelRunner(model.model, self.store, deterministic=config.deterministic)
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            watermark=config.watermark,
        )
        noise = measure_noise(
            self.runner,
            self.manager,
            vocab_size=model.vocab_size,
            max_tokens=min(self.max_model_len, config.max_batch_tokens),
            deterministic=config.deterministic,
        )
        # A native step rounds alike in every batch, but not as transformers does.
        self.rounding_noise = noise if config.deterministic else max(noise, SAFETY * self._native_difference)
        self.info = self._make_info()
        self._approximations = describe(self.encoding, self.plan.block_size, self.guarded_layers)
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._forked: list[Sequence] = []  # siblings that came to be in this step
        self._not_started = 0  # requests that were never scheduled; what the queue's bound counts
        self._order = 0
        self._failed_steps = 0
        self._steps = 0
        self._requests = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._computed_tokens = 0
        self._cancellations = 0
        self._finished: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self.left_queue = 0  # requests that started, or ended without starting; only grows

    # -- building -----------------------------------------------------------------------------------

    def make_coder(self, encoding: Encoding | None) -> MakeCoder:
        """Makes the codecs of ``encoding``, with the model's calibration if there is one and its rotary positions."""
        if encoding is None:
            return coder_maker(self._backend, None, None)
        loaded, config = self.loaded, self.config
        calibration = find_calibration(config.pipeline.calibration, loaded.weights_digest, config.cache_dir)
        rope = None
        if encoding.key.startswith("kvquant"):
            head_dim = loaded.layout.groups[0].planes[0].dim
            rope = rope_table(loaded.model, self.max_model_len + config.pipeline.block_size, head_dim)
        return coder_maker(self._backend, calibration, rope)

    def _guard(self, make_coder: MakeCoder) -> tuple[Encoding | None, tuple[int, ...]]:
        """The encoding with the layers raw whose keys it would ruin, and which those are.

        Only transformers' code can be looked into: a native model that is shared was guarded by whoever loaded it.

        Raises:
            ConfigError: the codec is not for this model.
        """
        pipeline = self.config.pipeline
        if self.encoding is None or pipeline.codec_guard == "off" or isinstance(self.loaded.model, NativeModel):
            return self.encoding, ()
        probe = Probe(loaded=self.loaded, block_size=pipeline.block_size, max_tokens=self.max_model_len)
        return guard_encoding(self.encoding, pipeline.codec_guard, probe, make_coder)

    def _choose_step(self, backend: KernelBackend) -> tuple[str, float]:
        """Put a native step in the model's place where there is one; its name, and its distance from transformers.

        Raises:
            ConfigError: a native step was asked for and there is none.
        """
        config, loaded = self.config, self.loaded
        if config.step == "transformers":
            return "transformers", 0.0
        if isinstance(loaded.model, NativeModel):
            if loaded.layout != loaded.model.layout:
                raise ConfigError(
                    "the native model was made for other layer groups: engines that share it must keep the same layers "
                    "raw (protect_layers); load the model anew"
                )
            return "native", 0.0
        found = build_native_step(loaded.model, loaded.model_type, loaded.layout, backend)
        if isinstance(found, NativeStep):
            self.loaded = replace(loaded, model=found.model)
            return "native", found.difference
        if config.step == "native":
            raise ConfigError(f"step is 'native', but {found}; use --step auto or transformers")
        if config.dtype == "auto" and auto_dtype(self._dtype(), self.device) == "float32":
            loaded.model.float()  # it was loaded for a native step, in a dtype that torch multiplies slowly here
        return f"transformers ({found})", 0.0

    def _resolve_max_model_len(self) -> int:
        own = self.loaded.max_model_len
        asked = self.config.max_model_len
        if asked is not None and asked > own:
            raise CapacityError(
                f"max_model_len is {asked} but the model's positions end at {own}; ask for at most {own}"
            )
        return own if asked is None else asked

    def _dtype(self) -> str:
        return str(next(self.loaded.model.parameters()).dtype).removeprefix("torch.")

    def _plan_memory(self) -> MemoryPlan:
        config, layout = self.config, self.loaded.layout
        dtype = self._dtype()
        codecs = {plane.name: dtype for group in layout.groups for plane in group.planes}

        def plan(budget: int) -> MemoryPlan:
            return plan_memory(
                layout,
                budget_bytes=budget,
                block_size=config.pipeline.block_size,
                codecs=codecs,
                max_model_len=self.max_model_len,
                max_batch_tokens=config.max_batch_tokens,
                encoding=self.encoding,
            )

        free = free_device_bytes(self.device)
        # Enough for every sequence at full length is always enough; less if memory is short.
        unbounded = plan(1 << 50)
        every_sequence = unbounded.slabs_for(config.max_sequences, self.max_model_len) * unbounded.slab_bytes
        one_sequence = unbounded.needed_bytes(self.max_model_len)
        auto = min(every_sequence, int(free * AUTO_CACHE_SHARE), max(AUTO_CACHE_BYTES, one_sequence))
        return plan(cache_bytes(config.kv_cache_memory, free_bytes=free, auto_bytes=auto))

    def _make_namespace(self) -> bytes:
        model = self.loaded
        text_config = model.hf_config
        return namespace_digest(
            {
                "weights": model.weights_digest,
                "tokenizer": model.tokenizer_digest,
                "rope": repr(getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_theta", None)),
                "rope_frequencies": model.rope_digest,
                "dtype": str(next(model.model.parameters()).dtype),
                "planes": [
                    [
                        [p.name, p.dim, str(p.dtype), p.order, p.pack, p.offset, getattr(p.codec, "identity", None)]
                        for p in fmt.planes
                    ]
                    for fmt in self.store.formats
                ],
                "groups": [[g.name, list(g.layers), g.num_heads, g.window] for g in model.layout.groups],
                "pipeline": repr(self.config.pipeline),
                "encoding": repr(self.encoding),
                "deterministic": self.config.deterministic,
                "step": self.step_name,
                "shard": [0, 1],
            }
        )

    def _make_info(self) -> EngineInfo:
        model, plan, store = self.loaded, self.plan, self.store
        # What a token really takes: read off the formats that the kernels use, not off the plan.
        actual = sum(
            item.group.num_layers
            * fmt.num_heads
            * sum(
                plane.dim * plane.dtype.itemsize * fmt.block_size if plane.codec is None else plane.codec.num_bytes
                for plane in fmt.planes
            )
            // fmt.block_size
            for item, fmt in zip(store.storage, store.formats, strict=True)
            if item.encoded or item.twin is None
        )
        return EngineInfo(
            model=model.name,
            model_type=model.model_type,
            verified=model.verified,
            max_model_len=self.max_model_len,
            vocab_size=model.vocab_size,
            device=str(self.device),
            dtype=self._dtype(),
            kernels=store.backend.name,
            kernel_variant=store.backend.variant,
            step=self.step_name,
            weight_bytes=model.model.weight_bytes if isinstance(model.model, NativeModel) else 0,
            block_size=plan.block_size,
            pipeline=self.config.pipeline.name,
            codec="raw" if self.encoding is None else self.encoding.name,
            sink_tokens=max(item.sinks * item.block_size for item in plan.storage),
            recent_tokens=max((item.recents or 0) * item.block_size for item in plan.storage),
            protect_layers=() if self.encoding is None else self.encoding.layers,
            guarded_layers=self.guarded_layers,
            bits_per_value=bits_per_value(plan),
            deterministic=self.config.deterministic,
            rounding_noise=self.rounding_noise,
            predicted_bytes_per_token=plan.bytes_per_token(),
            actual_bytes_per_token=actual,
            predicted_arena_bytes=plan.arena_bytes,
            actual_arena_bytes=store.arena.numel(),
            slab_bytes=plan.slab_bytes,
            num_slabs=plan.num_slabs,
            sequences_at_max_len=plan.sequences_at_max_len,
            groups=tuple(
                {
                    "name": item.name,
                    "layers": item.group.num_layers,
                    "kv_heads": item.group.num_heads,
                    "window": item.window,
                    "span_bytes": span.span_bytes,
                    "spans": plan.usable_slabs * (plan.slab_bytes // span.span_bytes),
                    "bytes_per_token": span.token_bytes,
                }
                for item, span in zip(plan.storage, plan.spans, strict=True)
            ),
        )

    def _copy(self, source: int, target: int, num_bytes: int) -> None:
        arena = self.store.arena
        arena[target : target + num_bytes] = arena[source : source + num_bytes]

    # -- requests -----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def holds(self, request_id: str) -> bool:
        """Whether the request is queued or running."""
        return request_id in self._records

    def prepare(self, request: EngineRequest) -> PreparedRequest:
        """Check a request and compile its grammar. Touches no engine state; any thread may call it.

        Raises:
            ContextLengthError: the prompt, or prompt + max_tokens, is beyond max_model_len.
            RequestError: an empty prompt, a token id outside the vocabulary, a bad grammar …
        """
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        limit = self.max_model_len
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but this model's context is {limit} tokens and one must be "
                f"left for the answer; shorten the prompt to at most {limit - 1} tokens",
                param="prompt",
            )
        if params.max_tokens is not None and len(prompt) + params.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, together "
                f"{len(prompt) + params.max_tokens}, but this model's context is {limit} tokens; lower max_tokens to "
                f"at most {limit - len(prompt)} or shorten the prompt",
                param="max_tokens",
            )
        vocab = self.loaded.vocab_size
        worst = max(max(prompt), -min(prompt) - 1 if min(prompt) < 0 else 0)
        if min(prompt) < 0 or worst >= vocab:
            bad = next(token for token in prompt if not 0 <= token < vocab)
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab} tokens", param="prompt")
        for token in (*params.logit_bias, *params.stop_token_ids):
            if not 0 <= token < vocab:
                name = "logit_bias" if token in params.logit_bias else "stop_token_ids"
                raise RequestError(f"{name} names token id {token}, outside the vocabulary of {vocab}", param=name)
        new = limit - len(prompt) if params.max_tokens is None else params.max_tokens
        grammar = None if params.grammar is None else self._compiler().compile(params.grammar)
        return PreparedRequest(request=request, max_len=len(prompt) + new, grammar=grammar)

    def _compiler(self) -> GrammarCompiler:
        with self._grammars_lock:  # several requests may ask first at the same moment
            if self._grammars is None:
                from kvloom.engine.grammar import GrammarCompiler  # its library loads only when somebody asks

                model = self.loaded
                self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
            return self._grammars

    def close(self) -> None:
        """End what lives beside the engine (the process that tries grammars). The engine is done then."""
        if self._grammars is not None:
            self._grammars.close()

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a prepared request.

        Raises:
            RequestError: its id is in use.
            QueueFullError: ``max_waiting`` requests wait already.
        """
        request = prepared.request
        if request.request_id in self._records:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        # Preempted sequences and siblings wait too, but they were let in before.
        if self._not_started >= self.config.max_waiting:
            raise QueueFullError(
                f"{self._not_started} requests wait already, the limit is {self.config.max_waiting}; try again later",
                retry_after_s=1,
            )
        seed = request.params.seed
        self._order += 1
        sequence = Sequence(
            request_id=request.request_id,
            index=0,
            prompt=np.asarray(request.prompt_token_ids, dtype=np.int32),
            params=request.params,
            priority=request.priority,
            order=self._order,
            salt=request.salt,
            seed=secrets.randbits(63) if seed is None else seed,
            arrival_time=request.arrival_time or time.monotonic(),
            max_len=prepared.max_len,
        )
        sequence.grammar = prepared.grammar
        self._records[request.request_id] = _Record(sequences=[sequence], unfinished=request.params.n)
        self._requests += 1
        self._not_started += 1
        self._prompt_tokens += sequence.num_prompt
        self.scheduler.add(sequence)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request (or its ``index``-th sequence) now; everything it holds is freed at once.

        Unknown or finished ids are ignored. A sequence that stopped on a stop string is ended this
        way too, by its reader; only whole requests count as cancelled.
        """
        record = self._records.get(request_id)
        if record is None:
            return []
        if index is None:
            self._cancellations += 1
        outputs: list[SequenceOutput] = []
        for sequence in list(record.sequences):
            if index in (None, sequence.index) and sequence.status is not SequenceStatus.FINISHED:
                outputs += self._end(sequence, "abort" if index is None else "stop")
        return outputs

    # -- stepping -----------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Run one step. Returns what every sequence in it produced.

        A failure inside the step ends the sequences that were in it with an error and leaves the
        engine usable.

        Raises:
            EngineError: steps keep failing, or nothing can advance although there is work.
        """
        chunks = self.scheduler.schedule()
        self._steps += 1
        if not chunks:
            if self.scheduler.has_work:
                raise EngineError("the scheduler found nothing to run although requests wait; this is a bug in kvloom")
            return []
        now = time.monotonic()
        for chunk in chunks:
            self._note_scheduled(chunk.sequence, now)
        self._forked = []
        try:
            outputs = self._run(chunks)
        except Exception as error:
            self._failed_steps += 1
            self._errors[type(error).__name__] += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineError(f"{MAX_FAILED_STEPS} steps failed in a row, the last with: {error}") from error
            message = f"the engine failed on this request: {error}"
            concerned = [*(chunk.sequence for chunk in chunks), *self._forked]
            return [output for sequence in concerned for output in self._fail(sequence, message)]
        self._failed_steps = 0
        return outputs

    def _fail(self, sequence: Sequence, message: str) -> list[SequenceOutput]:
        """End a sequence whose step failed."""
        if sequence.status is not SequenceStatus.FINISHED:
            return self._end(sequence, "error", error=message)
        # It had ended in this very step, and the output that said so is lost.
        return [
            SequenceOutput(request_id=sequence.request_id, index=sequence.index, finish_reason="error", error=message)
        ]

    def _note_scheduled(self, sequence: Sequence, now: float) -> None:
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            self._note_left_queue(sequence)

    def _note_left_queue(self, sequence: Sequence) -> None:
        record = self._records[sequence.request_id]
        if not record.left_queue:
            record.left_queue = True
            self.left_queue += 1
            self._not_started -= 1

    def _run(self, chunks: Seq[Chunk]) -> list[SequenceOutput]:
        rows, prompt_rows, sampled = self._wanted_rows(chunks)
        found = self.runner.forward(chunks, rows)
        logits = found.values
        for chunk in chunks:
            sequence = chunk.sequence
            self.manager.commit(sequence.cache, sequence.token_ids, chunk.end)
            sequence.computed_tokens += chunk.count
            self._computed_tokens += chunk.count
            if chunk.start < sequence.num_prompt <= chunk.end and sequence.num_generated == 0:
                self.scheduler.note_prompt_computed(sequence)
        for chunk, low, high in prompt_rows:
            sequence = chunk.sequence
            following = sequence.tokens[chunk.start + 1 : chunk.start + 1 + high - low]
            if chunk.start == 0:
                sequence.prompt_logprobs = [None]  # nothing precedes the first token; a recomputation starts over
            top = sequence.params.prompt_logprobs
            assert top is not None
            sequence.prompt_logprobs += prompt_logprobs(logits[low:high], following.tolist(), top)
        outputs = self._sample(found, sampled)
        self.runner.recycle()
        return outputs

    @staticmethod
    def _wanted_rows(
        chunks: Seq[Chunk],
    ) -> tuple[np.ndarray, list[tuple[Chunk, int, int]], list[tuple[Sequence, int]]]:
        """Which packed rows need logits.

        Returns:
            rows, ascending; (chunk, low, high): logits rows that predict the chunk's prompt tokens;
            (sequence, logits row): where to draw a token from.
        """
        rows: list[int] = []
        prompt_rows: list[tuple[Chunk, int, int]] = []
        sampled: list[tuple[Sequence, int]] = []
        start = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.params.prompt_logprobs is not None and sequence.num_generated == 0:
                count = min(chunk.end, sequence.num_prompt - 1) - chunk.start
                prompt_rows.append((chunk, len(rows), len(rows) + count))
                rows.extend(range(start, start + count))
            if chunk.samples:
                sampled.append((sequence, len(rows)))
                rows.append(start + chunk.count - 1)
            start += chunk.count
        return np.array(rows, dtype=np.int64), prompt_rows, sampled

    def _sample(self, found: StepLogits, sampled: list[tuple[Sequence, int]]) -> list[SequenceOutput]:
        if not sampled:
            return []
        # Siblings draw their first token from the same logits as the sequence they fork off.
        drawn: list[tuple[Sequence, int]] = []
        for sequence, row in sampled:
            drawn.append((sequence, row))
            drawn += [(sibling, row) for sibling in self._fork(sequence)]
        result = self._choose(found, drawn)
        token_ids = result.token_ids.tolist()
        failures = result.errors() if -1 in token_ids else {}
        logprobs = result.logprobs() if any(s.params.logprobs is not None for s, _ in drawn) else [None] * len(drawn)
        outputs: list[SequenceOutput] = []
        for row, (sequence, _) in enumerate(drawn):
            if row in failures:
                self._errors["sampling"] += 1
                reason = sequence.grammar.error if sequence.grammar is not None else None
                message = str(failures[row]) if reason is None else f"the grammar cannot go on: {reason}"
                outputs.append(self._finish(sequence, "error", error=message))
                continue
            outputs.append(self._append(sequence, token_ids[row], logprobs[row]))
        return outputs

    def _choose(self, found: StepLogits, drawn: list[tuple[Sequence, int]]) -> SamplerOutput:
        """A token for each (sequence, logits row)."""
        logits, best = found.values, found.best
        picked = [row for _, row in drawn]
        if picked != list(range(len(logits))):  # usually every row is wanted once: no copy
            index = torch.tensor(picked, device=logits.device)
            logits = logits[index]
            best = None if best is None else (best[0][index], best[1][index])
        if all(s.grammar is None and takes_best(s.params, s.num_generated) for s, _ in drawn):
            return take_best(logits, best)
        rows = [
            SamplingRow(
                params=sequence.params,
                seed=sequence.seed,
                step=sequence.num_generated,
                prompt_token_ids=sequence.tokens[: sequence.num_prompt],
                output_token_ids=sequence.tokens[sequence.num_prompt : sequence.num_tokens],
            )
            for sequence, _ in drawn
        ]
        batch = SamplingBatch.build(
            rows, logits.shape[-1], logits.device, eos_token_ids=tuple(self.loaded.eos_token_ids)
        )
        return sample(logits, batch, self._grammar_mask([sequence for sequence, _ in drawn], logits))

    @staticmethod
    def _grammar_mask(sequences: Seq[Sequence], logits: torch.Tensor) -> torch.Tensor | None:
        """int32 [N, ceil(V / 32)], all ones in rows without a grammar; None when no row has one."""
        if all(sequence.grammar is None for sequence in sequences):
            return None
        from kvloom.engine.grammar import fill_bitmask

        mask = fill_bitmask([sequence.grammar for sequence in sequences], logits.shape[-1])
        return None if mask is None else mask.to(logits.device)

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """The leader's pending siblings, sharing its spans; one that finds no memory will wait."""
        siblings: list[Sequence] = []
        for index in range(leader.params.n - leader.siblings, leader.params.n):
            sibling = Sequence(
                request_id=leader.request_id,
                index=index,
                prompt=leader.tokens[: leader.num_prompt],
                params=leader.params,
                priority=leader.priority,
                order=leader.order,
                salt=leader.salt,
                seed=sequence_seed(leader.seed, index),
                arrival_time=leader.arrival_time,
                max_len=leader.max_len,
            )
            sibling.first_scheduled = leader.first_scheduled
            sibling.grammar = None if leader.grammar is None else leader.grammar.fork()
            if self.scheduler.free_places > 0:
                sibling.cache = self.manager.fork(leader.cache)
            self.scheduler.start_forked(sibling)
            self._records[leader.request_id].sequences.append(sibling)
            self._forked.append(sibling)
            siblings.append(sibling)
            leader.siblings -= 1
        return siblings

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> SequenceOutput:
        sequence.append(token_id)
        self._generated_tokens += 1
        params = sequence.params
        reason: FinishReason | None = None
        if sequence.grammar is not None and not sequence.grammar.accept(token_id):
            self._errors["grammar"] += 1
            return self._finish(sequence, "error", error=f"token {token_id} broke the grammar that allowed it")
        enough = sequence.num_generated >= params.min_tokens
        if enough and (
            (token_id in self.loaded.eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
        ):
            reason, sequence.stop_token_id = "stop", token_id
        elif sequence.grammar is not None and sequence.grammar.is_finished:
            reason = "stop"
        elif sequence.num_tokens >= sequence.max_len:
            reason = "length"
        if reason is not None:
            return self._finish(sequence, reason, token_id=token_id, logprob=logprob)
        return self._output(sequence, token_id, logprob, None)

    def _end(self, sequence: Sequence, reason: FinishReason, *, error: str | None = None) -> list[SequenceOutput]:
        """Finish a sequence that gets no further token, and with it the siblings never forked off it."""
        missing = range(sequence.params.n - sequence.siblings, sequence.params.n) if sequence.siblings else range(0)
        never_forked = [
            SequenceOutput(request_id=sequence.request_id, index=index, finish_reason=reason, error=error)
            for index in missing
        ]
        return [self._finish(sequence, reason, error=error), *never_forked]

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token_id: int | None = None,
        logprob: TokenLogprob | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        output = self._output(sequence, token_id, logprob, reason, error)
        self._note_left_queue(sequence)
        self.scheduler.finish(sequence)
        ended = 1 + sequence.siblings  # siblings never forked end with their leader
        self._finished[reason] += ended
        record = self._records[sequence.request_id]
        record.unfinished -= ended
        if record.unfinished == 0:
            del self._records[sequence.request_id]
        return output

    def _output(
        self,
        sequence: Sequence,
        token_id: int | None,
        logprob: TokenLogprob | None,
        reason: FinishReason | None,
        error: str | None = None,
    ) -> SequenceOutput:
        first = sequence.num_generated <= 1 and sequence.prompt_logprobs
        started = sequence.first_scheduled
        return SequenceOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=() if token_id is None else (token_id,),
            logprobs=None if logprob is None else (logprob,),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first else None,
            finish_reason=reason,
            stop_token_id=sequence.stop_token_id,
            error=error,
            usage=SequenceUsage(
                cached_tokens=sequence.cached_tokens,
                computed_tokens=sequence.computed_tokens,
                stored_tokens=sequence.num_computed,
                recovered_tokens=sequence.recovered_tokens,
                num_preemptions=sequence.num_preemptions,
                approximations=self._approximations,
            ),
            queue_seconds=max(0.0, (time.monotonic() if started is None else started) - sequence.arrival_time),
        )

    # -- looking ------------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        """Counters and bytes now. Call it on the engine's thread."""
        scheduler = self.scheduler
        return EngineSnapshot(
            cache=self.manager.snapshot(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            requests=self._requests,
            finished=dict(self._finished),
            cancellations=self._cancellations,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            computed_tokens=self._computed_tokens,
            prefix_queried_tokens=scheduler.queried_tokens,
            prefix_hit_tokens=scheduler.hit_tokens,
            prefix_recovered_tokens=scheduler.recovered_tokens,
            prefix_hit_rate=scheduler.hit_rate,
            evicted_spans=self.manager.num_evicted,
            misses=dict(scheduler.misses),
            fallbacks={**self.store.backend.fallbacks, **self.store.faults},
            errors=dict(self._errors),
            steps=self._steps,
        )
