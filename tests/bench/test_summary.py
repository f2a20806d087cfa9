"""From rounds to the figures that are shown."""

from __future__ import annotations

from typing import Any

import pytest

from bench.bound import Layers, Machine, Model
from bench.cells import Cell
from bench.client import tokens_of
from bench.details import details
from bench.report import COLUMNS, heading, plain, rows
from bench.summary import compare, compare_parts, summarise

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


def inner(attention: float, encode: float, *, steps: list[float] | None = None) -> dict[str, Any]:
    """A round of 4 steps of 20 ms each on average."""
    return {
        "seconds": 0.08,
        "units": 4,
        "step_ms": steps or [10.0, 10.0, 10.0, 50.0],
        "parts_s": {"linear": 0.02, "attention": attention, "encode": encode, "rest": 0.004},
    }


def test_parts_are_of_the_mean_step_and_what_they_miss_is_outside() -> None:
    found = figures(DECODE, [inner(0.02, 0.012), inner(0.024, 0.012), inner(0.04, 0.012)])
    assert found["step_ms"] == {"median": 10.0, "mean": 20.0}
    parts = found["parts_ms"]
    assert parts["linear"] == pytest.approx(5)
    assert parts["attention"] == pytest.approx(6)
    assert parts["encode"] == pytest.approx(3)
    assert parts["outside"] == pytest.approx(20 - 5 - 6 - 3 - 1)


def test_parts_of_a_prefill_are_of_the_whole() -> None:
    cell = Cell(phase="prefill", sequences=2, context=50)
    found = figures(cell, [{"seconds": 0.5, "units": 100, "parts_s": {"attention": 0.2, "rest": 0.1}}])
    assert found["parts_ms"] == pytest.approx({"attention": 200, "rest": 100, "outside": 200})


def test_attention_is_compared_with_the_raw_caches() -> None:
    found = {
        "ours": figures(DECODE, [inner(0.02, 0.0)]),
        "ours@int8": figures(DECODE, [inner(0.01, 0.005)]),
        "llama": figures(DECODE, [{"seconds": 0.09, "units": 4}]),
        "ours@int4": {"not_run": "too old"},
    }
    compare_parts(found, raw="ours")
    assert found["ours@int8"]["attention_vs_raw"] == pytest.approx(0.5)
    assert found["ours@int8"]["with_encoding_vs_raw"] == pytest.approx(0.75)
    assert found["ours"]["attention_vs_raw"] == 1
    assert "attention_vs_raw" not in found["llama"]


def test_without_inner_times_nothing_is_compared() -> None:
    found = {"ours": figures(DECODE, [{"seconds": 0.09, "units": 4, "parts_s": None}])}
    compare_parts(found, raw="ours")
    assert "parts_ms" not in found["ours"] and "attention_vs_raw" not in found["ours"]


def test_memory_is_the_most_of_all_rounds() -> None:
    rounds = [
        {"seconds": 0.1, "units": 4, "memory": {"used_peak_bytes": used, "held_bytes": 7, "rss_by": "VmHWM"}}
        for used in (10, 30, 20)
    ]
    assert figures(DECODE, rounds)["memory"] == {"used_peak_bytes": 30, "held_bytes": 7, "rss_by": "VmHWM"}


def test_details_have_a_line_for_each_engine_with_figures() -> None:
    ours = figures(DECODE, [{**inner(0.02, 0.0), "memory": {"used_peak_bytes": 2**21, "arena_bytes": 2**22}}])
    llama = figures(DECODE, [{"seconds": 0.1, "units": 4, "memory": {"rss_peak_bytes": 3 * 2**20, "rss_by": "x"}}])
    engines = {"ours": ours, "llama": llama, "vllm": {"not_run": "why"}}
    inside, memory = details([{"name": DECODE.name, "engines": engines}])
    assert [line.columns[1] for line in inside.lines] == ["ours"]
    assert [line.columns[:4] for line in memory.lines] == [[DECODE.name, "ours", "4.0", "2.0"], ["", "llama", "", ""]]
    assert memory.lines[1].columns[-2:] == ["3.0", "x"]
    for table in (inside, memory):
        assert all(len(line.columns) == len(table.columns) for line in table.lines)
        assert len(plain(table.lines, table.columns)) == len(table.lines) + 1
    assert details([{"name": DECODE.name, "engines": {"vllm": {"not_run": "why"}}}]) == []


@pytest.mark.parametrize(("steps", "remarks"), [(64, 0), (24, 1)])
def test_steps_that_are_no_whole_number_of_blocks_are_remarked_on(steps: int, remarks: int) -> None:
    both = {"bandwidth_gb_s": [20.0, 21.0], "peak_gflop_s": {}}
    own = {"kernels": "cpu", "kernel_variant": "avx2", "block_size": 32, "recent_tokens": 64, "codec": "int4"}
    document = {
        "machine": {"processor": "p", "threads": 2, "capability": "AVX2", "start_and_end": both},
        "model": {"name": "a model"},
        "settings": {"steps": steps},
        "engines": {"ours@int4": {"version": "1", "dtype": "float32", "cache_element_bytes": 0.5, "engine": own}},
    }
    text = heading(document)
    assert "ours@int4: 1, float32, cache of 4 bits, kernels cpu/avx2, codec int4, last 64 tokens raw" in text
    assert text.count("no whole number of blocks of 32") == remarks


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
