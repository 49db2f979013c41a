"""What the server asks of the rest: takes records, answers queries and commands, brings everything up to date."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

from rltop.daemon.commands import Commands
from rltop.daemon.core import Core
from rltop.daemon.dump_pages import DumpReader
from rltop.daemon.ingest import Ingest
from rltop.daemon.lines import SourceLines
from rltop.daemon.publish import Publisher
from rltop.daemon.queries import answer_events, answer_lines, answer_series
from rltop.daemon.server import Counters
from rltop.daemon.sessions import Session
from rltop.daemon.verdicts import Verdicts
from rltop.protocol.messages import (
    Accepted,
    Command,
    DumpPageAnswer,
    DumpPageQuery,
    DumpsAnswer,
    DumpsQuery,
    EventsAnswer,
    EventsQuery,
    LinesAnswer,
    LinesQuery,
    Record,
    Rejected,
    SeriesAnswer,
    SeriesQuery,
    Tick,
)


class DaemonBackend:
    """Implements `rltop.daemon.server.Backend`.

    journal: path of the journal, for events that have left the ring. lag_ms: the loop's lag, measured elsewhere.
    refresh: called once a second. ages: source -> seconds since it said something; default those of the records.
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
        sources: SourceLines,
        dumps: DumpReader,
        refresh: Callable[[], None] = lambda: None,
        ages: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self._core = core
        self._run = run
        self._ingest = ingest
        self._verdicts = verdicts
        self._commands = commands
        self._journal = journal
        self._publisher = publisher
        self._lag_ms = lag_ms
        self._sources = sources
        self._dump_reader = dumps
        self._refresh = refresh
        self._ages = ages or ingest.ages
        self._troubles: dict[str, int] = {}

    def record(self, record: Record, key: str = "") -> None:
        """Apply a record and show it to the checks."""
        if record.run and record.run != self._run:
            self.not_a_record(f"it is of run {record.run[:80]!r}, this is {self._run!r}")
            return
        self._verdicts.feed(self._ingest.take(record, key))
        if record.kind == "bye":
            self._verdicts.refresh()  # whoever waits for the end of the run finds its last verdicts beside it

    def not_a_record(self, why: str) -> None:
        """Something else came in."""
        self._ingest.malformed(why)

    async def series(self, query: SeriesQuery) -> tuple[SeriesAnswer, list[bytes]]:
        """Bucketed history."""
        return await answer_series(self._core.series, query)

    async def events(self, query: EventsQuery) -> EventsAnswer:
        """A page of the event log: the ring, and behind it the journal."""
        return await answer_events(self._core.ring, self._journal, query)

    async def lines(self, query: LinesQuery) -> LinesAnswer:
        """Lines of a log around one line."""
        return await answer_lines(self._sources, query)

    async def dumps(self, query: DumpsQuery) -> DumpsAnswer:
        """Which dumps of rollouts the run has."""
        return await self._dump_reader.dumps(query)

    async def dump_page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Samples of one of them."""
        return await self._dump_reader.page(query)

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
        self._verdicts.tick()
        self._refresh()
        return Tick(time=self._core.now(), lag_ms=self._lag_ms(), ages=self._ages(), viewers=viewers)

    def trouble(self, where: str, error: Exception) -> None:
        """A fault of the daemon's own: an event the first time, counted in the key `daemon`."""
        text = f"fault in the daemon ({where}): {type(error).__name__}: {error}"
        self._troubles[text] = self._troubles.get(text, 0) + 1
        if self._troubles[text] == 1 and len(self._troubles) <= 50:
            self._core.event("log", "error", text, "daemon")
        self._core.update("daemon", faults=sum(self._troubles.values()))


def who(declared: str) -> str:
    """Who a local client is: only this user can open the sockets; a name of their own choosing is unverified."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # an arbitrary uid, as some container platforms give
        user = "?"
    uid = f"{user}, uid {os.getuid()}"
    return f"{declared[:80]} (unverified; {uid})" if declared else uid
