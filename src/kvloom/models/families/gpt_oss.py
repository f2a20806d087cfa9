"""gpt-oss: sink logits per query head, every second layer windowed, experts, yarn positions.

The sinks reach our attention as ``s_aux`` and enter the softmax's denominator only; nothing of them
is cached.
"""

from __future__ import annotations

from kvloom.models.families.alternating import Alternating


class GptOss(Alternating):
    """``layer_types`` alternates between sliding and full attention."""
