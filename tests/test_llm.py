"""``LLM``: the library as its users meet it, on a tiny model saved to a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvloom import LLM, SamplingParams
from kvloom.core.errors import ConfigError, ContextLengthError, EngineError, RequestError
from tests.engine.tiny import assert_greedy
from tests.models.tiny import llama_config, save

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    return save(tmp_path_factory.mktemp("llm") / "model", llama_config())


@pytest.fixture(scope="module")
def llm(directory: Path, tmp_path_factory: Any) -> LLM:
    return LLM(
        str(directory),
        kv_cache_memory="8MiB",
        max_model_len=256,
        block_size=16,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        max_waiting=3,
    )


def test_answers_come_in_the_order_of_the_prompts_and_equal_transformers(llm: LLM, directory: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(9)]  # more than the queue holds at once
    for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert result.prompt == prompt
        assert result.prompt_token_ids == llm.tokenizer(prompt)["input_ids"]
        (answer,) = result.outputs
        assert len(answer.token_ids) == 12 and answer.finish_reason == "length"
        assert answer.text == llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert_greedy(eager, result.prompt_token_ids, answer.token_ids)
    assert llm.snapshot().cache.used_bytes == 0


def test_one_text_token_ids_and_params_per_prompt(llm: LLM) -> None:
    (text,) = llm.generate("hello there", GREEDY)
    (ids,) = llm.generate([text.prompt_token_ids], [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)])
    assert ids.prompt is None
    assert ids.outputs[0].token_ids == text.outputs[0].token_ids[:3]
    assert llm.generate([], GREEDY) == []


def test_equal_prompts_are_found_in_the_cache(llm: LLM) -> None:
    prompt = [5] * 100
    llm.generate([prompt], GREEDY)
    (again,) = llm.generate([prompt], GREEDY)
    assert again.usage.cached_tokens == 96


def test_stop_strings_end_the_text_and_free_the_sequence(llm: LLM) -> None:
    (whole,) = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    text = whole.outputs[0].text
    stop = text[10:12]
    (cut,) = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert llm.snapshot().cache.used_bytes == 0 and llm.snapshot().running == 0


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_shows_only_when_asked_for(llm: LLM, include: bool) -> None:
    (whole,) = llm.generate("stop here", GREEDY)
    ids = whole.outputs[0].token_ids
    end = ids.index(ids[5]) + 1
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(ids[5],), include_stop_str_in_output=include
    )
    (cut,) = llm.generate("stop here", params)
    assert cut.outputs[0].token_ids == ids[:end]
    assert cut.outputs[0].text == llm.tokenizer.backend_tokenizer.decode(ids[: end if include else end - 1])


def test_n_answers_and_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (result,) = llm.generate("several", params)
    assert len(result.outputs) == 3
    assert len({tuple(output.token_ids) for output in result.outputs}) > 1
    for output in result.outputs:
        assert output.logprobs is not None and len(output.logprobs) == 6
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_grammars_bind_the_answer(llm: LLM) -> None:
    from kvloom.core.request import Grammar

    params = SamplingParams(temperature=1, seed=3, max_tokens=20, grammar=Grammar(kind="regex", text="[0-9]{3}-[a-f]"))
    (result,) = llm.generate("a number: ", params)
    import re

    assert re.fullmatch("[0-9]{3}-[a-f]", result.outputs[0].text)


def test_wrong_arguments_are_named(llm: LLM, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'max_model_length'.*'max_model_len'"):
        LLM(str(directory), max_model_length=5)
    with pytest.raises(ConfigError, match="block_size is 24"):
        LLM(str(directory), block_size=24)
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        LLM(str(directory), codec="int88")
    with pytest.raises(RequestError, match="empty"):
        llm.generate([""], GREEDY)
    with pytest.raises(ContextLengthError, match="at most 255"):
        llm.generate([[1] * 256], GREEDY)
    with pytest.raises(RequestError, match="2 sampling params for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="temperature is -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.snapshot().cache.used_bytes == 0


def test_a_failure_leaves_nothing_behind(llm: LLM, monkeypatch: Any) -> None:
    forward = llm._engine.runner.forward
    monkeypatch.setattr(llm._engine.runner, "forward", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="division by zero"):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.setattr(llm._engine.runner, "forward", forward)
    assert llm.snapshot().cache.used_bytes == 0 and llm.snapshot().running == llm.snapshot().waiting == 0
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12
