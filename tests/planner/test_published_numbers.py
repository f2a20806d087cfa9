"""Every exact number that was published with a source: each test names it. 16-bit cache unless said."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvloom.core.codec_sizes import bits_per_value
from kvloom.core.errors import ConfigError
from kvloom.planner.accounting import LlamaCpp, Vllm, segments
from kvloom.planner.whatif import what_if

from .helpers import GIB, MIB, accounting, architecture, ideal_bytes


def test_llama_31_8b() -> None:
    """huggingface/blog#2345: 131,072 B a token; 128,000 tokens are 15.625 GiB (the blog prints "15.62 GB")."""
    assert ideal_bytes("llama-3.1-8b", 1) == 131_072
    assert ideal_bytes("llama-3.1-8b", 128_000) / GIB == 15.625


def test_llama_3_70b_at_4096() -> None:
    """IETF draft-calabria-bmwg: 1,342,177,280 B."""
    assert ideal_bytes("llama-3-70b", 4096) == 1_342_177_280


def test_llama_3_70b_at_8192_and_the_folk_number() -> None:
    """8 KV heads: 2.50 GiB and 80 GiB for 32; the folk "20 GB" and "640 GB" are what 64 heads give."""
    assert ideal_bytes("llama-3-70b", 8192) == 2_684_354_560
    assert 32 * ideal_bytes("llama-3-70b", 8192) / GIB == 80.0
    wrong = accounting("ideal", what_if(architecture("llama-3-70b"), "mha"))
    assert wrong.sequence(8192).total / GIB == 20.0
    assert wrong.total(8192, 32) / GIB == 640.0


def test_llama_3_70b_at_131072() -> None:
    """Denneman: 40 GiB = 42.95 GB (wrong in public: 160 GB, 1,280 GB)."""
    assert ideal_bytes("llama-3.1-70b", 131_072) / GIB == 40.0
    assert round(ideal_bytes("llama-3.1-70b", 131_072) / 1e9, 2) == 42.95


def test_llama_31_405b() -> None:
    """tooljolt: 516,096 B a token with 8 KV heads; HF's 123.05 GB at 128k implies 16."""
    assert ideal_bytes("llama-3.1-405b", 1) == 516_096
    sixteen = accounting("ideal", what_if(architecture("llama-3.1-405b"), "gqa:16"))
    assert round(sixteen.sequence(128_000).total / GIB, 2) == 123.05


def test_deepseek_v3_latent() -> None:
    """provide.ai: 70,272 B a token; 2**20 tokens are 68.625 GiB."""
    assert ideal_bytes("deepseek-v3", 1) == 70_272
    assert ideal_bytes("deepseek-v3", 2**20) / GIB == 68.625


def test_deepseek_v3_in_q8_0() -> None:
    """ik_llama.cpp#259's log: 1166.62 MiB at 32,768 (34 bytes for 32 values)."""
    assert accounting("llama.cpp", "deepseek-v3", "q8_0").sequence(32_768).total / MIB == 1166.625


def test_deepseek_v2_lite_expanded_and_latent() -> None:
    """ollama#6279's log, not absorbed: K 6,480 + V 4,320 MiB at 40,960; the latent would be 1,215."""
    model = architecture("deepseek-v2-lite")
    expanded = accounting("ideal", what_if(model, "mha"))
    layer = expanded.architecture.layers[0]
    assert {plane.name: plane.dim for plane in layer.planes} == {"k": 192, "v": 128}
    per_value = layer.num_heads * len(expanded.architecture.layers) * 2 * 40_960
    assert (192 * per_value / MIB, 128 * per_value / MIB) == (6480, 4320)
    assert expanded.sequence(40_960).total / MIB == 10_800
    assert ideal_bytes("deepseek-v2-lite", 40_960) / MIB == 1215


def test_qwen25_7b_pool() -> None:
    """vllm#44594: 57,344 B a token; a 16 GiB pool in blocks of 16 is 299,584 tokens."""
    assert ideal_bytes("qwen2.5-7b", 1) == 57_344
    vllm = accounting("vllm", "qwen2.5-7b")
    assert isinstance(vllm, Vllm)
    assert vllm.pool_tokens(16 * GIB) == 299_584


@pytest.mark.parametrize(
    ("blocks", "gib", "length", "times"),
    [(5_691, 11.12, 8_192, 11.12), (1_952, 3.81, 20_000, 1.56)],
)
def test_llama_3_8b_pools(blocks: int, gib: float, length: int, times: float) -> None:
    """vllm#12330 and #10517: logged blocks, GiB and concurrency agree."""
    vllm = accounting("vllm", "llama-3-8b")
    assert isinstance(vllm, Vllm)
    size = blocks * vllm.pool_block_bytes
    assert round(size / GIB, 2) == gib
    assert vllm.pool_blocks(size) == blocks
    assert round(vllm.pool_tokens(size) / length, 2) == times


