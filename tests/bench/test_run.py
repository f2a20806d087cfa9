"""The command: its arguments, what engines are told, and a whole run with a missing peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.bound import Layers, Model
from bench.cells import parse_cells
from bench.model import Subject
from bench.options import load_options, new_tokens
from bench.run import better, parse

SUBJECT = Subject(
    name="a model",
    directory=Path("somewhere"),
    cost=Model(body=1, head=1, layers=(Layers(elements=100, operations=1),)),
    vocab_size=1000,
    max_model_len=8192,
)


def test_engines_are_told_no_more_than_the_model_holds() -> None:
    arguments = parse(["--steps", "64"])
    cells = [cell.within(8192, new_tokens(arguments, cell)) for cell in parse_cells("all")]
    options = load_options(arguments, SUBJECT, cells)
    assert options["max_model_len"] == 8192
    assert options["max_sequences"] == 64
    assert options["cache_bytes"] >= 8 * 8192 * 100 * 4
    assert options["loads"] is None  # with served cells among them


def test_engines_are_told_every_cell_that_they_are_to_hold() -> None:
    arguments = parse(["--steps", "64", "--cells", "codecs"])
    cells = [cell.within(8192, new_tokens(arguments, cell)) for cell in arguments.cells]
    options = load_options(arguments, SUBJECT, cells)
    assert options["loads"] == [(8, 4096 + 64 + 1 + 8), (1, 8192), (8, 4096 + 1)]


def test_one_word_asks_for_the_table_of_codecs() -> None:
    plain = parse(["--engines", "codecs"]).engines
    assert plain[:2] == ["ours", "ours@fp8"] and "ours@kivi2" in plain
    assert not any(name.startswith("llama") for name in plain)
    assert parse(["--engines", "codecs", "--llama-bin", "somewhere"]).engines == [
        *plain, "llama", "llama@q8_0", "llama@q4_0",
    ]  # fmt: skip


def test_the_default_formats_are_those_of_the_plain_names() -> None:
    argv = ["--set", "codec=int8", "--llama-cache-type", "q8_0", "--engines", "ours,ours@raw,ours@int8,llama@q8_0"]
    assert parse(argv).engines == ["ours", "ours@raw", "llama"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--cells", "8by5"],
        ["--engines", "ours,gpt"],
        ["--engines", "ours@int7"],
        ["--engines", "ours", "--set", "codec=int7"],
        ["--engines", "llama@q3_0"],
        ["--set", "dtype"],
    ],
)
def test_bad_arguments_are_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        parse(argv)
    assert status.value.code == 2
    assert "error" in capsys.readouterr().err


def test_the_better_measurement_counts() -> None:
    start = {"processor": "p", "bandwidth_gb_s": 20.0, "peak_gflop_s": {"float32": 100.0, "bfloat16": 9.0}}
    end = {"processor": "p", "bandwidth_gb_s": 24.0, "peak_gflop_s": {"float32": 90.0, "bfloat16": 9.5}}
    machine = better(start, end)
    assert machine["bandwidth_gb_s"] == 24.0
    assert machine["peak_gflop_s"] == {"float32": 100.0, "bfloat16": 9.5}
    assert machine["start_and_end"]["bandwidth_gb_s"] == [20.0, 24.0]


@pytest.mark.real_model
def test_a_run_names_the_peers_that_are_missing() -> None:
    command = [
        sys.executable,
        "-m",
        "bench.run",
        "--quick",
        "--json",
        "--cells",
        "1x60",
        "--engines",
        "ours,ours@int8,vllm,llama@q8_0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    (cell,) = document["cells"]
    assert cell["engines"]["ours"]["n"] == 1
    assert cell["engines"]["ours"]["reached"] > 0
    assert "--vllm-python" in cell["engines"]["vllm"]["not_run"]
    assert "--llama-bin" in cell["engines"]["llama@q8_0"]["not_run"]
    plain, coded = (document["engines"][name]["engine"] for name in ("ours", "ours@int8"))
    assert plain["actual_bytes_per_token"] > coded["actual_bytes_per_token"] > 0
    assert (plain["codec"], coded["codec"]) == ("raw", "int8")
    assert cell["engines"]["ours@int8"]["memory"]["used_peak_bytes"] > 0
