"""From rounds to the figures that are shown."""

from __future__ import annotations

from typing import Any

import pytest

from bench.bound import Layers, Machine, Model
from bench.cells import Cell
from bench.client import tokens_of
from bench.report import COLUMNS, plain, rows
from bench.summary import compare, summarise

MODEL = Model(body=900_000, head=100_000, layers=(Layers(elements=100, operations=800),))
MACHINE = Machine(bandwidth=1e9, peak=1e12)
DECODE = Cell(phase="decode", sequences=4, context=100)


def figures(cell: Cell, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return summarise(cell, rounds, model=MODEL, machine=MACHINE, steps=9, element_bytes=2)


def test_decode_is_the_median_step_over_rounds() -> None:
    found = figures(DECODE, [{"seconds": s, "units": 9} for s in (0.09, 0.18, 0.36)])
    assert found["seconds"] == pytest.approx(0.02)
    assert found["tokens_per_s"] == pytest.approx(200)
    assert found["spread"] == pytest.approx(1.5)
    assert found["n"] == 3
    # 2 MB of weights; 105 tokens seen on average by each of 4 sequences, 200 bytes each.
    assert found["bound_s"] == pytest.approx((2e6 + 4 * 105 * 200) / 1e9)
    assert found["reached"] == pytest.approx(found["bound_s"] / 0.02)
    assert found["bound_by"] == "bytes"


def test_prefill_is_tokens_over_a_rounds_time() -> None:
    found = figures(Cell(phase="prefill", sequences=2, context=50), [{"seconds": 0.5, "units": 100}])
    assert found["tokens_per_s"] == pytest.approx(200)
    assert found["spread"] == 0


def test_ratios_are_to_ours_of_the_same_cell() -> None:
    found = {"ours": {"seconds": 0.1}, "vllm": {"seconds": 0.25}, "llama": {"not_run": "no such file"}}
    compare(found, base="ours", processors=2)
    assert found["vllm"]["ours_faster"] == pytest.approx(2.5)
    assert "ours_faster" not in found["llama"]


def test_the_clients_time_is_given_back() -> None:
    cell = Cell(phase="served", sequences=32, context=128)
    served = figures(cell, [{"seconds": 10.0, "units": 4096, "client_cpu_s": 2.0}])
    found = {"offline": figures(cell, [{"seconds": 8.1, "units": 4096}]), "server": served}
    compare(found, base="offline", processors=2)
    assert served["share_of_offline"] == pytest.approx(0.81)
    assert served["without_client"] == pytest.approx(0.9)


def test_every_engine_has_its_line_and_its_reason() -> None:
    ours = figures(DECODE, [{"seconds": 0.09, "units": 9}])
    cells = [{"name": DECODE.name, "engines": {"ours": ours, "vllm": {"not_run": "illegal instruction"}}}]
    lines = rows(cells)
    assert [line.columns[:2] for line in lines] == [["decode:4x100", "ours"], ["", "vllm"]]
    assert len(lines[0].columns) == len(COLUMNS)
    shown = plain(lines)
    assert "not run: illegal instruction" in shown[2]


def test_tokens_are_read_from_a_streams_last_event() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b'2c\r\ndata: {"choices":[{"text":"a"}],"usage":null}\n\n\r\n'
        b'58\r\ndata: {"choices":[],"usage":{"completion_tokens":17}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    )
    assert tokens_of(answer) == 17
    with pytest.raises(RuntimeError, match="429"):
        tokens_of(b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error":{}}')
    with pytest.raises(RuntimeError):
        tokens_of(answer[:120])
