"""Load a model that the engine can run: checked files, a verified family, our attention, a cache layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.attention.interface import register_attention
from kvloom.core.config import EngineConfig
from kvloom.core.errors import ConfigError, CorruptModelError, ModelError, UnsupportedModelError
from kvloom.core.layout import KVLayout, group_layers
from kvloom.models.cachedir import cache_directory
from kvloom.models.checkpoint import Checkpoint, read_checkpoint
from kvloom.models.digest import tokenizer_digest, weights_digest
from kvloom.models.families import FAMILIES, find_family
from kvloom.models.families.base import ModelFamily
from kvloom.models.native.shapes import unrecognised
from kvloom.models.rope import rope_digest
from kvloom.models.seam import check_calls, check_masks
from kvloom.models.sources import ModelSource, resolve_model
from kvloom.models.upcast import in_float32

GENERATION_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to serve.

    ``model`` takes ``input_ids`` and ``position_ids`` [1, T], ``use_cache=False``,
    ``logits_to_keep`` (row indices) and ``kv`` (a KVBatch), and returns an object with ``logits``
    [1, N, vocab_size]. ``hf_config`` is the text model's configuration. ``generation_defaults``
    holds what ``generation_config.json`` says of sampling. ``rope_digest`` tells apart loads whose
    rotary frequencies differ. ``warnings`` are for the user's eyes.
    """

    model: Any
    hf_config: Any
    tokenizer: Any
    layout: KVLayout
    num_query_heads: tuple[int, ...]
    model_type: str
    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    weights_digest: str
    tokenizer_digest: str
    generation_defaults: Mapping[str, Any]
    verified: bool
    rope_digest: str = ""
    warnings: tuple[str, ...] = ()


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, check and load ``config.model`` on ``config.device``.

    Raises:
        ModelError: it does not exist or cannot be reached.
        CorruptModelError: its files are missing, truncated or contradict each other.
        UnsupportedModelError: it would be served wrongly, or was never verified.
        ConfigError: the device does not exist.
    """
    device = find_device(config.device)
    source = resolve_model(config.model, config.cache_dir)
    return load_checkpoint(source, config, device)


def load_checkpoint(source: ModelSource, config: EngineConfig, device: torch.device) -> LoadedModel:
    """Load the model directory ``source``; raises as ``load_model``."""
    checkpoint = read_checkpoint(source.directory)
    model_type = checkpoint.model_type
    family = find_family(model_type, allow_unverified=config.allow_unverified)
    hf_config = family.text_config(_read_config(checkpoint))
    reason = family.unsupported(hf_config)
    if reason is not None:
        raise UnsupportedModelError(f"{source.name} (model type {model_type!r}) cannot be served: {reason}")
    layout = group_layers(family.layers(hf_config))
    tokenizer = _read_tokenizer(checkpoint)
    native = native_step_expected(model_type, hf_config, config, device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = checkpoint.stored_dtype() if native else auto_dtype(checkpoint.stored_dtype(), device)
    model = _read_model(checkpoint, family, hf_config, getattr(torch, dtype), device)
    max_model_len = family.max_length(hf_config)
    family.prepare(model, config.max_model_len or max_model_len)

    query_heads = tuple(family.query_heads(hf_config))
    warnings = []
    # A model that will run natively may be in a dtype which torch multiplies slowly here.
    with in_float32(model) if native else nullcontext():
        vocab_size = check_calls(model, layout, query_heads)
        unchecked = check_masks(model, layout, hf_config)
    verified = model_type in FAMILIES
    if not verified:
        guess = "; ".join(
            f"{group.num_layers} layers with {group.num_heads} KV heads and window {group.window}"
            for group in layout.groups
        )
        warnings.append(
            f"model type {model_type!r} is not verified: nobody compared its answers with transformers' own; its cache "
            f"layout was read off its configuration ({guess})"
        )
        if unchecked is not None:
            warnings.append(unchecked)
    warnings += check_vocabulary(source, tokenizer, vocab_size)
    cache = cache_directory(config.cache_dir)
    return LoadedModel(
        model=model,
        hf_config=hf_config,
        tokenizer=tokenizer,
        layout=layout,
        num_query_heads=query_heads,
        model_type=model_type,
        name=source.name,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(checkpoint),
        vocab_size=vocab_size,
        weights_digest=weights_digest(checkpoint, cache),
        tokenizer_digest=tokenizer_digest(checkpoint),
        generation_defaults={
            name: checkpoint.generation_config[name]
            for name in GENERATION_FIELDS
            if checkpoint.generation_config.get(name) is not None
        },
        verified=verified,
        rope_digest=rope_digest(model),
        warnings=tuple(warnings),
    )


def find_device(name: str) -> torch.device:
    """The torch device ``name``.

    Raises:
        ConfigError: torch does not know it, or it is not in this machine.
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no data")
        # float64 too: the sampler draws with it, and MPS has none.
        torch.zeros(1, device=device, dtype=torch.float64).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"device {name!r} cannot be used ({reason}); use cpu, or a device of this machine that torch "
            f"{torch.__version__} was built for, such as cuda"
        ) from error
    return device


