"""Our worker on a tiny model: arenas that fit the format, what a round tells, and prompts that stay cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import budget
from bench.budget import cache_budget
from bench.cells import Cell
from bench.engines.ours import Ours
from kvloom.core.config import engine_config
from kvloom.core.layout import LayerSpec, group_layers
from tests.models.tiny import VOCAB_SIZE, llama_config, save

LAYOUT = group_layers([LayerSpec.kv(num_heads=2, k_dim=64)] * 4)
TOKEN_BYTES = 4 * 2 * 2 * 64 * 2  # in bf16
DECODE = Cell(phase="decode", sequences=4, context=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"), llama_config())


def load(model: Path, codec: str, **changes: Any) -> tuple[Ours, dict[str, Any]]:
    options = {
        "model": str(model),
        "elements": 3 * 2 * 2 * 32,
        "max_model_len": 256,
        "max_sequences": 4,
        "loads": [(4, 256)],
        "threads": 1,
        "steps": 32,
        "answer_tokens": 4,
        "settings": {"codec": codec},
    }
    worker = Ours()
    return worker, worker.load({**options, **changes})


def budget_of(codec: str, dtype: str = "bfloat16", loads: tuple[tuple[int, int], ...] = ((8, 4096),)) -> int:
    config = engine_config(("test", {"codec": codec}))
    return cache_budget(config, LAYOUT, dtype, loads) - budget.LEAST_ROOM


def test_an_arena_is_made_for_its_format_and_dtype() -> None:
    tokens = 8 * 4096
    assert budget_of("raw") == pytest.approx(1.25 * tokens * TOKEN_BYTES, rel=0.02)
    assert budget_of("raw", "float32") == pytest.approx(2 * budget_of("raw"), rel=0.01)
    copies = 4096 * TOKEN_BYTES  # of one prompt in eight
    assert budget_of("int8") == pytest.approx(1.25 * tokens * TOKEN_BYTES * 0.53 + copies, rel=0.1)
    assert budget_of("turboquant3") < budget_of("int4") < budget_of("int8") < budget_of("raw")


def test_the_largest_cell_counts() -> None:
    assert budget_of("raw", loads=((1, 512), (8, 4096), (2, 64))) == budget_of("raw")


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_round_tells_what_it_took(model: Path, codec: str) -> None:
    worker, info = load(model, codec)
    assert info["engine"]["codec"] == codec
    worker.prepare(DECODE)
    result = worker.round(0)
    assert len(result["step_ms"]) == result["units"] == 32
    memory = result["memory"]
    assert 0 < memory["held_bytes"] <= memory["used_peak_bytes"] < memory["arena_bytes"]
    # The prompts, the blocks that are open, and next to nothing else.
    tokens = 4 * (200 + 4 + 32)
    assert memory["held_bytes"] > 4 * 200 * info["engine"]["actual_bytes_per_token"]
    assert memory["held_bytes"] < tokens * 3 * 2 * 2 * 32 * 4 + info["engine"]["slab_bytes"]
    if info["engine"]["step"] == "native":
        parts = result["parts_s"]
        assert {"linear", "attention", "rest"} <= set(parts)
        assert 0 < sum(parts.values()) < result["seconds"]
    else:
        assert result["parts_s"] is None


def test_encoded_sequences_take_less(model: Path) -> None:
    held = {}
    for codec in ("raw", "int8", "int4"):
        worker, _ = load(model, codec, settings={"codec": codec, "sink_tokens": 0, "recent_tokens": 0})
        worker.prepare(DECODE)
        held[codec] = worker.round(0)["memory"]["held_bytes"]
    assert held["int4"] < held["int8"] < held["raw"]


def test_a_prefill_is_seen_while_its_sequences_are_there(model: Path) -> None:
    worker, _ = load(model, "raw")
    worker.prepare(Cell(phase="prefill", sequences=2, context=100))
    result = worker.round(0)
    assert result["units"] == 200
    # Both prompts end in the pass that computes them, after which nothing is in use.
    assert result["memory"]["used_peak_bytes"] >= 2 * 100 * 3 * 2 * 2 * 32 * 4
    assert "held_bytes" not in result["memory"]


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_prompts_stay_cached_in_an_arena_with_little_room(
    model: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LEAST_ROOM", 0)
    settings = {"codec": codec, "sink_tokens": 0, "recent_tokens": 0}
    worker, _ = load(model, codec, max_model_len=1000, max_sequences=16, loads=[(16, 1000)], steps=8, settings=settings)
    worker.prepare(Cell(phase="decode", sequences=16, context=900))
    for number in range(3):
        before = worker.engine.snapshot().computed_tokens
        worker.round(number)
        # The end of every prompt, up to 16 steps while others compute theirs, and the steps.
        assert worker.engine.snapshot().computed_tokens - before <= 16 * (32 + 16 + 8)


def test_an_arena_that_was_asked_for_is_left_alone(model: Path) -> None:
    _, info = load(model, "raw", settings={"kv_cache_memory": "8MiB"})
    assert info["engine"]["actual_arena_bytes"] <= 8 << 20
    _, info = load(model, "raw", loads=None, cache_bytes=16 << 20)
    assert 8 << 20 < info["engine"]["actual_arena_bytes"] <= 16 << 20


def test_prompts_are_of_the_models_tokens(model: Path) -> None:
    worker, _ = load(model, "raw")
    worker.cell = DECODE
    assert max(map(max, worker._prompts(0))) < VOCAB_SIZE


def test_blocks_that_windows_have_passed_have_room_under_every_codec() -> None:
    window = LayerSpec.kv(num_heads=1, k_dim=64, v_dim=64, window=512)
    layout = group_layers([window] * 5 + [LayerSpec.kv(num_heads=1, k_dim=64, v_dim=64)])
    tokens = 8 * 4096
    for codec in ("raw", "int4"):
        config = engine_config(("test", {"codec": codec}))
        found = cache_budget(config, layout, "bfloat16", ((8, 4096),)) - budget.LEAST_ROOM
        assert found > 1.25 * tokens * 5 * 128 * 2
