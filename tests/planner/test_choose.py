"""Ranking pipelines, saying when compression does not help, handing over."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvloom.core.codec_sizes import CODEC_CHOICES, RAW_DTYPES
from kvloom.core.config import PipelineConfig
from kvloom.planner.plan import answer
from kvloom.planner.quality import Quality, expected_loss, loss_elsewhere, tables
from kvloom.planner.question import Question
from kvloom.planner.situations import SITUATIONS
from kvloom.planner.workload import Workload


def ask(**what: Any) -> dict[str, Any]:
    return answer(Question(**{"model": "llama-3.1-8b", "context": 32_768, "device": "h100", **what})).document


@pytest.mark.parametrize("situation", sorted(SITUATIONS))
def test_every_situation_is_answered(situation: str) -> None:
    found = ask(situation=situation)
    assert found["choices"][0]["rank"] == 1
    assert found["situation"]["rule"] == SITUATIONS[situation].rule
    for choice in found["choices"]:
        assert choice["bytes_per_sequence"] > 0
        assert choice["reasons"] or choice["codec"] == "raw"
        assert choice["quality"]["note"] in (
            "lossless",
            "not measured",
            "not measured for this family",
            "measured on this model",
        )


def test_rules_that_practitioners_teach() -> None:
    accuracy = ask(situation="accuracy")["choices"]
    assert accuracy[0]["codec"] == "raw"
    assert [choice["codec"] for choice in accuracy if choice["accepted"]][1] in ("q8_0", "int8")
    assert all(choice["press"] is None for choice in accuracy)
    long = ask(situation="long-context")["choices"]
    assert long[0]["times_smaller"] > 3
    assert not any(choice["accepted"] for choice in long if choice["press"])
    chat = ask(situation="chat-rag")["choices"]
    assert [tier["kind"] for tier in chat[0]["tiers"]] == ["host", "disk"]
    assert chat[0]["conversations_held"] > 500
    edge = ask(situation="edge", model="smollm2-135m", context=4096, device=None, memory="512MiB")["choices"]
    assert edge[0]["times_smaller"] > 3
    throughput = ask(situation="throughput")["choices"]
    accepted = [choice["tokens_per_second"] for choice in throughput if choice["accepted"] and choice["fits"]]
    assert accepted[0] == max(accepted)


def test_accepted_loss_can_be_given() -> None:
    assert all(choice["quality"]["kl_mean"] == 0 for choice in ask(situation="edge", max_kl=0.0)["choices"][:1])


def test_pareto_is_not_dominated() -> None:
    choices = [c for c in ask(situation="throughput")["choices"] if c["quality"]["kl_mean"] is not None]
    marked = [choice for choice in choices if choice["pareto"]]
    assert 3 <= len(marked) < len(choices)
    for one in marked:
        for other in choices:
            better = (
                other["bytes_per_sequence"] < one["bytes_per_sequence"]
                and other["quality"]["kl_mean"] < one["quality"]["kl_mean"]
                and other["tokens_per_second"] > one["tokens_per_second"]
            )
            assert not better


def test_measured_on_this_model_or_not() -> None:
    own = {
        c["codec"]: c for c in ask(model="smollm2-135m", context=1024, situation="edge")["choices"] if not c["press"]
    }
    assert own["loom4"]["quality"]["note"] == "measured on this model"
    assert own["loom4"]["quality"]["kl_mean"] == pytest.approx(0.0018, abs=0.0002)
    assert own["int8"]["quality"]["text"].startswith("8 windows of 1,024 tokens")
    other = {c["codec"]: c for c in ask(situation="edge")["choices"] if not c["press"]}
    assert other["loom4"]["quality"]["note"] == "not measured for this family"
    assert other["loom4"]["quality"]["text"].startswith("2 windows of 4,096 tokens")  # for long contexts
    assert other["loom4"]["quality"]["kl_mean"] == pytest.approx(0.0021, abs=0.0002)


def test_tables_name_model_and_text() -> None:
    for table in tables():
        assert table["model"] and table["text"] and table["limits"]
        assert all(row["kl_mean"] >= 0 for row in table["rows"])
        assert table["rows"]


def test_no_row_flatters() -> None:
    """Protection comes in whole blocks; what was measured with more of it, or in larger blocks, is not used."""

    def loss(codec: str, recents: int, block_size: int = 32) -> Quality:
        return expected_loss(codec, sink_tokens=16, recent_tokens=recents, block_size=block_size, model="x")

    own = loss("turboquant3", 64)
    assert own.kl_mean == pytest.approx(0.0139, abs=0.0005)
    assert own.protection == "first 32 tokens and last 64 tokens and the open block raw"
    assert loss("turboquant3", 63) == own == loss("turboquant3", 33)
    assert loss("turboquant3", 32).kl_mean == 0.02735  # first and last 16 raw, the nearest weaker one
    assert loss("turboquant3", 64, block_size=64) == own
    assert loss("turboquant3", 64, block_size=16).kl_mean == 0.01393  # to the token, without an open block
    assert loss("k=int8,v=fp8", 64).note == "not measured"
    nothing = expected_loss("int8", sink_tokens=0, recent_tokens=0, block_size=32, model="x")
    assert nothing.protection == "the open block raw"


def test_this_engines_losses_come_first() -> None:
    for codec in (name for name in CODEC_CHOICES if name not in ("raw", *RAW_DTYPES)):
        choice = CODEC_CHOICES[codec]
        for long in (False, True):
            kept = {"sink_tokens": choice.sink_tokens, "recent_tokens": choice.recent_tokens}
            found = expected_loss(codec, **kept, block_size=32, model="Smollm2 135M 8k", long=long)
            assert found.text is not None and "Shakespeare" in found.text, codec
            assert found.measured_for_this_model and not found.short_text
    assert loss_elsewhere("turboquant4", model="x").kl_mean == 0.03972
    assert loss_elsewhere("turboquant4", model="x", long=True).kl_mean == 0.053
    assert loss_elsewhere("fp8", model="x").kl_mean == 0.00677  # one scale per tensor, as those engines have it
    assert loss_elsewhere("fp8", model="x", long=True).short_text
    assert loss_elsewhere("loom4", model="x").protection == "nothing raw"


def test_families_whose_keys_break() -> None:
    """transformers#35185, llama.cpp#21385: Qwen2.5-7B at int4 keys falls from 98/120 to 0/120."""
    for choice in ask(model="qwen2.5-7b", situation="edge")["choices"]:
        if choice["codec"] in ("int4", "loom4", "kivi2"):
            assert not choice["accepted"]
            assert any("0/120" in reason for reason in choice["reasons"])
    assert ask(model="qwen2.5-7b", situation="edge")["choices"][0]["codec"] in ("int8", "fp8", "q8_0")


