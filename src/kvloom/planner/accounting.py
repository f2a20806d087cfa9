"""How many bytes a sequence holds: by the arithmetic alone, and as four engines really count.

*ideal*      every query's keys and values once, nothing rounded: min(context, window) tokens.
*kvloom*     whole spans of the paged arena: the same :mod:`kvloom.core.sizes` that the engine allocates with.
*vllm*       blocks of 16 in groups of equally many layers (hybrid KV cache manager, vLLM 0.2x to 0.3x).
*llama.cpp*  cells padded to 256; windowed layers hold window + batch cells (PR 13194).

Derivations: ``docs/sizing.md``. Engines change these rules between releases, so each says its version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from kvloom.core.errors import ConfigError
from kvloom.core.layout import Plane
from kvloom.core.sizes import ALIGNMENT, choose_slab_bytes, group_blocks, round_up
from kvloom.planner.architecture import Architecture, RecurrentState
from kvloom.planner.errors import UnknownError
from kvloom.planner.formats import CacheFormat, PlannedGroup, planned_groups

LLAMA_CPP_PADDING = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBytes:
    """What one group of one sequence holds at a context.

    ``stored_tokens`` counts token slots held, rounding included; ``marginal`` is the bytes that one
    more token adds on average at this context (0 once a window has passed).
    """

    name: str
    layers: tuple[int, ...]
    num_heads: int
    planes: tuple[Plane, ...]
    window: int | None
    codecs: Mapping[str, str]
    stored_tokens: int
    sequence_bytes: Fraction
    marginal: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBytes:
    """What one sequence holds at a context, group by group, and its recurrent state."""

    groups: tuple[GroupBytes, ...]
    state_bytes: int

    @property
    def total(self) -> int:
        return ceil(sum((group.sequence_bytes for group in self.groups), Fraction(0))) + self.state_bytes

    @property
    def marginal(self) -> Fraction:
        return sum((group.marginal for group in self.groups), Fraction(0))


class Accounting:
    """One way of counting. Subclasses say how many slots a group holds and what a slot costs."""

    name = ""
    version = ""
    step = 1  # tokens by which a sequence grows

    def __init__(self, architecture: Architecture, form: CacheFormat) -> None:
        self.architecture = architecture
        self.form = form
        self.groups = planned_groups(architecture, form)

    def sequence(self, tokens: int) -> SequenceBytes:
        """What one sequence of ``tokens`` holds at its fullest moment."""
        return SequenceBytes(
            groups=tuple(self._group(group, tokens) for group in self.groups), state_bytes=self.state_bytes()
        )

    def total(self, tokens: int, batch: int) -> int:
        """Bytes for ``batch`` sequences of ``tokens`` at once."""
        return batch * self.sequence(tokens).total

    def state_bytes(self) -> int:
        """Recurrent bytes of one request."""
        return self.architecture.state_bytes(self.form.element_bytes)

    def knees(self) -> tuple[int, ...]:
        """Contexts at which the slope changes."""
        return ()

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        raise NotImplementedError

    def _describe(
        self, planned: PlannedGroup, *, stored: int, sequence_bytes: Fraction, marginal: Fraction
    ) -> GroupBytes:
        group = planned.group
        return GroupBytes(
            name=group.name,
            layers=tuple(self.architecture.positions[index] for index in group.layers),
            num_heads=group.num_heads,
            planes=group.planes,
            window=group.window,
            codecs={plane.name: self.plane_codec(planned, plane) for plane in group.planes},
            stored_tokens=stored,
            sequence_bytes=sequence_bytes,
            marginal=marginal,
        )

    def plane_codec(self, planned: PlannedGroup, plane: Plane) -> str:
        return self.form.codec_of(plane, encoded=planned.encoded)


class Ideal(Accounting):
    """min(context, window) tokens, side data and protected tokens counted, nothing rounded."""

    name = "ideal"
    version = "arithmetic"

    def knees(self) -> tuple[int, ...]:
        found: set[int] = set()
        for planned in self.groups:
            window = planned.group.window
            if window is not None:
                found.add(window)
            if planned.encoded:
                found.add(self._protected(planned))
        return tuple(sorted(found - {0}))

    def _protected(self, planned: PlannedGroup) -> int:
        sinks = self.form.sink_tokens if planned.group.window is None else 0
        return sinks + self.form.recent_tokens

    def _token_bytes(self, planned: PlannedGroup, *, encoded: bool) -> Fraction:
        group, size = planned.group, self.form.block_size
        per_head = sum(
            (Fraction(self.form.plane_block_bytes(plane, size, encoded=encoded), size) for plane in group.planes),
            Fraction(0),
        )
        return per_head * group.num_heads * group.num_layers

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        window = planned.group.window
        stored = tokens if window is None else min(tokens, window)
        growing = window is None or tokens <= window
        raw_rate = self._token_bytes(planned, encoded=False)
        if not planned.encoded:
            return self._describe(
                planned, stored=stored, sequence_bytes=stored * raw_rate, marginal=raw_rate if growing else Fraction(0)
            )
        rate = self._token_bytes(planned, encoded=True)
        raw = min(stored, self._protected(planned))
        marginal = raw_rate if tokens <= self._protected(planned) else rate
        return self._describe(
            planned,
            stored=stored,
            sequence_bytes=raw * raw_rate + (stored - raw) * rate,
            marginal=marginal if growing else Fraction(0),
        )


class Kvloom(Accounting):
    """Whole spans, from the engine's own geometry: block and window rounding, alignment, slabs.

    Of an encoded group, the sink blocks, the last r blocks and the open one stay raw (design:
    "What a query reads"), r = recent_tokens / block_size rounded up.
    """

    name = "kvloom"
    version = "this version's core/sizes"

    def __init__(self, architecture: Architecture, form: CacheFormat) -> None:
        super().__init__(architecture, form)
        self.step = form.block_size

    def knees(self) -> tuple[int, ...]:
        size = self.form.block_size
        found: set[int] = set()
        for planned in self.groups:
            if planned.group.window is not None:
                found.add(size * group_blocks(planned.group, 2**40, 1, size))
            if planned.encoded:
                found.add(size * self._raw_blocks(planned))
        return tuple(sorted(found))

    def span_bytes(self, planned: PlannedGroup, *, encoded: bool) -> int:
        """Bytes of one span of the group; equal to core.sizes' for formats that the engine has."""
        group, size = planned.group, self.form.block_size
        block = sum(
            round_up(self.form.plane_block_bytes(plane, size, encoded=encoded), ALIGNMENT) for plane in group.planes
        )
        return block * group.num_heads * group.num_layers

    def _raw_blocks(self, planned: PlannedGroup) -> int:
        size = self.form.block_size
        sinks = self.form.sink_tokens if planned.group.window is None else 0
        return ceil(sinks / size) + ceil(self.form.recent_tokens / size) + 1

    def spans(self, planned: PlannedGroup, tokens: int, chunk: int) -> tuple[int, int]:
        """(raw, encoded) spans that a sequence of ``tokens`` holds while it computes ``chunk``."""
        blocks = group_blocks(planned.group, tokens, chunk, self.form.block_size)
        if not planned.encoded:
            return blocks, 0
        raw = min(blocks, self._raw_blocks(planned))
        return raw, blocks - raw

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        raw, encoded = self.spans(planned, tokens, 1)
        raw_bytes = self.span_bytes(planned, encoded=False)
        encoded_bytes = self.span_bytes(planned, encoded=True) if planned.encoded else 0
        size = self.form.block_size
        window = planned.group.window
        growing = window is None or raw + encoded < group_blocks(planned.group, 2**40, 1, size)
        rate = encoded_bytes if encoded else raw_bytes
        return self._describe(
            planned,
            stored=(raw + encoded) * size,
            sequence_bytes=Fraction(raw * raw_bytes + encoded * encoded_bytes),
            marginal=Fraction(rate, size) if growing else Fraction(0),
        )

    def slab_bytes(self) -> int:
        """The arena's unit, as the engine chooses it from its span sizes."""
        runs = [self.span_bytes(planned, encoded=False) for planned in self.groups]
        runs += [self.span_bytes(planned, encoded=True) for planned in self.groups if planned.encoded]
        return choose_slab_bytes(runs)

    def total(self, tokens: int, batch: int) -> int:
        """Arena bytes: whole slabs, one of the sequences computing a full chunk."""
        if not self.groups:
            return batch * self.state_bytes()
        slab = self.slab_bytes()
        slabs = 0
        for planned in self.groups:
            raw, encoded = self.spans(planned, tokens, 1)
            peak = sum(self.spans(planned, tokens, self.form.chunk))
            per_slab = slab // self.span_bytes(planned, encoded=False)
            slabs += -(-(batch * raw + peak - raw - encoded) // per_slab)
            if encoded:
                slabs += -(-batch * encoded // (slab // self.span_bytes(planned, encoded=True)))
        return slabs * slab + batch * self.state_bytes()


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


# ggml rows: our codec -> (type name, bytes of a row of n values).
GGML_ROWS: Mapping[str, tuple[str, Callable[[int], int]]] = {
    "float32": ("f32", lambda n: 4 * n),
    "float16": ("f16", lambda n: 2 * n),
    "bfloat16": ("bf16", lambda n: 2 * n),
    "q8_0": ("q8_0", lambda n: ceil(n / 32) * 34),
    "q4_0": ("q4_0", lambda n: ceil(n / 32) * 18),
}


class LlamaCpp(Accounting):
    """llama.cpp: cells padded to 256; windowed layers hold min(context, window + batch) cells.

    ``chunk`` is the batch counted beside a window: 2,048 as PR 13194 shipped, 512 (the micro-batch) in
    later releases. MLA keeps latent and rope in one row, in K's type. Recurrent state is f32.
    """

    name = "llama.cpp"
    version = "llama.cpp PR 13194 (window + n_batch); later releases: --chunk 512"
    step = LLAMA_CPP_PADDING

    def __init__(self, architecture: Architecture, form: CacheFormat) -> None:
        super().__init__(architecture, form)
        for plane in ("k", "v"):
            self._row_rule(plane)

    def _row_rule(self, plane: str) -> tuple[str, Callable[[int], int]]:
        if self.form.lossless:
            return GGML_ROWS[self.form.raw_dtype]
        name = self.form.codec.value if plane == "v" else self.form.codec.key
        name = self.form.raw_dtype if name == "raw" else name
        if name not in GGML_ROWS:
            raise ConfigError(
                f"codec {self.form.codec.name!r} does not exist in llama.cpp; with --accounting llama.cpp use raw, "
                "q8_0, q4_0, or a pair of them such as k=q8_0,v=q4_0"
            )
        return GGML_ROWS[name]

    def plane_codec(self, planned: PlannedGroup, plane: Plane) -> str:
        return self._row_rule(plane.name)[0]

    def knees(self) -> tuple[int, ...]:
        windows = {planned.group.window for planned in self.groups if planned.group.window is not None}
        return tuple(sorted(round_up(window + self.form.chunk, LLAMA_CPP_PADDING) for window in windows))

    def _group(self, planned: PlannedGroup, tokens: int) -> GroupBytes:
        group = planned.group
        cells = round_up(tokens, LLAMA_CPP_PADDING)
        if {plane.name for plane in group.planes} & {"latent"}:
            # latent and rope are one row of K's type, V is a view of it; an indexer key has its own
            joined = sum(plane.dim for plane in group.planes if plane.name != "index")
            row = self._row_rule("k")[1](joined)
            row += sum(self._row_rule("k")[1](plane.dim) for plane in group.planes if plane.name == "index")
        else:
            row = sum(self._row_rule(plane.name)[1](plane.dim * group.num_heads) for plane in group.planes)
        growing = True
        if group.window is not None:
            limit = round_up(group.window + self.form.chunk, LLAMA_CPP_PADDING)
            growing, cells = cells < limit, min(cells, limit)
        rate = Fraction(row * group.num_layers)
        return self._describe(
            planned, stored=cells, sequence_bytes=cells * rate, marginal=rate if growing else Fraction(0)
        )

    def state_bytes(self) -> int:
        return sum(_float32(state) for state in self.architecture.states)


def _float32(state: RecurrentState) -> int:
    return len(state.layers) * state.elements * 4


ACCOUNTINGS: Mapping[str, type[Accounting]] = {
    "ideal": Ideal,
    "kvloom": Kvloom,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
}

DEFAULT_CHUNK: Mapping[str, int] = {"ideal": 512, "kvloom": 512, "vllm": 2048, "llama.cpp": 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Between two knees a sequence holds ``fixed + slope × context`` bytes, before rounding."""

    start: int
    end: int | None
    fixed: Fraction
    slope: Fraction


def segments(accounting: Accounting) -> tuple[Segment, ...]:
    """The piecewise-linear size of a sequence: one segment between each two knees."""
    step = accounting.step
    edges = [0, *(knee for knee in accounting.knees() if knee > 0)]
    result: list[Segment] = []
    for index, start in enumerate(edges):
        end = edges[index + 1] if index + 1 < len(edges) else None
        at = start + step
        here = accounting.sequence(at)
        exact = sum((group.sequence_bytes for group in here.groups), Fraction(here.state_bytes))
        following = accounting.sequence(at + step)
        later = sum((group.sequence_bytes for group in following.groups), Fraction(following.state_bytes))
        slope = (later - exact) / step if end is None or at + step <= end else here.marginal
        result.append(Segment(start=start, end=end, fixed=exact - slope * at, slope=slope))
    return tuple(result)


def segment_at(parts: tuple[Segment, ...], tokens: int) -> Segment:
    """The segment that ``tokens`` lies in; a knee belongs to the segment before it."""
    for part in parts:
        if part.end is None or tokens <= part.end:
            return part
    return parts[-1]
