"""The codec guard: layers whose keys a codec would ruin are found at load, from a short text.

Some models keep a few enormous numbers in every key (Qwen2.5: biases of ``k_proj``). A codec with few
bits and one scale per token then spends its levels on them, and what is lost is larger than what
attention tells keys apart by. So an engine that loads a model with a codec lets it read a few tokens,
encodes the keys, and compares attention logits. Layers beyond the limit stay raw, or the load is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from kvloom.attention.formats import MakeCoder
from kvloom.core.errors import ConfigError
from kvloom.core.storage import Encoding, is_encoded, protected_homes
from kvloom.kernels.ops import BlockCoder
from kvloom.models.calibration import default_text
from kvloom.models.capture import LayerVectors, capture
from kvloom.models.loader import LoadedModel, auto_dtype
from kvloom.models.upcast import in_float32

logger = logging.getLogger("kvloom.engine")

PROBE_TOKENS = 192
CHARACTERS_PER_TOKEN = 16  # more than any tokenizer makes of prose
SMALL_VOCABULARY = 1024  # below, text is as good as random

# RMS of the error of attention logits, in nats. A typical pair of keys is then misjudged by a factor of
# exp(4 · √2) = 286: what the layer reads is noise. The worst layers of models without outliers, with blocks
# of 32: 0.6 (SmolLM2) and 1.2 (Gemma 3) at 4 bits, 2.6 and 3.2 at 2 bits (docs/codecs.md).
LIMIT_NATS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A model (running transformers' code), the engine's block size, and how many tokens may be read."""

    loaded: LoadedModel
    block_size: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardReport:
    """RMS error in nats of each encoded layer's logits, worst KV head; empty where nothing was measured."""

    errors: Mapping[int, float] = field(default_factory=dict)

    @property
    def flagged(self) -> tuple[int, ...]:
        """Layers beyond the limit, ascending."""
        return tuple(sorted(layer for layer, error in self.errors.items() if error > LIMIT_NATS))

    @property
    def worst(self) -> tuple[int, float]:
        """The layer with the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: item[1])


def guard_encoding(
    encoding: Encoding, mode: str, probe: Probe, make_coder: MakeCoder
) -> tuple[Encoding, tuple[int, ...]]:
    """``encoding`` with the layers it would ruin kept raw, and which those are.

    ``mode`` is ``protect`` or ``refuse``. A model that cannot be measured is served unguarded, with a
    warning.

    Raises:
        ConfigError: layers are beyond the limit and ``mode`` is ``refuse``, or they are more than half
            of what is encoded: that codec is not for this model.
        CodecError: a codec does not fit its plane, or lacks its calibration.
    """
    report = measure(encoding, probe, make_coder)
    flagged = report.flagged
    if not flagged:
        return encoding, ()
    if mode == "refuse" or 2 * len(flagged) > len(report.errors):
        raise ConfigError(_refusal(encoding, report, mode, probe.loaded.name))
    logger.warning(
        "codec guard: keys of %s stay raw, because codec %s would move attention logits there by more than %g nats "
        "RMS (%s); --codec-guard off encodes them all the same",
        _named(flagged),
        encoding.name,
        LIMIT_NATS,
        ", ".join(f"layer {layer}: {report.errors[layer]:.3g}" for layer in flagged),
    )
    layers = protected_homes(probe.loaded.layout, (*encoding.layers, *flagged))
    return replace(encoding, layers=layers), flagged


def measure(encoding: Encoding, probe: Probe, make_coder: MakeCoder) -> GuardReport:
    """What ``encoding`` does to the attention logits of each layer that it encodes the keys of.

    Raises:
        CodecError: as ``guard_encoding``.
    """
    loaded, block_size = probe.loaded, probe.block_size
    coders = _key_coders(encoding, probe, make_coder)
    sinks = encoding.sink_blocks(block_size)
    count = min(probe.max_tokens, max(PROBE_TOKENS, (sinks + 1) * block_size))
    if not coders or count < (sinks + 1) * block_size:
        return GuardReport()
    try:
        seen = _read(loaded, count)
    except Exception as error:  # whatever a model's own code raises; serving it is not the guard's to decide
        logger.warning(
            "codec guard: %s could not be measured (%s: %s), so codec %s is used unguarded",
            loaded.name,
            type(error).__name__,
            error,
            encoding.name,
        )
        return GuardReport()
    return GuardReport(
        errors={layer: logit_error(seen[layer], layer, coder, block_size, sinks) for layer, coder in coders.items()}
    )


def logit_error(vectors: LayerVectors, layer: int, coder: BlockCoder, block_size: int, sinks: int) -> float:
    """RMS error in nats of logits over the encoded keys that each query may read, in the worst KV head.

    Encoded are the full blocks of ``vectors`` but for the first ``sinks``. Recent blocks, which a served
    query would read raw, count too: errors hardly depend on the distance.
    """
    first, end = sinks * block_size, len(vectors.keys) // block_size * block_size
    keys = vectors.keys[first:end].float()
    blocks = keys.reshape(-1, block_size, *keys.shape[1:]).transpose(1, 2)  # [N, H, block_size, dim]
    positions = torch.arange(first, end, block_size, device=keys.device)
    data = coder.encode(blocks, layer=layer, first_position=positions)
    decoded = coder.decode(data, layer=layer, first_position=positions).transpose(1, 2).flatten(0, 1)
    at = torch.arange(len(vectors.keys), device=keys.device)
    visible = at[first:end] <= at[:, None]  # [T, keys]
    worst = 0.0
    for queries in vectors.queries:
        exact, found = (_logits(queries, x, vectors) for x in (keys, decoded))
        squares = torch.nan_to_num((found - exact).square(), nan=0.0, posinf=0.0)  # not finite: no codec's doing
        readers = squares.shape[1] * int(visible.sum())
        worst = max(worst, float(((squares * visible).sum(dim=(1, 2, 3)) / readers).sqrt().max()))
    return worst


def probe_tokens(loaded: LoadedModel, count: int) -> torch.Tensor:
    """int64 [count]: a text's beginning, or random tokens where the model has no text."""
    if loaded.tokenizer is not None and loaded.vocab_size >= SMALL_VOCABULARY:
        ids = loaded.tokenizer(default_text()[: CHARACTERS_PER_TOKEN * count])["input_ids"][:count]
        if len(ids) == count and max(ids) < loaded.vocab_size:
            return torch.tensor(ids, dtype=torch.int64)
    return torch.randint(loaded.vocab_size, (count,), generator=torch.Generator().manual_seed(0))


