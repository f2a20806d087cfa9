"""A run that is stopped goes on where it was; the page keeps what people wrote below it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from kvloom.core.errors import RequestError
from kvloom.gate import command
from kvloom.gate.quality import Loss, Setting
from kvloom.gate.record import Record, digest

ABOUT = {"weights": "w", "texts": digest(["a", "b"]), "block_size": 32}


def loss_of(setting: Setting, kl: float = 0.1) -> Loss:
    return Loss(
        setting=setting, sink_tokens=32, recent_tokens=64, bits=4.25, kept_bits=5.0, tokens=1024, kl_mean=kl,
        kl_median=0.05, kl_p99=0.5, top1=0.9, perplexity=25.0, exact_perplexity=24.0,
    )  # fmt: skip


def test_what_was_measured_is_found_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    setting, other = Setting(codec="int8"), Setting(codec="int8", sink_tokens=0, recent_tokens=0)
    Record(path, ABOUT).add(loss_of(setting), 1024, 2, 4)
    again = Record(path, ABOUT)
    assert again.find(setting, 1024, 2, 4) == loss_of(setting)
    assert again.find(other, 1024, 2, 4) is None
    assert again.find(setting, 1024, 1, 4) is None and again.find(setting, 2048, 2, 4) is None
    assert again.find(setting, 1024, 2, 0) is None
    for changed in ({"weights": "v"}, {"texts": digest(["b", "a"])}, {"block_size": 16}):
        assert Record(path, {**ABOUT, **changed}).find(setting, 1024, 2, 4) is None
    assert Record(None, ABOUT).find(setting, 1024, 2, 4) is None


@pytest.mark.parametrize("line", ["no json", "[]", '{"run": {}}', '{"run": {}, "loss": {"setting": {"codec": "x"}}}'])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(line + "\n")
    with pytest.raises(RequestError, match=r"line 1 is not a measured loss.*another file"):
        Record(path, ABOUT)


def test_a_line_that_a_stop_tore_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    setting, other = Setting(codec="int8"), Setting(codec="int4")
    Record(path, ABOUT).add(loss_of(setting), 1024, 2, 4)
    Record(path, ABOUT).add(loss_of(other), 1024, 2, 4)
    path.write_text(path.read_text()[:-20])
    again = Record(path, ABOUT)
    assert again.find(setting, 1024, 2, 4) == loss_of(setting) and again.find(other, 1024, 2, 4) is None
    again.add(loss_of(other), 1024, 2, 4)
    assert Record(path, ABOUT).find(other, 1024, 2, 4) == loss_of(other)


class Stand:
    """``measure`` without a model: it is stopped at int4 once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[str] = []
        monkeypatch.setattr("kvloom.gate.quality.measure", self.measure)
        monkeypatch.setattr("kvloom.models.loader.load_model", lambda config: Loaded())
        monkeypatch.setattr("kvloom.models.calibration.find_calibration", lambda *_: None)
        monkeypatch.setattr(command, "_windows", lambda *_: ([], []))

    def measure(self, config: Any, settings: Any, *rest: Any) -> Any:
        for setting in settings:
            stopped = setting.codec == "int4" and "int4" not in self.measured
            self.measured.append(setting.codec)
            if stopped:
                raise KeyboardInterrupt
            yield loss_of(setting)


class Loaded:
    weights_digest = "w"
    tokenizer_digest = "t"


def rows_of(page: Path) -> list[str]:
    return [line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("| ")][1:]


def test_every_protection_is_measured_on_every_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    stand.measured.append("int4")
    text, output, record = tmp_path / "text.txt", tmp_path / "page.md", tmp_path / "losses.jsonl"
    text.write_text("words")
    command.quality(
        model="m", text=[text], codec=["int8", "int4"], window=["64x1", "32"], needles=0, output=output, record=record
    )
    # default, then int8 with 16 / 64, int4 with none; a heading between the tables
    assert rows_of(output) == ["int8", "int8", "int4", "int4", "codec", "int8", "int8", "int4", "int4"]
    runs = [json.loads(line)["run"] for line in record.read_text().splitlines()]
    settings = [
        {"codec": codec, "sink_tokens": sinks, "recent_tokens": recents}
        for codec, sinks, recents in (("int8", None, None), ("int8", 16, 64), ("int4", None, None), ("int4", 0, 0))
    ]
    assert [run["setting"] for run in runs if run["window"] == 32] == settings
    assert [run["setting"] for run in runs if run["window"] == 64] == settings


def test_a_page_of_others_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Stand(monkeypatch)
    text, output = tmp_path / "text.txt", tmp_path / "page.md"
    text.write_text("words")
    output.write_text("# Mine\n")
    with pytest.raises(typer.Exit):
        command.quality(model="m", text=[text], codec=["int8"], window=["64x1"], needles=0, output=output)
    assert output.read_text() == "# Mine\n"
    output.write_text("# Mine\n" + command.END)

    def refuse(*_: Any) -> Any:
        raise RequestError("the text is too short")

    monkeypatch.setattr(command, "_windows", refuse)
    with pytest.raises(typer.Exit):
        command.quality(model="m", text=[text], codec=["int8"], window=["64x1"], needles=0, output=output)
    assert output.read_text() == "# Mine\n" + command.END


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Stand(monkeypatch).measured
    text, output, record = tmp_path / "text.txt", tmp_path / "page.md", tmp_path / "losses.jsonl"
    text.write_text("words")

    def run() -> None:
        command.quality(
            model="m", text=[text], codec=["int8", "int4", "fp8"], protection=["default"], window=["64x1"], needles=0,
            output=output, record=record,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run()
    assert "| int8 |" in output.read_text() and "| int4 |" not in output.read_text()
    output.write_text(output.read_text() + "\nWhat people make of it.\n")
    run()
    assert measured == ["int8", "int4", "int4", "fp8"]
    page = output.read_text()
    assert rows_of(output) == ["int8", "int4", "fp8"]
    assert page.endswith(command.END + "\nWhat people make of it.\n")
    before = page
    run()  # nothing is left to measure
    assert len(measured) == 4 and output.read_text() == before
    assert [json.loads(line)["loss"]["setting"]["codec"] for line in record.read_text().splitlines()] == [
        "int8", "int4", "fp8",
    ]  # fmt: skip
