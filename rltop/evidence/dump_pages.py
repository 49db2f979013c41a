"""Pages of one dump for whoever looks at it: rows of a filtered, sorted list, one sample in full, the file's numbers.

The answers to `dump-page?`, made here for a local file and in the daemon for a remote one. A file is never read to its
end at once: every call works for at most `budget_s` seconds and says whether it is `done`; the next call goes on where
the last one stopped. What is kept of a file are places and sort keys, 16 bytes per sample of a list.

Failure policy: a file that cannot be read, now or further on, is an answer that says why. A file that was replaced is
opened anew.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_find import DumpRef, holes
from rltop.evidence.dump_rows import SORTS, Filter, Line, contains, line_of, sort_key
from rltop.evidence.dump_sample import DumpSample
from rltop.evidence.dump_stats import DumpStats
from rltop.evidence.dump_trained import Trained
from rltop.evidence.dump_whole import whole
from rltop.evidence.token_text import TokenTexts
from rltop.protocol.messages import DumpPageAnswer, DumpPageQuery, DumpsAnswer

BUDGET_S = 0.25
MOST_ROWS = 1_000
MOST_OPEN = 4
MOST_LISTS = 8
MOST_TOKENIZERS = 8
MOST_LINES = 20_000
"""Lines of one file that are kept."""
MOST_GROUP = 4_096
SMALL_BYTES = 32 << 20
MOST_SAMPLES = 1 << 40
SORT_AGAIN = 1.5
"""A list that is still being read is sorted again when it has grown by this factor: all sorts together cost three."""


def listed(refs: Sequence[DumpRef], places: Sequence[str]) -> DumpsAnswer:
    """The refs as they cross the wire."""
    out = []
    for ref in refs:
        changed = 0.0
        with suppress(OSError):
            changed = ref.path.stat().st_mtime
        out.append(
            {
                "path": str(ref.path),
                "rollout_id": ref.rollout_id,
                "eval": ref.is_eval,
                "kind": ref.kind,
                "bytes": ref.bytes,
                "t": changed,
                "train": [str(path) for path in ref.train],
                "problem": ref.problem,
                "damage": ref.damage,
            }
        )
    why = "" if out else f"no dump lies at {', '.join(places)}: --save-debug-rollout-data or --dump-details writes them"
    return DumpsAnswer(out, why, holes(refs)[:100])


class DumpPages:
    """Answers queries about dumps. Not safe to share between threads."""

    def __init__(self, *, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_s, self._clock = budget_s, clock
        self._open: dict[Path, _Opened] = {}
        self._texts: dict[Path, TokenTexts | None] = {}
        self.checkpoints: Sequence[Path] = ()
        """Directories with a `tokenizer.json`, for dumps that have none beside them."""

    def answer(self, ref: DumpRef, query: DumpPageQuery) -> DumpPageAnswer:
        """Work on the query for the budget."""
        try:
            opened = self._opened(ref)
            return opened.answer(query, self._clock() + self._budget_s, self._clock)
        except RltopError as error:
            self._forget(ref.path)
            return DumpPageAnswer(query.path, why=broken_words(error))
        except OSError as error:
            self._forget(ref.path)
            return DumpPageAnswer(query.path, why=error.strerror or str(error))

    def close(self) -> None:
        """Close every file."""
        for path in list(self._open):
            self._forget(path)

    def _opened(self, ref: DumpRef) -> _Opened:
        stat = ref.path.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        held = self._open.pop(ref.path, None)
        if held is not None and (held.stamp, held.ref.train) != (stamp, ref.train):
            held.close()
            held = None
        while len(self._open) >= MOST_OPEN:
            self._forget(next(iter(self._open)))
        held = held or _Opened(ref, stamp, self._tokenizer)
        self._open[ref.path] = held  # the newest is the last
        return held

    def _tokenizer(self, path: Path) -> TokenTexts | None:
        """`tokenizer/tokenizer.json` beside the dump or, as `--dump-details` writes it, one directory up; else one of
        the checkpoints."""
        folders = [folder / "tokenizer" for folder in (path.parent, path.parent.parent)]
        for folder in (*folders, *self.checkpoints):
            file = folder / "tokenizer.json"
            if file not in self._texts:
                while len(self._texts) >= MOST_TOKENIZERS:
                    del self._texts[next(iter(self._texts))]
                self._texts[file] = TokenTexts.read(file)
            if (found := self._texts[file]) is not None:
                return found
        return None

    def _forget(self, path: Path) -> None:
        if (held := self._open.pop(path, None)) is not None:
            held.close()


def broken_words(error: RltopError) -> str:
    """One line of an error."""
    return f"{error.what}: {error.why}" if error.why else error.what


class _Opened:
    """One dump, the train dumps beside it, and the lists that were made of it."""

    def __init__(
        self, ref: DumpRef, stamp: tuple[int, int, int], tokenizer: Callable[[Path], TokenTexts | None]
    ) -> None:
        self.ref, self.stamp, self._tokenizer = ref, stamp, tokenizer
        self._stack = ExitStack()
        self.file = self._stack.enter_context(DumpFile.open(ref.path))
        self._trained = Trained(self._stack, ref.train)
        self._lists: dict[tuple[str, str, int], _List] = {}
        self._lines: dict[int, Line] = {}
        self._search: tuple[DumpPageQuery, int] | None = None
        self._stats: DumpStats | None = None
        self._counted = 0
        self.broken = ""
        """Why the samples behind the last one that is known cannot be read."""

    def close(self) -> None:
        self._stack.close()

    def answer(self, query: DumpPageQuery, until: float, clock: Callable[[], float]) -> DumpPageAnswer:
        spent = lambda: clock() >= until  # noqa: E731
        if query.want == "stats":
            return self._numbers(query, spent)
        # Half of the time for the train dumps, so that there is a first picture without them where they are large.
        half = clock() + (until - clock()) / 2
        joined = self._join(lambda: clock() >= half)
        rows = self._list(query)
        if query.want == "whole":
            return self._whole(query, rows, spent)
        if "gap" in query.sort + query.filter and not joined:
            return self._answer(query, rows, done=False)
        start, back, found = max(0, query.start), query.stop < query.start, -1
        size = min(abs(query.stop - query.start), MOST_ROWS)
        if query.search:
            place, ended = self._searched(rows, query, spent, back=back)
            if place is None:
                return self._answer(query, rows, done=ended)
            start = found = place
        rows.reach(self, start + size, spent)
        # Past the end there is nothing: whoever asks for a place far behind wants the last page.
        if rows.done and start >= rows.count:
            start = max(0, rows.count - size)
        lines, whole_page = self._page(rows, start, start + size, spent)
        whole_page = whole_page and self._trained.complete
        return DumpPageAnswer(
            query.path,
            start=start,
            rows=[line.row() for line in lines],
            count=rows.count,
            indexed=rows.gone(self),
            done=whole_page and (rows.done or (not query.sort and rows.count >= start + size)),
            ended=rows.done,
            found=found,
            why=self.broken,
        )

    def _join(self, spent: Callable[[], bool]) -> bool:
        """Go on to find out where the samples stand in the train dumps; whether that is known."""
        if self._trained.complete:
            return True
        while self._trained.more():
            if spent():
                return False
        self._lists.clear()
        self._lines.clear()  # their gaps were not known
        return True

    def _answer(self, query: DumpPageQuery, rows: _List, *, done: bool) -> DumpPageAnswer:
        return DumpPageAnswer(query.path, count=rows.count, indexed=rows.gone(self), done=done, ended=rows.done)

    def _list(self, query: DumpPageQuery) -> _List:
        if query.sort.lstrip("-") not in ("", *SORTS):
            raise RltopError(f"no such sort: {query.sort[:80]!r}", why=f"there are {', '.join(SORTS)}")
        key = (query.filter.strip(), query.sort, query.group_at)
        found = self._lists.pop(key, None) or _List(*key)
        while len(self._lists) >= MOST_LISTS:
            del self._lists[next(iter(self._lists))]
        self._lists[key] = found
        return found

    def _page(self, rows: _List, start: int, stop: int, spent: Callable[[], bool]) -> tuple[list[Line], bool]:
        out: list[Line] = []
        for place in range(start, min(stop, rows.count)):
            if out and spent() and rows.at(place) not in self._lines:
                return out, False
            out.append(self.line(rows.at(place)))
        return out, True

    def line(self, at: int, sample: DumpSample | None = None) -> Line:
        """The line of a sample, kept for the next time."""
        line = self._lines.get(at)
        if line is None:
            sample = sample or self.file.sample(at)
            line = line_of(sample, self._trained.log_probs(sample))
            if len(self._lines) >= MOST_LINES:
                self._lines.clear()
            self._lines[at] = line
        return line

    def _searched(
        self, rows: _List, query: DumpPageQuery, spent: Callable[[], bool], *, back: bool
    ) -> tuple[int | None, bool]:
        """(place of the next hit, whether the search has ended). Goes on where the same search stopped."""
        place = query.start
        if self._search is not None and self._search[0] == query:
            place = self._search[1]
        step = -1 if back else 1
        while place >= 0:
            if not rows.reach(self, place + 1, spent):
                ended = rows.done
                self._search = None if ended else (query, place)
                return None, ended
            if contains(self.file.sample(rows.at(place)), query.search):
                self._search = None
                return place, True
            place += step
            if spent():
                self._search = (query, place)
                return None, place < 0
        self._search = None
        return None, True

    def _numbers(self, query: DumpPageQuery, spent: Callable[[], bool]) -> DumpPageAnswer:
        """Perf metrics over all samples: of those that cannot be had why not."""
        if not self._join(spent):
            return DumpPageAnswer(query.path, done=False, ended=False)
        if self._stats is None:
            self._stats = DumpStats(is_eval=self.ref.is_eval)
        while not (done := self.file.count() == self._counted):
            try:
                sample = self.file.sample(self._counted)
            except IndexError:
                done = True
                break
            except RltopError as error:
                self.broken = broken_words(error)
                done = True
                break
            self._stats.add(sample, self._trained.sample(sample.at, sample.index, sample.tokens))
            self._counted += 1
            if spent():
                break
        told: dict[str, Any] = {**self._stats.metrics(), **self._stats.absent()} if done else {}
        if done and (remarks := self._stats.remarks()):
            told["remarks"] = "; ".join(remarks)
        return DumpPageAnswer(query.path, stats=told, count=self._counted, indexed=self._counted, done=done, ended=done)

    def _whole(self, query: DumpPageQuery, rows: _List, spent: Callable[[], bool]) -> DumpPageAnswer:
        if not rows.reach(self, query.start + 1, spent):
            return self._answer(query, rows, done=rows.done)
        sample = self.file.sample(rows.at(query.start))
        group, all_of_it = self.group(sample.at, spent)
        rewards = [line.reward for line in map(self.line, group)]
        told = whole(
            sample,
            self._trained.sample(sample.at, sample.index, sample.tokens),
            rewards,
            self._tokenizer(self.ref.path),
        )
        return DumpPageAnswer(
            query.path,
            start=query.start,
            samples=[told],
            count=rows.count,
            indexed=rows.gone(self),
            done=self._trained.complete and all_of_it,
            ended=rows.done,
        )

    def group(self, at: int, spent: Callable[[], bool]) -> tuple[list[int], bool]:
        """(places of the samples around `at` that share its group, whether those are all).

        They are neighbours, as every trainer writes them; without a group there are none.
        """
        group = self._group_of(at)
        if group is None:
            return [], True
        found = [at]
        for step in (-1, 1):
            place = at + step
            while abs(place - at) < MOST_GROUP:
                if place not in self._lines and spent():
                    return sorted(found), False
                if self._group_of(place) != group:
                    break
                found.append(place)
                place += step
        return sorted(found), True

    def _group_of(self, at: int) -> int | None:
        """None where there is no sample either."""
        try:
            return self.line(at).group
        except IndexError:
            return None
        except RltopError as error:
            self.broken = broken_words(error)
            return None


class _List:
    """What a filter and an order make of a file, as far as it was gone through."""

    def __init__(self, text: str, sort: str, group_at: int) -> None:
        self._filter, self._sort, self._group_at = Filter(text), sort, group_at
        self.plain = not text and not sort and group_at < 0
        self.done = False
        self.count = 0
        self._places = array("Q")
        self._keys = array("d")
        self._order: Sequence[int] | None = None
        self._next = 0
        self._scan: Iterator[float] | None = None

    def at(self, place: int) -> int:
        """Place in the file of a place in the list."""
        if self.plain:
            return place
        return self._places[self._order[place] if self._order is not None else place]

    def gone(self, opened: _Opened) -> int:
        """Samples of the file that were gone through."""
        return opened.file.indexed() if self.plain else self._next

    def reach(self, opened: _Opened, count: int, spent: Callable[[], bool]) -> bool:
        """Go on until the list is known up to `count` places, or all of it where it is sorted; False: not (yet)."""
        if self.done:
            return count <= self.count
        if self.plain:
            # Of a small file the end costs nothing, and its count is worth knowing.
            small = opened.stamp[1] <= SMALL_BYTES
            self._reach_plain(opened, MOST_SAMPLES if small else count, spent)
        elif self._group_at >= 0:
            group, self.done = opened.group(self._group_at, spent)
            if self.done:
                self._fill(opened, group)
                self._put_in_order()
        else:
            self._reach_listed(opened, count, spent)
        return count <= self.count

    def _reach_plain(self, opened: _Opened, count: int, spent: Callable[[], bool]) -> None:
        try:
            self._reach_end(opened.file, count, spent)
        except RltopError as error:
            opened.broken = broken_words(error)
            self.count = opened.file.indexed()
            self.done = True
            if not self.count:
                raise

    def _reach_end(self, file: DumpFile, count: int, spent: Callable[[], bool]) -> None:
        while file.count() is None and file.indexed() < count:
            self._scan = self._scan or file.scan(count)
            if next(self._scan, None) is None:
                self._scan = None
            if spent():
                break
        self.count = file.indexed()
        total = file.count()
        self.done = total is not None
        self.count = total if total is not None else self.count

    def _reach_listed(self, opened: _Opened, count: int, spent: Callable[[], bool]) -> None:
        while not self.done and (self._sort or len(self._places) < count):
            total = opened.file.count()
            if total is not None and self._next >= total:
                self.done = True
            elif self._next < opened.file.indexed():
                self._fill(opened, [self._next])
                self._next += 1
            else:
                try:
                    sample = opened.file.sample(self._next)
                except IndexError:
                    self.done = True
                except RltopError as error:
                    opened.broken = broken_words(error)
                    self.done = True
                    if not self._next:
                        raise
                else:
                    self._fill(opened, [self._next], sample)
                    self._next += 1
            if spent():
                break
        sorted_so_far = 0 if self._order is None else len(self._order)
        if self.done or len(self._places) >= SORT_AGAIN * sorted_so_far:
            self._put_in_order()
        self.count = len(self._places) if self._order is None else len(self._order)

    def _put_in_order(self) -> None:
        if self._sort:
            self._order = array("Q", sorted(range(len(self._places)), key=self._keys.__getitem__))

    def _fill(self, opened: _Opened, places: Sequence[int], sample: DumpSample | None = None) -> None:
        for at in places:
            one = sample or opened.file.sample(at)
            line = opened.line(at, one)
            if self._filter.takes(line, one):
                self._places.append(at)
                self._keys.append(sort_key(line, self._sort))
        self.count = len(self._places)
