"""What the architecture itself saves: the same model with other heads.

A thought experiment on shapes: weights and quality of such a model are not claimed.
"""

from __future__ import annotations

from dataclasses import replace

from kvloom.core.errors import ConfigError
from kvloom.core.layout import LayerSpec
from kvloom.planner.architecture import Architecture


def what_if(architecture: Architecture, text: str) -> Architecture:
    """``architecture`` with ``mha``, ``gqa:N``, ``mqa`` or ``mla:RANK`` caches.

    Raises:
        ConfigError: unknown form, or heads that do not divide.
    """
    form, _, argument = text.partition(":")
    heads = architecture.num_query_heads
    if form in ("mha", "mqa") and not argument:
        return _with_heads(architecture, heads if form == "mha" else 1, text)
    if form in ("gqa", "mla") and argument.isdigit() and int(argument) > 0:
        number = int(argument)
        if form == "mla":
            rope = _rope_dim(architecture)
            return replace(
                architecture,
                kind=text,
                layers=tuple(
                    replace(
                        LayerSpec.mla(latent_dim=number, rope_dim=rope),
                        window=layer.window,
                        shares_with=layer.shares_with,
                    )
                    for layer in architecture.layers
                ),
            )
        if number > heads or heads % number:
            allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(f"--what-if {text}: {heads} query heads cannot share {number} KV heads; use {allowed}")
        return _with_heads(architecture, number, text)
    raise ConfigError(f"--what-if is {text!r}; it must be mha, gqa:N, mqa or mla:RANK")


def _rope_dim(architecture: Architecture) -> int:
    """The model's own rope width if it is MLA, else DeepSeek's 64."""
    for layer in architecture.layers:
        for plane in layer.planes:
            if plane.name == "rope":
                return plane.dim
    return 64


def _with_heads(architecture: Architecture, num_heads: int, text: str) -> Architecture:
    def convert(layer: LayerSpec) -> LayerSpec:
        shape = architecture.expanded if architecture.expanded is not None else layer
        planes = tuple(plane for plane in shape.planes if plane.name in ("k", "v"))
        return replace(layer, planes=planes, num_heads=num_heads)

    return replace(architecture, kind=text, layers=tuple(convert(layer) for layer in architecture.layers))
