"""The task of the reference run: chat prompts with a reward that a program can check.

A task is a pure function of a seed and an index, so that two runs draw the same prompts whatever happened before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Messages = tuple[tuple[str, str], ...]
"""Chat messages as (role, content)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: what the model is shown, and what the reward function knows."""

    messages: Messages
    label: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One worked example of the cold start."""

    messages: Messages
    response: str


class Task(Protocol):
    """What the rollout manager and the cold start need of a task."""

    @property
    def name(self) -> str:
        """Of its evaluation prompts, as a data set."""
        ...

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]: ...

    def evaluation(self, count: int) -> list[Prompt]: ...

    def demonstrations(self, count: int) -> list[Demonstration]: ...

    def reward(self, response: str, label: str) -> float: ...


@dataclass(frozen=True, slots=True)
class SortDigits:
    """Sort three different digits, "Sort (7 1 3)", and answer in one fixed sentence, "Sorted: 1 3 7."

    The reward is 1 for exactly the right sentence, else 0. The frame makes text that a person (and the check
    `rollout.text`) can read, and it is nearly certain under the model after the cold start: what is left to learn is
    the order. Prompts end in a character that no answer holds: without the chat template the model is visibly lost
    (check `logprob.magnitude`) instead of happening to know how to go on.
    """

    seed: int

    @property
    def name(self) -> str:
        return "sort"

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]:
        """The prompts of a rollout, a function of seed, rollout and position only."""
        digits = [self._digits("prompt", rollout_id, index) for index in range(count)]
        return [Prompt(_question(three), " ".join(map(str, sorted(three)))) for three in digits]

    def evaluation(self, count: int) -> list[Prompt]:
        """The prompts of every evaluation, drawn independently of the others. There are only 720 questions in all, so
        training meets some of them too."""
        digits = [self._digits("evaluation", 0, index) for index in range(count)]
        return [Prompt(_question(three), " ".join(map(str, sorted(three)))) for three in digits]

    def demonstrations(self, count: int) -> list[Demonstration]:
        """Worked examples, drawn independently of the prompts."""
        digits = [self._digits("demonstration", 0, index) for index in range(count)]
        return [Demonstration(_question(three), _answer(sorted(three))) for three in digits]

    def reward(self, response: str, label: str) -> float:
        """1.0 if `response` is the sentence for `label` (digits with a space between them), else 0.0."""
        return float(response == f"Sorted: {label}.")

    def _digits(self, use: str, rollout_id: int, index: int) -> list[int]:
        return list(_draw(stream_seed(self.seed, use, rollout_id, index), pool=range(10), count=3))


def stream_seed(*parts: int | str) -> int:
    """A 31-bit seed of a random stream of its own for these parts, the same on every machine and Python.

    31 bits because SGLang's `sampling_seed` is an int32.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) & 0x7FFFFFFF


def _draw(seed: int, *, pool: Sequence[int], count: int) -> list[int]:
    """`count` different members of `pool`: the seed is read as digits of a falling factorial, with no library's RNG."""
    left, drawn = list(pool), []
    for _ in range(count):
        seed, at = divmod(seed, len(left))
        drawn.append(left.pop(at))
    return drawn


def _question(digits: Sequence[int]) -> Messages:
    return (("user", f"Sort ({' '.join(map(str, digits))})"),)


def _answer(digits: Sequence[int]) -> str:
    return "Sorted: " + " ".join(map(str, digits)) + "."
