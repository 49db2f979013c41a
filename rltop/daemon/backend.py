"""What the server asks of the rest: takes records, answers queries and commands, brings everything up to date."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Callable
from pathlib import Path

from rltop.daemon import replay
from rltop.daemon.commands import Commands
from rltop.daemon.core import Core
from rltop.daemon.events import Event
from rltop.daemon.ingest import Ingest
from rltop.daemon.publish import Publisher
from rltop.daemon.server import Counters
from rltop.daemon.sessions import Session
from rltop.daemon.verdicts import Verdicts
from rltop.protocol.messages import (
    Accepted,
    Command,
    EventsAnswer,
    EventsQuery,
    Record,
    Rejected,
    SeriesAnswer,
    SeriesQuery,
    Tick,
)

MAX_SERIES_KEYS = 500
MAX_SERIES_POINTS = 300_000
"""Buckets in one answer, over all keys: 24 bytes each, so that it stays well below the limit of a message."""
MAX_EVENTS = 2000
MAX_EVENT_CHARACTERS = 2_000_000
"""Text in one answer: at most 8 of the 16 MiB of a message, whatever the script."""
_COLUMNS = ("step", "min", "max", "last", "nan")


class DaemonBackend:
    """Implements `rltop.daemon.server.Backend`.

    journal: path of the journal, for events that have left the ring. lag_ms: the loop's lag, measured elsewhere.
    """

    def __init__(
        self,
        core: Core,
        *,
        run: str,
        ingest: Ingest,
        verdicts: Verdicts,
        commands: Commands,
        journal: Path,
        publisher: Publisher,
        lag_ms: Callable[[], float],
    ) -> None:
        self._core = core
        self._run = run
        self._ingest = ingest
        self._verdicts = verdicts
        self._commands = commands
        self._journal = journal
        self._publisher = publisher
        self._lag_ms = lag_ms
        self._troubles: dict[str, int] = {}

    def record(self, record: Record) -> None:
        """Apply a record and show it to the checks."""
        if record.run and record.run != self._run:
            self.not_a_record(f"it is of run {record.run[:80]!r}, this is {self._run!r}")
            return
        self._ingest.take(record)
        self._verdicts.feed(record)
        if record.kind == "bye":
            self._verdicts.refresh()  # whoever waits for the end of the run finds its last verdicts beside it

    def not_a_record(self, why: str) -> None:
        """Something else came in."""
        self._ingest.malformed(why)

    async def series(self, query: SeriesQuery) -> tuple[SeriesAnswer, list[bytes]]:
        """Bucketed history; yields between keys, because one answer may touch millions of points."""
        cols: dict[str, dict[str, int]] = {}
        missing: list[str] = []
        blobs: list[bytes] = []
        keys = list(dict.fromkeys(query.keys))[:MAX_SERIES_KEYS]
        buckets = min(query.buckets, MAX_SERIES_POINTS // max(1, len(keys)))
        for key in keys:
            found = self._core.series.query(key, query.lo, query.hi, buckets)
            if found is None:
                missing.append(key)
                continue
            cols[key] = {"n": len(found.step), **{name: len(blobs) + i for i, name in enumerate(_COLUMNS)}}
            blobs += found.blobs()
            await asyncio.sleep(0)
        return SeriesAnswer(cols, missing), blobs

    async def events(self, query: EventsQuery) -> EventsAnswer:
        """A page of the event log: the ring, and behind it the journal."""
        ring, limit = self._core.ring, max(1, min(query.limit, MAX_EVENTS))
        hi = ring.shown if query.hi is None else min(query.hi, ring.shown)
        text = query.text.casefold()

        def matches(event: Event) -> bool:
            return (
                query.lo <= event["eseq"] <= hi
                and (not query.kinds or event["kind"] in query.kinds)
                and text in event["text"].casefold()
            )

        found = [event for event in ring.newest(len(ring)) if matches(event)]
        more = len(found) > limit
        found = found[-limit:]
        oldest = ring.first
        if not more and query.lo < oldest and oldest > 1:
            older, more = await asyncio.to_thread(
                replay.older_events,
                self._journal,
                lo=query.lo,
                hi=min(hi, oldest - 1),
                kinds=query.kinds,
                text=query.text,
                limit=limit,
            )
            more = more or len(older) + len(found) > limit
            found = [*older, *found][-limit:]
        kept = _newest_within(found, MAX_EVENT_CHARACTERS)
        return EventsAnswer(kept, more or len(kept) < len(found))

    async def command(self, command: Command, command_id: str, session: Session) -> Accepted | Rejected:
        """Take an operator's command."""
        return await self._commands.take(command, command_id, who=who(session.name), role=session.role)

    def client(self, what: str, session: Session) -> None:
        """Audit: who looked, who could act."""
        self._core.sink.client(self._core.now(), what, session.role, who(session.name), session.client[:200])

    def tick(self, viewers: int, counters: Counters) -> Tick:
        """Bring sources, losses and verdicts up to date."""
        self._core.update("daemon", malformed=counters.malformed, refused=counters.refused)
        self._publisher.tick()
        self._ingest.tick()
        self._verdicts.refresh()
        return Tick(time=self._core.now(), lag_ms=self._lag_ms(), ages=self._ingest.ages(), viewers=viewers)

    def trouble(self, where: str, error: Exception) -> None:
        """A fault of the daemon's own: an event the first time, counted in the key `daemon`."""
        text = f"fault in the daemon ({where}): {type(error).__name__}: {error}"
        self._troubles[text] = self._troubles.get(text, 0) + 1
        if self._troubles[text] == 1 and len(self._troubles) <= 50:
            self._core.event("log", "error", text, "daemon")
        self._core.update("daemon", faults=sum(self._troubles.values()))


def _newest_within(events: list[Event], characters: int) -> list[Event]:
    for index in range(len(events) - 1, -1, -1):
        characters -= len(events[index]["text"])
        if characters < 0:
            return events[index + 1 :]
    return events


def who(declared: str) -> str:
    """Who a local client is: only this user can open the sockets; a name of their own choosing is unverified."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # an arbitrary uid, as some container platforms give
        user = "?"
    uid = f"{user}, uid {os.getuid()}"
    return f"{declared[:80]} (unverified; {uid})" if declared else uid
