"""The command line: help at once, errors in one line with the right status, JSON when asked."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvloom.cli import app
from kvloom.core.errors import CapacityError, CorruptModelError, UnsupportedModelError
from kvloom.server.banner import base_url, curl_line, document, print_banner, rows
from tests.server.fake import FakeEngine, byte_tokenizer


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replaces the engine by a fake one; yields the configurations it was asked for."""
    from kvloom.engine.async_engine import AsyncEngine

    configs: list[Any] = []

    def create(config: Any) -> FakeEngine:
        configs.append(config)
        if isinstance(create.failure, Exception):  # type: ignore[attr-defined]
            raise create.failure  # type: ignore[attr-defined]
        return FakeEngine(byte_tokenizer())

    create.failure = None  # type: ignore[attr-defined]
    monkeypatch.setattr(AsyncEngine, "create", create)
    yield configs


def test_help_is_light() -> None:
    """No command's help may bring torch, transformers or FastAPI."""
    code = (
        "import sys; from kvloom.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for arguments in (["--help"], ["serve", "--help"], ["generate", "--help"], ["version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_help_is_quick() -> None:
    def cpu_seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "kvloom.cli", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_seconds() for _ in range(3)) < 0.5  # processor time: other work on the machine does not count


def test_every_setting_has_a_flag() -> None:
    from kvloom.server import settings

    shown = run("serve", "--help", COLUMNS="200").stdout
    flags = set(re.findall(r"--[a-z-]+", shown))
    renamed = {"api_keys": "--api-key", "served_model_names": "--served-model-name", "cors_origins": "--cors-origin"}
    for name in settings.KNOWN - {"model"}:
        assert renamed.get(name, "--" + name.replace("_", "-")) in flags, name


def test_version() -> None:
    assert run("version").stdout.startswith("kvloom ")
    assert set(json.loads(run("version", "--json").stdout)) == {"version"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "5"], ["--prot"]),
        (["serve", "--port", "many"], ["--port", "integer"]),
        (["serve", "--port", "70000"], ["70000", "65535"]),
        (["serve", "--block-size", "33"], ["33", "32"]),
        (["serve", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["serve", "--kernels", "gpu9"], ["gpu9"]),
        (["serve", "--pipeline", "lossy"], ["lossy"]),
        (["serve", "--codec", "int2"], ["int2"]),
        (["serve", "--watermark", "0.9"], ["0.9"]),
        (["serve", "--config", "/no/such/file.yaml"], ["/no/such/file.yaml"]),
        (["serve", "--max-body-bytes", "lots"], ["lots"]),
        (["serve", "--api-key", ""], ["key"]),
        (["serve", "--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
        (["generate"], ["prompt"]),
        (["frobnicate"], ["frobnicate"]),
    ],
)
def test_bad_usage_exits_2(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments, COLUMNS="200")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert all(word.lower() in result.stderr.lower() for word in words), result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hi", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "hi", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["generate", "hi", "--top-p", "2"], ["top_p", "2"]),
    ],
)
def test_bad_sampling_is_found_before_loading(loaded: list[Any], arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words)
    assert loaded == []


def test_port_in_use_before_loading(loaded: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port}" in result.stderr
    assert "--port" in result.stderr
    assert result.stderr.count("\n") == 1
    assert loaded == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (CapacityError("one sequence needs 5 GiB"), 1),
        (CorruptModelError("shard 2 is missing"), 2),
        (UnsupportedModelError("llama4 is silently wrong"), 2),
        (RuntimeError("a surprise"), 1),
    ],
)
@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "hi"]])
def test_models_that_cannot_be_loaded(loaded: list[Any], failure: Exception, status: int, command: list[str]) -> None:
    from kvloom.engine.async_engine import AsyncEngine

    AsyncEngine.create.failure = failure  # type: ignore[attr-defined]
    result = run(*command, "--json")
    assert result.exit_code == status
    assert str(failure) in result.stderr
    assert "Traceback" not in result.output
    error = json.loads(result.stdout)["error"]
    assert error["exit_status"] == status
    assert str(failure) in error["message"]


def test_debug_shows_the_traceback(loaded: list[Any]) -> None:
    from kvloom.engine.async_engine import AsyncEngine

    AsyncEngine.create.failure = CorruptModelError("shard 2 is missing")  # type: ignore[attr-defined]
    result = run("generate", "hi", KVLOOM_DEBUG="1")
    assert isinstance(result.exception, CorruptModelError)


def test_generate(loaded: list[Any]) -> None:
    result = run("generate", "hi", "--block-size", "16", KVLOOM_DTYPE="float32")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello, world\n"
    assert "13 tokens" in result.stderr
    (config,) = loaded
    assert (config.pipeline.block_size, config.dtype) == (16, "float32")


