"""The scheduler: which tokens of which sequences run in the next step. Plans from counts only.

A step holds decodes (one token each) and prefill chunks together, under ``max_batch_tokens`` and
``max_sequences``. Order is (priority, arrival). Decodes come first, since one token each keeps many
streams moving; then prefill takes what is left, its non-final chunks ending on block boundaries.

Memory: a sequence is admitted when its whole prompt fits beside what running prefills were promised
and a watermark. When spans run out, the last sequence in order is preempted: its references go, its
published spans stay cached, and it waits to be computed again. The first in order can always take
everything, and one sequence of ``max_model_len`` always fits alone, so somebody always advances.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvloom.cache.manager import CacheManager
from kvloom.core.sequence import Sequence, SequenceStatus

HIT_RATE_REQUESTS = 1000
MAX_REMOVED = 64  # entries of ended sequences that the queue may hold before it is cleaned


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of a sequence run in this step.

    ``samples``: the chunk reaches the sequence's last token, so its logits choose the next one.
    """

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        return self.end == self.sequence.num_tokens


class WaitingQueue:
    """Sequences by (priority, arrival), with removal from the middle."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._removed: set[int] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._heap if id(sequence) not in self._removed)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.key, sequence))
        self._count += 1

    def peek(self) -> Sequence | None:
        while self._heap and id(self._heap[0][1]) in self._removed:
            self._removed.discard(id(heapq.heappop(self._heap)[1]))
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        self._removed.add(id(sequence))
        self._count -= 1
        self.peek()  # drop it now if it is at the head, so that its id cannot be met again
        if len(self._removed) > max(MAX_REMOVED, self._count):
            # A head that waits for long must not let those cancelled behind it pile up.
            self._heap = [entry for entry in self._heap if id(entry[1]) not in self._removed]
            heapq.heapify(self._heap)
            self._removed.clear()


class Scheduler:
    """See the module. ``manager`` owns the memory; this class decides who gets it."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        watermark: float,
    ) -> None:
        self.manager = manager
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.num_preemptions = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.recovered_tokens = 0
        self.misses: Counter[str] = Counter()
        self._recent: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_REQUESTS)  # (hit, queried)
        self._watermark_bytes = int(watermark * manager.usable_bytes)
        self._block_size = manager.block_size

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def hit_rate(self) -> float:
        """Token-weighted share of prompts found in the prefix cache, over the last 1,000 requests."""
        queried = sum(entry[1] for entry in self._recent)
        return sum(entry[0] for entry in self._recent) / queried if queried else 0.0

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    @property
    def free_places(self) -> int:
        """Sequences that may still run beside those that do."""
        return self.max_sequences - len(self.running)

    def start_forked(self, sequence: Sequence) -> None:
        """A sibling forked off a running sequence: it runs on, or waits if it got no spans."""
        if sequence.cache is None:
            self.waiting.push(sequence)
            return
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over, for whatever reason, in whatever state: everything it holds is freed."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if sequence.cache is not None:
            self.manager.release(sequence.cache)
            sequence.cache = None
        sequence.status = SequenceStatus.FINISHED

    # -- planning -----------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, in (priority, arrival) order. Empty only when nothing can run."""
        self.running.sort(key=lambda sequence: sequence.key)
        plan: dict[int, Chunk] = {}
        prefilling = any(self._remaining(sequence) > 1 for sequence in self.running)
        # A block's worth of the budget stays for prefill, or decodes could starve it …
        budget = self._plan_decodes(plan, self.max_batch_tokens, keep=self._block_size if prefilling else 0)
        budget = self._plan_prefills(plan, budget)
        if prefilling:
            # … and what prefill left of it goes to decodes that were held back.
            budget = self._plan_decodes(plan, budget, keep=0)
        self._admit(plan, budget)
        return sorted(plan.values(), key=lambda chunk: chunk.sequence.key)

    def _plan_decodes(self, plan: dict[int, Chunk], budget: int, *, keep: int) -> int:
        """Plan decodes not planned yet, in order, while more than ``keep`` of the budget is left."""
        for sequence in list(self.running):
            if budget <= keep:
                break
            if id(sequence) in plan:
                continue
            if sequence.status is SequenceStatus.RUNNING and self._remaining(sequence) == 1:
                budget += self._make_fit(sequence, sequence.num_tokens, plan)
                if sequence.status is SequenceStatus.RUNNING:
                    plan[id(sequence)] = Chunk(sequence, sequence.num_computed, 1)
                    budget -= 1
        return budget

    def _plan_prefills(self, plan: dict[int, Chunk], budget: int) -> int:
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.RUNNING and self._remaining(sequence) > 1 and budget > 0:
                budget = self._plan_prefill(sequence, plan, budget, may_preempt=True)
        return budget

    def _plan_prefill(self, sequence: Sequence, plan: dict[int, Chunk], budget: int, *, may_preempt: bool) -> int:
        """Plan the sequence's next chunk if it can have one; returns the budget left."""
        # Others may have published more of its prefix since it was admitted.
        self._count_hit(sequence, self._attach(sequence))
        start = sequence.num_computed
        count = self._chunk(sequence, start, budget)
        if count == 0 or self._computed_elsewhere(sequence, start, plan):
            return budget
        if may_preempt:
            budget += self._make_fit(sequence, start + count, plan)
            if sequence.status is not SequenceStatus.RUNNING:
                return budget
        elif not self.manager.reserve(sequence.cache, start + count):
            return budget
        plan[id(sequence)] = Chunk(sequence, start, count)
        return budget - count

    def _chunk(self, sequence: Sequence, start: int, budget: int) -> int:
        remaining = sequence.num_tokens - start
        if remaining <= budget:
            return remaining
        end = (start + budget) // self._block_size * self._block_size
        return max(0, end - start)

    def _make_fit(self, sequence: Sequence, num_tokens: int, plan: dict[int, Chunk]) -> int:
        """Reserve spans up to ``num_tokens``, preempting the last in order as long as that fails.

        Returns the budget that unplanned victims give back. The sequence itself may be the last;
        it is preempted then, and waits.
        """
        returned = 0
        while not self.manager.reserve(sequence.cache, num_tokens):
            victim = max(self.running, key=lambda other: other.key)
            unplanned = plan.pop(id(victim), None)
            if unplanned is not None:
                returned += unplanned.count
            self._preempt(victim)
            if victim is sequence:
                break
        return returned

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._let_go(sequence)
        self.waiting.push(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.cache is not None:
            self.manager.release(sequence.cache)
            sequence.cache = None
        sequence.status = SequenceStatus.WAITING

    # -- admission ----------------------------------------------------------------------------------

    def _admit(self, plan: dict[int, Chunk], budget: int) -> None:
        while budget > 0:
            sequence = self.waiting.peek()
            if sequence is None:
                return
            while len(self.running) >= self.max_sequences:
                returned = self._displace(sequence, plan)
                if returned is None:
                    return
                budget += returned
            # Look up and pin before anything is allocated, or allocation could evict the hit.
            sequence.cache = self.manager.open(sequence.salt)
            hit = self._attach(sequence)
            while not self._fits(sequence):
                returned = self._displace(sequence, plan)
                if returned is None:
                    self._let_go(sequence)
                    return
                budget += returned
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            self._count_hit(sequence, hit)
            left = self._plan_prefill(sequence, plan, budget, may_preempt=len(self.running) == 1)
            if left == budget < self._block_size:
                return  # less than a block of budget is left: nobody else can start either
            budget = left

    def _attach(self, sequence: Sequence) -> int:
        """Pin published blocks beyond what the sequence has computed; returns their tokens."""
        if sequence.num_computed % self._block_size:
            return 0
        if sequence.params.prompt_logprobs is not None and sequence.num_generated == 0:
            # Prompt log-probabilities must be computed, and a cached block has none.
            sequence.miss_reason = "prompt log-probabilities asked"
            return 0
        hit = self.manager.attach_prefix(sequence.cache, sequence.token_ids)
        if sequence.num_computed == 0 or hit.tokens:
            sequence.miss_reason = hit.reason
        return hit.tokens

    def _count_hit(self, sequence: Sequence, tokens: int) -> None:
        if sequence.num_preemptions or sequence.num_generated:
            # Its own spans, found again: no merit of the prefix cache.
            sequence.recovered_tokens += tokens
            self.recovered_tokens += tokens
        else:
            sequence.cached_tokens += tokens

    def note_prompt_computed(self, sequence: Sequence) -> None:
        """The sequence's prompt is in the cache for the first time: count what was found of it."""
        queried, hit = sequence.num_prompt, sequence.cached_tokens
        self.queried_tokens += queried
        self.hit_tokens += hit
        self._recent.append((hit, queried))
        tail = queried - (queried - 1) // self._block_size * self._block_size
        if sequence.miss_reason is not None and queried - tail > hit:
            self.misses[sequence.miss_reason] += queried - tail - hit
        self.misses["last block, always computed"] += min(tail, queried - hit)

    def _computed_elsewhere(self, sequence: Sequence, start: int, plan: dict[int, Chunk]) -> bool:
        """Whether this step computes the sequence's next block for an equal prompt already.

        Waiting one step then saves the whole block, since the next step finds it published.
        """
        if not self.manager.prefix_cache or start % self._block_size or sequence.params.prompt_logprobs is not None:
            return False
        block = start // self._block_size
        if (block + 1) * self._block_size >= sequence.num_tokens:
            return False  # the last token is always computed, so this block is no use to it
        key = self.manager.keys(sequence.cache, sequence.token_ids, block + 1)[block]
        for chunk in plan.values():
            if chunk.start <= start and chunk.end >= (block + 1) * self._block_size:
                other = self.manager.keys(chunk.sequence.cache, chunk.sequence.token_ids, block + 1)[block]
                if other == key:
                    return True
        return False

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the whole prompt fits beside what running prefills still need, and the watermark."""
        if not self.running:
            return True
        promised = sum(self._outstanding(other) for other in self.running)
        return self.manager.free_bytes - promised - self._outstanding(sequence) >= self._watermark_bytes

    def _outstanding(self, sequence: Sequence) -> int:
        return self.manager.bytes_for(sequence.num_computed, sequence.num_tokens, self.max_batch_tokens)

    def _displace(self, sequence: Sequence, plan: dict[int, Chunk]) -> int | None:
        """Preempt the last running sequence if its priority is strictly behind ``sequence``'s.

        Returns the budget that its unplanned chunk gives back, or None when nobody may be displaced.
        """
        victim = max(self.running, key=lambda other: other.key, default=None)
        if victim is None or victim.priority <= sequence.priority:
            return None
        unplanned = plan.pop(id(victim), None)
        self._preempt(victim)
        return 0 if unplanned is None else unplanned.count

    @staticmethod
    def _remaining(sequence: Sequence) -> int:
        return sequence.num_tokens - sequence.num_computed
