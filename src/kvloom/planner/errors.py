"""The planner's own errors."""

from __future__ import annotations

from kvloom.core.errors import KvloomError


class UnknownError(KvloomError):
    """The planner does not know, and says so instead of guessing."""

    exit_status = 3
