"""A run of which only the directory is left, shown over the same wire as a living one: `view` only, nothing written.

It lives inside the process that shows it (`rltop proxy --stdio`, which `attach` and `get` start for a dead run, here or
behind ssh), so it ends with its viewer and leaves no daemon behind. Every viewer has its own.

Failure policy: a journal that cannot be read is an error before the first byte goes out. When a daemon takes up the
run again the archive says goodbye: from then on the daemon tells the truth, and the viewer connects to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq.asyncio

import rltop
from rltop import runs
from rltop.daemon import replay
from rltop.daemon.core import Core
from rltop.daemon.dump_pages import DumpReader, run_args
from rltop.daemon.events import RING_SIZE, Event
from rltop.daemon.lines import SourceLines
from rltop.daemon.log_watch import log_paths
from rltop.daemon.past import End, Past, end_of, open_past
from rltop.daemon.queries import answer_events, answer_lines, answer_series
from rltop.daemon.server import Counters, Server
from rltop.daemon.sessions import Session, Sessions
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
from rltop.runs.leftovers import owned_dir

LOOK_S = 1.0
"""How often it looks whether a daemon took up the run."""
START_S = 60.0
_LIVE_NUMBERS = ("running", "queued", "tokens_per_s", "token_usage")
"""Of an engine that is gone; what it was (state, version, weights) stays."""


@contextlib.contextmanager
def archived(run_dir: Path) -> Iterator[str]:
    """Serve what the journal in `run_dir` holds while the block runs; gives the address of the view socket.

    Raises RltopError when the journal cannot be read.
    """
    with owned_dir("rltop-view-", _short_temp()) as folder, open_past(run_dir) as past:
        archive = Archive(run_dir, past, folder / "view.sock")
        archive.start()
        try:
            yield f"ipc://{archive.socket}"
        finally:
            archive.stop()


def _short_temp() -> Path:
    """A unix socket's path has room for 107 bytes, and TMPDIR may be long."""
    temp = Path(tempfile.gettempdir())
    return temp if len(str(temp)) < 70 else Path("/tmp")