def test_when_compression_does_not_help() -> None:
    said = " ".join(ask(situation="throughput", context=1024)["warnings"])
    assert "fits already" in said
    assert "weights-bound at batch 1" in said
    busy = " ".join(ask(situation="throughput", context=128, batch=1024)["warnings"])
    assert "compute-bound at batch 1024" in busy


def test_workload_targets_and_sharing() -> None:
    workload = Workload(input_tokens=4000, output_tokens=200, shared_fraction=0.5, target_ttft_s=0.01)
    found = ask(context=None, batch=16, workload=workload)
    assert found["tokens"] == 4200
    assert any("no cache setting reaches it" in warning for warning in found["warnings"])
    assert any("2,000 shared prompt tokens are stored once" in r for r in found["choices"][0]["reasons"])
    tight = Workload(input_tokens=4000, output_tokens=200, target_tpot_s=0.012)
    limited = ask(context=None, workload=tight)["choices"]
    assert all(choice["step_seconds"] <= 0.012 for choice in limited)


def test_hand_over() -> None:
    found = ask(situation="chat-rag")
    engines = found["handover"]["engines"]
    assert set(engines) == {"vllm", "sglang", "tensorrt-llm", "tgi", "llama.cpp"}
    vllm = engines["vllm"]
    assert "vllm serve meta-llama/Llama-3.1-8B --max-model-len 32768" in vllm["command"]
    assert "--kv-offloading-size 64 --kv-offloading-backend native" in vllm["command"]
    assert "--kv-cache-dtype int8_per_token_head" in vllm["command"]
    assert any("codec loom4: not available there; int8" in item for item in vllm["cannot_express"])
    assert "--enable-hierarchical-cache" in engines["sglang"]["command"]
    assert "-ctk q8_0 -ctv q8_0" in engines["llama.cpp"]["command"]
    # fp8 was measured in short windows only where every token is encoded, so not at 32k
    assert "--kv-cache-dtype" not in engines["tgi"]["command"]
    options = yaml.safe_load(engines["tensorrt-llm"]["files"]["kv.yaml"])["kv_cache_config"]
    assert options["dtype"] == "auto"
    assert options["host_cache_size"] == 64 * 2**30
    short = ask(situation="chat-rag", context=1024, max_kl=0.01)["handover"]["engines"]
    assert "--kv-cache-dtype fp8_e4m3fn" in short["tgi"]["command"]
    assert "--kv-cache-dtype fp8_e4m3" in short["sglang"]["command"]


