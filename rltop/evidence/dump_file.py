"""A dump opened without torch and without unpickling: samples are built one by one, when they are asked for.

Reads slime's rollout dumps and train dumps (old and v2), rltop's, Relax's JSONL, and plain pickles of the same. Memory
does not grow with the file: of a sample that was passed only its place is kept.

Failure policy: RltopError (exit code 2) with what, where, why and what to do for a file that is no dump or is cut off;
samples before the broken place can be read. A part that is refused is named in its sample and the rest is read.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rltop.errors import RltopError
from rltop.evidence.dump_entries import Entries
from rltop.evidence.dump_lines import Lines, lines
from rltop.evidence.dump_sample import DumpKind, DumpSample, DumpTensor, Refused, make_sample
from rltop.evidence.pickle_values import Foreign, Known, Map, Seq, TensorRef, Unreadable
from rltop.evidence.samples import is_id, rollout_of_name
from rltop.evidence.saved import Mapped, mapped
from rltop.evidence.sink import Source

MOST_DEPTH = 12
TELL_EVERY_S = 0.1


class DumpFile:
    """A dump that is open: a context manager. Not to be used by two threads at once."""

    def __init__(self, path: Path, entries: Entries | Lines, file: Mapped | None, stack: ExitStack) -> None:
        self._entries = entries
        self._file = file
        self._stack = stack
        self.path = path
        head = entries.head if isinstance(entries, Entries) else None
        self.kind: DumpKind = entries.kind if isinstance(entries, Entries) else "samples"
        self.is_eval = path.name.startswith("eval_") or (self.kind == "samples" and path.parent.name == "eval")
        listed = head.get("rollout_id") if isinstance(head, Map) else None
        self.rollout_id: int | None = listed if is_id(listed) else rollout_of_name(Source(path, path.name))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a dump and reads up to its first sample. Raises RltopError (exit code 2) where it is none."""
        stack = ExitStack()
        try:
            if _is_json(path):
                return cls(path, stack.enter_context(lines(path)), None, stack)
            file = stack.enter_context(mapped(path, salvage=True))
            try:
                found = cls(path, Entries(file), file, stack)
            except Unreadable as error:
                raise Unreadable(file.damage or str(error)) from error
            if found.damage and not found.indexed():
                raise Unreadable(found.damage)
            if why := found._lists_nothing():
                raise Unreadable(why)
            return found
        except (Unreadable, OSError) as error:
            stack.close()
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise _unreadable(path, why) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Samples that were built stay; their tensors can not be read any more."""
        self._stack.close()

    @property
    def damage(self) -> str:
        """Why not all of the file can be read: the samples before the damage are there, `scan` raises at their end."""
        return self._file.damage if self._file is not None else ""

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names outside of the allow-list that the parts read so far wanted to import."""
        return self._entries.foreign if isinstance(self._entries, Entries) else ()

    @property
    def head(self) -> dict[str, Any]:
        """What the dump says beside its samples (`rank`, `dp_shards`, `raw_reward`, …), as far as it was read."""
        value = self._entries.head if isinstance(self._entries, Entries) else None
        items = value.items if isinstance(value, Map) else {}
        return {str(k): self._plain(v, []) for k, v in items.items() if k not in ("samples", "rollout_data")}

    def count(self) -> int | None:
        """Samples; None until the end of the dump was reached (`scan`, `page` past it, or a whole iteration)."""
        return len(self._entries) if self._entries.ended and not self.damage else None

    def indexed(self) -> int:
        """Samples whose place is known so far."""
        return len(self._entries)

    @property
    def share(self) -> float:
        """Part of the file that was gone over so far, 0 to 1."""
        return self._entries.share

    def scan(self, upto: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
        """Looks for the places of samples, up to number `upto` (None: the end).

        Yields the share of the file (0 to 1) that was gone over, several times a second: show it, or leave the loop.
        Raises RltopError where the file is broken.
        """
        told = clock()
        if not self._is_reached(upto):
            try:
                for _ in self._entries.steps():
                    if self._is_reached(upto):
                        break
                    if clock() - told >= TELL_EVERY_S:
                        told = clock()
                        yield self.share
            except Unreadable as error:
                raise self._broken(str(error)) from error
        if self.damage and (upto is None or len(self._entries) < upto):
            raise self._broken(self.damage)
        yield self.share

    def sample(self, at: int) -> DumpSample:
        """The sample at a position. Raises IndexError past the end, RltopError where the file is broken before it."""
        if at < 0:
            raise IndexError(at)
        if at >= len(self._entries):
            for _ in self.scan(at + 1):
                pass
            if at >= len(self._entries):
                raise IndexError(at)
        return self._sample(at)

    def page(self, start: int, stop: int) -> list[DumpSample]:
        """Samples `start` to `stop`, fewer at the end, or before a place where the file is broken."""
        found: list[DumpSample] = []
        for at in range(max(start, 0), stop):
            try:
                found.append(self.sample(at))
            except IndexError:
                break
            except RltopError:
                if not found:
                    raise
                break
        return found

    def __iter__(self) -> Iterator[DumpSample]:
        """All samples, one at a time, in constant memory. Raises RltopError where the file is broken."""
        at = 0
        while True:
            try:
                one = self.sample(at)
            except IndexError:
                return
            yield one
            at += 1

    def damaged(self) -> RltopError | None:
        """The error for a file that is damaged as far as was seen by now. None: nothing was seen."""
        return self._broken(self.damage) if self.damage else None

    @property
    def instead(self) -> str:
        """What a file holds that has no samples, in words."""
        value = self._entries.head if isinstance(self._entries, Entries) else None
        told = f"it has no samples but is {_kind(value)}"
        if isinstance(value, Foreign):
            told = "it has no samples but would make an object of a class"
        return told + (f"; not imported: {', '.join(self.foreign[:5])}" if self.foreign else "")

    # -- inside

    def _lists_nothing(self) -> str:
        """Why `samples` can be no list of samples; empty where it is one."""
        entries = self._entries
        if not isinstance(entries, Entries) or entries.columns or not entries.ended or len(entries):
            return ""
        value = entries.head.items.get("samples", ()) if isinstance(entries.head, Map) else ()
        if isinstance(value, Seq | tuple):
            return ""
        if isinstance(value, Map) and all(isinstance(one, Seq) for one in value.items.values()):
            return ""
        return f"its `samples` is no list but {_kind(value)}"

    def _broken(self, why: str) -> RltopError:
        return _unreadable(self.path, f"{self.damage or why} ({self._told()})")

    def _told(self) -> str:
        return f"{len(self._entries)} samples" + (" before it" if not self._entries.ended else " in it")

    def _is_reached(self, upto: int | None) -> bool:
        return self._entries.ended or (upto is not None and len(self._entries) >= upto)

    def _sample(self, at: int) -> DumpSample:
        try:
            entry = self._entries.element(at)
        except Unreadable as error:
            return DumpSample(at, refused=(f"sample: {error}",), problem=str(error))
        if isinstance(entry, Map):
            row, refused = self._row(entry)
        elif isinstance(entry, dict):
            row, refused = entry, []
        elif isinstance(entry, Foreign):
            return DumpSample(at, refused=(f"sample: {entry.name}",))
        else:
            odd = f"it is {'no map but ' if isinstance(self._entries, Entries) else 'no JSON object: '}{_kind(entry)}"
            return DumpSample(at, refused=(f"sample: {odd}",), problem=odd)
        group = self._entries.group(at) if isinstance(self._entries, Entries) else None
        if group is not None:
            row.setdefault("dataset", group)
        return make_sample(at, row, refused)

    def _row(self, entry: Map) -> tuple[dict[str, Any], list[str]]:
        """(fields, what was refused in them); flat lists of numbers stay arrays."""
        row: dict[str, Any] = {}
        refused: list[str] = []
        for key, value in entry.items.items():
            names: list[str] = []
            flat = isinstance(value, Seq) and isinstance(value.items, array)
            row[str(key)] = value.items if flat else self._plain(value, names)
            refused += [f"{key}: {name}" for name in names]
        return row, refused

    def _plain(self, value: Any, refused: list[str], depth: int = 0) -> Any:
        """Lists, maps, numbers and texts; tensors as places, refused parts by name."""
        match value:
            case Foreign():
                refused.append(value.name)
                return Refused(value.name)
            case TensorRef():
                return DumpTensor(value.dtype, value.shape, self._reads(value))
            case Known():
                return value.name
            case Seq(items=array()):
                return list(value.items)
            case Map() | Seq() | tuple() if depth >= MOST_DEPTH:
                return None
            case Seq():
                return [self._plain(one, refused, depth + 1) for one in value.items]
            case tuple():
                return [self._plain(one, refused, depth + 1) for one in value]
            case Map():
                return {str(key): self._plain(one, refused, depth + 1) for key, one in value.items.items()}
            case _:
                return value

    def _reads(self, ref: TensorRef) -> Callable[[], Sequence[float]]:
        file = self._file
        return lambda: file.floats(ref) if file is not None else []


def _kind(value: Any) -> str:
    """A value of a pickle in words."""
    match value:
        case None:
            return "None"
        case Map():
            named = ", ".join(repr(key)[:40] for key in list(value.items)[:5])
            return f"a map of {len(value.items)} ({named}{', …' if len(value.items) > 5 else ''})"
        case Seq() | tuple():
            return f"a list of {len(value)}"
        case Foreign():
            return f"a {value.name}"
        case str():
            return "a text"
        case _:
            return type(value).__name__


def _is_json(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _unreadable(path: Path, why: str) -> RltopError:
    do = "give a file that torch.save or pickle wrote, or JSON lines"
    if "truncated" in why or "cut off" in why or "empty" in why or "damaged" in why:
        do = "copy it again, or take another rollout's: the run was stopped, or its disk full, while it was written"
    return RltopError("cannot read this dump", where=str(path), why=why, do=do)
