"""Llama 2 and 3, SmolLM2 and others of model type ``llama``: GQA or MHA, rotary positions."""

from __future__ import annotations

from kvloom.models.families.base import DecoderFamily


class Llama(DecoderFamily):
    """Nothing differs from the plain decoder."""
