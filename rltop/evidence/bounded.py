"""Lists of any number of things in bounded memory: the first, the newest, and evenly some of those between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FirstAndNewest(Generic[T]):
    """Keeps the first `first` and the newest `newest` items, and of those between at most `between`, evenly spaced."""

    __slots__ = ("_between", "_every", "_first", "_limits", "_newest", "_passed", "seen")

    def __init__(self, first: int, newest: int, between: int = 0) -> None:
        self._limits = (first, newest, between)
        self._first: list[T] = []
        self._newest: deque[T] = deque()
        self._between: list[T] = []
        self._every = 1
        self._passed = 0
        self.seen = 0
        """Items that came, kept or not."""

    def append(self, item: T) -> None:
        """Takes the next item."""
        self.seen += 1
        first, newest, between = self._limits
        if len(self._first) < first:
            self._first.append(item)
            return
        self._newest.append(item)
        if len(self._newest) <= newest:
            return
        old = self._newest.popleft()
        if not between:
            return
        if self._passed % self._every == 0:
            self._between.append(old)
            if len(self._between) >= between:
                self._between = self._between[::2]
                self._every *= 2
        self._passed += 1

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        yield from self._between
        yield from self._newest

    def __len__(self) -> int:
        return len(self._first) + len(self._between) + len(self._newest)
