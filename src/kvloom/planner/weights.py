"""Bytes besides the cache: weights, activations, and the runtime's own. Estimates say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from kvloom.core.errors import ConfigError
from kvloom.core.sizes import format_bytes, parse_bytes
from kvloom.planner.architecture import Architecture
from kvloom.planner.sources import GGUF_ORIGIN, ModelSource

# What a runtime keeps for itself per device: context, kernels, allocator slack. An estimate.
GPU_OVERHEAD_BYTES = 1 * 2**30
CPU_OVERHEAD_BYTES = 512 * 2**20

# Bytes per weight, group scales included where the format has them.
WEIGHT_DTYPES: dict[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 2.0 / 128,  # groups of 128 with one fp16 scale
    "mxfp4": 0.5 + 1.0 / 32,  # groups of 32 with one 8-bit scale
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Bytes of all weights, where the number comes from, and whether it is an estimate."""

    num_bytes: int
    origin: str
    estimate: bool
    bytes_per_parameter: float


def weight_bytes(
    source: ModelSource, architecture: Architecture, *, dtype: str | None, override: str | None
) -> Weights | None:
    """The weights' bytes: as told, else from headers, else counted from the config. None: unknown.

    Raises:
        ConfigError: an unknown dtype or an unreadable size.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"--weight-dtype is {dtype!r}; it must be one of {', '.join(WEIGHT_DTYPES)}")
    count = architecture.parameters.total if architecture.parameters else source.parameters
    if override is not None:
        size = parse_bytes(override)
        return Weights(
            num_bytes=size, origin="--weights", estimate=False, bytes_per_parameter=size / count if count else 2.0
        )
    if source.weight_bytes is not None and dtype is None:
        return Weights(
            num_bytes=source.weight_bytes,
            origin=source.weight_origin,
            estimate=False,
            bytes_per_parameter=source.weight_bytes / count if count else 2.0,
        )
    if count is None:
        return None
    stated = _quantised(source)
    chosen = dtype or stated or "bfloat16"
    per = WEIGHT_DTYPES[chosen]
    why = f"{chosen}, as the config's quantization_config says" if stated and dtype is None else chosen
    return Weights(
        num_bytes=ceil(count * per),
        origin=f"{count:,} parameters counted from the configuration × {per:g} bytes ({why})",
        estimate=chosen not in ("float32", "bfloat16", "float16"),  # some tensors usually stay at 16 bits
        bytes_per_parameter=per,
    )


def packed_warning(source: ModelSource, weights: Weights) -> str | None:
    """Where a GGUF's packed weights are counted: what kvloom, which serves them in bfloat16, holds in their place."""
    per = WEIGHT_DTYPES["bfloat16"]
    if weights.origin != GGUF_ORIGIN or source.parameters is None or weights.bytes_per_parameter >= per:
        return None
    held = ceil(source.parameters * per)
    return (
        f"weights are counted as the GGUF packs them, {format_bytes(weights.num_bytes)}; kvloom serves them in "
        f"bfloat16, {format_bytes(held)}: --weight-dtype bfloat16 counts those"
    )


def _quantised(source: ModelSource) -> str | None:
    """The weight dtype that a config's ``quantization_config`` implies, where it is one we know."""
    stated = source.config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return None
    method, bits = str(stated.get("quant_method")), stated.get("bits")
    if method in ("fp8", "mxfp4"):
        return method
    if method in ("awq", "gptq") and bits in (4, 8):
        return f"int{bits}"
    return None


def activation_bytes(architecture: Architecture, *, chunk: int, batch: int, tp: int) -> int:
    """Peak activations of one step, an *estimate*: hidden and MLP rows of a chunk, and the logits.

    Four hidden-sized rows and two MLP-sized rows per token at two bytes, and float32 logits for
    each sequence; MLP rows and logits are divided among tensor-parallel ranks.
    """
    rows = max(chunk, batch)
    width = 4 * architecture.hidden_size + 2 * ceil(architecture.intermediate_size / tp)
    return 2 * rows * width + 4 * batch * ceil(architecture.vocab_size / tp)
