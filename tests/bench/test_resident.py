"""The peak of a process's resident memory, by the kernel's mark and without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import resident
from bench.resident import PeakResident

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TAKEN = 64 << 20


def test_what_was_given_back_before_does_not_count() -> None:
    taken = bytearray(TAKEN)
    del taken
    peak = PeakResident()
    figures = peak.figures()
    if figures["rss_by"] == "VmHWM":
        assert figures["rss_peak_bytes"] < figures["rss_before_bytes"] + TAKEN / 2


def test_the_peak_is_found_where_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "CLEAR", tmp_path / "not" / "there")
    peak = PeakResident()
    taken = bytearray(TAKEN)
    peak.look()
    del taken
    figures = peak.figures()
    assert figures["rss_by"] == "VmRSS"
    assert figures["rss_peak_bytes"] > figures["rss_before_bytes"] + TAKEN / 2


def test_without_proc_there_are_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "CLEAR", tmp_path / "not" / "there")
    monkeypatch.setattr(resident, "STATUS", tmp_path / "nor this")
    assert PeakResident().figures() == {}
