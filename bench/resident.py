"""Resident memory of a process, bytes. Standard library only; Linux, elsewhere there are no figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class PeakResident:
    """The most that this process has resident from now on.

    By the kernel's own mark (VmHWM) where a process may lower its own, else by what ``look`` saw (VmRSS).
    """

    def __init__(self) -> None:
        self._before = _field("VmRSS")
        self._seen = self._before or 0
        self._marked = _reset()

    def look(self) -> None:
        """To be called where the peak may be; costs nothing where the kernel watches."""
        if not self._marked:
            self._seen = max(self._seen, _field("VmRSS") or 0)

    def figures(self) -> dict[str, Any]:
        """``rss_before_bytes``, ``rss_peak_bytes`` and ``rss_by``, the field that the peak was read from."""
        self.look()
        peak = _field("VmHWM") if self._marked else self._seen
        if self._before is None or not peak:
            return {}
        return {
            "rss_before_bytes": self._before,
            "rss_peak_bytes": peak,
            "rss_by": "VmHWM" if self._marked else "VmRSS",
        }


def _reset() -> bool:
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
