"""Tiny random models, loaded for the engine and, with equal weights, for transformers' eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from kvloom.attention.interface import ATTENTION_NAME, register_attention
from kvloom.core.config import EngineConfig, PipelineConfig
from kvloom.core.errors import CapacityError
from kvloom.core.layout import group_layers
from kvloom.core.messages import EngineRequest, SequenceOutput
from kvloom.core.request import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.models.calibration import collect
from kvloom.models.families import find_family
from kvloom.models.loader import LoadedModel
from kvloom.models.rope_table import rope_table

VOCAB = 97


def llama_config() -> Any:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def gemma3_config() -> Any:
    return Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )


CONFIGS = {"llama": llama_config, "gemma3_text": gemma3_config}


def make_model(model_type: str, attention: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[model_type](), attn_implementation=attention, dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the initialisation's weights, so that logits are well apart.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.requires_grad_(False)


def load_tiny(model_type: str, tokenizer: Any = None, eos: tuple[int, ...] = ()) -> LoadedModel:
    register_attention()
    return as_loaded(make_model(model_type, ATTENTION_NAME), model_type, tokenizer, eos)


def save_calibration(path: Path) -> None:
    """Of the tiny Llama, for codecs that learn."""
    model = load_tiny("llama")
    windows = [torch.tensor(prompt_of(seed, 128)) for seed in range(3)]
    collect(model, windows, rope_table(model.model, 512, 32), fisher=True, about={}).save(path)


def as_loaded(model: Any, model_type: str, tokenizer: Any = None, eos: tuple[int, ...] = ()) -> LoadedModel:
    """What the loader would return for ``model``, which has our attention."""
    family = find_family(model_type, allow_unverified=False)
    return LoadedModel(
        model=model,
        hf_config=model.config,
        tokenizer=tokenizer,
        layout=group_layers(family.layers(model.config)),
        num_query_heads=tuple(family.query_heads(model.config)),
        model_type=model_type,
        name=f"tiny {model_type}",
        max_model_len=512,
        eos_token_ids=eos,
        vocab_size=model.config.vocab_size,
        weights_digest="tiny",
        tokenizer_digest="none",
        generation_defaults={},
        verified=True,
    )


def make_engine(
    model_type: str,
    *,
    block_size: int = 16,
    prefix_cache: bool = True,
    kernels: str = "reference",
    tokenizer: Any = None,
    eos: tuple[int, ...] = (),
    loaded: LoadedModel | None = None,
    **settings: Any,
) -> Engine:
    settings.setdefault("kv_cache_memory", "16MiB")
    settings.setdefault("max_batch_tokens", 64)
    settings.setdefault("debug_poison", True)
    config = EngineConfig(
        kernels=kernels, pipeline=PipelineConfig(block_size=block_size, prefix_cache=prefix_cache), **settings
    )
    return Engine(config, loaded or load_tiny(model_type, tokenizer, eos))


def minimum_memory(model_type: str, **settings: Any) -> str:
    """The smallest ``kv_cache_memory`` with which the engine starts, as its refusal names it."""
    try:
        make_engine(model_type, kv_cache_memory="1kB", **settings)
    except CapacityError as error:
        return str(error).split("--kv-cache-memory ")[1].split()[0]
    raise AssertionError("1 kB was enough")


def ask(engine: Engine, name: str, prompt: list[int], *, salt: bytes = b"", priority: int = 0, **params: Any) -> None:
    params.setdefault("temperature", 0.0)
    params.setdefault("max_tokens", 8)
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        salt=salt,
        priority=priority,
    )
    engine.add(engine.prepare(request))


def run(engine: Engine, limit: int = 5000) -> dict[tuple[str, int], list[SequenceOutput]]:
    """Step until nothing is left; outputs by (request, index). Checks the accounts after every step."""
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.manager.check()
    raise AssertionError("the engine did not come to rest")


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompt_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def assert_greedy(eager: Any, prompt: list[int], output: list[int]) -> None:
    """``output`` is what transformers' eager attention would choose greedily after ``prompt``.

    One pass over prompt and output suffices: token i must be the best one after all before it.
    """
    logits = eager(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == output


@torch.inference_mode()
def eager_greedy(eager: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers' eager attention, without any cache: everything recomputed."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(eager(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
