"""``kvloom models`` and ``kvloom models check``, as a user calls them; docs/models.md against the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.models import check as checking
from kvloom.models.families import FAMILIES
from kvloom.models.families.phimoe import Phimoe
from kvloom.models.families.refused import REFUSED
from kvloom.models.listing import list_types, markdown
from tests.models import configs
from tests.models.tiny import build_tokenizer

DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- kvloom models --markdown -->\n", "<!-- end -->"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["models", *arguments])


def save(directory: Path, model_type: str, **changes: Any) -> str:
    configs.build(model_type, **changes).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return str(directory)


def test_the_list_names_every_type_with_layout_and_versions() -> None:
    result = call("--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert {row["model_type"] for row in document["models"]} == set(FAMILIES)
    assert document["refused"] == dict(REFUSED)
    rows = {row["model_type"]: row for row in document["models"]}
    assert rows["mistral"]["groups"] == [{"layers": 32, "heads": 8, "planes": {"k": 128, "v": 128}, "window": 4096}]
    assert rows["deepseek_v3"]["groups"][0]["planes"] == {"latent": 512, "rope": 64}
    assert all(row["verified_with"] for row in document["models"])


def test_the_list_is_plain_text_in_a_pipe() -> None:
    result = call()
    assert result.exit_code == 0
    assert "gemma2" in result.stdout and "last 4096" in result.stdout
    assert not any(mark in result.stdout for mark in "│┃\x1b")


@pytest.mark.skipif(transformers.__version__ != "5.24.0", reason="default configurations differ between versions")
def test_the_documented_table_is_current() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == markdown(list_types()).strip(), (
        "docs/models.md is behind; put the output of `kvloom models --markdown` between its two comments"
    )


def test_a_model_of_an_unlisted_type_passes_on_evidence(tmp_path: Path) -> None:
    shape = configs.SHAPE | {"num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model("persimmon", **shape)
    assert "persimmon" not in FAMILIES
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    result = call("check", str(tmp_path / "model"), "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert document["passed"] and not document["verified_type"]
    assert {found["name"] for found in document["checks"]} == {
        "ragged batch",
        "chunked prefill",
        "decode in company",
        "prefix hit and preemption",
    }
    assert all(0 < found["error"] <= 1e-4 for found in document["checks"])


def test_windows_are_passed_or_named_as_left_out(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "gemma2")
    document = json.loads(call("check", model, "--json").stdout)
    assert document["passed"] and document["notes"] == []
    most, notes = checking._window_to_pass(_layout("gemma2"), 5, 0.5)
    assert most == 0 and "window of 12 tokens was not passed" in notes[0]


def _layout(model_type: str) -> Any:
    from kvloom.core.layout import group_layers
    from kvloom.models.families import find_family

    return group_layers(find_family(model_type, allow_unverified=False).layers(configs.tiny_config(model_type)))


def test_a_model_that_would_be_served_wrongly_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that forgets the window, with the loader's own check of masks out of the way."""
    model = save(tmp_path / "model", "phimoe")
    monkeypatch.setattr(Phimoe, "windows", lambda self, config, num_layers: [None] * num_layers)
    monkeypatch.setattr("kvloom.models.loader.check_masks", lambda *_: None)
    result = call("check", model)
    assert result.exit_code == 1
    assert "FAILED: logits differ" in result.stdout


def test_what_cannot_be_loaded_exits_2(tmp_path: Path) -> None:
    result = call("check", str(tmp_path / "nowhere"), "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "ModelError"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text"}))
    assert call("check", str(tmp_path)).exit_code == 2
