"""``kvloom generate``: one prompt through an engine of its own, without HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TextIO

from kvloom.core.config import EngineConfig
from kvloom.core.errors import RequestError
from kvloom.server.chat import render_chat
from kvloom.server.convert import chat_params, fit_to_context
from kvloom.server.generation import Generation, engine_requests
from kvloom.server.interface import ServingEngine
from kvloom.server.metrics import ServerMetrics
from kvloom.server.protocol import ChatBody, parse_body
from kvloom.server.rendering import new_id, usage
from kvloom.server.tokenization import Tokenization

DEFAULT_MAX_TOKENS = 256


def generate(
    config: EngineConfig,
    prompt: str,
    *,
    chat: bool | None,
    system: str | None,
    sampling: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Load, answer, print.

    Args:
        chat: None chats if the model has a chat template.
        sampling: fields of a chat request; None takes the model's default.

    Raises:
        KvloomError: the model cannot be loaded, or the prompt is refused.
    """
    # Checked first: a wrong temperature should not cost a model's loading time.
    body = parse_body(ChatBody, {"messages": [], **sampling})
    chat_params(body, {})

    async def run() -> None:
        from kvloom.engine.async_engine import AsyncEngine

        if sys.stderr.isatty():
            print(f"loading {config.model} …", file=sys.stderr, flush=True)
        engine = await asyncio.to_thread(AsyncEngine.create, config)
        await engine.start()
        try:
            await answer(engine, prompt, body, chat=chat, system=system, as_json=as_json, out=sys.stdout)
        finally:
            await engine.stop()

    asyncio.run(run())


async def answer(
    engine: ServingEngine,
    prompt: str,
    body: ChatBody,
    *,
    chat: bool | None,
    system: str | None,
    as_json: bool,
    out: TextIO,
) -> None:
    """Stream the answer to ``out`` and a line of numbers to stderr, or write one JSON document."""
    tokenization = Tokenization(engine.tokenizer)
    if chat is None:
        chat = bool(getattr(engine.tokenizer, "chat_template", None))
    text = prompt
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        text = render_chat(engine.tokenizer, [*messages, {"role": "user", "content": prompt}])
    prompt_ids = await tokenization.encode(text, add_special_tokens=not chat)
    params = chat_params(body, engine.generation_defaults)
    if not prompt_ids:
        raise RequestError("the prompt is empty; write some text", param="prompt")
    max_tokens = fit_to_context(
        len(prompt_ids), params.max_tokens, engine.info.max_model_len, default=DEFAULT_MAX_TOKENS, param="prompt"
    )
    params = replace(params, max_tokens=max_tokens)
    began = time.monotonic()
    requests = engine_requests(new_id("gen"), [prompt_ids], [params], priority=0, salt=b"", arrival_time=began)
    written: list[str] = []
    first: float | None = None
    async with await Generation.start(engine, requests, ServerMetrics()) as generation:
        async for gained in generation.updates():
            first = first or time.monotonic()
            for _, delta in gained:
                written.append(delta.text)
                if not as_json:
                    out.write(delta.text)
                    out.flush()
    tokenization.close()
    seconds = time.monotonic() - began
    numbers = usage(generation)
    choice = generation.choices[0]
    if as_json:
        document = {
            "model": engine.info.model,
            "prompt": text,
            "text": "".join(written),
            "finish_reason": choice.finish_reason,
            "usage": numbers,
            "seconds": {"first_token": (first or began) - began, "total": seconds},
        }
        out.write(json.dumps(document) + "\n")
        return
    out.write("\n")
    print(
        f"[{numbers['completion_tokens']} tokens in {seconds:.2f} s, first after {(first or began) - began:.2f} s; "
        f"{numbers['prompt_tokens']} prompt tokens, {numbers['prompt_tokens_details']['cached_tokens']} cached; "
        f"ended by {choice.finish_reason}]",
        file=sys.stderr,
    )
