"""A check at load that the model's layers reach our attention, each once, with the layout's shapes.

A model whose code computes attention elsewhere, skips the interface in some layers, or has other
heads than its family says would run and answer wrongly. Two short runs show it:

- *calls*: a few tokens through a small arena, every call recorded and compared with the layout;
- *masks*: what transformers' own eager attention would be allowed to see, layer by layer, compared
  with causality and the layout's windows. Our attention gets no masks, so a window, chunk or
  bidirectional span that a model states only there would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvloom.attention.batch import KVBatch
from kvloom.attention.interface import ATTENTION_NAME
from kvloom.attention.scratch import scratch_store
from kvloom.core.errors import UnsupportedModelError
from kvloom.core.layout import KVLayout
from kvloom.kernels.ops import BlockFormat, KernelBackend, Order, QueryBatch, choose_backend

NUM_TOKENS = 5
BLOCK_SIZE = 8
MAX_MASK_TOKENS = 8256  # a mask of this many tokens squared takes 260 MiB in float32
_LENGTH_FIELDS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention_window")


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's use of the cache: group and place, query heads, dims, window."""

    group: int
    index: int
    query_heads: int
    dims: tuple[int, ...]
    window: int | None


@dataclass(slots=True)
class Recorder:
    """A backend that notes each call and passes it on."""

    inner: KernelBackend
    groups: dict[int, int] = field(default_factory=dict)  # id of a group's format -> group
    attended: list[Call] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    name: str = "recorder"
    variant: str = ""
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    def plane_order(self, plane: str, dtype: torch.dtype, dim: int, block_size: int) -> tuple[Order, int]:
        return self.inner.plane_order(plane, dtype, dim, block_size)

    def unsupported(self, fmt: BlockFormat, num_query_heads: int) -> str | None:
        return self.inner.unsupported(fmt, num_query_heads)

    def write(
        self,
        values: Sequence[torch.Tensor],
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
    ) -> None:
        self.written.append((self.groups[id(fmt)], layer_offset // fmt.layer_bytes))
        expected = [(batch.num_tokens, fmt.num_heads, plane.dim) for plane in fmt.planes]
        got = [tuple(rows.shape) for rows in values]
        if got != expected:
            raise UnsupportedModelError(f"a layer gives planes of shape {got} to the cache; its layout says {expected}")
        self.inner.write(values, arena, fmt, layer_offset, tables, batch)

    def attend(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.attended.append(
            Call(
                self.groups[id(fmt)],
                layer_offset // fmt.layer_bytes,
                q.shape[1],
                tuple(plane.dim for plane in fmt.planes),
                options.get("window"),
            )
        )
        return self.inner.attend(q, arena, fmt, layer_offset, tables, batch, **options)

    def encode(
        self, arena: torch.Tensor, raw: BlockFormat, encoded: BlockFormat, index: int, *spans: torch.Tensor
    ) -> int:
        return self.inner.encode(arena, raw, encoded, index, *spans)

    def attend_latent(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        arena: torch.Tensor,
        fmt: BlockFormat,
        layer_offset: int,
        tables: torch.Tensor,
        batch: QueryBatch,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dims = (q_latent.shape[2], q_rope.shape[2])
        self.attended.append(Call(self.groups[id(fmt)], layer_offset // fmt.layer_bytes, q_latent.shape[1], dims, None))
        return self.inner.attend_latent(q_latent, q_rope, arena, fmt, layer_offset, tables, batch, **options)


@torch.inference_mode()
def check_calls(model: nn.Module, layout: KVLayout, query_heads: Sequence[int]) -> int:
    """Run a few tokens and compare every call with the layout.

    Returns:
        The width of the logits.

    Raises:
        UnsupportedModelError: a layer did not reach the cache once, as its layout says.
    """
    parameter = next(model.parameters())
    backend = Recorder(choose_backend("reference", parameter.device, deterministic=False, num_threads=1))
    store, offsets = scratch_store(
        layout,
        backend,
        num_spans=[1] * len(layout.groups),
        block_size=BLOCK_SIZE,
        dtype=parameter.dtype,
        device=parameter.device,
    )
    backend.groups = {id(fmt): group for group, fmt in enumerate(store.formats)}
    batch = KVBatch(
        store=store,
        queries=QueryBatch.build([NUM_TOKENS], [0], parameter.device),
        tables=tuple(torch.tensor([row], dtype=torch.int64, device=parameter.device) for row in offsets),
    )
    ids = torch.arange(NUM_TOKENS, device=parameter.device).unsqueeze(0)
    keep = torch.tensor([NUM_TOKENS - 1], device=parameter.device)
    output = model(
        input_ids=ids, position_ids=batch.queries.positions.unsqueeze(0), use_cache=False, logits_to_keep=keep, kv=batch
    )
    expected = [
        Call(
            group,
            index,
            query_heads[layer],
            tuple(plane.dim for plane in layout.groups[group].planes),
            layout.groups[group].window,
        )
        for layer, (group, index) in enumerate(layout.homes)
    ]
    for layer, (want, got) in enumerate(zip(expected, backend.attended, strict=False)):
        if want != got:
            raise UnsupportedModelError(f"layer {layer} attends as {got}; its layout says {want}")
    if len(backend.attended) != len(expected):
        raise UnsupportedModelError(
            f"{len(backend.attended)} of the model's {len(expected)} layers reached the paged cache; the others "
            "compute attention elsewhere, so the model cannot be served"
        )
    stores = [home for layer, home in enumerate(layout.homes) if layer not in layout.shared]
    if backend.written != stores:
        raise UnsupportedModelError(
            f"the model wrote layers {backend.written} (group, index) to the cache; its layout says {stores}"
        )
    logits: torch.Tensor = output.logits
    if logits.shape[:2] != (1, 1) or not bool(torch.isfinite(logits).all()):
        raise UnsupportedModelError(
            f"a short run gave logits of shape {tuple(logits.shape)}, "
            f"{int((~torch.isfinite(logits)).sum())} of them not finite; expected finite ones of shape (1, 1, vocab)"
        )
    return int(logits.shape[-1])


def mask_tokens(layout: KVLayout, config: Any) -> int:
    """Tokens that show every window: a few more than the longest one in layout or configuration."""
    lengths = [group.window for group in layout.groups if group.window is not None]
    lengths += [value for name in _LENGTH_FIELDS if isinstance(value := getattr(config, name, None), int)]
    return max([16, *lengths]) + 4


@torch.inference_mode()
def check_masks(model: Any, layout: KVLayout, config: Any) -> str | None:
    """Compare the masks that eager attention would get with causality and the layout's windows.

    The layers themselves do not run: each is replaced, on this instance and for this call, by one
    that notes its mask and passes its input on.

    Returns:
        None, or why the masks could not be looked at.

    Raises:
        UnsupportedModelError: a layer's mask is not what the layout says.
    """
    count = mask_tokens(layout, config)
    if count > MAX_MASK_TOKENS:
        return f"masks were not compared: windows of {count} tokens are longer than {MAX_MASK_TOKENS}"
    layers = decoder_layers(model, layout.num_layers)
    if layers is None:
        return "masks were not compared: the model's list of layers was not recognised"
    device = next(model.parameters()).device
    masks: list[torch.Tensor | None] = []

    def note(hidden_states: torch.Tensor, *_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> Any:
        masks.append(attention_mask)
        return hidden_states

    try:
        model.set_attn_implementation("eager")
        for layer in layers:
            layer.forward = note
        model(
            input_ids=torch.zeros(1, count, dtype=torch.int64, device=device),
            use_cache=False,
            logits_to_keep=torch.tensor([count - 1], device=device),
        )
    except Exception as error:  # whatever a model's own code makes of layers that do nothing
        return f"masks were not compared: {type(error).__name__}: {error}"
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
        model.set_attn_implementation(ATTENTION_NAME)
    if len(masks) != layout.num_layers or any(mask is None for mask in masks):
        return "masks were not compared: the model hands its layers none"
    at = torch.arange(count, device=device)
    query, key = at.unsqueeze(1), at.unsqueeze(0)
    for layer_index, mask in enumerate(masks):
        assert mask is not None
        window = layout.groups[layout.homes[layer_index][0]].window
        visible = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        wanted = (key <= query) & (key > query - (count if window is None else window))
        if not torch.equal(visible, wanted):
            raise UnsupportedModelError(
                f"layer {layer_index} masks its keys otherwise than the layout says (causal, window {window}): "
                f"of {count} tokens the last sees {int(visible[-1].sum())}, the layout shows it "
                f"{int(wanted[-1].sum())}; a mask is all that states this, and the paged attention gets none"
            )
    return None


def decoder_layers(model: nn.Module, num_layers: int) -> list[nn.Module] | None:
    """The model's list of layers: the one module list of that length with an attention in each entry."""
    found = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and all(any(hasattr(part, "layer_idx") for part in entry.modules()) for entry in module)
    ]
    return found[0] if len(found) == 1 else None
