"""Collect what calibrated codecs learn from: a model reads text, and every layer's vectors are kept.

The model runs in float32 with plain causal attention. With ``fisher`` it runs backward too, on the first
part of each window: squared gradients of the loss are the weights of kvquant's levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvloom.codecs.calibrate import LayerSample, calibrate
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.moments import Moments
from kvloom.codecs.rope import RopeTable
from kvloom.core.errors import CodecError, RequestError
from kvloom.models.cachedir import cache_directory
from kvloom.models.loader import LoadedModel

ATTENTION = "kvloom_calibration"
SKIPPED = 16  # first tokens of a window, whose keys are unlike all others
RECENT = 64  # tokens before a query that codecs with bases leave raw by default
WINDOW = 4096
CONTEXT = 8192  # positions that a calibration is made for, where the model has as many
LEVEL_TOKENS = 1024  # of each window, for kvquant's levels: gradients need a whole pass in memory
QUERY_ROWS = 256  # attended at once


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

    RoPE turns keys by their positions, so what is learnt at some says little of others: windows take
    turns at the positions up to ``CONTEXT``. If there is a rotary table, the model reads the first
    ``LEVEL_TOKENS`` of each again, for kvquant's levels.

    Raises:
        CodecError: the model keeps latents, which no calibrated codec takes.
    """
    if any(group.planes[0].name != "k" for group in loaded.layout.groups):
        raise CodecError("calibration is for keys and values; this model keeps latents: use int8 or turboquant4 for it")
    moments: dict[int, Moments] = {}
    with _Observer(loaded) as observer, torch.no_grad():
        for index, tokens in enumerate(_shown(windows, "reading for moments")):
            places = max(1, min(CONTEXT, loaded.max_model_len) // len(tokens))
            observer.read(tokens, first_position=index % places * len(tokens))
            for layer, (query, key, value, weights) in observer.seen.items():
                if layer not in moments:
                    moments[layer] = Moments(key.shape[1], key.shape[3], value.shape[3])
                moments[layer].add(_rows(key), _rows(value), _rows(query), _rows(weights).squeeze(-1))
    parts: dict[int, list[LayerSample]] = {}
    if rope is not None:
        with _Observer(loaded, retain_grad=fisher) as observer, torch.set_grad_enabled(fisher):
            for tokens in _shown(windows, "reading for levels"):
                start = tokens[:LEVEL_TOKENS]
                logits = observer.read(start)
                if fisher:
                    loss = torch.nn.functional.cross_entropy(logits[:-1].float(), start[1:], reduction="sum")
                    torch.autograd.backward(loss)
                for layer, (_, key, value, _) in observer.seen.items():
                    parts.setdefault(layer, []).append(_sample(key, value, rope, fisher=fisher))
    joined = {layer: _join(samples) for layer, samples in parts.items()}
    return calibrate(joined, moments=moments, weights_digest=loaded.weights_digest, about=about)


def _shown(windows: Sequence[torch.Tensor], what: str) -> Iterable[torch.Tensor]:
    """The windows, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(windows, description=what, console=console, transient=True, disable=not console.is_terminal)


class _Observer:
    """The model with an attention that keeps what each storing layer is given; within ``with``.

    ``seen`` holds, of the last text read, each layer's queries, keys, values [1, heads, T, dim] and by
    how far each query's attention follows its logits: Σ p (1 − p) over the keys that would be coded,
    [1, heads, T, 1]. With ``retain_grad`` keys and values keep their gradient.
    """

    def __init__(self, loaded: LoadedModel, *, retain_grad: bool = False) -> None:
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._model = loaded.model
        self._layout = loaded.layout
        self._retain_grad = retain_grad

    def __enter__(self) -> _Observer:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, self._attention)
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(ATTENTION)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation(self._before)
        self.seen.clear()

    def read(self, tokens: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        """Logits [T, vocab]; of the last token only where no gradient is asked for."""
        self.seen.clear()
        embedded = self._model.get_input_embeddings()(tokens.unsqueeze(0))
        if self._retain_grad:
            embedded = embedded.detach().requires_grad_()
        logits: torch.Tensor = self._model(
            inputs_embeds=embedded,
            position_ids=first_position + torch.arange(len(tokens)).unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if self._retain_grad else 1,
        ).logits[0]
        return logits

    def _attention(
        self,
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
        if self._retain_grad:
            for x in (key, value):
                x.retain_grad()
        groups = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        length = key.shape[2]
        window = self._layout.groups[self._layout.homes[layer][0]].window or length
        outputs, followed = [], []
        for first in range(0, length, QUERY_ROWS):
            rows = query[:, :, first : first + QUERY_ROWS]
            end = first + rows.shape[2]  # no row reads further
            logits = rows @ k[:, :, :end].mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            at = torch.arange(end)
            lag = torch.arange(first, end)[:, None] - at[None, :]
            logits = logits.masked_fill((lag < 0) | (lag >= window), float("-inf"))
            if s_aux is not None:
                column = s_aux.view(1, -1, 1, 1).expand(1, -1, len(lag), 1)
                logits = torch.cat([logits, column.to(logits.dtype)], -1)
            weights = torch.softmax(logits, -1)[..., :end]
            outputs.append(weights @ v[:, :, :end])
            coded = weights.detach() * ((lag >= RECENT) & (at >= SKIPPED))
            followed.append((coded - coded.square()).sum(-1, keepdim=True))
        if layer not in self._layout.shared:
            self.seen[layer] = (query, key, value, torch.cat(followed, dim=2))
        return torch.cat(outputs, dim=2).transpose(1, 2), None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] to rows [T, heads, dim] without the window's first tokens."""
    return x.detach()[0, :, SKIPPED:].transpose(0, 1).contiguous()


def _sample(key: torch.Tensor, value: torch.Tensor, rope: RopeTable, *, fisher: bool) -> LayerSample:
    """Of [1, heads, T, dim] each."""
    at = torch.arange(key.shape[2]).unsqueeze(0)
    found = {"keys": _rows(key), "values": _rows(value), "raw_keys": _rows(rope.unrotate(key.detach(), at))}
    if fisher and key.grad is not None and value.grad is not None:
        found["raw_key_gradients"] = _rows(rope.unrotate(key.grad, at))
        found["value_gradients"] = _rows(value.grad)
    return LayerSample(**found)


def _join(samples: list[LayerSample]) -> LayerSample:
    names = [name for name in LayerSample.__dataclass_fields__ if getattr(samples[0], name) is not None]
    return LayerSample(**{name: torch.cat([getattr(one, name) for one in samples]) for name in names})
