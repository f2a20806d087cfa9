"""Calibration files: bound to weights, refused when foreign or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvloom.codecs.calibration import Calibration
from kvloom.core.errors import CodecError

from .world import LAYER, calibration


def test_file_round_trip(tmp_path: Path) -> None:
    made = calibration(64)
    made.save(tmp_path / "calibration.safetensors")
    read = Calibration.load(tmp_path / "calibration.safetensors", weights_digest="0" * 64)
    assert read.digest == made.digest and read.about == made.about
    assert all(torch.equal(read.tensors[name], made.tensors[name]) for name in made.tensors)


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    calibration(64).save(tmp_path / "c")
    with pytest.raises(CodecError, match="was calibrated for weights 000000000000"):
        Calibration.load(tmp_path / "c", weights_digest="1" * 64)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(CodecError, match="no calibration file"):
        Calibration.load(path)
    path.write_bytes(b"not a calibration")
    with pytest.raises(CodecError, match="cannot be read"):
        Calibration.load(path)
    calibration(64).save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CodecError, match="damaged"):
        Calibration.load(path)


def test_wrong_content_is_refused() -> None:
    with pytest.raises(CodecError, match="no tensor called"):
        Calibration({"nonsense.0": torch.zeros(1)}, weights_digest="")
    with pytest.raises(CodecError, match="not finite"):
        Calibration({"key_mean.0": torch.tensor([float("nan")])}, weights_digest="")
    made = calibration(64)
    with pytest.raises(CodecError, match="no key_mean of layer 9"):
        made.get("key_mean", 9, (None, 64))
    with pytest.raises(CodecError, match="made for another model"):
        made.get("key_mean", LAYER, (5, 64))