def test_generate_json_chat_and_raw(loaded: list[Any]) -> None:
    chat = json.loads(run("generate", "hi", "--json", "--system", "be kind", "--max-tokens", "5").stdout)
    assert chat["prompt"].startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi")
    assert (chat["text"], chat["finish_reason"]) == ("Hello", "length")
    assert chat["usage"]["completion_tokens"] == 5
    raw = json.loads(run("generate", "hi", "--json", "--raw", "--stop", "wor").stdout)
    assert (raw["prompt"], raw["text"], raw["finish_reason"]) == ("hi", "Hello, ", "stop")


def test_generate_from_stdin(loaded: list[Any]) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--raw", "--json"], input="from a pipe")
    assert json.loads(result.stdout)["prompt"] == "from a pipe"


def test_generate_refusals(loaded: list[Any]) -> None:
    result = run("generate", "x" * 500)
    assert result.exit_code == 2
    assert "256" in result.stderr
    result = run("generate", "", "--raw")
    assert result.exit_code == 2
    assert "empty" in result.stderr


SCRIPT = """
import sys
from kvloom.engine.async_engine import AsyncEngine
from tests.server.fake import FakeEngine, byte_tokenizer
AsyncEngine.create = lambda config: FakeEngine(byte_tokenizer())
from kvloom.cli import app
app(sys.argv[1:])
"""


def start(command: list[str]) -> subprocess.Popen[str]:
    root = Path(__file__).parents[1]  # where ``tests`` can be imported from
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.parametrize("as_json", [False, True])
def test_serve_from_start_to_ctrl_c(as_json: bool) -> None:
    """The report on stdout alone; the pasted curl line answers; Ctrl-C ends with status 0."""
    command = [sys.executable, "-c", SCRIPT, "serve", "--port", "0", "--served-model-name", "it's"]
    process = start([*command, "--json"] if as_json else command)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not (lines and "curl" in lines[-1]):
            lines.append(process.stdout.readline())
            assert lines[-1] or process.poll() is None, process.communicate()
        if as_json:
            (line,) = lines
            report = json.loads(line)
            assert report["arena_bytes"] == {"predicted": 2**20, "actual": 2**20}
            curl = report["curl"]
        else:
            text = "".join(lines)
            assert "1048576 bytes (1.0 MiB), as predicted" in text
            assert "layers 2, spans 32" in text
            assert "4 sequences of 256 tokens" in text
            curl = lines[-1]
        assert run_curl(curl)["choices"][0]["message"]["content"] == "Hello, world"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        rest, _ = process.communicate()
        assert rest.strip() == ""
    finally:
        process.kill()
        process.communicate()


def run_curl(line: str) -> Any:
    """The answer to a pasted curl line, through the shell when curl is installed."""
    done = subprocess.run(["sh", "-c", "command -v curl"], capture_output=True)
    if done.returncode == 0:
        return json.loads(subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout)
    words = shlex.split(line)
    return httpx.post(words[1], content=words[words.index("-d") + 1]).json()


def test_curl_line_quotes_and_hides_the_key() -> None:
    line = curl_line("http://127.0.0.1:1", "it's", chat=False, with_key=True)
    words = shlex.split(line)
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization: Bearer $KVLOOM_API_KEY" in words
    assert "/v1/completions" in line


def test_addresses_that_can_be_reached() -> None:
    assert base_url("0.0.0.0", 5) == "http://127.0.0.1:5"
    assert base_url("::", 5) == "http://[::1]:5"
    assert base_url("10.0.0.1", 5) == "http://10.0.0.1:5"


def test_a_broken_promise_is_shouted() -> None:
    from dataclasses import replace

    info = replace(FakeEngine(byte_tokenizer()).info, actual_arena_bytes=5)
    text = dict(rows(info, "http://x", ("fake/model",)))
    assert "1048576 WERE PREDICTED" in text["cache"]
    assert document(info, "http://x", ("a",), "curl")["arena_bytes"] == {"predicted": 2**20, "actual": 5}


def test_report_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    info = FakeEngine(byte_tokenizer()).info
    curl = curl_line("http://127.0.0.1:1", "m" * 300, chat=True, with_key=False)
    monkeypatch.setenv("COLUMNS", "60")
    print_banner(out, rows(info, "http://x", ("fake/model",)), curl)
    assert "fake/model" in out.getvalue()
    assert curl in out.getvalue()  # on one line, however long, so that it pastes


def test_output_into_a_closed_pipe() -> None:
    """``kvloom … | head`` ends quietly."""
    process = start([sys.executable, "-c", SCRIPT, "generate", "hi"])
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in (errors or "")
    assert "unexpected" not in (errors or "")
