"""Whole answers: shapes, defaults, indices, logprobs and usage."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvloom.core.request import Grammar
from kvloom.server.config import ServerConfig
from tests.server.conftest import client_for
from tests.server.fake import EOS, FakeEngine, Step

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post(CHAT, json={"model": "fake/model", "messages": HI})).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake/model")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = engine.requests[0].prompt_token_ids
    assert engine.tokenizer.decode(prompt) == RENDERED
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 13,  # the end-of-text token counts
        "total_tokens": len(prompt) + 13,
        "prompt_tokens_details": {"cached_tokens": 3},
        "kvloom": {
            "cached_tokens": 3,
            "computed_tokens": len(prompt) - 3,
            "stored_tokens": len(prompt),
            "recovered_tokens": 2,
            "preemptions": 1,
            "approximations": ["codec int8"],
        },
    }


async def test_cached_tokens_are_zero_not_null(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached_tokens = 0
    usage = (await client.post(CHAT, json={"messages": HI})).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_parts_developer_and_history(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        # as a client sends our own answer back
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": ""},
    ]
    assert (await client.post(CHAT, json={"messages": messages})).status_code == 200
    text = engine.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert text.startswith(
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    )


async def test_continue_final_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [*HI, {"role": "assistant", "content": "I think"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert engine.tokenizer.decode(engine.requests[0].prompt_token_ids).endswith("assistant\nI think")


async def test_sampling_fields_arrive(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "messages": HI,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"7": -50},
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "min_tokens": 1,
        "max_completion_tokens": 20,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": True,
        "top_logprobs": 3,
        "priority": 4,
    }
    assert (await client.post(CHAT, json=body)).status_code == 200
    request = engine.requests[0]
    params = request.params
    assert request.priority == 4
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (2, 0.5, 0.9, 40, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (params.logit_bias, params.seed, params.stop, params.stop_token_ids) == ({7: -50}, 11, ("x", "y"), (9,))
    assert (params.min_tokens, params.max_tokens, params.ignore_eos) == (1, 20, True)
    assert (params.include_stop_str_in_output, params.skip_special_tokens, params.logprobs) == (True, False, 3)


async def test_model_defaults_stand_in_where_the_client_says_nothing(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, generation_defaults={"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    async with client_for(engine) as client:
        await client.post(CHAT, json={"messages": HI})
        await client.post(CHAT, json={"messages": HI, "temperature": 0, "top_p": 1, "top_k": -1})
    given = [(r.params.temperature, r.params.top_p, r.params.top_k) for r in engine.requests]
    assert given == [(0.6, 0.95, 20), (0.0, 1.0, 0)]


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            Grammar(kind="json_schema", text='{"type": "object"}'),
        ),
        ({"guided_json": {"type": "null"}}, Grammar(kind="json_schema", text='{"type": "null"}')),
        ({"guided_regex": "a+"}, Grammar(kind="regex", text="a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(kind="choice", text='["a", "b"]')),
        ({"guided_grammar": "start: x"}, Grammar(kind="lark", text="start: x")),
        ({"structured_outputs": {"regex": "b"}}, Grammar(kind="regex", text="b")),
        ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_object")),
    ],
)
async def test_output_constraints(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert (await client.post(CHAT, json={"messages": HI, **fields})).status_code == 200
    assert engine.requests[0].params.grammar == grammar


async def test_chat_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = "é"
    answer = (await client.post(CHAT, json={"messages": HI, "logprobs": True, "top_logprobs": 2})).json()
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 3
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "é"
    assert content[0]["token"] == "\ufffd"
    assert [len(one["top_logprobs"]) for one in content] == [2, 2, 2]
    assert content[2]["token"] == "<|im_end|>"


async def test_infinite_logprob_is_json(client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: Any) -> None:
    from tests.server import fake

    monkeypatch.setattr(
        fake, "scoring", lambda top: lambda token: fake.TokenLogprob(token_id=token, logprob=float("-inf"))
    )
    answer = await client.post(CHAT, json={"messages": HI, "logprobs": True})
    assert answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_completion_prompts_in_every_form(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    a, b = 64, 65  # "a" and "b" in the byte alphabet
    assert engine.tokenizer.decode([a, b]) == "ab"
    for prompt, expected in (
        ("ab", [(a, b)]),
        ([a, b], [(a, b)]),
        (["a", "b"], [(a,), (b,)]),
        ([[a], [b, a]], [(a,), (b, a)]),
    ):
        engine.requests.clear()
        answer = await client.post(PLAIN, json={"prompt": prompt, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert [request.prompt_token_ids for request in engine.requests] == expected
        assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_completion_indices_and_usage_over_prompts_and_n(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def script(request: Any, index: int) -> Any:
        yield Step((request.prompt_token_ids[0],))
        yield Step((15 + index,), finish="length")  # "0", "1"

    engine.script = script
    answer = (await client.post(PLAIN, json={"prompt": ["a", "bc"], "n": 2, "max_tokens": 2})).json()
    assert answer["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "a0", "length"),
        (1, "a1", "length"),
        (2, "b0", "length"),
        (3, "b1", "length"),
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6  # once per prompt
    assert usage["kvloom"]["cached_tokens"] == 12  # once per sequence


async def test_completion_defaults(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(PLAIN, json={"prompt": "a"})
    await client.post(CHAT, json={"messages": HI})
    assert [request.params.max_tokens for request in engine.requests] == [16, None]


async def test_echo_and_logprobs_score_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 1}
    (choice,) = (await client.post(PLAIN, json=body)).json()["choices"]
    assert engine.requests[0].params.prompt_logprobs == 2
    assert choice["text"] == "abH"
    assert "prompt_logprobs" not in choice
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "H"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"b": -0.5, "c": -1.5}, {"H": -0.5, "I": -1.5}]
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_offsets_count_characters(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Tokens that share a character share its offset; the end-of-text token stands with the last."""
    engine.reply = "aéb"
    body = {"prompt": "ü!", "echo": True, "logprobs": 0, "max_tokens": 10}
    (choice,) = (await client.post(PLAIN, json=body)).json()["choices"]
    assert choice["text"] == "ü!aéb"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3, 4, 4]


