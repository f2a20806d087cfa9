"""``NativeModel``: built from a transformers model, called like one, computed by ``_cpu.Step``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from kvloom import _cpu
from kvloom.attention.batch import KVBatch, KVStore
from kvloom.attention.encoded import count_faults, encode_due
from kvloom.codecs.rope import RopeTable
from kvloom.core.layout import KVLayout
from kvloom.kernels.cpu import CpuBackend
from kvloom.kernels.decoded import DecodedBlocks
from kvloom.kernels.ops import KeyRange
from kvloom.kernels.packing import DTYPE_CODES, PackedLinear, Packer
from kvloom.models.native.encodings import Encodings
from kvloom.models.native.shapes import ACTIVATIONS, SHAPES, activation_of, unrecognised

_FIRST_POSITIONS = 512
_MOST_SPARE = 64  # times the logits wanted: those of a whole prompt are not kept for a few rows


class NoNativeStepError(Exception):
    """The model differs from what the native step computes; the message says in what."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """As transformers' model output: ``logits`` [1, N, vocab] float32.

    ``best``: of each row the first place [N] int64 of its largest logit and that logit [N] float32, NaN
    counting as largest; None where it was not looked for.
    """

    logits: torch.Tensor
    best: tuple[torch.Tensor, torch.Tensor] | None = None


class NativeModel(nn.Module):
    """A decoder whose forward pass is one native call.

    A token's logits depend on it and its keys alone, bit for bit, whatever else is in the batch. Not
    for several threads at once: activations live in one set of buffers.

    Args:
        model: transformers' model; its weights are copied into packed form, the model is not kept.
        model_type: a key of ``shapes.SHAPES``.
        layout: of the cache.
        backend: the native kernels that the cache is read with.
        pairs: round activations to bfloat16 and multiply in pairs, where weights and CPU allow it.

    Raises:
        NoNativeStepError: the model has a part that the step does not compute.
    """

    batch_invariant = True
    reads_codecs = True

    def __init__(
        self, model: Any, model_type: str, layout: KVLayout, backend: CpuBackend, *, pairs: bool = True
    ) -> None:
        super().__init__()
        config = model.config
        reason = unrecognised(model_type, config)
        if reason is not None:
            raise NoNativeStepError(reason)
        if layout.shared:
            raise NoNativeStepError("layers share each other's cache")
        self._layout, self._backend = layout, backend
        self._encodings: Encodings | None = None
        self._kept: list[torch.Tensor] = []  # what the native step holds by address
        self._lent: torch.Tensor | None = None  # the last logits, which their reader may give back,
        self._spare: torch.Tensor | None = None  # and those given back
        dtype = next(model.parameters()).dtype
        # Says the dtype and device of the model to those who ask any module for its parameters.
        self.anchor = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self._shape = SHAPES[model_type]
        body = model.model
        self._rotary = body.rotary_emb
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        layers = list(body.layers)
        self._rope_types = self._find_rope_types(config)
        self._packer = Packer(backend.variant)
        self._packed = [self._pack_layer(layer) for layer in layers]
        head = self._linear(model.lm_head)
        embedding = body.embed_tokens.weight
        tied = head.bias is None and torch.equal(model.lm_head.weight, embedding)
        self._packed.append([head])
        eps = {_eps(norm) for norm in self._norms(body, layers)}
        if len(eps) != 1:
            raise NoNativeStepError(f"its norms have different epsilons {sorted(eps)}")
        self.pairs = (
            pairs
            and dtype == torch.bfloat16
            and _cpu.has_pair_products(backend.variant)
            and all(linear.dtype == torch.bfloat16 for layer in self._packed for linear in layer)
        )
        self._vocab = int(model.lm_head.weight.shape[0])
        self._step = _cpu.Step(
            backend.variant,
            backend.num_threads,
            backend.gomp_parallel,
            int(embedding.shape[1]),
            int(config.intermediate_size),
            self._vocab,
            eps.pop(),
            float(getattr(config, "residual_multiplier", None) or 1.0),
            ACTIVATIONS[activation_of(config)],
            self.pairs,
        )
        if not tied:
            rows = self._keep(embedding.detach().clone())
            self._step.set_embedding(rows.data_ptr(), DTYPE_CODES[rows.dtype])
        exact, rounded = _embedding_scale(body.embed_tokens, config, dtype)
        self.exact_embedding_scale, self.embedding_scale = exact, rounded
        self.set_embedding_scale(rounded)
        self._step.set_head(head.native, self._norm(body.norm))
        self._query_heads: dict[int, int] = {}  # by layer group, whose layers share a plan of attention
        self._capped: set[int] = set()  # layer groups with a softcap
        for index, layer in enumerate(layers):
            self._add_layer(index, layer, config)
        self._softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self._logit_divisor = float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: every packed matrix once (an embedding row per token comes on top)."""
        return sum(linear.num_bytes for layer in self._packed for linear in layer)

    @property
    def layout(self) -> KVLayout:
        """Of the cache that it reads and writes."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._vocab

    def set_embedding_scale(self, scale: float) -> None:
        self._step.set_embedding_scale(scale)

    @property
    def passes_by_rows(self) -> int:
        """Passes in which each thread took rows of its own through all layers (``csrc/lanes.h``)."""
        return self._step.by_rows()

    def rope_table(self, positions: int) -> RopeTable | None:
        """The table of positions 0 … ``positions`` - 1, or None where layers rotate by different ones."""
        frequencies = getattr(self._rotary, "inv_freq", None)
        if self._rope_types != [None] or not isinstance(frequencies, torch.Tensor):
            return None
        factor = float(getattr(self._rotary, "attention_scaling", 1.0))
        return RopeTable.from_frequencies(frequencies.cpu(), max(positions, 16), factor=factor, style="half")

    def take_times(self) -> dict[str, float]:
        """Seconds in matrix products, attention, encoding and everything else since the last call."""
        times: dict[str, float] = self._step.take_times()
        return times

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        kv: KVBatch,
        use_cache: bool = False,
    ) -> StepOutput:
        """As the transformers model it replaces: see ``attention.interface``.

        Args:
            input_ids: int64 [1, T].
            position_ids: int64 [1, T].
            logits_to_keep: int64 [N], rows whose logits are wanted.
            kv: the batch; without padding.
            use_cache: must be False.

        Returns:
            Logits [1, N, vocab] float32.
        """
        if use_cache or kv.num_padding:
            raise ValueError("the native step has the paged cache only, and takes no padding")
        store, backend = kv.store, self._backend
        ids, rows = input_ids[0].contiguous(), logits_to_keep.contiguous()
        positions = position_ids[0].contiguous()
        queries = kv.queries
        ends = queries.first_position_host + np.diff(queries.query_start_host)
        self._cover(int(ends.max(initial=0)))
        encodings = self._encodings_of(store)
        formats, batches = [], []
        decoded: dict[int, DecodedBlocks] = {}
        for group, fmt in enumerate(store.formats):
            home, arena, tables = store.storage[group].home, store.arena, kv.tables[group]
            if fmt.is_encoded and home in encodings.decoded:
                decoded[home] = self._decoded_blocks(kv, group)
                fmt, arena, tables = decoded[home].format, decoded[home].arena, decoded[home].tables
            formats.append(backend.native_format(fmt, self._query_heads[home]))
            batches.append(backend.native_batch(arena, tables, queries))
        logits = self._lend(len(rows) * self._vocab).view(len(rows), self._vocab)
        # Of a prompt's rows nobody asks for the best; what changes logits afterwards could make equals of them.
        best = None
        if len(rows) <= queries.num_sequences and self._logit_divisor == 1.0 and not self._softcap:
            best = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows), dtype=torch.float32)
        not_finite = self._step.run(
            ids.data_ptr(),
            positions.data_ptr(),
            len(ids),
            [(cosines.data_ptr(), sines.data_ptr()) for cosines, sines in self._angles],
            self._angles[0][0].shape[-1],
            formats,
            batches,
            encodings.native,
            self._encode_tasks(kv),
            partial(self._encode, kv) if kv.encode else None,
            partial(self._decode, kv, decoded) if any(blocks.num_spans for blocks in decoded.values()) else None,
            rows.data_ptr(),
            len(rows),
            logits.data_ptr(),
            *((0, 0) if best is None else (best[0].data_ptr(), best[1].data_ptr())),
        )
        count_faults(store, not_finite)
        if self._logit_divisor != 1.0:
            logits /= self._logit_divisor
        if self._softcap:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return StepOutput(logits.unsqueeze(0), best)

    def recycle(self) -> None:
        """The logits of the last pass are not read any more: the next may overwrite them.

        Memory that is new to the process comes a page at a time, which costs more than what is written there.
        """
        self._spare, self._lent = self._lent, None

    def _lend(self, count: int) -> torch.Tensor:
        spare, self._spare = self._spare, None
        if spare is None or not count <= len(spare) <= _MOST_SPARE * count:
            spare = torch.empty(count, dtype=torch.float32)
        self._lent = spare
        return spare[:count]

    def _encode_tasks(self, kv: KVBatch) -> list[_cpu.EncodeTask]:
        """Per layer group, what the pass encodes natively; empty where that is nothing."""
        if not kv.encode:
            return []
        tasks = []
        for item in kv.store.storage[: len(self._layout.groups)]:
            task = None if item.twin is None else kv.encode.get(item.twin)
            if task is None:
                tasks.append(_cpu.EncodeTask(0, 0, 0))
            else:
                tasks.append(self._backend.encode_task(task.raw_offsets, task.encoded_offsets))
        return tasks

    def _encode(self, kv: KVBatch, layer: int) -> None:
        group, place = self._layout.homes[layer]
        encode_due(kv, kv.store.storage[group], place)

    def decoded_first(self, store: KVStore) -> list[str]:
        """Why PyTorch decodes encoded blocks of ``store`` before they are read; empty where it does not."""
        return sorted(set(self._encodings_of(store).decoded.values()))

    def _encodings_of(self, store: KVStore) -> Encodings:
        if self._encodings is None or self._encodings.store is not store:
            self._encodings = Encodings(store, self._backend, self._query_heads, self._capped)
        return self._encodings

    def _decoded_blocks(self, kv: KVBatch, group: int) -> DecodedBlocks:
        item, store = kv.store.storage[kv.store.storage[group].home], kv.store
        assert item.recents is not None
        keys = KeyRange(first_block=item.sinks, min_lag=item.recents + 1)
        window = self._layout.groups[item.home].window
        return self._backend.decoded_blocks(store.formats[group], kv.tables[group], kv.queries, keys, window)

    def _decode(self, kv: KVBatch, decoded: Mapping[int, DecodedBlocks], layer: int) -> None:
        group, place = self._layout.homes[layer]
        store = kv.store
        twin = store.storage[group].twin
        assert twin is not None
        if not decoded[group].num_spans:
            return
        backend = store.backend  # that whose counters are shown: a native model may serve several engines
        assert isinstance(backend, CpuBackend)
        backend.fallbacks[f"decode: {self._encodings_of(store).decoded[group]}"] += 1
        decoded[group].fill(store.arena, place * store.formats[twin].layer_bytes)

    # -- building -----------------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor

    def _cover(self, length: int) -> None:
        """Have cosines and sines of positions 0 … length - 1, by the model's own module."""
        if self._angles and len(self._angles[0][0]) >= length:
            return
        # Twice as many at least, so that long answers do not compute them anew every step.
        have = len(self._angles[0][0]) if self._angles else _FIRST_POSITIONS
        positions = torch.arange(max(length, 2 * have)).unsqueeze(0)
        like = torch.empty(0, dtype=torch.float32)
        self._angles = []
        for kind in self._rope_types:
            cosines, sines = self._rotary(like, positions) if kind is None else self._rotary(like, positions, kind)
            self._angles.append((cosines[0].contiguous(), sines[0].contiguous()))

    def _find_rope_types(self, config: Any) -> list[str | None]:
        """Keys of the model's tables of angles: one per layer type (Gemma 3), or a single None."""
        kinds = getattr(self._rotary, "layer_types", None)
        return [None] if kinds is None else list(kinds)

    def _pack_layer(self, layer: Any) -> list[PackedLinear]:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):  # Phi 3 stores them fused
            qkv = self._linear(attention.qkv_proj)
        else:
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            biases = [part.bias for part in parts]
            if any(bias is None for bias in biases) != all(bias is None for bias in biases):
                biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
            bias = None if biases[0] is None else torch.cat(biases)
            qkv = self._packer.linear(torch.cat([part.weight for part in parts]), bias)
        if hasattr(mlp, "gate_up_proj"):
            gate, up = mlp.gate_up_proj.weight.chunk(2)
            bias = mlp.gate_up_proj.bias
            gate_biases = None if bias is None else list(bias.chunk(2))
        else:
            gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
            gate_biases = None if mlp.gate_proj.bias is None else [mlp.gate_proj.bias, mlp.up_proj.bias]
        return [
            qkv,
            self._linear(attention.o_proj),
            self._packer.gated(gate, up, gate_biases),
            self._linear(mlp.down_proj),
        ]

    def _linear(self, module: nn.Linear) -> PackedLinear:
        try:
            return self._packer.linear(module.weight, module.bias)
        except ValueError as error:
            raise NoNativeStepError(str(error)) from error

    def _norm(self, module: nn.Module | None) -> int:
        """Address of a norm's weights, 0 for none."""
        if module is None:
            return 0
        weight = module.get_parameter("weight").detach().float() + self._shape.norm_offset
        return self._keep(weight.contiguous().clone()).data_ptr()

    def _layer_norms(self, layer: Any) -> dict[str, nn.Module | None]:
        shape = self._shape
        found = {
            name: None if attribute is None else getattr(layer, attribute)
            for name, attribute in (
                ("input_norm", shape.input_norm),
                ("attention_out_norm", shape.attention_out_norm),
                ("mlp_norm", shape.mlp_norm),
                ("mlp_out_norm", shape.mlp_out_norm),
            )
        }
        for name in ("q_norm", "k_norm"):
            found[name] = getattr(layer.self_attn, name, None)
        return found

    def _norms(self, body: Any, layers: list[Any]) -> list[nn.Module]:
        found = [norm for layer in layers for norm in self._layer_norms(layer).values() if norm is not None]
        return [body.norm, *found]

    def _add_layer(self, index: int, layer: Any, config: Any) -> None:
        attention = layer.self_attn
        group, place = self._layout.homes[index]
        spec = self._layout.groups[group]
        k_dim, v_dim = (plane.dim for plane in spec.planes)
        query_heads = int(layer.self_attn.o_proj.weight.shape[1]) // v_dim
        qkv, out, gate_up, down = self._packed[index]
        native = _cpu.StepLayer()
        native.qkv, native.o, native.gate_up, native.down = qkv.native, out.native, gate_up.native, down.native
        for name, module in self._layer_norms(layer).items():
            if name in ("q_norm", "k_norm") and module is not None:
                size = int(module.get_parameter("weight").numel())
                if size != k_dim:
                    raise NoNativeStepError(f"{name} spans {size} channels, not one head's {k_dim}")
            getattr(native, f"set_{name}")(self._norm(module))
        native.query_heads = query_heads
        native.group = group
        native.place = place
        if getattr(attention, "use_rope", True):
            kinds = getattr(config, "layer_types", None)
            native.rope = 0 if kinds is None or self._rope_types == [None] else self._rope_types.index(kinds[index])
        native.window = -1 if spec.window is None else spec.window
        native.scale = float(attention.scaling)
        native.softcap = float(getattr(attention, "attn_logit_softcapping", None) or 0.0)
        if native.softcap:
            self._capped.add(group)
        if self._query_heads.setdefault(group, query_heads) != query_heads:
            raise NoNativeStepError("layers with equal caches have different numbers of query heads")
        self._step.add_layer(native)


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _embedding_scale(embedding: Any, config: Any, dtype: torch.dtype) -> tuple[float, float]:
    """What embeddings are multiplied by: exactly, and as rounded to the weights' dtype where the model does that."""
    if getattr(config, "embedding_multiplier", None) is not None:  # Granite
        return float(config.embedding_multiplier), float(config.embedding_multiplier)
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return 1.0, 1.0
    exact = float(scale)
    return exact, float(torch.tensor(exact).to(dtype))
