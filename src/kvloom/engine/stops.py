"""Stop strings in a growing text: all of them at once, character by character."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """Aho and Corasick's automaton (1975) over a request's stop strings.

    A state stands for the longest end of the text that begins some stop string, so its depth is how
    much must be held back. Cost per character does not depend on the number of strings.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._fallback = [0]
        self.depth = [0]
        self.found: list[str | None] = [None]  # the longest stop string that ends in this state
        children: list[list[tuple[str, int]]] = [[]]
        for stop in stops:
            state = 0
            for character in stop:
                following = self._next.get((state, character))
                if following is None:
                    following = len(self.depth)
                    self._next[state, character] = following
                    children[state].append((character, following))
                    children.append([])
                    self.depth.append(self.depth[state] + 1)
                    self._fallback.append(0)
                    self.found.append(None)
                state = following
            self.found[state] = stop
        queue = deque(child for _, child in children[0])
        while queue:
            state = queue.popleft()
            for character, child in children[state]:
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)
            self.found[state] = self.found[state] or self.found[self._fallback[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        following = self._next.get((state, character))
        while following is None and state:
            state = self._fallback[state]
            following = self._next.get((state, character))
        return following or 0


@lru_cache(maxsize=32)  # the n sequences of a request, and requests of one application, share theirs
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of ``stops``; it is never changed after it was built."""
    return StopAutomaton(stops)
