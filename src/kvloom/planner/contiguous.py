"""What older allocators waste on the same trace and memory: one contiguous piece per request.

As in the PagedAttention paper's comparison, contiguous pieces come from a buddy allocator and are
sized by what the engine knows: *maximum length* (the limit, always), *power of two* (prompt plus
the output rounded up to a power of two), *oracle* (prompt plus the true output). Beside them
*paged*: blocks taken as tokens arrive, the newest request preempted when memory runs out.

All requests queue from the start, in trace order, so memory is always wanted: this measures
capacity, not the trace's own load. Everything is an average over the time while a queue waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloom.planner.replay import ServiceModel
from kvloom.planner.trace import TraceRequest

BUDDY_UNIT = 16  # tokens
WATERMARK = 0.01  # share of memory that paged admission leaves free, as the engine does


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorResult:
    """Mean shares of memory while requests wait, and how many ran at once.

    ``stored`` holds tokens. ``reserved`` will hold tokens of this request later. ``internal`` never
    will. ``rounding`` is the buddy's or the last block's excess. ``free`` is unallocated (too small
    or too scattered for the next request).
    """

    name: str
    stored: float
    reserved: float
    internal: float
    rounding: float
    free: float
    mean_running: float
    rejected: int
    preemptions: int
    seconds: float

    @property
    def waste_of_allocated(self) -> float:
        """Share of allocated memory that holds no token."""
        allocated = self.stored + self.reserved + self.internal + self.rounding
        return 1 - self.stored / allocated if allocated else 0.0


class Buddy:
    """A buddy allocator over ``units``; memory that is no power of two starts as several trees."""

    def __init__(self, units: int) -> None:
        self.free: dict[int, set[int]] = {}
        address = 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self.free.setdefault(order, set()).add(address)
                address += 1 << order
        self.roots = {(min(starts), order) for order, starts in self.free.items()}  # one tree per set bit

    def allocate(self, units: int) -> tuple[int, int] | None:
        """(address, order) of the smallest free piece that holds ``units``, split down; None if none."""
        order = max(0, (units - 1).bit_length())
        available = [o for o, starts in self.free.items() if o >= order and starts]
        if not available:
            return None
        current = min(available)
        address = self.free[current].pop()
        while current > order:
            current -= 1
            self.free.setdefault(current, set()).add(address + (1 << current))
        return address, order

    def release(self, address: int, order: int) -> None:
        """Give a piece back and join it with its free buddies."""
        while (address, order) not in self.roots:
            root = next(start for start, size in self.roots if start <= address < start + (1 << size))
            buddy = root + ((address - root) ^ (1 << order))
            if buddy not in self.free.get(order, ()):
                break
            self.free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        self.free.setdefault(order, set()).add(address)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value`` (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()


def contiguous(
    name: str,
    requests: Sequence[TraceRequest],
    *,
    memory_tokens: int,
    service: ServiceModel,
    slots: Callable[[TraceRequest], int],
) -> AllocatorResult:
    """Run a buddy allocator that reserves ``slots(request)`` tokens for each request."""
    buddy = Buddy(memory_tokens // BUDDY_UNIT)
    queue = deque(requests)
    finishing: list[tuple[float, int, int, int]] = []
    now = 0.0
    serial = rejected = 0
    running = 0
    # integrals over time of tokens stored, reserved, internal, rounded up; and of requests running
    stored = reserved = internal = rounding = running_time = 0.0
    while queue:
        request = queue[0]
        wanted = max(slots(request), request.input_tokens + request.output_tokens)
        piece = buddy.allocate(-(-wanted // BUDDY_UNIT))
        if piece is None:
            if not finishing:
                queue.popleft()
                rejected += 1
                continue
            later, _, address, order = heapq.heappop(finishing)
            running_time += running * (later - now)
            running -= 1
            now = later
            buddy.release(address, order)
            continue
        queue.popleft()
        running += 1
        prefill = service.seconds(request.input_tokens, 0)
        decode = service.seconds(0, request.output_tokens)
        life = prefill + decode
        stored += life * request.input_tokens + decode * request.output_tokens / 2
        reserved += prefill * request.output_tokens + decode * request.output_tokens / 2
        internal += life * (wanted - request.input_tokens - request.output_tokens)
        rounding += life * ((BUDDY_UNIT << piece[1]) - wanted)
        heapq.heappush(finishing, (now + life, serial, *piece))
        serial += 1
    # requests still running when the queue empties overhang the measured time: their part is left out
    overhang = sum(finish - now for finish, *_ in finishing)
    whole = running_time / (running_time + overhang) if running_time + overhang else 1.0
    area = memory_tokens * now if now else 1.0
    shares = [value * whole / area for value in (stored, reserved, internal, rounding)]
    return AllocatorResult(
        name=name,
        stored=shares[0],
        reserved=shares[1],
        internal=shares[2],
        rounding=shares[3],
        free=max(0.0, 1 - sum(shares)),
        mean_running=running_time / now if now else float(running),
        rejected=rejected,
        preemptions=0,
        seconds=now,
    )


@dataclass(slots=True)
class _Sequence:
    """A running request; its output is taken to grow evenly over its life."""

    prompt: int
    output: int
    start: float
    finish: float

    @property
    def rate(self) -> float:
        return self.output / max(self.finish - self.start, 1e-12)


def paged(
    requests: Sequence[TraceRequest],
    *,
    memory_tokens: int,
    block_size: int,
    service: ServiceModel,
) -> AllocatorResult:
    """Blocks on demand: admission looks at what is stored now; when it is full, the newest goes back.

    A preempted request keeps its output as prompt and is recomputed. The last block of a sequence is
    half empty on average. Stored tokens are a sum of straight lines, kept as one: base + rate × time.
    """
    queue: deque[tuple[int, int]] = deque((r.input_tokens, r.output_tokens) for r in requests)
    running: dict[int, _Sequence] = {}  # in order of admission
    finishing: list[tuple[float, int]] = []
    half_block = block_size / 2
    now = base = rate = 0.0
    serial = rejected = preemptions = 0
    stored_time = running_time = 0.0

    def leave(number: int) -> _Sequence:
        nonlocal base, rate
        sequence = running.pop(number)
        base -= sequence.prompt - sequence.rate * sequence.start
        rate -= sequence.rate
        return sequence

    while queue:
        used = base + rate * now + half_block * len(running)
        while queue:
            prompt, output = queue[0]
            if prompt + output + block_size > memory_tokens:
                queue.popleft()
                rejected += 1
                continue
            if used + prompt + block_size > memory_tokens * (1 - WATERMARK) and running:
                break
            queue.popleft()
            sequence = _Sequence(prompt, output, now, now + service.seconds(prompt, output))
            running[serial] = sequence
            base += prompt - sequence.rate * now
            rate += sequence.rate
            heapq.heappush(finishing, (sequence.finish, serial))
            serial += 1
            used += prompt + half_block
        if not queue:
            break
        while finishing[0][1] not in running:  # preempted earlier
            heapq.heappop(finishing)
        ends, number = finishing[0]
        room = memory_tokens - half_block * len(running)
        full_at = (room - base) / rate if rate > 0 else float("inf")
        later = max(now, min(ends, full_at if len(running) > 1 else ends))
        stored_time += (base + rate * (now + later) / 2) * (later - now)
        running_time += len(running) * (later - now)
        now = later
        if later < ends:
            newest = next(reversed(running))
            victim = leave(newest)
            preemptions += 1
            done = min(victim.output, int(victim.rate * (now - victim.start)))
            queue.appendleft((victim.prompt + done, victim.output - done))
            continue
        heapq.heappop(finishing)
        leave(number)
    area = memory_tokens * now if now else 1.0
    stored = stored_time / area
    rounding = half_block * running_time / area
    return AllocatorResult(
        name="paged",
        stored=stored,
        reserved=0.0,
        internal=0.0,
        rounding=rounding,
        free=max(0.0, 1 - stored - rounding),
        mean_running=running_time / now if now else float(len(running)),
        rejected=rejected,
        preemptions=preemptions,
        seconds=now,
    )


def compare(
    requests: Sequence[TraceRequest],
    *,
    memory_tokens: int,
    max_tokens: int,
    block_size: int,
    service: ServiceModel,
) -> tuple[AllocatorResult, ...]:
    """The three contiguous allocators and the paged one, on the same requests and memory."""

    def run(name: str, slots: Callable[[TraceRequest], int]) -> AllocatorResult:
        return contiguous(name, requests, memory_tokens=memory_tokens, service=service, slots=slots)

    return (
        run("maximum length", lambda request: max_tokens),
        run("power of two", lambda request: request.input_tokens + next_power_of_two(request.output_tokens)),
        run("oracle", lambda request: request.input_tokens + request.output_tokens),
        paged(requests, memory_tokens=memory_tokens, block_size=block_size, service=service),
    )
