"""What ``kvloom models`` shows: each verified type, what it stores, and with what it was checked.

Layouts are those of transformers' default configuration of a type, which is a published model's or
near one; a checkpoint's own configuration decides what is served.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import KVLayout, group_layers
from kvloom.models.families import FAMILIES, find_family
from kvloom.models.families.refused import REFUSED

CHECKED = (
    "ragged batch",
    "chunked prefill",
    "decode past every window",
    "prefix hit",
    "preemption",
    "fork",
    "cache off",
    "bytes per token",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers that are kept alike; ``window`` None: all tokens."""

    layers: int
    heads: int
    planes: dict[str, int]
    window: int | None

    def __str__(self) -> str:
        planes = " + ".join(f"{name} {dim}" for name, dim in self.planes.items())
        span = "all tokens" if self.window is None else f"last {self.window}"
        return f"{self.layers} × {self.heads} × ({planes}), {span}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model type. ``groups`` is empty where the installed transformers does not know it."""

    model_type: str
    groups: tuple[Group, ...]
    shared_layers: int
    values_per_token: int
    verified_with: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def layout(self) -> str:
        """Groups as layers × KV heads × planes; layers that read another's planes are named apart."""
        if not self.groups:
            return "not in the installed transformers"
        shared = f"; {self.shared_layers} layers store nothing" if self.shared_layers else ""
        return "; ".join(str(group) for group in self.groups) + shared


def list_types() -> list[Row]:
    """A row for each type of ``FAMILIES``."""
    return [_row(model_type) for model_type in sorted(FAMILIES)]


def _row(model_type: str) -> Row:
    family = find_family(model_type, allow_unverified=False)
    layout = _default_layout(model_type)
    groups = () if layout is None else layout.groups
    return Row(
        model_type=model_type,
        groups=tuple(
            Group(
                layers=group.num_layers,
                heads=group.num_heads,
                planes={plane.name: plane.dim for plane in group.planes},
                window=group.window,
            )
            for group in groups
        ),
        shared_layers=0 if layout is None else len(layout.shared),
        values_per_token=sum(group.elements_per_token for group in groups),
        verified_with=family.verified_with,
    )


def _default_layout(model_type: str) -> KVLayout | None:
    from transformers import AutoConfig

    family = find_family(model_type, allow_unverified=False)
    try:
        config = AutoConfig.for_model(model_type)
        return group_layers(family.layers(family.text_config(config)))
    except (ValueError, UnsupportedModelError):  # an older or newer transformers than the type
        return None


def markdown(rows: list[Row]) -> str:
    """The tables of ``docs/models.md``."""
    lines = [
        "| model type | kept per token: layers × KV heads × planes | values per token | verified with transformers |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{row.model_type}` | {row.layout()} | {row.values_per_token:,} | {', '.join(row.verified_with)} |"
        for row in rows
    ]
    lines += ["", "Refused, whatever the flags:", "", "| model type | why |", "|---|---|"]
    lines += [f"| `{model_type}` | {reason} |" for model_type, reason in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"
