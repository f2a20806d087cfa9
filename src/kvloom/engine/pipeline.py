"""From a pipeline's configuration to what is encoded: names resolved, defaults filled in, the impossible refused."""

from __future__ import annotations

from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES, is_served, parse_codec
from kvloom.core.config import PipelineConfig
from kvloom.core.errors import ConfigError
from kvloom.core.layout import KVLayout
from kvloom.core.sizes import MemoryPlan
from kvloom.core.storage import Encoding, is_encoded, protected_homes, raw_tokens, split_layers


def resolve_encoding(pipeline: PipelineConfig, layout: KVLayout, dtype: str) -> Encoding | None:
    """What ``pipeline`` encodes of a model with ``layout`` whose raw values are ``dtype``; None: nothing.

    Raises:
        ConfigError: an unknown codec or one that this version does not serve, a raw format that is
            not the model's, protected layers that do not exist, or a codec that would encode nothing.
    """
    choice = parse_codec(pipeline.codec)
    if choice.name in RAW_DTYPES and choice.name != dtype:
        raise ConfigError(
            f"codec {choice.name!r} keeps raw values as {choice.name}, but the model computes in {dtype}; use codec "
            f"raw, or --dtype {choice.name}"
        )
    if choice.name == "raw" or choice.name in RAW_DTYPES:
        return None
    for name in (choice.key, choice.value):
        if not is_served(name):
            served = ", ".join(c.name for c in CODEC_CHOICES.values() if is_served(c.key) and is_served(c.value))
            raise ConfigError(
                f"codec {choice.name!r} is planned: this version sizes it but does not serve it; served: {served}"
            )
    layers = pipeline.protected_layers
    split_layers(layout, layers)  # refuses layers that the model lacks
    encoding = Encoding(
        name=choice.name,
        key="raw" if choice.key in RAW_DTYPES else choice.key,
        value="raw" if choice.value in RAW_DTYPES else choice.value,
        sink_tokens=choice.sink_tokens if pipeline.sink_tokens is None else pipeline.sink_tokens,
        recent_tokens=choice.recent_tokens if pipeline.recent_tokens is None else pipeline.recent_tokens,
        layers=protected_homes(layout, layers),
    )
    if not any(is_encoded(group, encoding) for group in split_layers(layout, layers).groups):
        why = "every full-attention layer is protected" if layers else "all its layers have windows, which stay raw"
        raise ConfigError(f"codec {choice.name!r} would encode nothing of this model: {why}; use codec raw")
    return encoding


def describe(encoding: Encoding | None, block_size: int, guarded: tuple[int, ...] = ()) -> tuple[str, ...]:
    """What of the cache is inexact, in words; ``guarded`` are the layers that the codec guard keeps raw."""
    if encoding is None:
        return ()
    sinks = encoding.sink_blocks(block_size) * block_size
    recents = encoding.recent_blocks(block_size) * block_size
    kept = raw_tokens(sinks, recents)
    by_guard = f" ({', '.join(map(str, guarded))} by the codec guard)" if guarded else ""
    kept += [f"layers {', '.join(map(str, encoding.layers))}{by_guard}"] * bool(encoding.layers)
    return (f"codec {encoding.name}; raw: {'; '.join(kept)}",)


def bits_per_value(plan: MemoryPlan) -> float:
    """Average bits of an encoded value, side data included; of a raw one where nothing is encoded."""
    encoded = [pair for pair in zip(plan.storage, plan.spans, strict=True) if pair[0].encoded]
    chosen = encoded or list(zip(plan.storage, plan.spans, strict=True))
    bits = sum(8 * plane.num_bytes * span.num_layers * span.num_heads for _, span in chosen for plane in span.planes)
    return bits / sum(item.group.elements_per_token * span.block_size for item, span in chosen)
