"""Codecs: how a plane's block becomes bytes and is read back. Numerics only; docs/codecs.md has the layouts.

A new codec is one file, one line in ``CODECS`` and its bytes in ``core/codec_sizes``; the conformance
tests walk this table.
"""

from __future__ import annotations

import importlib

from kvloom.codecs.base import PLANES, CodecSpec, PlaneCodec
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.rope import RopeTable
from kvloom.core.codec_sizes import block_bytes
from kvloom.core.errors import CodecError
from kvloom.core.sizes import check_block_size

# plane format -> module:function(CodecSpec) that makes the codec; imported on use.
CODECS = {
    "fp8": "kvloom.codecs.fp8:make",
    "fp8_e5m2": "kvloom.codecs.fp8:make",
    "int8": "kvloom.codecs.int8:make",
    "int4": "kvloom.codecs.int4:make",
    "q8_0": "kvloom.codecs.ggml:make",
    "q4_0": "kvloom.codecs.ggml:make",
    "kivi4.key": "kvloom.codecs.kivi:make",
    "kivi4.value": "kvloom.codecs.kivi:make",
    "kivi2.key": "kvloom.codecs.kivi:make",
    "kivi2.value": "kvloom.codecs.kivi:make",
    "kvquant4.key": "kvloom.codecs.kvquant:make",
    "kvquant4.value": "kvloom.codecs.kvquant:make",
    "kvquant3.key": "kvloom.codecs.kvquant:make",
    "kvquant3.value": "kvloom.codecs.kvquant:make",
    "kvquant2.key": "kvloom.codecs.kvquant:make",
    "kvquant2.value": "kvloom.codecs.kvquant:make",
    "kvarn4.key": "kvloom.codecs.kvarn:make",
    "kvarn4.value": "kvloom.codecs.kvarn:make",
    "kvarn2.value": "kvloom.codecs.kvarn:make",
    "turboquant4": "kvloom.codecs.turboquant:make",
    "turboquant3": "kvloom.codecs.turboquant:make",
    "turboquant2": "kvloom.codecs.turboquant:make",
    "turboquant3.5": "kvloom.codecs.turboquant_split:make",
    "turboquant2.5": "kvloom.codecs.turboquant_split:make",
    "turboquant4.prod": "kvloom.codecs.turboquant_prod:make",
    "turboquant3.prod": "kvloom.codecs.turboquant_prod:make",
    "turboquant2.prod": "kvloom.codecs.turboquant_prod:make",
    "loom4": "kvloom.codecs.loom:make",
    "loom3": "kvloom.codecs.loom:make",
    "loom2": "kvloom.codecs.loom:make",
}


def make_codec(
    name: str,
    plane: str,
    dim: int,
    block_size: int,
    calibration: Calibration | None = None,
    rope: RopeTable | None = None,
) -> PlaneCodec:
    """The codec of plane format ``name`` for a plane of ``dim`` channels in blocks of ``block_size`` tokens.

    Raises:
        CodecError: an unknown name, a plane it is not made for, a width that it cannot code, or a
            calibration or RoPE table that it lacks.
        ConfigError: an impossible block size.
    """
    if name not in CODECS:
        raise CodecError(f"there is no codec for the plane format {name!r}; known: {', '.join(CODECS)}")
    if plane not in PLANES:
        raise CodecError(f"there is no plane {plane!r}; codecs encode {', '.join(PLANES)}")
    if dim <= 0:
        raise CodecError(f"plane {plane!r} has width {dim}; it must be positive")
    check_block_size(block_size)
    if (name.endswith(".key") and plane == "v") or (name.endswith(".value") and plane != "v"):
        raise CodecError(f"codec {name} is not made for the plane {plane!r}; name the format of that plane")
    module, function = CODECS[name].split(":")
    codec: PlaneCodec = getattr(importlib.import_module(module), function)(
        CodecSpec(name=name, plane=plane, dim=dim, block_size=block_size, calibration=calibration, rope=rope)
    )
    assert codec.num_bytes == block_bytes(name, dim, block_size), (name, dim, block_size)
    return codec