class Archive:
    """The server over one dead run, in a thread with a loop of its own."""

    def __init__(self, run_dir: Path, past: Past, socket: Path) -> None:
        """Read the journal. Raises what reading a damaged one raises (`past.DAMAGE`)."""
        self.socket = socket
        self._run_dir = run_dir
        self._core = Core(_Nowhere(), now=time.time)
        restored = replay.restore(past.connection, self._core.series, events=RING_SIZE)
        self._core.ring.restore(restored.events, restored.head)
        end = end_of(past.connection, run_dir)
        for key, value in {**restored.state, **_as_past(restored.state, end, run_dir)}.items():
            self._core.table.set(key, value)
        logs = SourceLines(
            run_dir, lambda: {name: path for name, (path, _) in log_paths(self._core.table, run_dir).items()}
        )
        self._dumps = DumpReader(run_dir, lambda: run_args(self._core.table))
        self._backend = ArchiveBackend(self._core, past, logs, self._dumps)
        self._bound = threading.Event()
        self._ended: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rltop-archive", daemon=True)

    def start(self) -> None:
        """Start the thread; returns when the socket is bound."""
        self._thread.start()
        self._bound.wait(START_S)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop it."""
        self._ended()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # handed to whoever started the thread
            self._error = error
        finally:
            self._bound.set()

    async def _serve(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self._ended = lambda: _quietly(lambda: loop.call_soon_threadsafe(over.set))
        epoch, name = secrets.token_hex(8), self._run_dir.name
        context = zmq.asyncio.Context()
        server = Server(
            context,
            {"view": self.socket},
            sessions=Sessions(
                self._core.table, self._core.ring, epoch=epoch, run=name, server=f"rltop/{rltop.__version__} archive"
            ),
            backend=self._backend,
            epoch=epoch,
            clock=time.monotonic,
            wall=time.time,
        )
        try:
            server.bind()
            self._bound.set()
            tasks = [loop.create_task(server.run()), loop.create_task(self._until_taken_up())]
            await asyncio.wait([*tasks, loop.create_task(over.wait())], return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                await server.goodbye("a daemon took up the run again")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._dumps.close()
            server.close()
            context.destroy()

    async def _until_taken_up(self) -> None:
        while True:  # another process takes the lock: there is nothing to be woken by
            await asyncio.sleep(LOOK_S)
            if runs.lock_holder(self._run_dir) is not None:
                return


def _quietly(what: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
        what()


def _as_past(state: Mapping[str, Any], end: End, run_dir: Path) -> dict[str, Any]:
    """State keys that differ now that the daemon is gone."""
    over = end.state != "orphaned"
    run = {**(state.get("run") or {}), "name": run_dir.name}
    if over:
        run |= {"state": end.state, "text": end.text, "ended": end.ended}
    changed: dict[str, Any] = {
        "run": run,
        "archive": {"path": str(run_dir), "state": end.state, "text": end.text, "ended": end.ended},
    }
    for key, value in state.items():
        if key.startswith("engine/") and over:
            changed[key] = {**value, **dict.fromkeys(_LIVE_NUMBERS)}
    trainer = state.get("trainer")
    if trainer is not None and trainer.get("state") == "running" and over:
        changed["trainer"] = {**trainer, "state": "gone"}
    return changed


class ArchiveBackend:
    """Implements `rltop.daemon.server.Backend` for a run of which nothing new will come."""

    def __init__(self, core: Core, past: Past, sources: SourceLines, dumps: DumpReader) -> None:
        self._core = core
        self._past = past
        self._sources = sources
        self._dump_reader = dumps

    def record(self, record: Record, key: str = "") -> None:
        """There is no ingest socket."""

    def not_a_record(self, why: str) -> None:
        """There is no ingest socket."""

    async def series(self, query: SeriesQuery) -> tuple[SeriesAnswer, list[bytes]]:
        """Bucketed history."""
        return await answer_series(self._core.series, query)

    async def events(self, query: EventsQuery) -> EventsAnswer:
        """A page of the event log."""
        return await answer_events(self._core.ring, self._past.path, query, immutable=self._past.immutable)

    async def lines(self, query: LinesQuery) -> LinesAnswer:
        """Lines of a log that the run left."""
        return await answer_lines(self._sources, query)

    async def dumps(self, query: DumpsQuery) -> DumpsAnswer:
        """Which dumps of rollouts the run has."""
        return await self._dump_reader.dumps(query)

    async def dump_page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Samples of one of them."""
        return await self._dump_reader.page(query)

    async def command(self, command: Command, command_id: str, session: Session) -> Accepted | Rejected:
        """Nothing of a dead run can be changed."""
        return Rejected("not-control", "the run has ended; this is what it left", "rltop up starts it again")

    def client(self, what: str, session: Session) -> None:
        """Nothing is written down."""

    def tick(self, viewers: int, counters: Counters) -> Tick:
        """The time, and that is all that goes on."""
        return Tick(time=self._core.now(), lag_ms=0.0, ages={}, viewers=viewers)

    def trouble(self, where: str, error: Exception) -> None:
        """A fault of ours: shown to the viewer, like a daemon's."""
        self._core.event("log", "error", f"fault in the archive ({where}): {type(error).__name__}: {error}", "archive")


class _Nowhere:
    """A sink that keeps nothing: the run is over and its journal is not ours to write."""

    def event(self, event: Event) -> None: ...
    def state(self, t: float, key: str, value: Any) -> None: ...
    def verdict(self, t: float, verdict: dict[str, Any], was: str | None) -> None: ...
    def operation(self, row: dict[str, Any]) -> None: ...
    def point(self, key: str, step: float, value: float, t: float | None = None) -> None: ...
    def cut(self, key: str, step: float) -> None: ...
    def record(self, t: float, kind: str, source: str, payload: Any) -> None: ...
    def client(self, t: float, what: str, role: str, who: str, client: str) -> None: ...
