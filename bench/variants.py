"""Engines by name, and variants that keep their cache in another format: ``ours@int8``, ``llama@q8_0``.

A variant is an engine of its own for everything but the code that it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench.engines.llama import CACHE_TYPES
from kvloom.core.codec_sizes import is_served, parse_codec
from kvloom.core.errors import ConfigError

ENGINES = ("ours", "transformers", "vllm", "llama")
CODECS = "codecs"  # stands for the two lists below
OUR_CODECS = ("raw", "fp8", "int8", "int4", "turboquant4", "turboquant3", "loom4", "kivi2")
LLAMA_TYPES = ("f16", "q8_0", "q4_0")

# A pair of codecs, k=int8,v=int4, is one item.
_COMMA = re.compile(r",(?![kv]=)")


def engine_of(name: str) -> str:
    """Which engine a variant runs."""
    return name.partition("@")[0]


def format_of(name: str) -> str | None:
    """What a variant keeps its cache in; None for a plain name."""
    return name.partition("@")[2] or None


def parse_engines(text: str, *, formats: Mapping[str, str], llama: bool) -> list[str]:
    """Names by commas, each once: engines, variants and ``codecs``.

    Args:
        formats: what plain ``ours`` and ``llama`` keep their cache in; the variant of that format is the plain name.
        llama: whether ``codecs`` stands for variants of llama.cpp too.

    Raises:
        ValueError: an unknown engine, codec or cache type.
    """
    found: dict[str, None] = {}
    for item in _COMMA.split(text):
        names = [item]
        if item == CODECS:
            names = [f"ours@{codec}" for codec in OUR_CODECS]
            names += [f"llama@{kind}" for kind in LLAMA_TYPES] if llama else []
        found.update(dict.fromkeys(_checked(name, formats) for name in names))
    return list(found)


def _checked(name: str, formats: Mapping[str, str]) -> str:
    engine, at, asked = name.partition("@")
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}, {CODECS}")
    if engine not in formats:
        if at:
            raise ValueError(f"{name!r}: there are variants of {' and '.join(formats)} only")
        return name
    if at and not asked:
        raise ValueError(f"{name!r} names no format after the @")
    kept = asked or formats[engine]
    if engine == "llama":
        if kept not in CACHE_TYPES:
            raise ValueError(f"{name!r}: llama.cpp has no cache type {kept!r}; known: {', '.join(CACHE_TYPES)}")
        return engine if kept == formats[engine] else f"{engine}@{kept}"
    try:
        choice, default = parse_codec(kept), parse_codec(formats[engine])
    except ConfigError as error:
        raise ValueError(f"{name!r}: {error}") from error
    if not (is_served(choice.key) and is_served(choice.value)):
        raise ValueError(f"{name!r}: the codec is planned and not served by this version")
    return engine if choice == default else f"{engine}@{choice.name}"


def base_of(names: Sequence[str]) -> str:
    """Whom the others are compared with: plain ``ours``, or the first variant of it."""
    ours = [name for name in names if engine_of(name) == "ours"]
    return "ours" if "ours" in ours or not ours else ours[0]


def with_format(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the worker of ``name`` is told: the common options, and the format it keeps its cache in."""
    kept = format_of(name)
    if kept is None:
        return options
    if engine_of(name) == "llama":
        return {**options, "llama_cache_type": kept}
    return {**options, "settings": {**options["settings"], "codec": kept}}
