"""What the dump screen asks of its source, and what has come: the current file, its list, the sample under the cursor.

One question of a kind is out at a time; when its answer comes, what is wanted by then is asked next, so that a held
arrow key costs no queue. An answer for a file, filter or order that was left is dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import PurePath
from typing import Any

from rltop.protocol.messages import DumpPageQuery, DumpsAnswer
from rltop.tui.dump_source import DumpSource
from rltop.tui.rows import Row, Span
from rltop.tui.text import clean, num, wrap
from rltop.tui.theme import Glyphs
from rltop.tui.widgets.dump_list import DumpList
from rltop.tui.widgets.dump_text import SampleText

RETRY_S = 2.0
"""After an answer that says that there is none."""
AGAIN_S = 0.1
"""Between two questions about something that is still being read."""
NEWER_S, NEWER_SHARE = 3.0, 10.0
"""Between two looks for newer dumps: so long, and so many times as long as the last one took."""
KEPT = 24
"""Samples that are kept in full."""


class DumpDesk:
    """spawn: runs a coroutine beside the screen. changed: something came that should be painted."""

    def __init__(
        self,
        source: DumpSource,
        glyphs: Glyphs,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        changed: Callable[[], None],
        *,
        newest: bool = False,
    ) -> None:
        """newest: begin with the newest rollout, and look for newer ones behind it."""
        self._newest = newest
        self._source, self._glyphs, self._spawn, self._changed = source, glyphs, spawn, changed
        self.dumps: list[dict[str, Any]] = []
        self.holes: list[int] = []
        self.at = 0
        """Which of them."""
        self.list = DumpList()
        self.filter, self.sort, self.group_at, self.search = "", "", -1, ""
        self.message = ""
        self.sample_why = ""
        self._before_group = 0
        """Where the cursor was when a group was opened."""
        self._wholes: OrderedDict[tuple[object, ...], SampleText] = OrderedDict()
        self.damaged: dict[str, str] = {}
        """Path -> what of it could not be read, of the dumps that were looked at."""
        self._shown: SampleText | None = None
        self._stats: dict[str, Any] | None = None
        self._stats_why = ""
        self._counted = 0
        self._busy: set[str] = set()
        self._not_before = 0.0

    # -------------------------------------------------------------- what there is

    @property
    def dump(self) -> dict[str, Any] | None:
        """The current file."""
        return self.dumps[self.at] if self.dumps else None

    @property
    def path(self) -> str:
        """Of the current file."""
        return str(self.dump["path"]) if self.dump is not None else ""

    @property
    def text(self) -> SampleText | None:
        """The sample under the cursor, or, while it is fetched, the one before."""
        if (found := self._wanted_text) is not None:
            self._shown = found
        return self._shown

    @property
    def _wanted_text(self) -> SampleText | None:
        """The sample under the cursor, if it has come."""
        row = self.list.current
        return self._wholes.get((self.path, row.get("at"))) if row is not None else None

    def _of(self) -> tuple[object, ...]:
        """What the list is made of."""
        return (self.path, self.filter, self.sort, self.group_at)

    def file_words(self) -> str:
        """`rollout 12`, `eval 3`, or the file's name."""
        dump = self.dump
        if dump is None:
            return "no dumps"
        name = clean(PurePath(self.path).name, ascii_only=self._glyphs.ascii_only)
        if dump.get("rollout_id") is None:
            return name
        kind = "eval of rollout" if dump.get("eval") else "train" if "train" in str(dump.get("kind")) else "rollout"
        return f"{kind} {dump['rollout_id']}"

    def file_facts(self) -> list[Span]:
        """What is known of the file."""
        dump = self.dump
        if dump is None:
            return [(self.list.why or f"looking for dumps {self._glyphs.more}", "dim")]
        facts: list[Span] = []
        if dump.get("damage") and not self.list.broken:
            facts.append((clean(dump["damage"], ascii_only=self._glyphs.ascii_only), "bad"))
        if len(self.dumps) > 1:
            facts.append((f"file {self.at + 1}/{len(self.dumps)}", "text"))
        if newer := self.newer:
            facts.append((f"newer: {newer}", "accent"))
        if self.list.ended and not self.filter and self.group_at < 0:
            facts.append((f"{self.list.count} sample{'s' * (self.list.count != 1)}", "text"))
        facts.append((_size(dump.get("bytes")), "dim"))
        trains = len(dump.get("train") or ())
        if trains:
            facts.append((f"{trains} train dump{'s' * (trains > 1)} joined", "text"))
        elif "train" not in str(dump.get("kind")):
            facts.append(("no train dump", "dim"))
        if self.holes:
            told = ", ".join(map(str, self.holes[:6])) + (", ..." if len(self.holes) > 6 else "")
            facts.append((f"no dump of rollout {told}", "warn"))
        if self.list.broken:
            facts.append((clean(self.list.broken, ascii_only=self._glyphs.ascii_only), "bad"))
        if self.list.busy and self.list.indexed:
            facts.append((f"reading: {self.list.indexed} samples", "accent"))
        return facts

    @property
    def newer(self) -> int:
        """Dumps of later rollouts, of a run that may still write some."""
        dump = self.dump
        now = dump.get("rollout_id") if dump is not None else None
        if not self._newest or now is None:
            return 0
        return sum(1 for one in self.dumps if (one.get("rollout_id") or 0) > now and not one.get("eval"))

    def list_words(self) -> str:
        """Filter, order and group of the list."""
        words = []
        if self.group_at >= 0:
            words.append("one group")
        if self.filter:
            words.append(f"/{clean(self.filter, ascii_only=self._glyphs.ascii_only)[:24]}")
        if self.sort:
            words.append(f"by {self.sort.lstrip('-')} {self._glyphs.down if self.sort[0] == '-' else self._glyphs.up}")
        return " ".join(words)

    def sample_words(self) -> str:
        """Name of the sample that is shown."""
        text = self.text
        if text is None:
            return ""
        index, group = text.sample.get("index"), text.sample.get("group_index")
        name = f"Sample {index if index is not None else text.sample.get('at')}"
        waits = "" if self._wanted_text is text else f" {self._glyphs.more}"
        return name + (f", group {group}" if group is not None else "") + waits

    def stats_rows(self, width: int) -> list[Row]:
        """The numbers of the file."""
        if self._stats_why:
            told = clean(self._stats_why, ascii_only=self._glyphs.ascii_only)
            return [((f" {line}", "warn"),) for line in wrap(told, max(10, width - 2))]
        if self._stats is None:
            gone = f": {self._counted} samples" if self._counted else ""
            return [((f" reading the whole file{gone} {self._glyphs.more}", "dim"),)]
        names = [clean(name, ascii_only=self._glyphs.ascii_only) for name in self._stats]
        room = max([len(name) for name in names], default=0)
        rows: list[Row] = []
        for name, value in zip(names, self._stats.values(), strict=True):
            if isinstance(value, str):
                told = clean(value, ascii_only=self._glyphs.ascii_only)
                rows += [((f" {line}", "faint"),) for line in wrap(f"{name}: {told}", max(10, width - 2))]
            else:
                rows.append(((f" {name:<{room}} ", "dim"), (num(value), "text")))
        return rows

    @property
    def busy(self) -> bool:
        """A question is out."""
        return bool(self._busy)

    # -------------------------------------------------------------- what is asked

    def begin(self, *, text: str = "", sort: str = "", search: str = "", place: int = 0) -> None:
        """What the first picture shows, before anything was asked."""
        self.filter, self.sort, self.search = text.strip(), sort, search.strip()
        self.list.cursor = place

    def open(self) -> None:
        """Fetch the list of files."""
        self._once("files", self._files())
        if self._newest:
            self._spawn(self._watch())

    def close(self) -> None:
        """Nobody looks any more."""
        self._source.close()

    def look(self) -> None:
        """Fetch what is in sight and missing."""
        rested = asyncio.get_running_loop().time() >= self._not_before
        if self.dump is None:
            if self.list.why and rested:
                self._once("files", self._files())
            return
        if rested and (self.list.wanted() is not None or self.list.busy):
            self._once("rows", self._rows())
        if self._wanted_text is None and self.list.current is not None:
            self._once("whole", self._whole())

    def turn(self, step: int) -> None:
        """Another file; the place in it stays."""
        if self._newest and step > 0 and self.at == len(self.dumps) - 1:
            self._once("files", self._newer())
        elif len(self.dumps) > 1:
            self._to_file((self.at + step) % len(self.dumps))

    def _to_file(self, at: int) -> None:
        self.at = at
        self.group_at = -1
        self._fresh(self.list.cursor if not self.filter and not self.sort else 0)
        self._stats, self._stats_why = None, ""

    def rearrange(self, *, text: str | None = None, sort: str | None = None) -> None:
        """Another filter or order."""
        self.filter = self.filter if text is None else text.strip()
        self.sort = self.sort if sort is None else sort
        if text is not None:
            self.group_at = -1
        self._fresh(0)

    def toggle_group(self) -> None:
        """All samples of the prompt under the cursor, or the whole list again."""
        if self.group_at >= 0:
            self.group_at = -1
            self._fresh(self._before_group)
        elif self.list.current is not None:
            self._before_group = self.list.cursor
            self.group_at = int(self.list.current["at"])
            self._fresh(0)

    def seek(self, *, back: bool = False, here: bool = False) -> None:
        """To the next sample whose prompt or response has the text that is searched."""
        if self.search:
            place = self.list.cursor + (0 if here else -1 if back else 1)
            self._once("search", self._search(place, back=back))

    def want_stats(self) -> None:
        """Fetch the numbers of the file."""
        if self._stats is None and self.dump is not None:
            self._once("stats", self._file_stats())

    def _rest(self) -> None:
        """Nothing could be had: ask again after a while, when something is painted."""
        self._not_before = asyncio.get_running_loop().time() + RETRY_S

    def _fresh(self, cursor: int) -> None:
        self._not_before = 0.0
        self.list.reset(cursor)
        self.sample_why = ""
        self._changed()

    def _query(self, **more: Any) -> DumpPageQuery:
        return DumpPageQuery(self.path, filter=self.filter, sort=self.sort, group_at=self.group_at, **more)

    def _once(self, kind: str, work: Coroutine[Any, Any, None]) -> None:
        if kind in self._busy:
            work.close()
            return
        self._busy.add(kind)

        async def run() -> None:
            try:
                await work
            finally:
                self._busy.discard(kind)

        self._spawn(run())

    async def _files(self) -> None:
        answer = await self._source.list()
        self.dumps, self.holes = answer.dumps, answer.holes
        self.list.why = "" if self.dumps else answer.why or "there are no dumps"
        if not self.dumps:
            self._rest()
        train = [at for at, one in enumerate(self.dumps) if not one.get("eval")]
        self.at = train[-1] if self._newest and train else 0
        self._changed()
        self.seek(here=True)

    async def _newer(self) -> None:
        """The run may have written another dump since."""
        answer = await self._source.list()
        if not answer.dumps:
            self.message = clean(answer.why, ascii_only=self._glyphs.ascii_only)
        else:
            at = self._take(answer)
            if at == len(self.dumps) - 1:
                self.message = "this is the newest dump"
                self.at = at
            else:
                self._to_file(at + 1)
        self._changed()

    def _take(self, answer: DumpsAnswer) -> int:
        """A newer list of files. Returns where the current one is in it; -1: it is gone."""
        before = self.path
        self.dumps, self.holes = answer.dumps, answer.holes
        return next((at for at, one in enumerate(self.dumps) if one["path"] == before), -1)

    async def _watch(self) -> None:
        """Learn of dumps that are written meanwhile; the reader stays where he is."""
        clock, rest = asyncio.get_running_loop().time, NEWER_S
        while True:
            await asyncio.sleep(rest)
            begin = clock()
            answer = await self._source.list()
            rest = max(NEWER_S, NEWER_SHARE * (clock() - begin))
            had = self.dump
            if had is None or not answer.dumps or "files" in self._busy:
                continue  # the first list has a loop of its own
            at = self._take(answer)
            if at < 0:  # it was deleted: what is on the screen stays until somebody turns
                self.dumps.insert(min(self.at, len(self.dumps)), had)
                at = min(self.at, len(self.dumps) - 1)
            self.at = at
            self._changed()

    async def _rows(self) -> None:
        while True:
            wanted = self.list.wanted()
            if wanted is None and not self.list.busy:
                return
            start, stop = wanted or (self.list.top, self.list.top + self.list.page)
            of, end = self._of(), self.list.asked_end
            answer = await self._source.page(self._query(start=start, stop=stop))
            if of != self._of() or (end and not self.list.asked_end):
                continue
            self.list.take(answer)
            if answer.why:
                self.damaged[answer.path] = answer.why
            if answer.why and not answer.count:
                self._rest()
                self._changed()
                return
            self._changed()
            if not answer.done:
                await asyncio.sleep(AGAIN_S)

    async def _whole(self) -> None:
        while self._wanted_text is None and self.list.current is not None:
            path, place = self.path, self.list.cursor
            answer = await self._source.page(self._query(start=place, want="whole"))
            if path != self.path:
                continue
            if answer.samples and not answer.done:
                # Its train dump is still being read: it is shown without, and asked for again.
                found = answer.samples[0]
                if self._shown is None or self._shown.sample.get("at") != found.get("at"):
                    self._shown = SampleText.of(found, self._glyphs)
            elif answer.samples:
                found = answer.samples[0]
                self._wholes[(path, found.get("at"))] = SampleText.of(found, self._glyphs)
                while len(self._wholes) > KEPT:
                    self._wholes.popitem(last=False)
                self.sample_why = ""
            elif answer.done:
                self.sample_why = clean(answer.why, ascii_only=self._glyphs.ascii_only)
                self._shown = None
                self._changed()
                return
            self._changed()
            if answer.done and place == self.list.cursor and self._wanted_text is None:
                self.list.rows.clear()  # an order that was still being made, or the file, has changed
            if not answer.done or not self.list.rows:
                await asyncio.sleep(AGAIN_S)

    async def _search(self, place: int, *, back: bool) -> None:
        of, text = self._of(), self.search
        while True:
            stop = -1 if back else place + self.list.page
            answer = await self._source.page(self._query(start=place, stop=stop, search=text))
            if of != self._of() or text != self.search:
                return
            if answer.found >= 0:
                self.message = ""
                self.list.go(answer.found)
                self._changed()
                await self._show_hit(text)
                return
            if answer.done:
                where = "before this" if back else "from here on"
                self.message = answer.why or f"no sample {where} has {clean(text)[:40]!r}"
                self._changed()
                return
            self.message = f"searching: {answer.indexed} samples gone through"
            self._changed()
            await asyncio.sleep(AGAIN_S)

    async def _show_hit(self, text: str) -> None:
        """Wait for the sample, then bring the text into sight."""
        place, of = self.list.cursor, self._of()
        while (place, of) == (self.list.cursor, self._of()):
            if (found := self._wanted_text) is not None:
                found.find(text)
                self._changed()
                return
            if self.sample_why:
                return
            await asyncio.sleep(AGAIN_S / 2)

    async def _file_stats(self) -> None:
        path = self.path
        while True:
            answer = await self._source.page(DumpPageQuery(path, want="stats"))
            if path != self.path:
                return
            self._stats_why, self._counted = answer.why, answer.indexed
            if answer.stats:
                self._stats = answer.stats
            self._changed()
            if answer.done:
                return
            await asyncio.sleep(AGAIN_S)


def _size(size: object) -> str:
    if not isinstance(size, int | float):
        return "size unknown"
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:.1f} {unit}"
    return f"{int(size)} B"