def test_hand_over_to_engines_that_keep_nothing_raw() -> None:
    """turboquant4 is accepted here for its raw first and last tokens; vLLM has the codec, but not those."""
    found = ask(situation="chat-rag", max_kl=0.01)
    accepted = [choice["codec"] for choice in found["choices"] if choice["accepted"]]
    assert "turboquant4" in accepted
    assert "--kv-cache-dtype int8_per_token_head" in found["handover"]["engines"]["vllm"]["command"]
    told = found["handover"]["engines"]["vllm"]["cannot_express"][0]
    assert "int8, the next that is accepted with every token encoded, instead" in told
    lax = ask(situation="chat-rag", max_kl=0.06)["handover"]["engines"]["vllm"]
    assert "--kv-cache-dtype turboquant_4bit_nc" in lax["command"]
    throughput = ask(situation="throughput", context=1024, max_kl=0.004)
    assert throughput["choices"][0]["codec"] == "int4"
    told = throughput["handover"]["engines"]["vllm"]
    assert told["cannot_express"][0].startswith("codec int4: not accepted with every token encoded; int8")
    int8 = next(choice for choice in throughput["choices"] if choice["codec"] == "int8")
    assert f"--max-num-seqs {int8['at_batch']} " in told["command"]


def test_yaml_is_what_kvloom_reads() -> None:
    handed = ask(situation="chat-rag")["handover"]
    planned = yaml.safe_load(handed["kvloom_yaml"])["pipeline"]
    assert planned["codec"] == "loom4"
    assert planned["protect"] == {"sink_tokens": 16, "recent_tokens": 64}
    assert planned["tiers"][0] == {"kind": "host", "size": "64GiB"}
    now = yaml.safe_load(handed["kvloom_yaml_served_now"])
    assert PipelineConfig(**now["pipeline"]).codec == "raw"
    assert now["max_model_len"] == 32_768


def test_parallel_flags() -> None:
    engines = ask(model="llama-3.1-70b", device="h200:8", tp=4, dp=2, situation="throughput")["handover"]["engines"]
    assert "--tensor-parallel-size 4 --data-parallel-size 2" in engines["vllm"]["command"]
    assert "--tp-size 4 --dp-size 2" in engines["sglang"]["command"]
    assert any("start as many servers" in item for item in engines["tgi"]["cannot_express"])


def test_choice_under_another_accounting() -> None:
    """Pipelines are kvloom's, so they are sized as kvloom counts whatever --accounting says."""
    sizes = [
        {choice["name"]: choice["bytes_per_sequence"] for choice in ask(situation="edge", accounting=name)["choices"]}
        for name in ("ideal", "kvloom", "vllm", "llama.cpp")
    ]
    assert all(found == sizes[0] for found in sizes)


def test_windowed_models_gain_nothing() -> None:
    found = ask(model="mistral-7b-v0.1", situation="long-context")
    assert any("every layer is windowed" in warning for warning in found["warnings"])
    assert {choice["bytes_per_sequence"] for choice in found["choices"] if not choice["press"]} == {4128 * 131_072}