async def test_token_ids(client: httpx.AsyncClient) -> None:
    for route, body in ((PLAIN, {"prompt": "a"}), (CHAT, {"messages": HI})):
        answer = await client.post(route, json={**body, "max_tokens": 2, "return_token_ids": True})
        assert answer.json()["choices"][0]["token_ids"] == [39, 68]  # "He"
        assert "token_ids" not in (await client.post(route, json=body)).json()["choices"][0]


async def test_echo_of_token_ids(client: httpx.AsyncClient) -> None:
    answer = await client.post(PLAIN, json={"prompt": [[64], [65]], "echo": True, "max_tokens": 1})
    assert [choice["text"] for choice in answer.json()["choices"]] == ["aH", "bH"]


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    for route, body in ((PLAIN, {"prompt": "ab"}), (CHAT, {"messages": HI})):
        answer = await client.post(route, json={**body, "prompt_logprobs": 1, "max_tokens": 1})
        scores = answer.json()["choices"][0]["prompt_logprobs"]
        assert scores[0] is None
        assert len(scores) == answer.json()["usage"]["prompt_tokens"]
        assert all(set(one.popitem()[1]) == {"logprob", "decoded_token"} for one in scores[1:])


async def test_stop_string_ends_the_sequence_in_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": HI, "stop": [", w"], "logprobs": True}
    answer = (await client.post(CHAT, json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "stop", ", w")
    assert answer["usage"]["completion_tokens"] == len("Hello, w") == len(choice["logprobs"]["content"])
    assert engine.aborted_sequences == [(engine.requests[0].request_id, 0)]
    assert engine.aborted == []


async def test_stop_token(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def script(request: Any, index: int) -> Any:
        yield Step((64,))
        yield Step((65,), finish="stop", stop_token_id=65)

    engine.script = script
    for include, text in ((False, "a"), (True, "ab")):
        body = {"prompt": "x", "stop_token_ids": [65], "include_stop_str_in_output": include}
        answer = (await client.post(PLAIN, json=body)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", 65)
        assert answer["usage"]["completion_tokens"] == 2


async def test_special_tokens_in_the_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request, index: iter(
        [Step((257, 64)), Step((256,)), Step((EOS,), finish="stop", stop_token_id=EOS)]
    )
    for skip, text in ((True, "a"), (False, "<|im_start|>a<|endoftext|>")):
        answer = await client.post(PLAIN, json={"prompt": "x", "skip_special_tokens": skip})
        assert answer.json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("step", "status", "code"),
    [
        (Step(finish="error", error="the step failed"), 500, "engine_error"),
        (Step(finish="abort"), 503, "engine_stopped"),
    ],
)
async def test_a_request_that_the_engine_fails_on(
    client: httpx.AsyncClient, engine: FakeEngine, step: Step, status: int, code: str
) -> None:
    engine.script = lambda request, index: iter([Step((64,)), step])
    answer = await client.post(CHAT, json={"messages": HI, "n": 2})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert engine.live == {}


async def test_models_version_tokenize(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake/model", "model", 256)
    assert (await client.get("/v1/models/fake/model")).json() == card
    assert set((await client.get("/version")).json()) == {"version"}

    answer = (await client.post("/tokenize", json={"prompt": "añ<|im_end|>", "return_token_strs": True})).json()
    assert (answer["count"], answer["max_model_len"]) == (4, 256)
    assert answer["tokens"][-1] == EOS
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd", "<|im_end|>"]
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "añ<|im_end|>"}
    chat = (await client.post("/tokenize", json={"messages": HI})).json()
    assert engine.tokenizer.decode(chat["tokens"]) == RENDERED


async def test_long_texts_are_tokenised_as_short_ones(client: httpx.AsyncClient) -> None:
    text = "añb " * 50_000
    answer = (await client.post("/tokenize", json={"prompt": text})).json()
    assert answer["count"] == len(text.encode())
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_served_names(tokenizer: Any) -> None:
    config = ServerConfig(served_model_names=("chat", "alias"))
    async with client_for(FakeEngine(tokenizer), config) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["chat", "alias"]
        for asked, told in ((None, "chat"), ("chat", "chat"), ("alias", "alias")):
            assert (await client.post(CHAT, json={"messages": HI, "model": asked})).json()["model"] == told
        assert (await client.post(CHAT, json={"messages": HI, "model": "fake/model"})).status_code == 404


async def test_request_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/version", headers={"X-Request-Id": "abc-1.2"})).headers["x-request-id"] == "abc-1.2"
    for wild in ("", "a b", "x" * 200, "a\tb", "<script>"):
        given = (await client.get("/version", headers={"X-Request-Id": wild})).headers["x-request-id"]
        assert given.startswith("req-")
    assert (await client.get("/nothing", headers={"X-Request-Id": "q"})).headers["x-request-id"] == "q"


async def test_health_over_a_life(tokenizer: Any) -> None:
    async with client_for(None) as client:
        for route in ("/health", "/v1/models"):
            answer = await client.get(route)
            assert answer.status_code == 503
            assert "loading" in answer.json()["error"]["message"]
        answer = await client.post(CHAT, json={"messages": HI})
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert "kvloom_ready 0.0" in (await client.get("/metrics")).text
        serving = client._transport.app.state.serving  # type: ignore[attr-defined]
        engine = FakeEngine(tokenizer)
        serving.attach(engine)
        assert (await client.get("/health")).json() == {"status": "ok"}
        serving.draining = True
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 503
        serving.draining = False
        engine.failed = "out of luck"
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        assert "out of luck" in answer.json()["error"]["message"]
