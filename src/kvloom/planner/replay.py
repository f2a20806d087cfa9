"""Replay of a trace through the planned cache: prefix tree, LRU, tiers, block size.

The cache is the engine's in outline. A prompt's blocks form a chain; running requests pin theirs;
what nobody uses stays until memory is needed, least recently used first and children before
parents (a request touches its chain from the leaf up, so a parent is always younger). Evicted
blocks sink to the next tier and are promoted when found there. Time is the trace's own; a request
holds its memory from admission until prefill and decode are done.

Simplifications, all reported: output blocks are reserved at admission, outputs are not shared with
later turns (traces do not name them), loads from tiers take no time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kvloom.core.errors import ConfigError
from kvloom.core.sizes import parse_bytes
from kvloom.planner.trace import Trace, TraceRequest

SERIES_POINTS = 240
DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSpec:
    """A tier below the device: its name and its bytes."""

    name: str
    num_bytes: int


def parse_tier(text: str) -> TierSpec:
    """``host:64GiB`` or ``disk:1TiB``.

    Raises:
        ConfigError: unknown kind, or no size.
    """
    kind, _, size = text.partition(":")
    if kind not in ("host", "disk", "redis", "object") or not size:
        raise ConfigError(f"--tier is {text!r}; write host:SIZE, disk:SIZE, redis:SIZE or object:SIZE")
    return TierSpec(name=kind, num_bytes=parse_bytes(size))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceModel:
    """How long a request holds its memory: uncached prompt × prefill + output × decode, in seconds."""

    prefill_s_per_token: float
    decode_s_per_token: float

    def seconds(self, uncached: int, output: int) -> float:
        return uncached * self.prefill_s_per_token + output * self.decode_s_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class UsagePoint:
    """Bytes at one moment: pinned by running requests, and held in all (reusable blocks included)."""

    time_s: float
    pinned: int
    held: int
    running: int
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """What the replay saw. Rates are token-weighted shares of all prompt tokens."""

    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    unlimited_hit_rate: float | None
    peak_pinned_bytes: int
    peak_held_bytes: int
    peak_running: int
    mean_wait_s: float
    evicted_blocks: int
    series: tuple[UsagePoint, ...]

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0


class _Tier:
    """Blocks at rest, least recently used first, within a number of bytes."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        self.blocks: OrderedDict[int, int] = OrderedDict()

    def put(self, node: int, size: int) -> list[tuple[int, int]]:
        """Store a block; returns what had to leave for it (itself if it is larger than the tier)."""
        if size > self.capacity:
            return [(node, size)]
        self.blocks[node] = size
        self.used += size
        left: list[tuple[int, int]] = []
        while self.used > self.capacity:
            old = self.blocks.popitem(last=False)
            self.used -= old[1]
            left.append(old)
        return left


class _Cache:
    """The device's blocks and the tiers below. Nodes are (parent, hash) pairs, numbered."""

    def __init__(self, capacity: int | None, tiers: Sequence[TierSpec]) -> None:
        self.capacity = capacity
        self.tiers = [_Tier(tier.name, tier.num_bytes) for tier in tiers]
        self.numbers: dict[tuple[int, int], int] = {}
        self.sizes: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.pinned_bytes = 0
        self.idle_bytes = 0
        self.evicted = 0

    def chain(self, hashes: Sequence[int]) -> list[int]:
        parent = -1
        nodes: list[int] = []
        for value in hashes:
            number = self.numbers.setdefault((parent, value), len(self.numbers))
            nodes.append(number)
            parent = number
        return nodes

    def where(self, node: int) -> str | None:
        if node in self.pins or node in self.idle:
            return DEVICE
        for tier in self.tiers:
            if node in tier.blocks:
                return tier.name
        return None

    def make_room(self, wanted: int) -> bool:
        """Evict idle blocks until ``wanted`` more bytes fit; False when running requests need it all."""
        if self.capacity is None:
            return True
        if self.pinned_bytes + wanted > self.capacity:
            return False
        excess = self.pinned_bytes + self.idle_bytes + wanted - self.capacity
        idle, sizes = self.idle, self.sizes
        while excess > 0:
            node, _ = idle.popitem(last=False)
            size = sizes.pop(node)
            self.idle_bytes -= size
            excess -= size
            self.evicted += 1
            self._sink(node, size)
        return True

    def _sink(self, node: int, size: int) -> None:
        falling = [(node, size)]
        for tier in self.tiers:
            left: list[tuple[int, int]] = []
            for moved, bytes_moved in falling:
                left += tier.put(moved, bytes_moved)
            if not left:
                return
            falling = left

    def pin(self, node: int, size: int) -> None:
        pins = self.pins
        if node in pins:
            pins[node] += 1
            return
        pins[node] = 1
        if node in self.idle:
            del self.idle[node]
            size = self.sizes[node]
            self.idle_bytes -= size
        else:
            for tier in self.tiers:
                stored = tier.blocks.pop(node, None)
                if stored is not None:
                    tier.used -= stored
                    break
            self.sizes[node] = size
        self.pinned_bytes += size

    def unpin(self, node: int) -> None:
        self.pins[node] -= 1
        if not self.pins[node]:
            del self.pins[node]
            size = self.sizes[node]
            self.pinned_bytes -= size
            self.idle_bytes += size
            self.idle[node] = None


@dataclass(slots=True)
class _Running:
    nodes: list[int]
    private: int


