"""As vLLM counts: pages of 16 tokens, unlike layers sharing one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil

from kvloom.core.errors import ConfigError
from kvloom.core.layout import Plane
from kvloom.planner.accounting.base import Accounting, GroupBytes
from kvloom.planner.architecture import Architecture
from kvloom.planner.errors import UnknownError
from kvloom.planner.formats import CacheFormat, PlannedGroup

# vLLM's names for what it can store: our codec -> (flag value, bytes of a head's token of width d).
VLLM_CODECS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "raw": ("auto", lambda dim, element: dim * element),
    "fp8": ("fp8", lambda dim, element: dim),
    "fp8_e5m2": ("fp8_e5m2", lambda dim, element: dim),
    "int8": ("int8_per_token_head", lambda dim, element: dim + 4),
    "int4": ("int4_per_token_head", lambda dim, element: dim // 2 + 4),
}


class Vllm(Accounting):
    """vLLM's paged pool: blocks of 16 tokens; unlike layers share a pool in groups of equal size.

    Layers of each kind are cut into groups of ``group_size`` layers, the smallest kind's count (the
    largest's if that is under 1.25 times it); the last group of a kind is padded. A block of a group
    is one page for each of its layers. Windowed groups are sized for window - 1 + chunk tokens and one
    block more. Layers with smaller pages get proportionally longer blocks.
    """

    name = "vllm"
    version = "vLLM 0.2x-0.3x, hybrid KV cache manager"
    BLOCK = 16

    def __init__(self, architecture: Architecture, form: CacheFormat) -> None:
        if form.codec.name not in VLLM_CODECS and not form.lossless:
            known = ", ".join(VLLM_CODECS)
            raise ConfigError(
                f"codec {form.codec.name!r} has no known vLLM byte layout; with --accounting vllm use one of {known}"
            )
        super().__init__(architecture, form)
        self.step = self.BLOCK
        counts = [planned.group.num_layers for planned in self.groups]
        states = [len(state.layers) for state in architecture.states[:1]]
        counts += states
        low, high = min(counts), max(counts)
        self.group_size = high if high < 1.25 * low else low
        self._pages = {planned.name: self._page(planned) for planned in self.groups}
        self.page = max(self._pages.values(), default=0)
        self._state_page = sum(
            state.elements * (state.element_bytes or form.element_bytes) for state in architecture.states
        )
        self.block = self.BLOCK
        if self.groups and self._state_page > self.page:
            # attention blocks grow until one page holds a layer's state
            factor = ceil(self._state_page / self.page)
            self.block, self.page = self.BLOCK * factor, self.page * factor
            self.step = self.block
            self._pages = {name: size * factor for name, size in self._pages.items()}
        elif not self.groups:
            self.page = self._state_page
        for name, size in self._pages.items():
            if self.page % size:
                raise UnknownError(
                    f"vLLM cannot page layers of {size} and {self.page} bytes a block together ({name}); how it would "
                    "pad them is not known"
                )

    def _page(self, planned: PlannedGroup) -> int:
        key = "raw" if self.form.lossless else self.form.codec.name
        rule = VLLM_CODECS[key][1]
        group = planned.group
        per_token = sum(
            plane.dim + 4 if plane.name == "index" else rule(plane.dim, self.form.element_bytes)
            for plane in group.planes  # indexer keys are always fp8 with one float32 scale
        )
        return self.BLOCK * group.num_heads * per_token

    def plane_codec(self, planned: PlannedGroup, plane: Plane) -> str:
        return self.form.raw_dtype if self.form.lossless else self.form.codec.name

    @property
    def pool_block_bytes(self) -> int:
        """Bytes of one block of the pool: a page for each of ``group_size`` layers."""
        return self.page * self.group_size

    def _block_tokens(self, planned: PlannedGroup) -> int:
        return self.block * (self.page // self._pages[planned.name])

    def _blocks(self, planned: PlannedGroup, tokens: int) -> int:
        size, window = self._block_tokens(planned), planned.group.window
        whole = -(-tokens // size)
        if window is None:
            return whole
        # the planner's own bound: never more than the tokens themselves fill
        return min(whole, -(-min(window - 1 + self.form.chunk, tokens) // size) + 1)

    def _copies(self, planned: PlannedGroup) -> int:
        return ceil(planned.group.num_layers / self.group_size)

    def knees(self) -> tuple[int, ...]:
        return tuple(
            sorted(
                self._block_tokens(planned) * self._blocks(planned, 2**40)
                for planned in self.groups
                if planned.group.window is not None
            )
        )

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        size, blocks = self._block_tokens(planned), self._blocks(planned, tokens)
        block_bytes = self.pool_block_bytes * self._copies(planned)
        growing = planned.group.window is None or blocks < self._blocks(planned, 2**40)
        return self._describe(
            planned,
            stored=blocks * size,
            sequence_bytes=Fraction(blocks * block_bytes),
            marginal=Fraction(block_bytes, size) if growing else Fraction(0),
        )

    def state_bytes(self) -> int:
        states = self.architecture.states
        if not states:
            return 0
        return ceil(len(states[0].layers) / self.group_size) * self.pool_block_bytes

    def pool_blocks(self, available_bytes: int) -> int:
        """Blocks that fit (one of them is vLLM's null block, which its log counts too)."""
        return available_bytes // self.pool_block_bytes

    def pool_tokens(self, available_bytes: int) -> int:
        """vLLM's "GPU KV cache size" for a model with one kind of layer."""
        return self.pool_blocks(available_bytes) * self.block
