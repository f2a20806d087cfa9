"""Times, break-even bandwidths and costs; what fits."""

from __future__ import annotations

import pytest

from kvloom.planner.hardware import Device, parse_device
from kvloom.planner.plan import answer
from kvloom.planner.question import Question
from kvloom.planner.roofline import Roofline, break_even, break_even_bandwidth, decode_step, prefill_seconds

from .helpers import GIB, architecture, ideal_bytes

H200_AT_HALF = Roofline(bandwidth=4.8e12, flops=989e12 * 0.5)


@pytest.mark.parametrize(
    ("name", "tokens", "gb_per_second"),
    [
        ("llama-3.1-8b", 4096, 3.8),
        ("llama-3.1-8b", 32_768, 2.6),
        ("llama-3.1-8b", 131_072, 1.3),
        ("llama-3.1-70b", 4096, 1.1),
        ("llama-3.1-70b", 32_768, 0.89),
        ("llama-3.1-70b", 131_072, 0.52),
        ("qwen3-0.6b", 4096, 34),
        ("qwen3-0.6b", 32_768, 11),
    ],
)
def test_break_even_table(name: str, tokens: int, gb_per_second: float) -> None:
    """tiers.md section 4: H200, 989 TFLOP/s at 50 %: load wins above bytes × prefill rate.

    The table multiplies every token with all P weights; the input lookup multiplies nothing, so that
    untied models come out up to 7 % faster here.
    """
    model = architecture(name)
    found = break_even_bandwidth(model, H200_AT_HALF, tokens=tokens, prefix_bytes=ideal_bytes(name, tokens))
    assert found is not None
    assert found / 1e9 == pytest.approx(gb_per_second, rel=0.08)


def test_break_even_of_mla() -> None:
    """The table has 0.40 GB/s at 4k; it widens values to the keys' 192, here 128 are counted."""
    found = break_even_bandwidth(
        architecture("deepseek-v3"), H200_AT_HALF, tokens=4096, prefix_bytes=ideal_bytes("deepseek-v3", 4096)
    )
    assert found is not None
    assert found / 1e9 == pytest.approx(0.40, rel=0.05)


def test_load_or_recompute() -> None:
    """8B at 32k: NVMe at 5 GB/s loads in 0.86 s against 1.63 s of prefill; 10 Gbit/s loses (tiers.md)."""
    model = architecture("llama-3.1-8b")
    rows = {row.store: row for row in break_even(model, H200_AT_HALF, tokens=32_768, prefix_bytes=32_768 * 131_072)}
    nvme, slow = rows["NVMe"], rows["network 10 Gbit/s"]
    assert nvme.load_wins
    assert nvme.load_s == pytest.approx(0.86, abs=0.01)
    assert nvme.recompute_s == pytest.approx(1.63, rel=0.05)
    assert not slow.load_wins
    assert slow.load_s == pytest.approx(3.4, abs=0.1)
    assert slow.minimum_tokens is None


def test_decode_is_bound_by_what_is_largest() -> None:
    model = architecture("llama-3.1-8b")

    def bound(batch: int, tokens: int) -> str:
        step = decode_step(
            model,
            H200_AT_HALF,
            batch=batch,
            tokens=tokens,
            read_bytes=batch * tokens * 131_072,
            bytes_per_parameter=2.0,
        )
        assert step is not None
        return step.bound

    assert bound(1, 512) == "weights"
    assert bound(64, 8192) == "cache"
    assert bound(2048, 1) == "compute"


def test_decode_on_two_cores() -> None:
    """peers.md: SmolLM2, 8 × 4096: 269 + 755 MB at 26.5 GB/s is 39 ms."""
    tokens = 8 * 4096 * 23_040
    step = decode_step(
        architecture("smollm2-135m"),
        Roofline(bandwidth=26.5e9, flops=1e15),
        batch=8,
        tokens=4096,
        read_bytes=tokens,
        bytes_per_parameter=2.0,
    )
    assert step is not None
    assert step.seconds == pytest.approx(0.039, abs=0.0005)


def test_experts_read_by_a_batch() -> None:
    parameters = architecture("mixtral-8x7b").parameters
    assert parameters is not None
    one, many = parameters.read_per_step(1), parameters.read_per_step(1000)
    assert one == pytest.approx(parameters.active)
    assert many == pytest.approx(parameters.total - parameters.embedding)


def test_prefill_is_superlinear() -> None:
    model = architecture("llama-3.1-8b")
    short, long = prefill_seconds(model, H200_AT_HALF, 1000), prefill_seconds(model, H200_AT_HALF, 10_000)
    assert short is not None and long is not None
    assert long > 10 * short


def test_cost() -> None:
    fit = answer(Question(model="llama-3.1-8b", context=4096, batch=8, device="h100", price_per_hour=3.6)).document[
        "fit"
    ]
    rate = fit["decode"]["tokens_per_second"]
    assert fit["cost"]["per_million_output_tokens"] == pytest.approx(3.6 / 3600 / rate * 1e6)


def test_fit_is_the_largest() -> None:
    """The answer's longest context fits and one block more does not; likewise the batch."""
    base = Question(model="llama-3.1-8b", context=8192, batch=4, memory="40GiB")
    fit = answer(base).document["fit"]
    for name, value in (("context", fit["longest_context"]), ("batch", fit["largest_batch"])):
        for more, fits in ((0, True), (128 if name == "context" else 1, False)):
            asked = Question(**{**_plain(base), name: value + more})
            assert answer(asked).document["fit"]["fits"] is fits, (name, more)


def _plain(question: Question) -> dict[str, object]:
    return {name: getattr(question, name) for name in ("model", "context", "batch", "memory")}


def test_memory_alone_gives_no_speeds() -> None:
    fit = answer(Question(model="llama-3.1-8b", memory="40GiB")).document["fit"]
    assert fit["fits"] is True
    assert fit["speed"] is None
    given = answer(Question(model="llama-3.1-8b", memory="40GiB", bandwidth="900GB", tflops=100)).document["fit"]
    assert given["decode"]["seconds"] > 0


def test_devices() -> None:
    assert parse_device("h200:8").count == 8
    assert parse_device("H100").device.memory_bytes == 81_559 * 2**20
    here = parse_device("this").device
    assert isinstance(here, Device)
    assert here.is_cpu
    assert here.memory_bytes > GIB // 4
    assert here.bandwidth is not None and here.bandwidth > 1e8


def test_vllm_pool_in_the_document() -> None:
    found = answer(Question(model="qwen2.5-7b", accounting="vllm", memory="40GiB")).document["fit"]
    assert found["vllm_pool_tokens"] == found["available_for_cache_bytes"] // 57_344 // 16 * 16
