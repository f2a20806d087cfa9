"""One device's share: what divides, what is replicated, what is refused."""

from __future__ import annotations

import pytest

from kvloom.core.errors import ConfigError
from kvloom.planner.accounting import Ideal
from kvloom.planner.fit import DeviceCache, choose_parallel
from kvloom.planner.hardware import parse_device
from kvloom.planner.parallel import Parallel, stages

from .helpers import architecture, format_of

TOKENS = 5_000


def rank_bytes(name: str, **degrees: int) -> list[int]:
    return [
        Ideal(stage, format_of()).sequence(TOKENS).total for stage in stages(architecture(name), Parallel(**degrees))
    ]


def whole(name: str) -> int:
    return Ideal(architecture(name), format_of()).sequence(TOKENS).total


@pytest.mark.parametrize("name", ["llama-3-70b", "gemma-3-27b", "gpt-oss-20b", "llama-2-7b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_sum_to_the_whole_while_tp_divides(name: str, tp: int) -> None:
    assert rank_bytes(name, tp=tp)[0] * tp == whole(name)


@pytest.mark.parametrize("pp", [1, 2, 3, 7, 80])
def test_stages_sum_to_the_whole(pp: int) -> None:
    assert sum(rank_bytes("llama-3-70b", pp=pp)) == whole("llama-3-70b")
    assert max(rank_bytes("llama-3-70b", pp=pp)) == -(-80 // pp) * whole("llama-3-70b") // 80


def test_heads_are_replicated_beyond_their_number() -> None:
    assert rank_bytes("llama-3-70b", tp=16)[0] == rank_bytes("llama-3-70b", tp=8)[0]


def test_the_latent_is_replicated() -> None:
    assert rank_bytes("deepseek-v3", tp=8)[0] == whole("deepseek-v3")


def test_state_is_divided_where_its_heads_allow() -> None:
    model = architecture("qwen3-next-80b-a3b")
    (rank,) = stages(model, Parallel(tp=2))
    assert rank.state_bytes(2) * 2 == model.state_bytes(2)


def test_data_parallel_takes_the_fullest_replica() -> None:
    cache = DeviceCache(architecture("llama-3-8b"), format_of(), "ideal", Parallel(dp=4))
    assert cache.bytes(100, 9) == 3 * 100 * 131_072


def test_shared_layers_must_stay_with_their_owner() -> None:
    assert len(stages(architecture("gemma-3n-e4b"), Parallel(pp=2))) == 2  # layers 18 to 34 stand together
    with pytest.raises(ConfigError, match="whose cache it reads; use pp 1"):
        stages(architecture("gemma-3n-e4b"), Parallel(pp=4))


def test_default_degree_divides_heads() -> None:
    asked = {"tp": None, "pp": None, "dp": None}
    assert choose_parallel(architecture("llama-3-70b"), parse_device("h200:8"), asked).tp == 8
    assert choose_parallel(architecture("qwen2.5-7b"), parse_device("h200:8"), asked).tp == 4  # 28 heads
    assert choose_parallel(architecture("falcon-7b"), parse_device("h200:8"), asked).tp == 1  # 71 heads
