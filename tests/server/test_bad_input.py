"""Every wrong request gets a clear 4xx in OpenAI's shape, names its field, and leaves the server serving."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvloom.server.config import ServerConfig
from tests.server.conftest import client_for
from tests.server.fake import CHATML_TOOLS, STRICT, FakeEngine, byte_tokenizer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def assert_error(answer: httpx.Response, status: int, param: str | None, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error


BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": ["hi"]}, "messages.0", "object"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role", "wizard"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages.0.role", "function"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages.0.role", "user"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role", "None"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "5"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0", "object"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "text"),
    ({"messages": [{"role": "user", "content": "hi", "mood": 1}]}, "messages.0.mood", "unknown field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages.0.content.0",
        "text only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages.0.content.0",
        "text only",
    ),
    ({"messages": [{"role": "tool", "content": "42", "tool_call_id": "a"}]}, "messages.0", "tool"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages.0.tool_calls", "assistant"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no place for tools"),
    ({"tools": "f"}, "tools", "list"),
    ({"tools": [{"type": "function"}]}, "tools.0", "function"),
    ({"tool_choice": "required"}, "tool_choice", "cannot force"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "cannot force"),
    ({"functions": []}, "functions", "tools"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"prompt": "hi"}, "prompt", "unknown field"),
    ({"x" * 100_000: 1}, "x" * 64, "unknown field"),
    ({"cache_salt": "mine"}, "cache_salt", "API key"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"temperature": float("inf")}, "temperature", "inf"),
    ({"temperature": 10**400}, "temperature", "number"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"temperature": True}, "temperature", "True"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"n": 0}, "n", "0"),
    ({"n": 65}, "n", "64"),
    ({"n": "2"}, "n", "integer"),
    ({"seed": 2**63}, "seed", "64 bits"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -5}, "max_tokens", "at least 1"),
    ({"max_tokens": 5.5}, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "send one"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "9"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"stop": [f"s{i}" for i in range(1000)]}, "stop", "1000"),
    ({"stop": ["a" * 5000]}, "stop", "5000"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": 5}, "stop", "5"),
    ({"stop_token_ids": [999]}, "stop_token_ids", "999"),
    ({"stop_token_ids": ["a"] * 100_000}, "stop_token_ids.0", "integer"),
    ({"logit_bias": {"zzz": 1}}, "logit_bias", "zzz"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "999"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias", "nan"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "x"),
    ({"logit_bias": [1]}, "logit_bias", "[1]"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "2000"),
    ({"top_logprobs": 5}, "top_logprobs", "logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs", "20"),
    ({"logprobs": 5}, "logprobs", "boolean"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"response_format": "json"}, "response_format", "json"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
    ({"guided_regex": "a+", "guided_choice": ["a"]}, "guided_choice", "one of them"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"priority": 2**40}, "priority", "between"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "may not"),
    ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning"),
    ({"model": 5}, "model", "string"),
]


@pytest.mark.parametrize(("change", "param", "word"), BAD_CHAT, ids=lambda value: str(value)[:40])
async def test_wrong_chat_request(
    client: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], param: str, word: str
) -> None:
    body = json.dumps({"messages": HI, **change})
    for stream in (False, True):
        if stream and "stream" not in change and "stream_options" not in change:
            body = json.dumps({"messages": HI, "stream": True, **change})
        assert_error(await client.post(CHAT, content=body), 400, param, word)
    assert engine.requests == []
    assert (await client.post(CHAT, json={"messages": HI})).status_code == 200


BAD_PLAIN: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt.0", "empty"),
    ({"prompt": ["hi", ""]}, "prompt.1", "empty"),
    ({"prompt": 5}, "prompt", "5"),
    ({"prompt": {"text": "hi"}}, "prompt", "text"),
    ({"prompt": [1, "a"]}, "prompt.0", "only"),
    ({"prompt": ["a", 1]}, "prompt.0", "only"),
    ({"prompt": [True, False]}, "prompt.0", "only"),
    ({"prompt": [[1], [2.5]]}, "prompt.1", "only"),
    ({"prompt": [259]}, "prompt", "259"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [10**30]}, "prompt", "1000"),
    ({"prompt": [[1], [2, 777]]}, "prompt.1", "777"),
    ({"prompt": ["hi"] * 257}, "prompt", "256"),
    ({"prompt": ["hi"] * 100, "n": 64}, "n", "1024"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 0, "echo": True, "logprobs": 1}, "max_tokens", "at least 1"),
    ({"best_of": 3}, "best_of", "3"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"echo": "yes"}, "echo", "boolean"),
    ({"messages": HI}, "messages", "unknown field"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
]


@pytest.mark.parametrize(("change", "param", "word"), BAD_PLAIN, ids=lambda value: str(value)[:40])
async def test_wrong_completion_request(
    client: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], param: str, word: str
) -> None:
    assert_error(await client.post(PLAIN, json={"prompt": "hi", **change}), 400, param, word)
    assert engine.requests == []
    assert (await client.post(PLAIN, json={"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "array"),
        (b'"hi"', "string"),
        (b"null", "null"),
        (b"3", "number"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b"\x00", "JSON"),
        (b"[" * 200_000, "nested"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": "a" "b"}', "JSON"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_unreadable_body(client: httpx.AsyncClient, body: bytes, word: str) -> None:
    for route in (CHAT, PLAIN, "/tokenize", "/detokenize"):
        assert_error(await client.post(route, content=body), 400, None, word)
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (PLAIN, r'{"prompt": "a\ud800b"}', "prompt"),
        (PLAIN, r'{"prompt": "hi", "stop": ["\udfff"]}', "stop.0"),
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "messages.0.content"),
        (CHAT, r'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\uDE00"}]}]}', None),
        (CHAT, r'{"messages": [], "\ud800": 1}', None),
        (CHAT, r'{"messages": [], "model": "\ud800"}', "model"),
    ],
)
async def test_lone_surrogates_are_refused(client: httpx.AsyncClient, route: str, body: str, param: str | None) -> None:
    answer = await client.post(route, content=body)
    assert_error(answer, 400, answer.json()["error"]["param"], "surrogate")
    if param:
        assert answer.json()["error"]["param"] == param


async def test_surrogate_pairs_and_nul_are_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(PLAIN, content=r'{"prompt": "\ud83d\ude00\u0000", "echo": true, "max_tokens": 1}')
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "\U0001f600\0H"
    assert len(engine.requests[0].prompt_token_ids) == 5


async def test_extreme_but_legal_values(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": HI, "temperature": 1e9, "top_k": 10**30, "max_tokens": 2, "seed": -(2**63), "priority": -5}
    assert (await client.post(CHAT, json=body)).status_code == 200
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.seed) == (1e9, 2**31 - 1, -(2**63))
    assert engine.requests[0].priority == -5


async def test_harmless_and_null_fields_are_ignored(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi", "name": None}],
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "temperature": None,
        "audio": None,
        "stop": None,
    }
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert engine.requests[0].params.temperature == 1.0


async def test_too_long_is_refused_before_a_stream_starts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stream in (False, True):
        answer = await client.post(PLAIN, json={"prompt": "a" * 256, "stream": stream})
        assert_error(answer, 400, "prompt", "256", "shorten it by 1")
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = await client.post(PLAIN, json={"prompt": "a" * 250, "max_tokens": 7, "stream": stream})
        assert_error(answer, 400, "prompt", "250", "7", "lower max_tokens to 6")
        answer = await client.post(CHAT, json={"messages": HI, "max_tokens": 10**9, "stream": stream})
        assert_error(answer, 400, "messages", "1000000000")
    assert engine.requests == []
    assert (await client.post(PLAIN, json={"prompt": "a" * 255, "max_tokens": 1})).status_code == 200
    assert (await client.post(PLAIN, json={"prompt": "a" * 250})).status_code == 200
    assert engine.requests[-1].params.max_tokens == 6  # the default of 16, shortened to what is left


async def test_huge_bodies(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(max_body_bytes=10_000)) as client:
        answer = await client.post(PLAIN, json={"prompt": "a" * 10_000_000})
        assert_error(answer, 413, None, "10000", "--max-body-bytes")

        async def chunked() -> Any:
            for _ in range(100):
                yield b"a" * 1000

        answer = await client.post(PLAIN, content=chunked())
        assert_error(answer, 413, None, "10000")
        body = json.dumps({"prompt": "a"})
        answer = await client.post(PLAIN, content=body + " " * (10_000 - len(body)))
        assert answer.status_code == 200
        answer = await client.post(PLAIN, content=body + " " * (10_001 - len(body)))
        assert answer.status_code == 413


async def test_unknown_routes_methods_and_models(client: httpx.AsyncClient) -> None:
    assert_error(await client.get("/v1/nothing"), 404, None, "no such route")
    assert_error(await client.get(CHAT), 405, None, "POST")
    assert_error(await client.delete("/health"), 405, None, "GET")
    for route, body in (
        (CHAT, {"messages": HI}),
        (PLAIN, {"prompt": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await client.post(route, json={**body, "model": "gpt-9"})
        assert_error(answer, 404, "model", "gpt-9", "fake/model")
        assert answer.json()["error"]["code"] == "model_not_found"
    assert_error(await client.get("/v1/models/gpt-9"), 404, "model", "gpt-9")


async def test_template_that_refuses(tokenizer: Any) -> None:
    engine = FakeEngine(byte_tokenizer(STRICT))
    async with client_for(engine) as client:
        answer = await client.post(CHAT, json={"messages": [{"role": "system", "content": "s"}]})
        assert_error(answer, 400, "messages", "must start with a user turn")
        broken = FakeEngine(byte_tokenizer("{{ messages[0].nothing.more }}"))
    async with client_for(broken) as client:
        assert_error(await client.post(CHAT, json={"messages": HI}), 400, "messages", "template")
    none = FakeEngine(byte_tokenizer(None))
    async with client_for(none) as client:
        assert_error(await client.post(CHAT, json={"messages": HI}), 400, "messages", "/v1/completions")
        assert (await client.post(PLAIN, json={"prompt": "hi"})).status_code == 200


async def test_tools_reach_a_template_that_knows_them() -> None:
    engine = FakeEngine(byte_tokenizer(CHATML_TOOLS))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    async with client_for(engine) as client:
        for choice in (None, "auto", "none"):
            answer = await client.post(CHAT, json={"messages": history, "tools": tools, "tool_choice": choice})
            assert answer.status_code == 200, answer.text
    prompts = [engine.tokenizer.decode(request.prompt_token_ids) for request in engine.requests]
    assert ["weather" in prompt for prompt in prompts] == [True, True, False]
    assert all("<|im_start|>tool\nsunny<|im_end|>" in prompt for prompt in prompts)


async def test_refusals_by_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.max_waiting = 0
    for stream in (False, True):
        answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
        assert_error(answer, 429, None, "wait")
        assert answer.headers["Retry-After"] == "2"
        assert answer.json()["error"]["code"] == "queue_full"


async def test_refused_prompt_cancels_those_before_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.max_waiting = 2
    answer = await client.post(PLAIN, json={"prompt": ["a", "b", "c"]})
    assert_error(answer, 429, None, "wait")
    assert len(engine.aborted) == 2
    assert engine.live == {}


async def test_unexpected_errors_tell_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail = ZeroDivisionError("a secret")
    answer = await client.post(CHAT, json={"messages": HI})
    assert_error(answer, 500, None, "internal error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]


async def test_tokenize_refusals(client: httpx.AsyncClient) -> None:
    assert_error(await client.post("/tokenize", json={}), 400, "prompt", "either")
    assert_error(await client.post("/tokenize", json={"prompt": "a", "messages": HI}), 400, "prompt", "either")
    assert_error(await client.post("/detokenize", json={"tokens": [5000]}), 400, "tokens", "5000")
    assert_error(await client.post("/detokenize", json={"tokens": ["a"] * 9999}), 400, "tokens.0", "integer")
    assert_error(await client.post("/detokenize", json={}), 400, "tokens", "missing")
