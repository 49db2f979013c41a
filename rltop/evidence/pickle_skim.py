"""Goes over the elements of a list in a pickle without building them: where each begins, and what of the memo it has.

A rollout dump keeps tokens and log-probs as Python lists, so its pickle can have hundreds of millions of opcodes.
Inside an element only the marks are followed: runs of numbers and of other opcodes of fixed size are passed by one
regular expression, in C. At the level of the list every opcode is looked at, because there an element ends.

Failure policy: `Unreadable` with the reason; elements that were found before stay.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from rltop.evidence.pickle_values import Unreadable

STEP_BYTES = 2 << 20
"""After about so many bytes `skim` says how far it is."""
MOST_ELEMENTS = 100_000_000
MOST_PENDING = 2_000_000
MOST_DEPTH = 100_000
MOST_NUMBER = (1 << 32) - 1
"""Of a memo, as its opcode of four bytes has it."""
_FIXED = rb"(?:G.{8})++|(?:M..)++|(?:J.{4})++|K.|h.|j.{4}|[N\x88\x89)\]}as\x85\x86\x87RbQ\x81\x92\x930\x32\x97\x98]"
_FIXED += rb"|\x82.|\x83..|\x84.{4}|\x95.{8}|\x80."
_RUN = re.compile(rb"(?s:(?:" + _FIXED + rb"){0,20000}+)")
"""Opcodes of fixed size that neither open nor close a mark, nor memoize."""
_FLAT = rb"\](?:q.|r.{4})?\((?:K.|M..|J.{4}|G.{8}){0,1000}+e"
_RUN_NUMBERED = re.compile(rb"(?s:(?:" + _FLAT + rb"|" + _FIXED + rb"|q.|r.{4}|e\(){0,2000}+)")
"""The same, with opcodes that memoize under a number of their own, and whole short lists of numbers."""
_LINE = re.compile(rb"[^\n]*+\n")
_SIZED = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x55: 1, 0x54: 4, 0x43: 1, 0x42: 4, 0x8E: 8, 0x96: 8, 0x8A: 1, 0x8B: 4}
"""Opcode -> bytes of the length that follows it."""
_LINES = {ord(c): 1 for c in "ILFSVP"} | {ord("c"): 2}
"""Opcode that pushes -> lines that follow it."""
_SIMPLE = {ord("G"): 8, ord("M"): 2, ord("J"): 4, ord("K"): 1, ord("h"): 1, ord("j"): 4} | dict.fromkeys(
    (*b"N)]2", 0x88, 0x89, 0x8F, 0x97), 0
)
_SIMPLE |= {0x82: 1, 0x83: 2, 0x84: 4}
"""Opcode that pushes one value -> bytes that follow it."""
_POPS = {
    0x85: 0,
    0x86: 1,
    0x87: 2,
    ord("R"): 1,
    0x81: 1,
    0x92: 2,
    0x93: 1,
    ord("b"): 1,
    ord("s"): 2,
    ord("Q"): 0,
    ord("0"): 1,
}
"""Opcode without bytes behind it -> values that are fewer on the stack after it."""
_OTHER = {0x95: 8, 0x80: 1, 0x98: 0}
_MARK, _EMPTY_DICT, _APPEND, _APPENDS = 0x28, 0x7D, 0x61, 0x65
_CLOSE_PUSH = frozenset({*b"tldo", 0x91, ord("i")})
_CLOSE_ONLY = frozenset({*b"eu1", 0x90})


@dataclass(slots=True)
class Places:
    """Elements that were found, in three flat arrays: 24 bytes each."""

    begins: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("Q"))
    memos: array[int] = field(default_factory=lambda: array("Q"))
    """The number that the first memoized value of the element has (or a smaller one)."""

    def __len__(self) -> int:
        return len(self.ends)


class Skim:
    """Finds the elements of one list. The pickle in `data` is at `at`, right behind the opcode that made the list."""

    def __init__(self, data: memoryview, at: int, memoized: int, places: Places, *, numbered: bool) -> None:
        self._data = data
        self.at = self._start = at
        self.memoized = memoized
        """Of the next value that is memoized."""
        self.memo_of_list: int | None = None
        self.places = places
        self._numbered = numbered
        self._batch = False
        self._pushed = -1
        """Behind the opcode that began the last element."""
        self._pending: list[tuple[int, int, bool]] = []
        """(begin, number of its memo, is a dict) of elements of which it is not known yet whether they are whole."""

    def skim(self) -> Iterator[int]:
        """Goes over the whole list; yields the place in `data` now and then, and after elements. Raises Unreadable."""
        try:
            yield from self._skim()
        except IndexError:
            raise Unreadable(f"the pickle is cut off after {len(self.places)} samples") from None

    def _skim(self) -> Iterator[int]:
        data = self._data
        while True:
            begin = self.at
            code = data[begin]
            if code == _EMPTY_DICT:
                self._dict(begin)
                yield begin
            elif code == _MARK:
                if not self._batch and not self._pending:
                    self._batch = True
                    self.at += 1
                else:
                    yield from self._inner(begin)
            elif code == _APPENDS and self._batch:
                self._settle(begin)
                self._batch = False
                self.at += 1
            elif code == _APPEND and not self._batch and len(self._pending) == 1:
                self._settle(begin)
                self.at += 1
            elif code in (0x71, 0x72, 0x70, 0x94):
                self._put(code)
            elif not self._batch and not self._pending and not self._is_element(code):
                return  # the list was over
            else:
                self._level(begin, code)

    def _is_element(self, code: int) -> bool:
        """What begins here outside of a batch is one more element, no key of the map around the list."""
        if code in (0x68, 0x6A):  # a value that was there before: an element if it is appended next
            return self._data[self.at + (2 if code == 0x68 else 5)] == _APPEND
        return code == ord("c") or code in _OTHER

    def _dict(self, begin: int) -> None:
        if all(is_dict for _, _, is_dict in self._pending):
            self._settle(begin)
        elif len(self._pending) > MOST_PENDING:
            raise Unreadable("its samples are no plain maps")
        self.at += 1
        data, at = self._data, self.at + 1
        if data[at - 1] == 0x71:
            number = data[at]
        elif data[at - 1] == 0x72:
            number = int.from_bytes(data[at : at + 4], "little")
        else:
            # No number of its own: they have to be counted, also inside of it.
            self._numbered = self._numbered and len(self.places) > 0
            number = self._number()
        self._pending.append((begin, number, True))

    def _number(self) -> int:
        """The number that the next element's first memoized value has, or a smaller one that an element before has."""
        if not self._numbered:
            return self.memoized
        if self._pending:
            return self._pending[-1][1]
        return self.places.memos[-1] if len(self.places) else self.memoized

    def _settle(self, end: int) -> None:
        """What is pending are whole elements; the last one ends at `end`."""
        places = self.places
        for begin, number, _ in self._pending:
            places.begins.append(begin)
            places.memos.append(number)
        places.ends.extend([*(begin for begin, _, _ in self._pending[1:]), end][: len(self._pending)])
        self._pending.clear()
        if len(places) > MOST_ELEMENTS:
            raise Unreadable("more samples than any dump has")

    def _level(self, begin: int, code: int) -> None:
        """One opcode at the level of the list."""
        self.at += 1
        if (size := _SIMPLE.get(code)) is not None:
            self.at += size
            self._push(begin)
        elif (size := _SIZED.get(code)) is not None:
            self._skip(size)
            self._push(begin)
        elif (lines := _LINES.get(code)) is not None:
            self._lines(lines)
            self._push(begin)
        elif code == ord("g"):
            self._lines(1)
            self._push(begin)
        elif (fewer := _POPS.get(code)) is not None:
            if fewer >= len(self._pending):
                raise Unreadable(f"the pickle is broken near byte {begin}: it takes more than is there")
            if fewer:
                del self._pending[-fewer:]
        elif code == _APPEND and len(self._pending) > 1:
            self._pending.pop()
        elif (size := _OTHER.get(code)) is not None:
            self.at += size
        else:
            raise Unreadable(f"the pickle is broken near byte {begin}: opcode 0x{code:02x} among the samples")

    def _push(self, begin: int) -> None:
        self._pending.append((begin, self._number(), False))
        self._pushed = self.at
        if len(self._pending) > MOST_PENDING:
            raise Unreadable("its samples are no plain maps")

    def _inner(self, begin: int) -> Iterator[int]:
        """From a mark inside an element to what closes it."""
        data, match = self._data, (_RUN_NUMBERED if self._numbered else _RUN).match
        depth, at, told = 1, begin + 1, begin
        number = self._number()
        while True:
            at = match(data, at).end()  # type: ignore[union-attr]
            code = data[at]
            at += 1
            if code == _MARK:
                depth += 1
                if depth > MOST_DEPTH:
                    raise Unreadable("the pickle is nested deeper than any dump")
            elif code in _CLOSE_ONLY or code in _CLOSE_PUSH:
                if code == 0x69:
                    at = self._line_end(self._line_end(at))
                depth -= 1
                if depth == 0:
                    break
            elif (width := _SIZED.get(code)) is not None:
                at = self._behind(at, width)
            elif code == 0x94:
                self.memoized += 1
            elif code == 0x71:
                self.memoized = max(self.memoized, data[at] + 1)
                at += 1
            elif code == 0x72:
                self.memoized = max(self.memoized, int.from_bytes(data[at : at + 4], "little") + 1)
                at += 4
            elif code == 0x70:
                end = self._line_end(at)
                self.memoized = max(self.memoized, _number(data[at : end - 1]) + 1)
                at = end
            elif (lines := _LINES.get(code, 1 if code == 0x67 else 0)) > 0:
                for _ in range(lines):
                    at = self._line_end(at)
            elif code == 0x8F:
                pass
            elif at + 8 > len(data):
                raise IndexError
            elif match(data, at - 1).end() == at - 1:  # type: ignore[union-attr]
                raise Unreadable(f"the pickle is broken near byte {at - 1}: opcode 0x{code:02x}")
            else:
                at -= 1  # the expression stopped at its limit, not at this opcode
            if at - told > STEP_BYTES:
                told = at
                yield at
        self.at = at
        if code in _CLOSE_PUSH:
            self._pending.append((begin, number, False))

    def _put(self, code: int) -> None:
        data, at = self._data, self.at + 1
        if code == 0x94:
            number, self.at = self.memoized, at
        elif code == 0x71:
            number, self.at = data[at], at + 1
        elif code == 0x72:
            number, self.at = int.from_bytes(data[at : at + 4], "little"), at + 4
        else:
            self.at = self._line_end(at)
            number = _number(data[at : self.at - 1])
        if at == self._start + 1:
            self.memo_of_list = number
        if at == self._pushed + 1 and self._pending:  # the element itself
            begin, _, is_dict = self._pending.pop()
            self._pending.append((begin, number, is_dict))
        self.memoized = max(self.memoized, number + 1)

    def _skip(self, width: int) -> None:
        self.at = self._behind(self.at, width)

    def _behind(self, at: int, width: int) -> int:
        """Where a value ends whose size stands in `width` bytes. Raises IndexError: behind the end."""
        end = at + width + int.from_bytes(self._data[at : at + width], "little")
        if end > len(self._data):
            raise IndexError
        return end

    def _lines(self, count: int) -> None:
        for _ in range(count):
            self.at = self._line_end(self.at)

    def _line_end(self, at: int) -> int:
        found = _LINE.match(self._data, at)
        if found is None:
            raise IndexError
        return found.end()


def _number(text: memoryview) -> int:
    try:
        number = int(bytes(text[:20]))
    except ValueError:
        raise Unreadable("the pickle is broken: a memo without a number") from None
    if not 0 <= number <= MOST_NUMBER:
        raise Unreadable(f"the pickle is broken: a memo with the number {number}")
    return number
