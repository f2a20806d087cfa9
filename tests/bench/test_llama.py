"""What is asked of and read from llama.cpp's programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.cells import Cell
from bench.engines.llama import Llama, context_size, link_libraries, parse_result

SAID = """\
llama_context: n_ctx = 4608
{"n_kv_max": 4608, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, "is_pp_shared": 1, "n_gpu_layers": -1, \
"n_threads": 2, "n_threads_batch": 2, "pp": 512, "tg": 64, "pl": 8, "n_kv": 4608, "t_pp": 0.75, "speed_pp": 682.7, \
"t_tg": 2.75, "speed_tg": 186.2, "t": 3.5, "speed": 1316.6}

llama_perf_context_print:        load time =     100.00 ms
"""


def test_the_result_is_found_among_the_log() -> None:
    found = parse_result(SAID)
    assert (found["t_pp"], found["t_tg"], found["pl"]) == (0.75, 2.75, 8)


def test_no_result_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no result"):
        parse_result("llama_context: n_ctx = 4608\n")


def test_every_sequence_fits_its_part_of_the_cache() -> None:
    assert context_size(Cell(phase="decode", sequences=8, context=512), 64) == 8 * 768
    assert context_size(Cell(phase="decode", sequences=32, context=1024, shared=960), 64) == 1024 + 32 * 64


def test_a_program_is_heard_and_its_memory_seen() -> None:
    llama = Llama()
    llama.environment = dict(os.environ)
    take = "import sys; b = b'1' * (64 << 20); print('out'); print('err', file=sys.stderr)"
    assert sorted(llama._run([sys.executable, "-c", take]).split()) == ["err", "out"]
    assert llama.peak > 64 << 20
    with pytest.raises(RuntimeError, match="ended with status 3: the reason"):
        llama._run([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"])


def test_missing_links_are_made(tmp_path: Path) -> None:
    home, links = tmp_path / "bin", tmp_path / "links"
    home.mkdir()
    links.mkdir()
    (home / "libllama.so.0.6.0").write_text("library")
    (home / "libggml.so").write_text("library")
    (home / "libggml.so.0.26.0").write_text("library")
    link_libraries(home, links)
    assert sorted(path.name for path in links.iterdir()) == [
        "libggml.so.0", "libggml.so.0.26", "libllama.so", "libllama.so.0", "libllama.so.0.6",
    ]  # fmt: skip
    assert (links / "libllama.so.0").read_text() == "library"
