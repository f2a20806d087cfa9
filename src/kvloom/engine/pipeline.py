"""From a pipeline's configuration to what is encoded: names resolved, defaults filled in, the impossible refused."""

from __future__ import annotations

from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES, is_served, parse_codec
from kvloom.core.config import PipelineConfig
from kvloom.core.errors import ConfigError
from kvloom.core.layout import KVLayout
from kvloom.core.storage import Encoding, is_encoded, protected_homes, split_layers


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
