"""Collect what calibrated codecs learn from: a model reads text, and every layer's vectors are kept.

The model runs in float32 with plain causal attention. With ``fisher`` it runs backward too: squared
gradients of the loss are the weights of kvquant's levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvloom.codecs.calibrate import LayerSample, calibrate
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.rope import RopeTable
from kvloom.core.errors import CodecError, RequestError
from kvloom.models.cachedir import cache_directory
from kvloom.models.loader import LoadedModel

ATTENTION = "kvloom_calibration"
SKIPPED = 16  # first tokens of a window, whose keys are unlike all others
RECENT = 64  # tokens before a query that codecs with bases leave raw by default
WINDOW = 1024


def calibration_path(weights_digest: str, cache_dir: str | None) -> Path:
    """Where the calibration of a model with these weights is kept unless another place is named."""
    return cache_directory(cache_dir) / "calibration" / f"{weights_digest[:32]}.safetensors"


def shipped_calibration(weights_digest: str) -> Path:
    """Where this package would bring a calibration for these weights: for SmolLM2-135M-Instruct it does."""
    return Path(__file__).with_name("calibrations") / f"{weights_digest[:32]}.safetensors"


def find_calibration(named: str | None, weights_digest: str, cache_dir: str | None) -> Calibration | None:
    """The calibration at ``named``, else the one made for the model, else the one shipped for it, if any.

    Raises:
        CodecError: the file named is missing; either is damaged or of another model.
    """
    if named:
        return Calibration.load(Path(named).expanduser(), weights_digest=weights_digest)
    path = calibration_path(weights_digest, cache_dir)
    if not path.exists():
        path = shipped_calibration(weights_digest)
    if not path.exists():
        return None
    return Calibration.load(path, weights_digest=weights_digest)


def default_text() -> str:
    """English prose that every Python has: its language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_of(loaded: LoadedModel, text: str, count: int, length: int = WINDOW) -> list[torch.Tensor]:
    """``count`` windows of ``length`` tokens, evenly spread over ``text``.

    Raises:
        RequestError: the text has too few tokens for one window.
    """
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    length = min(length, loaded.max_model_len)
    if len(ids) < length:
        raise RequestError(f"the text has {len(ids)} tokens; a calibration needs at least one window of {length}")
    count = max(1, min(count, len(ids) // length))
    step = (len(ids) - length) // max(1, count - 1)
    return [ids[i * step : i * step + length] for i in range(count)]


def collect(
    loaded: LoadedModel, windows: Sequence[torch.Tensor], rope: RopeTable | None, *, fisher: bool, about: dict[str, str]
) -> Calibration:
    """A calibration of ``loaded`` (float32, transformers' code) from ``windows`` of token ids, int64 [T] each.

    Raises:
        CodecError: the model keeps latents, which no calibrated codec takes.
    """
    layout = loaded.layout
    if any(group.planes[0].name != "k" for group in layout.groups):
        raise CodecError("calibration is for keys and values; this model keeps latents: use int8 or turboquant4 for it")
    seen: dict[int, list[torch.Tensor]] = {}

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx
        if fisher:
            for x in (key, value):
                x.retain_grad()
        groups = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        logits = query @ k.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(key.shape[2])
        lag = at[:, None] - at[None, :]
        window = layout.groups[layout.homes[layer][0]].window
        logits = logits.masked_fill((lag < 0) | (lag >= (window or len(at))), float("-inf"))
        if s_aux is not None:
            column = s_aux.view(1, -1, 1, 1).expand(1, -1, len(at), 1)
            logits = torch.cat([logits, column.to(logits.dtype)], -1)
        weights = torch.softmax(logits, -1)[..., : len(at)]
        if layer not in layout.shared:
            coded = weights.detach() * ((lag >= RECENT) & (at >= SKIPPED))
            seen[layer] = [query, key, value, (coded - coded.square()).sum(-1, keepdim=True)]
        return (weights @ v).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model = loaded.model
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    parts: dict[int, list[LayerSample]] = {}
    with torch.set_grad_enabled(fisher):
        for tokens in windows:
            embedded = model.get_input_embeddings()(tokens.unsqueeze(0))
            inputs = embedded.detach().requires_grad_() if fisher else embedded
            logits = model(inputs_embeds=inputs, use_cache=False).logits[0]
            if fisher:
                loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum")
                torch.autograd.backward(loss)
            for layer, (query, key, value, weights) in seen.items():
                parts.setdefault(layer, []).append(_sample(query, key, value, weights, rope, fisher=fisher))
            seen.clear()
    model.set_attn_implementation(before)
    joined = {layer: _join(samples) for layer, samples in parts.items()}
    return calibrate(joined, weights_digest=loaded.weights_digest, about=about)


def _sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_weights: torch.Tensor,
    rope: RopeTable | None,
    *,
    fisher: bool,
) -> LayerSample:
    """[1, heads, T, dim] each (weights: dim 1), to rows [T, heads, dim] without the window's first tokens."""
    at = torch.arange(key.shape[2]).unsqueeze(0)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.detach()[0, :, SKIPPED:].transpose(0, 1).contiguous()

    found = {"queries": rows(query), "keys": rows(key), "values": rows(value)}
    found["query_weights"] = rows(query_weights).squeeze(-1)
    if rope is not None:
        found["raw_keys"] = rows(rope.unrotate(key.detach(), at))
        if fisher and key.grad is not None and value.grad is not None:
            found["raw_key_gradients"] = rows(rope.unrotate(key.grad, at))
            found["value_gradients"] = rows(value.grad)
    return LayerSample(**found)


def _join(samples: list[LayerSample]) -> LayerSample:
    names = [name for name in LayerSample.__dataclass_fields__ if getattr(samples[0], name) is not None]
    return LayerSample(**{name: torch.cat([getattr(one, name) for one in samples]) for name in names})
