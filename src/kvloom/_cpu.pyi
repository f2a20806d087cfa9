"""Native kernels, for ``kvloom.kernels`` and ``kvloom.models.native``. Addresses and strides are plain integers."""

from collections.abc import Callable

MIN_DIM: int
MAX_DIM: int
MAX_LATENT_DIM: int
CHUNK: int

def variant_names() -> list[str]: ...

class Format:
    def __init__(
        self,
        dtype: int,
        block_size: int,
        num_heads: int,
        k_dim: int,
        v_dim: int,
        k_offset: int,
        v_offset: int,
        block_bytes: int,
        layer_bytes: int,
        /,
    ) -> None: ...
    def set_codes(
        self,
        values: bool,
        exponent_bits: int,
        center: float,
        token_groups: int,
        token_scale: int,
        token_offset: int,
        channel_scale: int,
        channel_offset: int,
        /,
    ) -> None: ...
    def add_part(self, values: bool, bits: int, channels: int, levels: list[int], codes: list[int], /) -> None: ...

class Batch:
    def __init__(
        self,
        arena: int,
        arena_bytes: int,
        tables: int,
        table_stride: int,
        max_blocks: int,
        query_start: int,
        first_position: int,
        sequences: int,
        /,
    ) -> None: ...

def keys_read(format: Format, batch: Batch, query_heads: int, latent: bool, window: int, /) -> int: ...

class BlockEncoder:
    def __init__(self, raw: Format, coded: Format, /) -> None: ...
    def set_plane(
        self,
        values: bool,
        method: int,
        rotated: bool,
        signs: int,
        means: int,
        stretch: int,
        edges: int,
        transforms: int,
        weights: int,
        /,
    ) -> None: ...

class Kernels:
    def __init__(self, variant: str, num_threads: int, gomp_parallel: int, /) -> None: ...
    def encode(self, encoder: BlockEncoder, task: EncodeTask, place: int, arena: int, arena_bytes: int, /) -> int: ...
    def write(
        self,
        fmt: Format,
        batch: Batch,
        layer_offset: int,
        k: int,
        k_dtype: int,
        k_token_stride: int,
        k_head_stride: int,
        v: int,
        v_dtype: int,
        v_token_stride: int,
        v_head_stride: int,
        /,
    ) -> None: ...
    def attend(
        self,
        fmt: Format,
        batch: Batch,
        layer_offset: int,
        q: int,
        q_dtype: int,
        q_token_stride: int,
        q_head_stride: int,
        query_heads: int,
        out: int,
        out_dtype: int,
        lse: int,
        scale: float,
        softcap: float,
        sinks: int,
        window: int,
        first_block: int,
        end_block: int,
        min_lag: int,
        max_lag: int,
        /,
    ) -> None: ...
    def attend_latent(
        self,
        fmt: Format,
        batch: Batch,
        layer_offset: int,
        dtype: int,
        q_latent: int,
        latent_token_stride: int,
        latent_head_stride: int,
        q_rope: int,
        rope_token_stride: int,
        rope_head_stride: int,
        query_heads: int,
        out: int,
        out_dtype: int,
        lse: int,
        scale: float,
        first_block: int,
        end_block: int,
        min_lag: int,
        max_lag: int,
        /,
    ) -> None: ...

def vector_lanes(variant: str, /) -> int: ...
def panel_width(variant: str, /) -> int: ...
def has_pair_products(variant: str, /) -> bool: ...
def pack_weights(rows: int, dtype: int, outputs: int, inner: int, panel: int, to: int, /) -> None: ...

class Linear:
    def __init__(self, panels: int, dtype: int, outputs: int, inner: int, bias: int, /) -> None: ...

class StepLayer:
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    query_heads: int
    group: int
    place: int
    rope: int
    window: int
    scale: float
    softcap: float
    def __init__(self) -> None: ...
    def set_input_norm(self, weight: int, /) -> None: ...
    def set_q_norm(self, weight: int, /) -> None: ...
    def set_k_norm(self, weight: int, /) -> None: ...
    def set_attention_out_norm(self, weight: int, /) -> None: ...
    def set_mlp_norm(self, weight: int, /) -> None: ...
    def set_mlp_out_norm(self, weight: int, /) -> None: ...
    def set_sinks(self, logits: int, /) -> None: ...

class Encoding:
    def __init__(
        self,
        storage: int,
        decoded: bool,
        sinks: int,
        recents: int,
        query_turn: int,
        turns_by_head: bool,
        output_turn: int,
        means: int,
        encoder: BlockEncoder | None,
    ) -> None: ...

class EncodeTask:
    def __init__(self, from_offsets: int, to_offsets: int, count: int, /) -> None: ...

class Step:
    def __init__(
        self,
        variant: str,
        num_threads: int,
        gomp_parallel: int,
        hidden: int,
        intermediate: int,
        vocab: int,
        eps: float,
        residual_scale: float,
        activation: int,
        pairs: bool,
        /,
    ) -> None: ...
    def set_embedding(self, rows: int, dtype: int, /) -> None: ...
    def set_embedding_scale(self, scale: float, /) -> None: ...
    def set_head(self, head: Linear, norm: int, /) -> None: ...
    def add_layer(self, layer: StepLayer, /) -> None: ...
    def run(
        self,
        ids: int,
        positions: int,
        tokens: int,
        ropes: list[tuple[int, int]],
        rotary_channels: int,
        formats: list[Format],
        batches: list[Batch],
        encodings: list[Encoding],
        encode_tasks: list[EncodeTask],
        encode: Callable[[int], None] | None,
        decode: Callable[[int], None] | None,
        rows: int,
        num_rows: int,
        logits: int,
        best: int,
        best_value: int,
    ) -> int: ...
    def by_rows(self) -> int: ...
    def take_times(self) -> dict[str, float]: ...
