"""The routes. Each reads like its contract: read, check, convert, submit, answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvloom import __version__
from kvloom.core.errors import EngineStoppedError, RequestError
from kvloom.core.request import SamplingParams
from kvloom.server.body import read_json_object
from kvloom.server.chat import read_messages, read_tools, render_chat
from kvloom.server.convert import (
    COMPLETION_MAX_TOKENS,
    chat_params,
    check_choices,
    check_ids,
    completion_params,
    fit_to_context,
    read_prompts,
)
from kvloom.server.errors import describe
from kvloom.server.generation import Generation, engine_requests
from kvloom.server.interface import ServingEngine
from kvloom.server.jsontext import dump_json
from kvloom.server.metrics import render_metrics
from kvloom.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from kvloom.server.rendering import ChatRenderer, CompletionRenderer, new_id
from kvloom.server.state import Phase, Serving
from kvloom.server.streaming import EventStream, whole_answer

router = APIRouter()


def _json(data: object, status: int = 200) -> Response:
    return Response(dump_json(data), status, media_type="application/json")


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


@dataclass(frozen=True, slots=True)
class Call(Generic[Body]):
    """A request whose body is read and which somebody can answer. ``num_bytes`` is the body's size."""

    serving: Serving
    engine: ServingEngine
    model: str
    body: Body
    num_bytes: int
    arrival: float


async def _read(request: Request, model: type[Body]) -> Call[Body]:
    arrival = time.monotonic()
    serving = _serving(request)
    data, num_bytes = await read_json_object(request, serving.config.max_body_bytes)
    body = parse_body(model, data)
    engine = serving.engine
    return Call(serving, engine, serving.resolve_model(body.model), body, num_bytes, arrival)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    call = await _read(request, ChatBody)
    body = call.body
    params = chat_params(body, call.engine.generation_defaults)
    prompt = await _chat_prompt(call)
    params = _fitted(params, prompt, call.engine, default=None, param="messages")
    request_id = new_id("chatcmpl")
    renderer = ChatRenderer(
        request_id,
        call.model,
        call.serving.tokenization,
        body.logprobs,
        body.prompt_logprobs is not None,
        body.return_token_ids,
    )
    generation = await _start(request, call, request_id, [prompt], [params])
    return await _answer(request, call, generation, renderer)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    call = await _read(request, CompletionBody)
    body, tokenization = call.body, call.serving.tokenization
    params = completion_params(body, call.engine.generation_defaults)
    given = read_prompts(body.prompt)
    check_choices(len(given), params.n)
    prompts: list[list[int]] = []
    fitted: list[SamplingParams] = []
    for index, one in enumerate(given):
        param = "prompt" if len(given) == 1 else f"prompt.{index}"
        ids = (
            await tokenization.encode(one, add_special_tokens=body.add_special_tokens)
            if isinstance(one, str)
            else list(one)
        )
        prompts.append(ids)
        fitted.append(_fitted(params, ids, call.engine, default=COMPLETION_MAX_TOKENS, param=param))
    request_id = new_id("cmpl")
    renderer = CompletionRenderer(
        request_id,
        call.model,
        tokenization,
        body.logprobs is not None,
        body.prompt_logprobs is not None,
        body.return_token_ids,
    )
    if body.echo:
        texts = [
            one if isinstance(one, str) else await tokenization.decode(one, skip_special_tokens=True) for one in given
        ]
        renderer.echo = {f"{request_id}-{index}": text for index, text in enumerate(texts)}
    generation = await _start(request, call, request_id, prompts, fitted)
    return await _answer(request, call, generation, renderer)


async def _chat_prompt(call: Call[ChatBody] | Call[TokenizeBody]) -> list[int]:
    body, tokenization = call.body, call.serving.tokenization
    tool_choice = body.tool_choice if isinstance(body, ChatBody) else None

    def render() -> str:
        return render_chat(
            tokenization.tokenizer,
            read_messages(body.messages),
            tools=read_tools(body.tools, tool_choice),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )

    text = await tokenization.run(call.num_bytes, render)
    # The template wrote the beginning-of-text token already, if the model has one.
    return await tokenization.encode(text, add_special_tokens=False)


def _fitted(
    params: SamplingParams, prompt: Sequence[int], engine: ServingEngine, *, default: int | None, param: str
) -> SamplingParams:
    """``params`` for this prompt, with its length settled and its token ids known to the model."""
    info = engine.info
    if not prompt:
        raise RequestError(f"{param} has no tokens; send some text", param=param)
    check_ids(prompt, info.vocab_size, param)
    check_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
    check_ids(list(params.logit_bias), info.vocab_size, "logit_bias")
    max_tokens = fit_to_context(len(prompt), params.max_tokens, info.max_model_len, default=default, param=param)
    return params if max_tokens == params.max_tokens else replace(params, max_tokens=max_tokens)


async def _start(
    request: Request,
    call: Call[ChatBody] | Call[CompletionBody],
    request_id: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> Generation:
    requests = engine_requests(
        request_id,
        prompts,
        params,
        priority=call.body.priority,
        salt=getattr(request.state, "tenant_salt", b""),
        arrival_time=call.arrival,
    )
    return await Generation.start(call.serving.engine, requests, call.serving.metrics)


async def _answer(
    request: Request,
    call: Call[ChatBody] | Call[CompletionBody],
    generation: Generation,
    renderer: ChatRenderer | CompletionRenderer,
) -> Response:
    if not call.body.stream:
        return await whole_answer(generation, request.receive, renderer.whole)
    options = call.body.stream_options
    return EventStream(
        generation,
        renderer,
        metrics=call.serving.metrics,
        final_usage=options is not None and (options.include_usage or options.continuous_usage_stats),
        continuous_usage=options is not None and options.continuous_usage_stats,
        stall_timeout=call.serving.config.stall_timeout,
    )


def _model_card(serving: Serving, name: str, created: int) -> dict[str, Any]:
    info = serving.engine.info
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvloom",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    serving = _serving(request)
    created = int(serving.started_at)
    serving.engine  # noqa: B018 - not before it is loaded
    cards = [_model_card(serving, name, created) for name in serving.model_names]
    return _json({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    serving = _serving(request)
    serving.engine  # noqa: B018
    return _json(_model_card(serving, serving.resolve_model(name), int(serving.started_at)))


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    call = await _read(request, TokenizeBody)
    body, tokenization = call.body, call.serving.tokenization
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await tokenization.encode(body.prompt, add_special_tokens=special)
    else:
        ids = await _chat_prompt(call)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": call.engine.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [tokenization.token(token_id).text for token_id in ids]
    return _json(answer)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    call = await _read(request, DetokenizeBody)
    body = call.body
    check_ids(body.tokens, call.engine.info.vocab_size, "tokens")
    text = await call.serving.tokenization.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return _json({"prompt": text})


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 while requests are served; else 503 with the reason."""
    serving = _serving(request)
    phase = serving.phase
    if phase is Phase.READY:
        return _json({"status": "ok"})
    told = describe(EngineStoppedError(serving.problem or phase.value))
    return _json({"status": phase.value, **told.body()}, told.status)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    page, content_type = render_metrics(_serving(request).collector)
    return Response(page, media_type=content_type)


@router.get("/version")
async def version() -> Response:
    return _json({"version": __version__})
