"""The command line: keys, exit statuses, exact messages, what goes where."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvloom.planner.command import plan

KEYS = "model architecture tokens batch bytes_per_token fixed_bytes bytes_per_sequence bytes_total groups"
KEYS += " weights_bytes per_device fit choices assumptions warnings"

app = typer.Typer()
app.command("plan")(plan)
runner = CliRunner()


def run(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments))


def document(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def message(*arguments: str, status: int = 2) -> str:
    result = run(*arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    return str(result.stderr)


def test_fixed_keys_and_numbers() -> None:
    found = document("llama-3-70b", "--context", "8192", "--batch", "32", "--tp", "8")
    assert set(KEYS.split()) <= set(found)
    assert found["bytes_per_token"] == 327_680
    assert found["bytes_per_sequence"] == 2_684_354_560
    assert found["bytes_total"] == 85_899_345_920
    assert found["weights_bytes"] == 2 * 70_553_706_496
    assert found["per_device"]["cache_bytes"] == 85_899_345_920 // 8
    assert found["accountings"]["kvloom"]["bytes_total"] == 85_899_345_920
    assert found["choices"] == []


def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    result = run("smollm2-135m", "--json", "--html", str(tmp_path / "page.html"))
    json.loads(result.stdout)
    assert "wrote" in result.stderr


def test_plain_text_in_a_pipe() -> None:
    text = run("gemma-3-27b", "--context", "64K").stdout
    assert "\x1b" not in text
    assert "64K = 65,536 tokens" in text
    assert "bytes = 436,207,616 + 81,920 × context" in text
    assert "16 KV heads are counted, not 32 query heads" in text


def test_exit_status_follows_the_named_hardware() -> None:
    assert run("llama-3-70b", "--device", "h200:8", "--context", "8192").exit_code == 0
    assert run("llama-3-70b", "--device", "t4").exit_code == 1
    assert run("llama-3-70b").exit_code == 0  # sizes only: nothing to fail
    assert document("llama-3-70b", "--memory", "24GiB", status=1)["fit"]["fits"] is False


def test_unknown_weights_leave_the_fit_unknown() -> None:
    found = document("gemma-3n-e4b", "--device", "h100", status=3)
    assert found["fit"]["fits"] is None
    assert found["bytes_per_sequence"] > 0
    assert document("gemma-3n-e4b", "--device", "h100", "--weights", "16GB")["fit"]["fits"] is True


def test_unknown_architecture(config_file: Callable[..., Path]) -> None:
    path = config_file(model_type="llamma")
    said = message(str(path), status=3)
    assert "architecture 'llamma' is unknown" in said
    assert "nearest known one is 'llama'" in said
    failed = json.loads(run(str(path), "--json").stdout)["error"]
    assert failed["kind"] == "unknown"
    assert failed["exit_status"] == 3
    assert "no model_type" in message(str(config_file(model_type=None)), status=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--context", "-1"), "--context is '-1'; it must be at least 1 token"),
        (("--context", "0"), "--context is '0'; it must be at least 1 token"),
        (("--context", "32q"), "--context is '32q'; write a number of tokens such as 8192, 32k (32,000) or 32K"),
        (("--context", "1.5"), "--context is '1.5', which is 1.5 tokens; it must be a whole number"),
        (("--batch", "0"), "--batch is 0; it must be at least 1 sequence"),
        (("--batch", "-3"), "--batch is -3; it must be at least 1 sequence"),
        (("--codec", "int88"), "there is no codec 'int88'; did you mean 'int8'?"),
        (("--dtype", "bf16"), "--dtype is 'bf16'; it must be one of bfloat16, float16, float32"),
        (("--accounting", "sglang"), "--accounting is 'sglang'; it must be one of ideal, kvloom, vllm, llama.cpp"),
        (("--block-size", "20"), "block_size is 20; it must be one of 8, 16, 32, 64, 128, 256"),
        (("--tp", "3"), "tp 3 does not divide the model's 32 query heads"),
        (("--tp", "0"), "tp is 0; it must be at least 1"),
        (("--pp", "99"), "pp 99 is more than the model's 32 layers"),
        (("--device", "h20"), "'h20' is unknown; did you mean 'h200'?"),
        (("--device", "h200:0"), "after the colon stands a number of devices, at least 1"),
        (("--device", "h100", "--tp", "2"), "tp 2 × pp 1 × dp 1 = 2 devices, but there is 1"),
        (("--memory", "24Gigs"), "cannot read '24Gigs' as a size"),
        (("--what-if", "gqa:5"), "32 query heads cannot share 5 KV heads"),
        (("--what-if", "nope"), "it must be mha, gqa:N, mqa or mla:RANK"),
        (("--situation", "long"), "did you mean 'long-context'?"),
        (("--utilisation", "1.2"), "--utilisation is 1.2; it must be above 0 and at most 1"),
        (("--protect-layers", "0,99"), "the model has layers 0 to 31"),
        (("--protect-layers", "a"), "write layer numbers such as 0,27"),
        (("--tier", "host"), "write host:SIZE"),
        (("--input-tokens", "100"), "--output-tokens is missing; a workload needs both lengths"),
        (("--shared", "0.5"), "--shared needs --input-tokens and --output-tokens"),
        (("--price-per-hour", "0"), "--price-per-hour is 0.0; it must be above 0"),
        (("--weight-dtype", "int3"), "--weight-dtype is 'int3'; it must be one of"),
        (("--plot", "chart.gif"), "the name must end in .svg"),
        (("--replay", "nowhere.jsonl"), "cannot read trace nowhere.jsonl"),
        (("--codec", "kivi2", "--accounting", "vllm"), "'kivi2' has no known vLLM byte layout"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...], said: str) -> None:
    assert said in message("llama-3-8b", *arguments)


def test_k_and_capital_k_differ() -> None:
    assert document("llama-3-8b", "--context", "32k")["tokens"] == 32_000
    assert document("llama-3-8b", "--context", "32K")["tokens"] == 32_768


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; model_type 'llama' cannot be sized without it"),
        ({"hidden_size": -64}, "hidden_size is -64; it must be a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a positive whole number"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3 KV heads"),
        ({"hidden_size": 66}, "head_dim is missing and hidden_size 66 is no multiple of 4 heads"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; it must be a positive whole number"),
    ],
)
def test_wrong_config(config_file: Callable[..., Path], changes: dict[str, Any], said: str) -> None:
    assert said in message(str(config_file(**changes)))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    assert "holds a list; a config.json holds an object" in message(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    assert "as JSON" in message(str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert "has no config.json and no .gguf file" in message(str(tmp_path / "empty"))
    (tmp_path / "bad.gguf").write_bytes(b"nope")
    assert "is no GGUF file" in message(str(tmp_path / "bad.gguf"))
    assert "did you mean" in message("lama-3.1-8b")
    assert "MODEL is missing" in message()


def test_html_and_plot_open_offline(tmp_path: Path, mooncake_trace: Path) -> None:
    page, chart = tmp_path / "page.html", tmp_path / "chart.svg"
    arguments = ("llama-3.1-8b", "--device", "h100", "--situation", "throughput", "--replay", str(mooncake_trace))
    assert run(*arguments, "--html", str(page), "--plot", str(chart)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r'https?://[^"<\s]+', text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert text.count("<svg") == 4
    import xml.etree.ElementTree as ElementTree

    for svg in [*re.findall(r"<svg.*?</svg>", text, re.S), chart.read_text(encoding="utf-8")]:
        ElementTree.fromstring(svg)


def test_what_if() -> None:
    found = document("llama-3-70b", "--what-if", "mha")["what_if"]
    assert found["times_as_published"] == 8.0
    latent = document("llama-3-70b", "--what-if", "mla:512", "--context", "1000")
    assert latent["bytes_per_sequence"] == 1000 * 80 * (512 + 64) * 2


def test_list_models() -> None:
    assert "deepseek-v3.2" in run("--list-models").stdout.split()


def test_no_torch_and_under_two_seconds() -> None:
    """A fresh interpreter. Processor seconds are counted: other processes share the machine, and all of
    the work is on one thread, so that on an idle machine they are the seconds that a user waits."""
    script = (
        "import sys; from kvloom.planner.plan import answer; from kvloom.planner.question import Question;"
        "import kvloom.planner.command;"
        "answer(Question(model='llama-3-70b', context=8192, device='h200:8', situation='throughput'));"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
