"""Digests follow the content of weights, configuration and tokenizer, not their names or times."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvloom.models import digest
from kvloom.models.checkpoint import read_checkpoint
from kvloom.models.digest import tokenizer_digest, weights_digest
from tests.models import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "model", tiny.llama_config())


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def digests(directory: Path, cache: Path) -> tuple[str, str]:
    checkpoint = read_checkpoint(directory)
    return weights_digest(checkpoint, cache), tokenizer_digest(checkpoint)


def test_a_copy_elsewhere_is_the_same_model(saved: Path, directory: Path, tmp_path: Path) -> None:
    assert digests(saved, tmp_path / "one") == digests(directory, tmp_path / "two")


def test_one_changed_byte_under_the_same_name_size_and_time(directory: Path, tmp_path: Path) -> None:
    before = digests(directory, tmp_path / "cache")
    path = directory / "model.safetensors"
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = digests(directory, tmp_path / "cache")
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_configuration_counts_but_not_who_wrote_it(directory: Path, tmp_path: Path) -> None:
    before = digests(directory, tmp_path / "cache")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert digests(directory, tmp_path / "cache") == before
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert digests(directory, tmp_path / "cache")[0] != before[0]


def test_the_tokenizer_counts_but_not_the_chat_template(directory: Path, tmp_path: Path) -> None:
    before = digests(directory, tmp_path / "cache")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert digests(directory, tmp_path / "cache") == before
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text.replace("<unk>", "<huh>"))
    after = digests(directory, tmp_path / "cache")
    assert after[0] == before[0] and after[1] != before[1]


def test_a_file_is_read_once(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(directory, tmp_path / "cache")
    monkeypatch.setattr(digest, "_CHUNK_BYTES", None)  # reading again would fail
    assert digests(directory, tmp_path / "cache") == before