def _key_coders(encoding: Encoding, probe: Probe, make_coder: MakeCoder) -> dict[int, BlockCoder]:
    """The coder of each storing layer whose keys (of MLA: latents) are encoded."""
    found: dict[int, BlockCoder] = {}
    for group in probe.loaded.layout.groups:
        plane = group.planes[0]
        name = encoding.plane_codec(plane.name, "raw")
        if name == "raw" or not is_encoded(group, encoding):
            continue
        coder = make_coder(name, plane.name, plane.dim, probe.block_size)
        found.update({layer: coder for layer in group.layers if layer not in encoding.layers})
    return found


def _read(loaded: LoadedModel, count: int) -> dict[int, LayerVectors]:
    parameter = next(loaded.model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    # Absorbed latents are multiplied by weights outside of their module, which stay in 16 bits.
    latents = any(group.planes[0].name == "latent" for group in loaded.layout.groups)
    slow = auto_dtype(dtype, parameter.device) != dtype and not latents
    with in_float32(loaded.model) if slow else nullcontext():
        return capture(loaded.model, loaded.layout, probe_tokens(loaded, count).to(parameter.device))


def _logits(queries: torch.Tensor, keys: torch.Tensor, vectors: LayerVectors) -> torch.Tensor:
    """float32 [H, heads / H, T, keys] of queries [T, heads, dim] and keys [keys, H, dim]."""
    grouped = queries.float().reshape(queries.shape[0], keys.shape[1], -1, queries.shape[2])
    logits = torch.einsum("thgd,shd->hgts", grouped, keys) * vectors.scale
    return logits if vectors.softcap is None else vectors.softcap * torch.tanh(logits / vectors.softcap)


def _refusal(encoding: Encoding, report: GuardReport, mode: str, model: str) -> str:
    flagged, (layer, error) = report.flagged, report.worst
    safer = [name for name in ("int8", "kivi4") if not encoding.key.startswith(name)]
    if not encoding.key.startswith("loom"):
        safer.append("loom4 (after kvloom calibrate)")
    if mode == "refuse":
        keep = f"--protect-layers {','.join(map(str, (*encoding.layers, *flagged)))} keeps these layers raw"
    else:
        keep = "that is more than half, too many to keep raw"
    return (
        f"codec {encoding.name!r} would ruin the keys of {len(flagged)} of {len(report.errors)} encoded layers of "
        f"{model} ({_named(flagged)}): it moves attention logits by up to {error:.3g} nats RMS (layer {layer}), where "
        f"{LIMIT_NATS:g} is the limit. Use {' or '.join(safer)}, for keys at least (k=…,v=…); {keep}; "
        "--codec-guard off encodes all the same"
    )


def _named(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