def test_llama_3_8b_small_pool() -> None:
    """vllm#10517: 1,478 blocks hold 23,648 tokens."""
    vllm = accounting("vllm", "llama-3-8b")
    assert isinstance(vllm, Vllm)
    assert vllm.pool_tokens(1_478 * vllm.pool_block_bytes) == 23_648


def test_qwen3_8b() -> None:
    """LMCache#1740: 10,010 tokens are 1.3747 GiB (logged as "gb")."""
    assert round(ideal_bytes("qwen3-8b", 10_010) / GIB, 4) == 1.3747


def test_gemma_3_27b_in_llama_cpp() -> None:
    """r/LocalLLaMA on llama.cpp#13194, 65,536: 5,120 + 1,248 = 6,368 MiB; without windows 31,744."""
    counted = accounting("llama.cpp", "gemma-3-27b")
    assert isinstance(counted, LlamaCpp)
    full, window = counted.sequence(65_536).groups
    assert (full.sequence_bytes / MIB, window.sequence_bytes / MIB) == (5120, 1248)
    assert window.stored_tokens == 1024 + 2048
    assert counted.sequence(65_536).total / MIB == 6368
    everything = accounting("ideal", "gemma-3-27b").sequence(1).total * 65_536
    assert everything / MIB == 31_744


def test_gpt_oss() -> None:
    """kvfit's tests: 4.50439453125 and 3.0029296875 GiB at 131,072; 73,728 B at one token (hf-mem#60: 36,864)."""
    assert ideal_bytes("gpt-oss-120b", 131_072) / GIB == 4.50439453125
    assert ideal_bytes("gpt-oss-20b", 131_072) / GIB == 3.0029296875
    assert ideal_bytes("gpt-oss-120b", 1) == 73_728
    after = segments(accounting("ideal", "gpt-oss-120b"))[-1]
    assert (after.slope, after.fixed) == (36_864, 128 * 36_864)


def test_fill_of_short_prompts() -> None:
    """vllm#57336: 17-token prompts in blocks of 16 fill at most 53.1 %."""
    held = accounting("vllm", "llama-3-8b").sequence(17).groups[0].stored_tokens
    assert held == 32
    assert round(100 * 17 / held, 1) == 53.1


def test_gpt2_xl_and_opt_13b() -> None:
    """botbeat: 307,200 B a token; PagedAttention's "800 KB a token": 819,200 B."""
    assert ideal_bytes("gpt2-xl", 1) == 307_200
    assert ideal_bytes("opt-13b", 1) == 819_200


def test_bits_of_formats() -> None:
    """llama.cpp#7412: q8_0 8.5, q4_0 4.5 bits. 2 bits in groups of 32 with fp16 scale and zero are 3.0 (5.33 times)."""
    assert bits_per_value("q8_0", 128, 32) == 8.5
    assert bits_per_value("q4_0", 128, 32) == 4.5
    assert bits_per_value("kivi2.key", 128, 32) == 3.0
    assert bits_per_value("kivi2.value", 128, 32) == 3.0
    assert Fraction(16) / Fraction(bits_per_value("kivi2.key", 64, 32)) == Fraction(16, 3)


def test_smollm2() -> None:
    """quantization.md: 23,040 B a token raw, 6,120 at 4.25 bits."""
    assert ideal_bytes("smollm2-135m", 1) == 23_040
    assert ideal_bytes("smollm2-135m", 1000, "loom4", sink_tokens=0, recent_tokens=0) == 6_120_000


def test_head_dim_is_not_hidden_over_heads() -> None:
    """LMCache#688: Qwen3 (and Mistral Nemo) state a head_dim that hidden / heads misses."""
    assert architecture("qwen3-0.6b").layers[0].planes[0].dim == 128  # 1024 / 16 = 64
    assert architecture("mistral-nemo-12b").layers[0].planes[0].dim == 128  # 5120 / 32 = 160


def test_tensor_parallel_divisor() -> None:
    """tenstorrent/vllm#50: the divisor is min(tp, KV heads), and heads are then replicated."""
    from kvloom.planner.parallel import Parallel, replicas_per_head, stages

    model = architecture("llama-3-70b")
    (rank,) = stages(model, Parallel(tp=16))
    assert rank.layers[0].num_heads == 1
    assert replicas_per_head(8, 16) == 2
    with pytest.raises(ConfigError, match="tp 3 cannot divide 8 KV heads"):
        replicas_per_head(8, 3)
