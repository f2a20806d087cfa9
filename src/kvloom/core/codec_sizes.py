"""Bytes of every codec that kvloom serves or plans to serve, side data included. No torch.

:mod:`kvloom.core.sizes` knows the codecs that the engine has today; this table adds those that are
specified but not built yet, so that the planner can size them and say that they are *planned*. A
codec that becomes real moves its line to ``block_sizes.SERVED_BLOCK_BYTES``, which then wins here.

Layouts per block of ``n`` tokens of one plane of dimension ``d`` (bits per value in brackets):

==================  ================================================================================
raw                 2 or 4 bytes a value
fp8, int8           one byte a value + one fp16 scale per token                       [8 + 16/d]
int4                four bits a value + fp16 scale and minimum per token              [4 + 32/d]
q8_0, q4_0          ggml's groups of 32 values with one fp16 scale: 34 and 18 bytes   [8.5, 4.5]
kivi-B key          B bits a value + fp16 scale and minimum per channel and block     [B + 32/n]
kivi-B value        B bits a value + fp16 scale and minimum per token and 32 channels [B + 1]
kvquant-B           B bits a value + 1 % outliers of 32 bits; values: low and high    [B + 0.32 …]
turboquant-B        B bits a value + one fp16 scale per token                         [B + 16/d]
turboquant-B.prod   B bits a value, one of them a sign + two fp16 scales per token    [B + 32/d]
turboquant-B.5      a quarter of the channels one bit wider + two scales per token    [B + 1/4 + 32/d]
loom-B              as turboquant-B (the calibrated key mean is per model)            [B + 16/d]
kvarn-B key         B bits + scale and minimum per channel + scale per token, fp16
kvarn-B value       B bits + scale and minimum per token + scale per channel, fp16
==================  ================================================================================

The fields behind these bytes are in ``docs/codecs.md``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from kvloom.core.block_sizes import BlockBytes
from kvloom.core.errors import ConfigError
from kvloom.core.sizes import CODEC_BLOCK_BYTES

# Plane codec name -> (dim, tokens in block) -> bytes. Keys are the names of one plane's format.
PLANNED_BLOCK_BYTES: Mapping[str, BlockBytes] = {}

RAW_DTYPES: tuple[str, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecChoice:
    """A codec as users name it: what keys and values become, and what stays raw by default.

    ``sink_tokens`` and ``recent_tokens`` are the default protection: tokens at the start and at the
    end kept raw, from the measurements in ``docs/sizing.md``.
    """

    name: str
    key: str
    value: str
    sink_tokens: int = 0
    recent_tokens: int = 0


def _same(name: str, sink_tokens: int = 0, recent_tokens: int = 0) -> CodecChoice:
    return CodecChoice(name=name, key=name, value=name, sink_tokens=sink_tokens, recent_tokens=recent_tokens)


def _pair(name: str, stem: str, sink_tokens: int, recent_tokens: int) -> CodecChoice:
    return CodecChoice(
        name=name, key=f"{stem}.key", value=f"{stem}.value", sink_tokens=sink_tokens, recent_tokens=recent_tokens
    )


_CHOICES: tuple[CodecChoice, ...] = (
    _same("raw"),
    *(_same(dtype) for dtype in RAW_DTYPES),
    _same("fp8"),
    _same("fp8_e5m2"),
    _same("int8"),
    _same("q8_0"),
    _same("int4", 16, 64),
    _same("q4_0", 16, 64),
    _pair("kivi4", "kivi4", 16, 128),
    _pair("kivi2", "kivi2", 16, 128),
    _pair("kvquant4", "kvquant4", 1, 0),
    _pair("kvquant3", "kvquant3", 1, 0),
    _pair("kvquant2", "kvquant2", 1, 0),
    _same("turboquant4", 16, 64),
    _same("turboquant3", 16, 64),
    _same("turboquant2", 16, 64),
    *(
        CodecChoice(
            name=f"turboquant{bits}-prod",
            key=f"turboquant{bits}.prod",
            value=f"turboquant{bits}",
            sink_tokens=16,
            recent_tokens=64,
        )
        for bits in (4, 3, 2)
    ),
    _same("turboquant3.5", 16, 64),
    _same("turboquant2.5", 16, 64),
    _same("loom4", 16, 64),
    _same("loom3", 16, 64),
    _same("loom2", 16, 64),
    _pair("kvarn-k4v4", "kvarn4", 16, 64),
    CodecChoice(name="kvarn-k4v2", key="kvarn4.key", value="kvarn2.value", sink_tokens=16, recent_tokens=64),
)

CODEC_CHOICES: Mapping[str, CodecChoice] = {choice.name: choice for choice in _CHOICES}


def parse_codec(text: str) -> CodecChoice:
    """The codec that ``int8`` or ``k=int8,v=int4`` names.

    Raises:
        ConfigError: an unknown name, with the nearest known one; or a malformed pair.
    """
    if "=" not in text:
        return _known(text.strip(), text)
    parts: dict[str, CodecChoice] = {}
    for item in text.split(","):
        plane, _, name = item.partition("=")
        plane = plane.strip()
        if plane not in ("k", "v") or plane in parts:
            raise ConfigError(f"codec {text!r}: write one name, or a pair such as k=int8,v=int4")
        parts[plane] = _known(name.strip(), text)
    if set(parts) != {"k", "v"}:
        missing = "v" if "k" in parts else "k"
        raise ConfigError(f"codec {text!r} names no codec for {missing}; write a pair such as k=int8,v=int4")
    key, value = parts["k"], parts["v"]
    if key.name == value.name:
        return key
    return CodecChoice(
        name=f"k={key.name},v={value.name}",
        key=key.key,
        value=value.value,
        sink_tokens=max(key.sink_tokens, value.sink_tokens),
        recent_tokens=max(key.recent_tokens, value.recent_tokens),
    )


def _known(name: str, text: str) -> CodecChoice:
    if name in CODEC_CHOICES:
        return CODEC_CHOICES[name]
    near = difflib.get_close_matches(name.lower(), list(CODEC_CHOICES), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    where = "" if name == text else f"codec {text!r}: "
    raise ConfigError(f"{where}there is no codec {name!r}{hint} Known: {', '.join(CODEC_CHOICES)}")


def block_bytes(codec: str, dim: int, tokens: int) -> int:
    """Bytes of one plane's block of ``tokens`` tokens under ``codec``, side data included.

    Raises:
        ConfigError: the codec is unknown, or does not fit the plane.
    """
    if codec in CODEC_BLOCK_BYTES:
        return CODEC_BLOCK_BYTES[codec](dim, tokens)
    if codec not in PLANNED_BLOCK_BYTES:
        raise ConfigError(f"there is no plane format {codec!r}")
    return PLANNED_BLOCK_BYTES[codec](dim, tokens)


def is_served(codec: str) -> bool:
    """Whether this version's engine has the plane format ``codec``."""
    return codec in CODEC_BLOCK_BYTES or codec == "raw"


def bits_per_value(codec: str, dim: int, block_size: int) -> float:
    """Average bits per value, side data included, of a plane of ``dim`` in blocks of ``block_size``."""
    return 8 * block_bytes(codec, dim, block_size) / (dim * block_size)
