"""The samples of a pickle, each built when it is asked for: `{"samples": [...], ...}`, also a map of such lists.

What stands before the list is built at once; the list is gone over as far as it is needed (`pickle_skim`); what stands
behind it is built when the end was reached. A sample that uses a value of an earlier one (samples of a group share
their prompt, all share the names of their fields) gets it by building that one: the memo of the whole pickle is never
kept.

Failure policy: `Unreadable` with the reason; samples that were found before it can be read all the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from rltop.evidence.pickle_skim import Places, Skim
from rltop.evidence.pickle_values import Foreign, Known, Map, Seq, Unreadable
from rltop.evidence.pickles import Walker

KEPT_BYTES = 8 << 20
"""Bytes of the pickle of which the memo is kept: samples are read in order, and share with those just before."""
MOST_SMALL = 4096
MOST_BUILT = 1_000
"""Samples that are built for the sake of one: shared values can be nested so that it would never end."""
MOST_CHAIN = 16
"""A shared value that is shared through more samples than these is not followed."""
SMALL_TEXT = 200
LISTS = ("samples",)


class Samples:
    """Places and values of the samples of one pickle."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data = data
        self._walker = Walker(data, at)
        self._walker.memo = _Memo(self)
        self.foreign = self._walker.foreign
        """Names that were refused so far."""
        self._places = Places()
        self._groups: list[tuple[str, int]] = []
        self._built: list[Any] | None = None
        """Samples of a pickle whose lists are made in an older way, all at once."""
        self._numbered = not (len(data) > at + 1 and data[at] == 0x80 and data[at + 1] >= 4)
        self._kept: OrderedDict[int, dict[int, Any]] = OrderedDict()
        self._kept_bytes = 0
        self._small: dict[int, Any] = {}
        self._building: list[int] = []
        self._left = MOST_BUILT
        self._unknown = 0
        """Shared values that were not found."""
        self._steps = self._go()
        self.at = at
        """How far in the pickle the samples are known."""
        self.ended = False
        next(self._steps, None)

    def __len__(self) -> int:
        """Samples whose place is known so far."""
        return len(self._places) if self._built is None else len(self._built)

    @property
    def head(self) -> Any:
        """The value around the samples: what stands before them, and when `ended` also what stands behind."""
        stack = self._walker.stack
        if not stack or not isinstance(stack[0], Map):
            return stack[0] if stack else None
        pairs = zip(stack[1::2], stack[2::2], strict=False)
        known = {key: value for key, value in pairs if isinstance(key, str)}
        return Map({**stack[0].items, **known}, stack[0].sizes)

    def group(self, at: int) -> str | None:
        """The name of the list that a sample is in, where there are several (data sets of an evaluation)."""
        found = bisect_right(self._groups, at, key=lambda one: one[1])
        return self._groups[found - 1][0] or None if found else None

    def scan(self) -> Iterator[int]:
        """Finds samples; yields how far in the pickle it is, at least after every sample. Raises Unreadable."""
        return self._steps

    def element(self, at: int) -> Any:
        """The sample at a position that is known (`Map`, or whatever is there). Raises Unreadable."""
        self._left = MOST_BUILT
        return self._built[at] if self._built is not None else self._build(at)[0]

    def size(self, at: int) -> int:
        """Bytes of the pickle that a sample takes."""
        return 0 if self._built is not None else self._places.ends[at] - self._places.begins[at]

    # -- finding

    def _go(self) -> Iterator[int]:
        walker = self._walker
        yield from self._to_list()
        while not self.ended:
            name = walker.stack[-2]
            self._groups.append((name if len(walker.stack) > 1 and name not in LISTS else "", len(self)))
            skim = Skim(self._data, walker.at, walker.memoized, self._places, numbered=self._numbered)
            for self.at in skim.skim():
                yield self.at
            walker.at, walker.memoized = skim.at, skim.memoized
            if skim.memo_of_list is not None:
                walker.memo[skim.memo_of_list] = walker.stack[-1]
            yield from self._to_list()

    def _to_list(self) -> Iterator[int]:
        """Builds up to the next list of samples, or to the end."""
        walker = self._walker
        try:
            self.ended = walker.run(len(self._data), _at_samples)
        finally:
            self.at = walker.at
        if self.ended:
            self._take_built(walker.stack[-1])
        elif not _at_samples(walker):
            raise Unreadable("the pickle is cut off: it has no end")
        yield self.at

    def _take_built(self, value: Any) -> None:
        listed = value.get("samples") if isinstance(value, Map) else None
        if not self._groups and isinstance(listed, Seq):
            self._built = list(listed.items)
        elif not self._groups and isinstance(listed, Map):
            self._built = []
            for name, part in listed.items.items():
                if isinstance(part, Seq):
                    self._groups.append((str(name), len(self._built)))
                    self._built += part.items

    # -- building

    def _build(self, at: int) -> tuple[Any, dict[int, Any]]:
        """(value, memo) of a sample."""
        if (memo := self._kept.get(at)) is not None and -1 in memo:
            self._kept.move_to_end(at)
            return memo[-1], memo
        begin, end = self._places.begins[at], self._places.ends[at]
        self._left -= 1
        walker = Walker(self._data, begin)
        walker.foreign, walker.integers = self.foreign, self._walker.integers
        walker.memo, walker.memoized = _Memo(self), self._places.memos[at]
        self._building.append(at)
        unknown = self._unknown
        try:
            walker.run(end)
        finally:
            self._building.pop()
        if len(walker.stack) != 1:
            raise Unreadable(f"sample {at} of the pickle is no single value")
        value = walker.memo[-1] = walker.stack[0]
        if self._unknown == unknown:
            self._keep(at, walker.memo, end - begin)
        return value, walker.memo

    def _keep(self, at: int, memo: dict[int, Any], size: int) -> None:
        self._kept[at] = memo
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            gone, _ = self._kept.popitem(last=False)
            self._kept_bytes -= self._places.ends[gone] - self._places.begins[gone]

    def shared(self, number: int) -> Any:
        """The value that was memoized under a number before the sample that asks for it."""
        if number in self._small:
            return self._small[number]
        if number in self._walker.memo:
            return self._walker.memo[number]
        unknown = self._unknown
        found = self._found(number)
        if self._unknown > unknown:
            return found
        if isinstance(found, Known | Foreign) or (isinstance(found, str) and len(found) <= SMALL_TEXT):
            if len(self._small) >= MOST_SMALL:
                self._small.clear()
            self._small[number] = found
        return found

    def _found(self, number: int) -> Any:
        memos = self._places.memos
        last = bisect_right(memos, number) - 1
        # Elements without a number of their own have that of the one before.
        for at in range(last, max(last - MOST_CHAIN, -1), -1):
            if memos[at] != memos[last] or len(self._building) > MOST_CHAIN:
                break
            if self._left <= 0:
                break
            if at in self._building or self._is_reference(at):
                continue
            memo = self._build(at)[1]
            if number in memo:
                return memo[number]
        self._unknown += 1
        return Foreign("a shared value whose place is not known")

    def _is_reference(self, at: int) -> bool:
        """The element is nothing but a value that was there before."""
        return (self._data[self._places.begins[at]], self.size(at)) in ((0x68, 2), (0x6A, 5))


class _Memo(dict[int, Any]):
    """The memo of one sample; what it lacks is looked for in those before."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    def __missing__(self, number: int) -> Any:
        return self._samples.shared(number)


def _at_samples(walker: Walker) -> bool:
    """A list was just begun that is the value of `samples` in the outermost map, or a value in the map that is."""
    stack = walker.stack
    if len(stack) < 3 or not isinstance(stack[0], Map) or not isinstance(stack[-1], Seq) or len(stack[-1]):
        return False
    if len(stack) % 2 and isinstance(stack[-2], str) and stack[-2] in LISTS:
        return True
    for at in range(len(stack) - 3, 1, -1):
        if isinstance(stack[at], Map) and isinstance(stack[at - 1], str) and stack[at - 1] in LISTS and at % 2 == 0:
            return (len(stack) - 1 - at) % 2 == 0 and isinstance(stack[-2], str)
    return False
