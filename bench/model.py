"""The model to measure: where it is, and what a pass over it costs (dense models)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from bench.bound import Layers, Model
from kvloom.core.layout import KVLayout, group_layers
from kvloom.models.checkpoint import read_checkpoint
from kvloom.models.families import find_family
from kvloom.models.sources import resolve_model


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model's directory, costs, and limits."""

    name: str
    directory: Path
    cost: Model
    vocab_size: int
    max_model_len: int


def find_model(model: str) -> Subject:
    """Find ``model`` (converted or downloaded if need be) and count its weights and layers."""
    from transformers import AutoConfig

    source = resolve_model(model)
    checkpoint = read_checkpoint(source.directory)
    family = find_family(checkpoint.model_type, allow_unverified=False)
    config = family.text_config(AutoConfig.from_pretrained(source.directory, local_files_only=True))
    layout = group_layers(family.layers(config))
    total, embedding, head = _count(source.directory)
    return Subject(
        name=source.name,
        directory=source.directory,
        # A tied embedding is the head; one of its own is only looked up, row by row.
        cost=Model(
            body=total - embedding - head, head=head or embedding, layers=_layers(layout, family.query_heads(config))
        ),
        vocab_size=int(config.vocab_size),
        max_model_len=family.max_length(config),
    )


def _count(directory: Path) -> tuple[int, int, int]:
    """Parameters in all, of the input embedding, and of a head of its own (0: tied)."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            sizes |= {name: prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    embedding = sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
    head = sum(size for name, size in sizes.items() if name == "lm_head.weight")
    return sum(sizes.values()), embedding, head


def _layers(layout: KVLayout, query_heads: list[int]) -> tuple[Layers, ...]:
    operations = [0] * len(layout.groups)
    for (group, _), heads in zip(layout.homes, query_heads, strict=True):
        dims = {plane.name: plane.dim for plane in layout.groups[group].planes}
        # Multiply and add, for the logit and for the output; a latent serves both.
        width = sum(dims.values()) + dims.get("latent", 0)
        operations[group] += 2 * heads * width
    return tuple(
        Layers(elements=group.elements_per_token, operations=count, window=group.window)
        for group, count in zip(layout.groups, operations, strict=True)
    )