def replay(
    trace: Trace,
    *,
    bytes_per_token: float,
    fixed_bytes: int,
    block_size: int,
    capacity: int | None,
    tiers: Sequence[TierSpec],
    service: ServiceModel,
    prefix_cache: bool = True,
    unlimited: float | None = None,
) -> ReplayResult:
    """Run ``trace`` through a cache of ``capacity`` bytes (None: unlimited) and the tiers below it.

    ``fixed_bytes`` is what each running request holds whatever its length (windows, states,
    protected tokens). Of a hit, at most the blocks before the prompt's last token count, since that
    token must be computed.
    """
    cache = _Cache(capacity, tiers)
    hash_block = trace.block_tokens
    hits: dict[str, int] = {DEVICE: 0, **{tier.name: 0 for tier in tiers}}
    waiting: deque[TraceRequest] = deque()
    finishing: list[tuple[float, int]] = []
    running: dict[int, _Running] = {}
    series: list[UsagePoint] = []
    prompt_tokens = rejected = peak_pinned = peak_held = peak_running = 0
    waited = 0.0
    serial = 0

    def block_bytes(tokens: int) -> int:
        return ceil(-(-tokens // block_size) * block_size * bytes_per_token)

    block = hash_block or 0
    full_bytes = block_bytes(block)

    def admit(request: TraceRequest, now: float) -> bool:
        """Start ``request`` if it fits now. True also when it can never fit and is rejected."""
        nonlocal serial, prompt_tokens, rejected, waited
        hashes = request.hash_ids if prefix_cache and hash_block and request.hash_ids else ()
        nodes = cache.chain(hashes)
        covered = min(len(nodes) * block, request.input_tokens)
        last = len(nodes) - 1
        last_bytes = block_bytes(covered - last * block) if nodes else 0
        private = block_bytes(request.input_tokens - covered + request.output_tokens) + fixed_bytes
        if capacity is not None and private + max(0, last) * full_bytes + last_bytes > capacity:
            rejected += 1
            return True
        found: list[str] = []
        for node in nodes:
            place = cache.where(node)
            if place is None:
                break
            found.append(place)
        # what is on the device needs no room; it is pinned first so that making room spares it
        pinned: list[int] = []
        to_fetch: list[tuple[int, int]] = []
        for index, node in enumerate(nodes):
            size = last_bytes if index == last else full_bytes
            if index < len(found) and found[index] == DEVICE:
                cache.pin(node, size)
                pinned.append(node)
            else:
                to_fetch.append((node, size))
        if not cache.make_room(sum(size for _, size in to_fetch) + private):
            for node in reversed(pinned):
                cache.unpin(node)
            return False
        for node, size in to_fetch:
            cache.pin(node, size)
        cache.pinned_bytes += private
        usable = (request.input_tokens - 1) // block_size * block_size
        matched = 0
        for index, place in enumerate(found):
            gain = min((index + 1) * block, usable) - matched
            if gain > 0:
                hits[place] += gain
                matched += gain
        prompt_tokens += request.input_tokens
        waited += now - request.arrival_s
        running[serial] = _Running(nodes, private)
        heapq.heappush(
            finishing, (now + service.seconds(request.input_tokens - matched, request.output_tokens), serial)
        )
        serial += 1
        return True

    def note(now: float) -> None:
        nonlocal peak_pinned, peak_held, peak_running
        held = cache.pinned_bytes + cache.idle_bytes
        peak_pinned = max(peak_pinned, cache.pinned_bytes)
        peak_held = max(peak_held, held)
        peak_running = max(peak_running, len(running))
        series.append(
            UsagePoint(time_s=now, pinned=cache.pinned_bytes, held=held, running=len(running), waiting=len(waiting))
        )

    def drain(now: float) -> None:
        while waiting and admit(waiting[0], now):
            waiting.popleft()

    def finish_until(limit: float) -> None:
        while finishing and finishing[0][0] <= limit:
            now, number = heapq.heappop(finishing)
            done = running.pop(number)
            for node in reversed(done.nodes):  # leaf first: parents stay younger than children
                cache.unpin(node)
            cache.pinned_bytes -= done.private
            drain(now)
            note(now)

    for request in trace.requests:
        finish_until(request.arrival_s)
        waiting.append(request)
        drain(request.arrival_s)
        note(request.arrival_s)
    finish_until(float("inf"))
    admitted = len(trace.requests) - rejected
    return ReplayResult(
        requests=len(trace.requests),
        rejected=rejected,
        prompt_tokens=prompt_tokens,
        hit_tokens=hits,
        unlimited_hit_rate=unlimited,
        peak_pinned_bytes=peak_pinned,
        peak_held_bytes=peak_held,
        peak_running=peak_running,
        mean_wait_s=waited / admitted if admitted else 0.0,
        evicted_blocks=cache.evicted,
        series=_thin(series),
    )


def _thin(series: Sequence[UsagePoint]) -> tuple[UsagePoint, ...]:
    """At most SERIES_POINTS points, each the fullest moment of its stretch of time."""
    if len(series) <= SERIES_POINTS:
        return tuple(series)
    end = series[-1].time_s or 1.0
    best: dict[int, UsagePoint] = {}
    for point in series:
        slot = min(SERIES_POINTS - 1, int(point.time_s / end * SERIES_POINTS))
        if slot not in best or point.pinned > best[slot].pinned:
            best[slot] = point
    return tuple(best[slot] for slot in sorted(best))
