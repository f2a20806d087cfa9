"""Needles in a haystack: facts told once in a long text and asked for at its end.

Every window holds a few facts at even depths, and all questions after the text, each with its answer:
whoever reads it teacher-forced has found a needle if every token of its answer was the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.core.errors import RequestError

PLACES = ("Oslo", "Cairo", "Lima", "Delhi", "Paris", "Tokyo", "Quito", "Perth")
FACT = "\n\nThe secret number of {place} is {number}.\n\n"
QUESTION = "\n\nThe secret number of {place} is"
DIGITS = 5

Encode = Callable[[str], Sequence[int]]  # text -> token ids, without special tokens


@dataclass(frozen=True, slots=True)
class Haystack:
    """``ids`` int32 [T]; ``answers``: first and end position of each needle's answer."""

    ids: np.ndarray
    answers: tuple[tuple[int, int], ...]

    @property
    def first_wanted(self) -> int:
        """The position whose logits say the first answer's first token."""
        return self.answers[0][0] - 1

    def found(self, logits: torch.Tensor) -> int:
        """How many needles were found, by logits [T - first_wanted, vocab] from ``first_wanted`` on."""
        likeliest = logits.argmax(dim=-1).cpu().numpy()
        first = self.first_wanted
        return sum(
            bool(np.array_equal(likeliest[start - 1 - first : end - 1 - first], self.ids[start:end]))
            for start, end in self.answers
        )


def plant(encode: Encode, text: Sequence[int], length: int, count: int, seed: int) -> Haystack:
    """A window of ``length`` tokens: the beginning of ``text`` with ``count`` needles, then the questions.

    Raises:
        RequestError: the window has no room for them, or the text is too short.
    """
    generator = np.random.default_rng(seed)
    places = list(generator.permutation(PLACES)[:count])
    numbers = [" " + "".join(map(str, generator.integers(0, 10, DIGITS))) for _ in places]
    facts = [
        list(encode(FACT.format(place=place, number=number.strip())))
        for place, number in zip(places, numbers, strict=True)
    ]
    questions = [
        (list(encode(QUESTION.format(place=place))), list(encode(n))) for place, n in zip(places, numbers, strict=True)
    ]
    room = length - sum(map(len, facts)) - sum(len(asked) + len(answer) for asked, answer in questions)
    if count > len(PLACES) or room < count or len(text) < room:
        raise RequestError(
            f"{count} needles do not fit a window of {length} tokens of a text of {len(text)}; use longer windows"
        )
    ids: list[int] = []
    for index, fact in enumerate(facts):
        start, end = index * room // count, (index + 1) * room // count
        middle = (start + end) // 2
        ids += [*text[start:middle], *fact, *text[middle:end]]
    answers: list[tuple[int, int]] = []
    for asked, answer in questions:
        ids += asked
        answers.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return Haystack(np.array(ids, dtype=np.int32), tuple(answers))
