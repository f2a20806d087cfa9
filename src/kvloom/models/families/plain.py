"""Decoders of equal, fully attending layers: heads, head size and length say it all.

What else sets them apart (norms, biases, gates, parallel blocks, experts, scaled residuals, partial
or interleaved rotary positions, learned positions) happens outside attention, or reaches it as its
scale. GPT-2 and GPT-NeoX have one KV head per query head; their configurations do not say so, and
``key_value_heads`` knows.
"""

from __future__ import annotations

from kvloom.models.families.base import DecoderFamily


class Plain(DecoderFamily):
    """Nothing differs from the plain decoder."""
