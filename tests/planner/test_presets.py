"""Shipped configurations against the models' published weight counts."""

from __future__ import annotations

import pytest

from kvloom.planner.presets import find_preset, load_preset, nearest_presets, preset_names

from .helpers import architecture


@pytest.mark.parametrize("name", preset_names())
def test_weight_count_is_the_published_one(name: str) -> None:
    published = load_preset(name).parameters
    counted = architecture(name).parameters
    if published is None:
        pytest.skip("no exact published count of the language model alone")
    assert counted is not None
    assert counted.total == published


def test_named_families_are_shipped() -> None:
    wanted = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "mistral-7b-v0.1", "qwen2.5-7b", "gemma-3-27b")
    wanted += ("deepseek-v3", "deepseek-v3.2", "gpt-oss-120b", "mixtral-8x7b", "gpt2-xl", "opt-13b", "smollm2-135m")
    assert set(wanted) <= set(preset_names())


def test_active_parameters_of_experts() -> None:
    """Published roundings: gpt-oss-120b 5.1B, 20b 3.6B, DeepSeek-V3 37B, Mixtral 12.9B active."""
    for name, billions in (("gpt-oss-120b", 5.1), ("gpt-oss-20b", 3.6), ("deepseek-v3", 37), ("mixtral-8x7b", 12.9)):
        parameters = architecture(name).parameters
        assert parameters is not None
        assert parameters.active / 1e9 == pytest.approx(billions, rel=0.02)


def test_found_by_hub_id_in_any_case() -> None:
    found = find_preset("META-LLAMA/llama-3.1-8b-instruct")
    assert found is not None
    assert found.name == "llama-3.1-8b"
    assert find_preset("Qwen2.5-7B-Instruct") is not None
    assert find_preset("no-such-model") is None


def test_a_typo_finds_its_neighbours() -> None:
    assert "llama-3.1-8b" in nearest_presets("lama-3.1-8b")
