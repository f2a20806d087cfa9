"""Token counts as people write them: ``8192``, ``32k`` (32,000), ``32K`` (32,768), ``1M`` (1,048,576)."""

from __future__ import annotations

import re

from kvloom.core.errors import ConfigError

# vLLM's convention: small letters are decimal, capitals binary.
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


def parse_tokens(text: str, *, flag: str) -> int:
    """The number of tokens that ``text`` means. ``flag`` names the option in messages.

    Raises:
        ConfigError: not a positive whole number of tokens.
    """
    match = re.fullmatch(r"\s*([+-]?[0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2) not in _UNITS:
        raise ConfigError(f"{flag} is {text!r}; write a number of tokens such as 8192, 32k (32,000) or 32K (32,768)")
    value = float(match.group(1).replace(",", "").replace("_", "")) * _UNITS[match.group(2)]
    if value != int(value):
        raise ConfigError(f"{flag} is {text!r}, which is {value} tokens; it must be a whole number")
    if value < 1:
        raise ConfigError(f"{flag} is {text!r}; it must be at least 1 token")
    if value > 2**40:
        raise ConfigError(f"{flag} is {text!r}, which is {int(value):,} tokens; the planner's limit is {2**40:,}")
    return int(value)


def echo_tokens(text: str, value: int) -> str | None:
    """What a written unit meant, for the list of assumptions; None for a plain number."""
    unit = text.strip()[-1:]
    if unit not in ("k", "K", "m", "M"):
        return None
    return f"{text.strip()} = {value:,} tokens (k = 1,000, K = 1,024, m = 1,000,000, M = 1,048,576)"
