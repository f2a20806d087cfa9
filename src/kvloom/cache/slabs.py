"""Slab allocator: hands out equal-sized runs of several formats from one budget of bytes.

The arena is cut into slabs; a slab holds runs of one format while any of them is in use, and
belongs to nobody otherwise. Allocation fills the fullest slab first, so that emptier ones drain.
Bookkeeping only: no bytes are touched here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvloom.core.errors import ConfigError


class _Slab:
    """A slab in use: its format and which of its runs are taken."""

    __slots__ = ("format", "free_runs", "used")

    def __init__(self, format: int, num_runs: int) -> None:
        self.format = format
        self.free_runs = list(range(num_runs - 1, -1, -1))  # popped from the end: lowest run first
        self.used: set[int] = set()


class SlabAllocator:
    """Runs of ``run_bytes[f]`` bytes for format f, out of ``num_slabs`` slabs of ``slab_bytes``.

    ``reserve_slabs`` stay out of reach of ordinary allocation; sealing and pressing, which need
    memory before they free any, may take them with ``from_reserve``.

    Raises:
        ConfigError: a run is larger than a slab, or the reserve larger than the arena.
    """

    def __init__(self, run_bytes: Sequence[int], *, slab_bytes: int, num_slabs: int, reserve_slabs: int = 0) -> None:
        for run in run_bytes:
            if not 0 < run <= slab_bytes:
                raise ConfigError(f"a run of {run} bytes does not fit a slab of {slab_bytes} bytes")
        if not 0 <= reserve_slabs <= num_slabs:
            raise ConfigError(f"a reserve of {reserve_slabs} slabs does not fit an arena of {num_slabs} slabs")
        self.run_bytes = tuple(run_bytes)
        self.slab_bytes = slab_bytes
        self.num_slabs = num_slabs
        self.reserve_slabs = reserve_slabs
        self.runs_per_slab = tuple(slab_bytes // run for run in run_bytes)
        self.used_runs = [0] * len(run_bytes)
        self.slabs_of = [0] * len(run_bytes)
        self._free = list(range(num_slabs - 1, -1, -1))
        self._slabs: dict[int, _Slab] = {}
        # Per format: slabs with a free run, bucketed by their number of used runs. Dicts serve as
        # ordered sets, so that equal histories give equal offsets.
        self._partial: list[dict[int, dict[int, None]]] = [{} for _ in run_bytes]

    @property
    def free_slabs(self) -> int:
        """Slabs that belong to no format, the reserve included."""
        return len(self._free)

    def free_runs(self, format: int) -> int:
        """Free runs in slabs that already belong to ``format``."""
        return self.slabs_of[format] * self.runs_per_slab[format] - self.used_runs[format]

    def slab_of(self, offset: int) -> int:
        return offset // self.slab_bytes

    def format_of(self, slab: int) -> int | None:
        """The format that owns ``slab``, or None."""
        entry = self._slabs.get(slab)
        return None if entry is None else entry.format

    def slabs(self, format: int) -> Iterator[int]:
        """Slabs owned by ``format``."""
        return (index for index, slab in self._slabs.items() if slab.format == format)

    def used_offsets(self, slab: int) -> list[int]:
        """Arena offsets of the runs in use within ``slab``."""
        entry = self._slabs.get(slab)
        if entry is None:
            return []
        base, run = slab * self.slab_bytes, self.run_bytes[entry.format]
        return [base + index * run for index in sorted(entry.used)]

    def allocate(self, format: int, *, from_reserve: bool = False, avoid_slab: int | None = None) -> int | None:
        """The arena offset of a free run, or None when ``format`` has none left.

        ``avoid_slab`` names a slab that is being emptied, and forbids opening a new one: moving
        runs into a fresh slab would free nothing.
        """
        slab = self._fullest(format, avoid_slab)
        if slab is None:
            if avoid_slab is not None or len(self._free) <= (0 if from_reserve else self.reserve_slabs):
                return None
            slab = self._free.pop()
            self._slabs[slab] = _Slab(format, self.runs_per_slab[format])
            self.slabs_of[format] += 1
        entry = self._slabs[slab]
        self._unlist(slab, entry)
        run = entry.free_runs.pop()
        entry.used.add(run)
        self._list(slab, entry)
        self.used_runs[format] += 1
        return slab * self.slab_bytes + run * self.run_bytes[format]

    def free(self, offset: int) -> None:
        """Give back the run at ``offset``; an emptied slab belongs to nobody again."""
        slab = self.slab_of(offset)
        entry = self._slabs[slab]
        run, remainder = divmod(offset - slab * self.slab_bytes, self.run_bytes[entry.format])
        assert remainder == 0 and run in entry.used, f"offset {offset} is not an allocated run"
        self._unlist(slab, entry)
        entry.used.discard(run)
        self.used_runs[entry.format] -= 1
        if not entry.used:
            del self._slabs[slab]
            self.slabs_of[entry.format] -= 1
            self._free.append(slab)
            return
        entry.free_runs.append(run)
        self._list(slab, entry)

    def _fullest(self, format: int, avoid_slab: int | None) -> int | None:
        buckets = self._partial[format]
        for used in sorted(buckets, reverse=True):
            for slab in buckets[used]:
                if slab != avoid_slab:
                    return slab
        return None

    def _unlist(self, slab: int, entry: _Slab) -> None:
        if entry.free_runs:
            bucket = self._partial[entry.format].get(len(entry.used))
            if bucket is not None:
                bucket.pop(slab, None)
                if not bucket:
                    del self._partial[entry.format][len(entry.used)]

    def _list(self, slab: int, entry: _Slab) -> None:
        if entry.free_runs:
            self._partial[entry.format].setdefault(len(entry.used), {})[slab] = None

    def check(self) -> None:
        """Assert that the counts balance: used + free runs fill exactly the owned slabs."""
        assert len(self._slabs) + len(self._free) == self.num_slabs
        for format, per_slab in enumerate(self.runs_per_slab):
            owned = [slab for slab in self._slabs.values() if slab.format == format]
            assert len(owned) == self.slabs_of[format]
            assert sum(len(slab.used) for slab in owned) == self.used_runs[format]
            for slab in owned:
                assert slab.used and len(slab.used) + len(slab.free_runs) == per_slab
