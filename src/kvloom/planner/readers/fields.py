"""Reading a ``config.json`` strictly: every value checked, every default on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.core.errors import CorruptModelError
from kvloom.planner.errors import UnknownError

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"


class Fields:
    """A configuration with checked access. ``notes`` collects what was not stated in it."""

    def __init__(self, values: Mapping[str, Any], *, origin: str) -> None:
        self.values = values
        self.origin = origin
        self.notes: list[str] = []

    def has(self, name: str) -> bool:
        """Whether ``name`` is given and not null."""
        return self.values.get(name) is not None

    def integer(self, *names: str, default: int | None = None, rule: str | None = None) -> int:
        """The first of ``names`` that is given, a positive whole number.

        ``default`` is what the architecture's published code takes when the field is missing;
        ``rule`` says where that default comes from, and is noted.

        Raises:
            CorruptModelError: missing without a default, or not a positive whole number.
        """
        for name in names:
            if not self.has(name):
                continue
            value = self.values[name]
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise CorruptModelError(
                    f"{self.origin}: {name} is {value!r}; it must be a positive whole number. Correct the field"
                )
            return value
        if default is None:
            also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            kind = self.values.get("model_type", "?")
            raise CorruptModelError(
                f"{self.origin}: {names[0]}{also} is missing; model_type {kind!r} cannot be sized without it. "
                "Use the model's complete config.json"
            )
        if rule is not None:
            self.notes.append(f"{names[0]} is not in the config; {rule}: {default}")
        return default

    def count(self, *names: str, default: int = 0) -> int:
        """Like :meth:`integer`, but zero is allowed."""
        for name in names:
            if self.has(name):
                value = self.values[name]
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise CorruptModelError(f"{self.origin}: {name} is {value!r}; it must be zero or more")
                return value
        return default

    def optional(self, *names: str) -> int | None:
        """The first of ``names`` given as a positive whole number, else None."""
        return self.integer(*names) if any(self.has(name) for name in names) else None

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CorruptModelError(f"{self.origin}: {name} is {value!r}; it must be true or false")
        return value

    def names(self, name: str, length: int) -> list[str] | None:
        """A list of ``length`` names, or None when the field is absent.

        Raises:
            CorruptModelError: not a list of ``length`` strings.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise CorruptModelError(f"{self.origin}: {name} must be a list of names")
        if len(value) != length:
            raise CorruptModelError(f"{self.origin}: {name} has {len(value)} entries for {length} layers")
        return list(value)

    def layer_types(self, length: int, default: list[str]) -> list[str]:
        """``layer_types`` as given, else the architecture's published pattern.

        Raises:
            UnknownError: a kind of layer that the planner does not know.
        """
        kinds = self.names("layer_types", length)
        if kinds is None:
            return default
        unknown = sorted(set(kinds) - {FULL, SLIDING, CHUNKED, LINEAR, "conv", "mamba", "attention"})
        if unknown:
            raise UnknownError(f"{self.origin}: layer type {unknown[0]!r} is unknown; its cache cannot be sized")
        return kinds

    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads.

        Raises:
            CorruptModelError: query heads are no multiple of KV heads.
        """
        query = self.integer("num_attention_heads")
        kv = self.integer(
            "num_key_value_heads", default=query, rule="the architecture then has one KV head per query head"
        )
        if query % kv:
            raise CorruptModelError(f"{self.origin}: {query} query heads are no multiple of {kv} KV heads")
        return query, kv

    def head_dim(self, query_heads: int, default: int | None = None) -> int:
        """``head_dim``; else ``default``; else hidden_size / heads, as the architecture defines it."""
        if self.has("head_dim"):
            return self.integer("head_dim")
        if default is not None and "head_dim" not in self.values:  # an explicit null means hidden / heads
            return self.integer("head_dim", default=default, rule="the architecture's default")
        hidden = self.integer("hidden_size")
        if hidden % query_heads:
            raise CorruptModelError(
                f"{self.origin}: head_dim is missing and hidden_size {hidden} is no multiple of {query_heads} heads"
            )
        return hidden // query_heads
