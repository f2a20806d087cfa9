"""Losses that were measured, kept in a file of JSON lines: a long run that is stopped goes on where it was.

A line says what was measured and what came out. A loss is taken for measured if all that it depends on is equal:
weights, tokenizer, calibration, texts, windows, setting, block size and needles. Kernels only matter by their rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvloom.core.errors import RequestError
from kvloom.gate.quality import Loss, Setting


class Record:
    """The losses in ``path``, or none without one.

    Args:
        about: what all measurements of this run have in common, as JSON values.

    Raises:
        RequestError: the file is not such a record.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = dict(about)
        self._losses: dict[str, Loss] = {}
        if path is None or not path.exists():
            return
        whole, newline, torn = path.read_text(encoding="utf-8").rpartition("\n")
        if torn and newline:  # a run was stopped while it wrote
            path.write_text(whole + newline, encoding="utf-8")
        for number, line in enumerate((whole if newline else torn).splitlines(), start=1):
            try:
                entry = json.loads(line)
                loss = entry["loss"]
                self._losses[_key(entry["run"])] = Loss(**{**loss, "setting": Setting(**loss["setting"])})
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(
                    f"--record {path}: line {number} is not a measured loss ({error}); name another file"
                ) from error

    def find(self, setting: Setting, length: int, count: int, needles: int) -> Loss | None:
        """What was measured of ``setting``, if it was."""
        return self._losses.get(_key(self._run(setting, length, count, needles)))

    def add(self, loss: Loss, length: int, count: int, needles: int) -> None:
        """Write it down at once."""
        run = self._run(loss.setting, length, count, needles)
        self._losses[_key(run)] = loss
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": run, "loss": asdict(loss)}, sort_keys=True) + "\n")

    def _run(self, setting: Setting, length: int, count: int, needles: int) -> dict[str, Any]:
        return {**self._about, "setting": asdict(setting), "window": length, "count": count, "needles": needles}


def digest(texts: Sequence[str]) -> str:
    """Tells texts apart, in their order."""
    joined = hashlib.sha256()
    for text in texts:
        joined.update(hashlib.sha256(text.encode()).digest())
    return joined.hexdigest()[:16]


def _key(run: Mapping[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)