def auto_dtype(stored: str, device: torch.device) -> str:
    """The dtype that ``auto`` means: the checkpoint's, or float32 on a CPU that cannot multiply in it.

    Without AVX-512 or AMX, torch's bfloat16 and float16 matrix products on x86 run element by
    element, ten and more times slower than float32's.
    """
    if device.type != "cpu" or stored == "float32":
        return stored
    supported = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return stored if supported[stored]() else "float32"


def native_step_expected(model_type: str, hf_config: Any, config: EngineConfig, device: torch.device) -> bool:
    """Whether the engine will try a native step for this model."""
    return (
        config.step != "transformers"
        and config.kernels != "reference"
        and device.type == "cpu"
        and unrecognised(model_type, hf_config) is None
    )


def check_vocabulary(source: ModelSource, tokenizer: Any, vocab_size: int) -> list[str]:
    """A warning where added tokens have ids beyond the logits, as Gemma 3's image token in its text models.

    Raises:
        CorruptModelError: the vocabulary itself goes beyond them: the tokenizer is another model's.
    """
    if tokenizer.vocab_size > vocab_size:
        raise CorruptModelError(
            f"{source.directory} has a tokenizer of {tokenizer.vocab_size} tokens but logits for {vocab_size}; "
            "use the tokenizer that came with the weights"
        )
    beyond = sorted(token for token, number in tokenizer.get_added_vocab().items() if number >= vocab_size)
    if not beyond:
        return []
    return [f"prompts with {', '.join(beyond[:4])} are refused: the model has no embedding for it"]


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Every token that ends an answer, from both configurations, ascending."""
    text = checkpoint.config.get("text_config") or {}
    found: set[int] = set()
    for value in (
        checkpoint.generation_config.get("eos_token_id"),
        checkpoint.config.get("eos_token_id"),
        text.get("eos_token_id"),
    ):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def _read_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the configuration's own validation raises many types
        raise CorruptModelError(
            f"{checkpoint.directory / 'config.json'} is refused by transformers ({_first_line(error)}); "
            "use the config.json that came with the weights"
        ) from error


def _read_tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise CorruptModelError(
            f"the tokenizer in {checkpoint.directory} cannot be loaded ({_first_line(error)}); "
            "copy the tokenizer files that came with the weights"
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"the tokenizer in {checkpoint.directory} has no fast version (tokenizer.json), which streaming and "
            "grammars need; add the model's tokenizer.json"
        )
    return tokenizer


def _read_model(
    checkpoint: Checkpoint, family: ModelFamily, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    from transformers import AutoModelForCausalLM

    register_attention()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            config=hf_config,
            dtype=dtype,
            attn_implementation=family.build_attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            key_mapping=dict(family.weight_names) or None,
            ignore_mismatched_sizes=True,  # so that they are reported below, by name
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{checkpoint.directory} cannot be loaded by transformers: {_first_line(error)}") from error
    _check_report(checkpoint, family, report)
    try:
        model = model.to(device)
    except RuntimeError as error:
        raise ModelError(f"{checkpoint.directory} does not fit on {device}: {_first_line(error)}") from error
    return model.eval().requires_grad_(False)


def _check_report(checkpoint: Checkpoint, family: ModelFamily, report: Mapping[str, Any]) -> None:
    """Raise for every weight that transformers could not fill from the files."""
    mismatched = sorted(tuple(entry) for entry in report.get("mismatched_keys") or ())
    if mismatched:
        name, stored, built = (*mismatched[0], "?", "?")[:3]
        raise CorruptModelError(
            f"{checkpoint.directory}: config.json contradicts the weights: {name} is {_shape(stored)} in the files but "
            f"{_shape(built)} by the configuration ({len(mismatched)} such weights); use the config.json that came "
            "with the weights"
        )
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise CorruptModelError(
            f"{checkpoint.directory}: {len(missing)} weights are in none of the files, such as {missing[0]}; "
            "download the missing files, or use the config.json that came with the weights"
        )
    unexpected = sorted(
        name
        for name in report.get("unexpected_keys") or ()
        if family.ignored_weights is None or re.search(family.ignored_weights, name) is None
    )
    if unexpected:
        raise CorruptModelError(
            f"{checkpoint.directory}: {len(unexpected)} weights in the files have no place in the model that "
            f"config.json describes, such as {unexpected[0]}; use the config.json that came with the weights"
        )
    if report.get("error_msgs"):
        raise CorruptModelError(f"{checkpoint.directory}: {report['error_msgs'][0]}")


def _shape(value: Any) -> str:
    return str(tuple(value)) if hasattr(value, "__iter__") and not isinstance(value, str) else str(value)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
