"""2,000 mixed requests against live servers over tiny models, every greedy answer checked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from tests.models.tiny import gemma3_config, llama_config, save
from tests.soak.traffic import check, play, vocabulary


@contextmanager
def serving(directory: Path, log: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """``kvloom serve`` in a process of its own; yields what it printed at start. Ctrl-C must end it well."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvloom.cli", "serve", str(directory), "--port", "0", "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        printed = ""
        while True:
            line = process.stdout.readline()
            assert line, f"the server ended early, with status {process.wait(10)}: {log.read_text()[-2000:]}"
            printed += line
            try:
                yield json.loads(printed)
                break
            except json.JSONDecodeError:
                continue
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def metrics(url: str) -> dict[str, float]:
    """Sums over labels of every metric."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_every_answer_of_a_soak_is_exact(tmp_path: Path, model_type: str, deterministic: bool) -> None:
    config = {"llama": llama_config, "gemma3_text": gemma3_config}[model_type]()
    directory = save(tmp_path / "model", config)
    # The four cells together send 2,000; the deterministic mode runs in passes of 16 rows, so it gets fewer.
    requests = 200 if deterministic else 800
    flags = ["--cache-dir", str(tmp_path / "cache"), "--block-size", "16", "--debug-poison"]
    # Little memory, so that sequences preempt each other and spans are evicted.
    flags += ["--kv-cache-memory", "3MiB", "--max-model-len", "512", "--max-batch-tokens", "128"]
    flags += ["--max-sequences", "24", "--max-waiting", "64", *(["--deterministic"] if deterministic else [])]
    eager = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    async def run(url: str) -> Any:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            return await play(
                client,
                requests=requests,
                concurrency=48,
                vocab_size=vocabulary(eager) - 4,
                longest=200,
                most_tokens=24,
                seed=1,
            )

    with serving(directory, tmp_path / "log", *flags) as started:
        assert "url" in started, started
        url, noise = started["url"], started["rounding_noise"]
        greedy, report = asyncio.run(run(url))
        deadline = time.monotonic() + 30
        while (found := metrics(url))["kvloom_requests_running"] or found["kvloom_requests_waiting"]:
            assert time.monotonic() < deadline, "requests that were left early still run"
            time.sleep(0.1)
        assert found["kv_cache_used_blocks"] == 0
        assert found["kvloom_prefix_hit_tokens_total"] > 0
        assert found["kvloom_evicted_spans_total"] > 0
        assert found.get("kvloom_errors_total", 0) == 0
        assert httpx.get(f"{url}/health").status_code == 200
    check(eager, greedy, 1e-4 if deterministic else noise, report)
    assert not report.wrong, report.wrong[:5]
    assert report.checked_tokens > 4 * requests
    if deterministic:
        assert not report.kinds["seeded, differing"]  # equal seeds draw equal tokens, whatever runs beside them
