"""Engines and their variants as they are written on the command line."""

from __future__ import annotations

import pytest

from bench.variants import (
    CODECS,
    LLAMA_TYPES,
    OUR_CODECS,
    base_of,
    engine_of,
    format_of,
    parse_engines,
    with_format,
)

FORMATS = {"ours": "raw", "llama": "f16"}


def parse(text: str, llama: bool = True, **formats: str) -> list[str]:
    return parse_engines(text, formats={**FORMATS, **formats}, llama=llama)


def test_variants_keep_their_names_and_their_order() -> None:
    text = "ours,vllm,ours@int8,llama@q8_0,llama,ours@turboquant4"
    assert parse(text) == text.split(",")
    assert [engine_of(name) for name in parse(text)] == ["ours", "vllm", "ours", "llama", "llama", "ours"]
    assert [format_of(name) for name in parse("ours,ours@int8")] == [None, "int8"]


def test_the_default_format_is_the_plain_engine_and_each_is_there_once() -> None:
    assert parse("ours@raw,ours,llama@f16,ours@int8,ours@int8") == ["ours", "llama", "ours@int8"]
    assert parse("ours@int8,ours@raw", ours="int8") == ["ours", "ours@raw"]


def test_a_pair_of_codecs_is_one_variant() -> None:
    assert parse("ours,ours@k=int8,v=int4,llama") == ["ours", "ours@k=int8,v=int4", "llama"]
    assert parse("ours@k=int8,v=int8") == ["ours@int8"]


@pytest.mark.parametrize("llama", [True, False])
def test_codecs_stands_for_the_table(llama: bool) -> None:
    found = parse(f"{CODECS},vllm", llama=llama)
    ours = ["ours", *(f"ours@{codec}" for codec in OUR_CODECS if codec != "raw")]
    peers = ["llama", *(f"llama@{kind}" for kind in LLAMA_TYPES if kind != "f16")]
    assert found == [*ours, *(peers if llama else []), "vllm"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ours@int7", "int8"),  # the nearest is named
        ("ours@", "no format"),
        ("ours@k=int8", "names no codec for v"),
        ("llama@q3_0", "no cache type"),
        ("vllm@fp8", "variants of ours and llama only"),
        ("gpt@int8", "unknown engine"),
        ("", "unknown engine"),
    ],
)
def test_what_cannot_be_run_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)


def test_others_are_compared_with_plain_ours_or_its_first_variant() -> None:
    assert base_of(["llama", "ours@int8", "ours"]) == "ours"
    assert base_of(["llama", "ours@int8", "ours@int4"]) == "ours@int8"
    assert base_of(["llama"]) == "ours"


def test_a_worker_is_told_its_format_and_nothing_else_changes() -> None:
    options = {"settings": {"dtype": "float32", "codec": "fp8"}, "llama_cache_type": "f16", "steps": 8}
    assert with_format("ours", options) == options
    assert with_format("ours@int8", options) == {**options, "settings": {"dtype": "float32", "codec": "int8"}}
    assert with_format("llama@q8_0", options) == {**options, "llama_cache_type": "q8_0"}
    assert options["settings"] == {"dtype": "float32", "codec": "fp8"}
