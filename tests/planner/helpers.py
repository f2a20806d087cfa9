"""Short ways to the planner's pieces for tests."""

from __future__ import annotations

from typing import Any

from kvloom.core.codec_sizes import parse_codec
from kvloom.planner.accounting import ACCOUNTINGS, DEFAULT_CHUNK, Accounting
from kvloom.planner.architecture import Architecture
from kvloom.planner.formats import CacheFormat
from kvloom.planner.presets import load_preset
from kvloom.planner.readers import read_architecture

GIB = 2**30
MIB = 2**20


def architecture(preset: str) -> Architecture:
    return read_architecture(load_preset(preset).config, origin=preset)


def format_of(codec: str = "raw", *, chunk: int = 512, **more: Any) -> CacheFormat:
    """A format with the codec's own protection unless given otherwise."""
    choice = parse_codec(codec)
    more.setdefault("sink_tokens", choice.sink_tokens)
    more.setdefault("recent_tokens", choice.recent_tokens)
    return CacheFormat(codec=choice, chunk=chunk, **more)


def accounting(name: str, model: str | Architecture, codec: str = "raw", **more: Any) -> Accounting:
    known = architecture(model) if isinstance(model, str) else model
    more.setdefault("chunk", DEFAULT_CHUNK[name])
    return ACCOUNTINGS[name](known, format_of(codec, **more))


def ideal_bytes(model: str, tokens: int, codec: str = "raw", **more: Any) -> int:
    return accounting("ideal", model, codec, **more).sequence(tokens).total
