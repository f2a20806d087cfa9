"""As llama.cpp counts: padded cells, rows of ggml types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil

from kvloom.core.errors import ConfigError
from kvloom.core.layout import Plane
from kvloom.core.sizes import round_up
from kvloom.planner.accounting.base import Accounting, GroupBytes
from kvloom.planner.architecture import Architecture, RecurrentState
from kvloom.planner.formats import CacheFormat, PlannedGroup

LLAMA_CPP_PADDING = 256  # cells

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
