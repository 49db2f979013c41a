"""One daemon from start to end: lock, journal, sockets, trainer, and everything down again in good order.

On SIGTERM, SIGINT or the command `shutdown` the trainer that this daemon started is stopped first, then its engines.
When the daemon is killed instead, trainer and engines go on, and the next daemon of the run finds them by their markers
and start times. Engines end with the trainer that they were for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import zmq.asyncio

import rltop
from rltop import runs
from rltop.daemon import attempts
from rltop.daemon.aside import Aside
from rltop.daemon.backend import DaemonBackend
from rltop.daemon.bisect import Bisections
from rltop.daemon.commands import Actions, Commands, Stage
from rltop.daemon.core import Core
from rltop.daemon.dump_pages import DumpReader, run_args
from rltop.daemon.engine_commands import EngineCommands
from rltop.daemon.engines import EngineOptions, Engines, MakeFleet, make_fleet, refuse_newer_slots
from rltop.daemon.gate import Gate, raise_file_limit
from rltop.daemon.hooks import HookOptions, Hooks
from rltop.daemon.ingest import Ingest
from rltop.daemon.lines import SourceLines
from rltop.daemon.log_watch import Logs, LogWatch, log_paths
from rltop.daemon.memory import Opened, open_journal
from rltop.daemon.others import Others, engine_http, watched
from rltop.daemon.publish import Publisher
from rltop.daemon.server import Server
from rltop.daemon.sessions import Sessions
from rltop.daemon.sources import EngineScraper, HttpScrape, Scrape
from rltop.daemon.supervisor import TrainerSupervisor
from rltop.daemon.verdicts import Checks, Verdicts
from rltop.daemon.watched import LOG_SOURCE, Watched
from rltop.errors import RltopError
from rltop.evidence.metric_names import Names
from rltop.protocol.messages import PROTO_MAX, PROTO_MIN, Command, Rejected
from rltop.runs.masks import load_key, mask_command
from rltop.settings import Settings

LAG_S = 0.1
LAST_WORDS_S = 1.0
LOCK_PATIENCE_S = 0.3
"""Whoever looks whether a run is alive holds its lock for a moment; a start waits that out."""
LIFE_S = 5.0
"""Between two signs of life on the disk: so much, at most, is the end of a killed daemon dated too early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonOptions:
    """What a daemon is started with."""

    run_dir: Path
    """Run directory (exists, 0700); its name is the run's name."""
    trainer: Sequence[str] = ()
    """argv of the trainer to start and supervise; empty: none."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Kept in `run.json` for whoever asks what this run was."""
    ingest_tcp: str = ""
    """HOST:PORT where producers on other machines may connect; empty: nowhere."""
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment of the trainer, to which the RLTOP_ variables are added."""
    settings: Settings = field(default_factory=Settings)
    """How much is kept."""
    names: Names | None = None
    """What metrics of other trainers are here; None: the table that comes with rltop."""
    tether: int | None = None
    """Read end of a pipe whose other end belongs to the process that owns this run (`rltop.daemon.tether`)."""


class Daemon:
    """The parts of a running daemon, and how they end."""

    def __init__(
        self, options: DaemonOptions, *, checks: Checks | None, scrape: Scrape, fleet: MakeFleet = make_fleet
    ) -> None:
        self._options = options
        self._name = options.run_dir.name
        self._epoch = secrets.token_hex(8)
        self._started = time.time()
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lag = 0.0
        engines = EngineOptions.of(options.config)
        if engines is not None:
            refuse_newer_slots(options.run_dir)  # before the journal is opened: a start that is refused leaves nothing
        opened = open_journal(
            options.run_dir,
            on_problem=lambda level, text: self._from_thread(lambda: self._publisher.problem(level, text)),
            on_written=lambda eseq: self._from_thread(lambda: self._publisher.written(eseq)),
            on_working=lambda works: self._from_thread(lambda: self._publisher.working(works)),
            limits=options.settings.journal,
        )
        self._journal = opened.journal
        self._core = Core(opened.journal, now=time.time)
        self._publisher = Publisher(self._core)
        self._engines = Engines(
            self._core,
            engines,
            run_dir=options.run_dir,
            trainer_lives=self._trainer_lives,
            make=fleet,
        )
        self._bisections = Bisections(self._core, self._engines)
        self._ingest = Ingest(
            self._core,
            host=socket.gethostname(),
            alive=psutil.pid_exists,
            engines=self._engines,
            names=options.names,
        )
        self._hooks = Hooks(
            _hook_options(options.config),
            run=self._name,
            told=lambda level, text: self._core.event("log", level, text, "hooks"),
        )
        self._verdicts = Verdicts(self._core, checks, changed=self._hooks.fire)
        self._paths = runs.socket_paths(options.run_dir)
        self._trainer = TrainerSupervisor(
            self._core,
            self._trainer_ended,
            run_dir=options.run_dir,
            epoch=self._epoch,
            ingest=self._ingest_addresses,
            fleet=f"ipc://{self._paths['ctl']}" if self._engines.enabled else "",
        )
        self._others = Others(self._core, watched(options.config))
        self._watched = Watched(
            self._core,
            options.config,
            ingest=self._ingest,
            verdicts=self._verdicts,
            others=self._others,
            run_dir=options.run_dir,
            names=options.names,
        )
        self._commands = Commands(self._core, self._actions(), epoch=self._epoch)
        sessions = Sessions(
            self._core.table, self._core.ring, epoch=self._epoch, run=self._name, server=f"rltop/{rltop.__version__}"
        )
        self._dumps = DumpReader(options.run_dir, lambda: run_args(self._core.table))
        backend = DaemonBackend(
            self._core,
            run=self._name,
            ingest=self._ingest,
            verdicts=self._verdicts,
            commands=self._commands,
            journal=opened.journal.path,
            publisher=self._publisher,
            lag_ms=self._take_lag,
            sources=SourceLines(options.run_dir, self._evidence, self._before),
            dumps=self._dumps,
            refresh=self._engines.refresh,
            ages=self._ages,
        )
        self._context = zmq.asyncio.Context()
        self._server = Server(
            self._context,
            self._paths,
            sessions=sessions,
            backend=backend,
            epoch=self._epoch,
            clock=time.monotonic,
            wall=time.time,
        )
        self._gate = self._make_gate(options)
        self._core.changed = self._server.wake
        self._scraper = EngineScraper(self._core, scrape)
        self._logs = LogWatch(self._log_paths, names=options.names)
        self._restore(opened)

    def _make_gate(self, options: DaemonOptions) -> Gate | None:
        if not options.ingest_tcp:
            return None
        return Gate(options.ingest_tcp, options.run_dir / "keys", self._core, take=self._server.take)

    def _ingest_addresses(self) -> str:
        """RLTOP_INGEST for the trainer: on this machine the unix socket, elsewhere TCP."""
        local = f"ipc://{self._paths['ingest']}"
        return local if self._gate is None else f"{local} {self._gate.url()}".strip()

    # ---------------------------------------------------------------- life

    async def run(self) -> int:
        """Serve until told to stop; returns the exit code (130 after SIGINT)."""
        options, code = self._options, 0

        def stop(number: int) -> None:
            nonlocal code
            code = 130 if number == signal.SIGINT else 0
            self._core.event("run", "info", f"the daemon got {signal.Signals(number).name} and stops", "daemon")
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, stop, number)
        self._journal.start()
        self._hold_tether()
        raise_file_limit()  # every producer is a connection
        try:
            self._server.bind()
            if self._gate is None:
                self._core.set("ingest", None)  # an earlier daemon of the run may have had one
            else:
                self._gate.open()
            self._write_run_json()
            self._others.begin()
            parts = [self._server.run(), self._measure_lag(), self._scraper.run(), self._logs.run(self._see_logs)]
            parts += [self._engines.run(), self._others.run(), self._watched.run()]
            if self._gate is not None:
                parts.append(self._gate.run())
            tasks = [self._loop.create_task(part) for part in parts]
            await self._engines.begin(stale=self._new_attempt)
            await self._trainer.start(options.trainer, options.env)
            await self._begin_engines()
            aside = self._loop.create_task(
                Aside(self._core, options.run_dir, options.settings, self._journal.committed).run(
                    options.trainer, options.env, options.config, adopted=self._trainer.adopted()
                )
            )
            stopped = self._loop.create_task(self._stop.wait())
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():  # told to stop; a fault of our own must not cost the run its trainer
                await self._trainer.stop(lambda text: None)
                await self._engines.end()
            await self._bisections.close()
            await self._commands.finish()
            await self._hooks.finish()
            with contextlib.suppress(TimeoutError):  # the last events are shown too, if the disk takes them soon
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._journal.committed()
            await self._server.goodbye("the daemon stops")
            for task in (*tasks, stopped, aside):
                task.cancel()
            await asyncio.gather(*tasks, stopped, aside, return_exceptions=True)
            for task in done - {stopped}:
                task.result()  # a part that ended by itself failed: say why
        finally:
            await self._dumps.close()
            await self._engines.close()
            if self._gate is not None:
                self._gate.close()
            self._server.close()
            self._context.destroy()
            await asyncio.to_thread(self._journal.close)
        return code

    def _restore(self, opened: Opened) -> None:
        core, restored = self._core, opened.restored
        for key, value in restored.state.items():
            core.table.set(key, value)
        core.ring.restore(restored.events, restored.head)
        self._publisher.begin()
        core.series = opened.series
        self._commands.restore(restored.operations)
        self._new_attempt = attempts.begins(self._options.trainer, restored.head, self._options.run_dir)
        if self._new_attempt:
            attempts.begin(core, self._options.run_dir)
        else:
            self._ingest.restore()
            self._verdicts.restore(opened.records)
        run = {
            "name": self._name,
            "framework": "",
            "mode": "",
            "state": "waiting",
            "text": "",
            "started": self._started,
            "attempt": 1,
        }
        core.set("run", {**run, "ended": None, "args": {}, **(core.table.get("run") or {}), "name": self._name})
        core.set(
            "daemon",
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "version": rltop.__version__,
                "started": self._started,
                "epoch": self._epoch,
                "journal": "ok",
                "faults": 0,
                "malformed": 0,
                "refused": 0,
            },
        )
        again = (
            f"; {restored.head} events and {len(core.series.keys())} series from its journal" if restored.head else ""
        )
        core.event(
            "run", "info", f"daemon {rltop.__version__} started{again}", "daemon", state=core.table.get("run")["state"]
        )
        for level, text in opened.remarks:
            core.event("log", level, text, "journal")

    def _write_run_json(self) -> None:
        runs.write_run_json(
            self._options.run_dir,
            {
                "name": self._name,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "started": self._started,
                "version": rltop.__version__,
                "proto": [PROTO_MIN, PROTO_MAX],
                "epoch": self._epoch,
                "sockets": {name: f"ipc://{path}" for name, path in self._paths.items()},
                "command": mask_command(list(self._options.trainer) or psutil.Process().cmdline(), load_key()),
                "config": _without_secrets(self._options.config),
            },
        )
        try:
            runs.register(self._options.run_dir)
        except (RltopError, OSError) as error:
            text = f"this run is not in the registry ({error}): rltop attach needs RLTOP_DIR to find it"
            self._core.event("log", "warn", text, "daemon")

    async def _shutdown(self, stage: Stage) -> str:
        await self._trainer.stop(stage)
        await self._engines.stop_all(stage)
        self._stop.set()
        return "the daemon stops"

    def _actions(self) -> Actions:
        return Actions(
            stop_trainer=self._trainer.stop,
            shutdown=self._shutdown,
            trainer_running=self._trainer.running,
            committed=self._journal.committed,
            mute=lambda check_id, reason, who, since: self._verdicts.mute(
                check_id, reason=reason, who=who, since=since
            ),
            unmute=self._verdicts.unmute,
            engines=EngineCommands(self._core.table, self._engines, engine_http, self._others.hold),
            bisections=self._bisections,
        )

    # ---------------------------------------------------------------- engines

    def _trainer_lives(self) -> bool:
        return self._trainer.running() or (self._core.table.get("run") or {}).get("state") == "running"

    def _trainer_ended(self, state: str, text: str, source: str) -> None:
        self._ingest.end(state, text, source)
        self._engines.trainer_ended(text or state)

    async def _begin_engines(self) -> None:
        """The trainer is there, adopted, or was never to be: what the run's engines do now."""
        if not self._trainer.running() and self._options.trainer:
            self._engines.trainer_ended("it did not start")
        elif not self._trainer.running() and not self._engines.own_slots:
            await self._engines.stop_left()
        self._bisections.begin()
        self._commands.resume()
        if self._engines.own_slots:
            # As an operation like those of people: seen by every viewer, and in the journal.
            command = Command("engines-start", "", {"slots": [dict(slot) for slot in self._engines.own_slots]})
            answer = await self._commands.take(command, f"daemon-{self._epoch}", who="daemon", role="daemon")
            if isinstance(answer, Rejected) and answer.code != "busy":  # then an earlier daemon's start goes on
                self._core.event("log", "error", f"the engines were not started: {answer.why}", "daemon")

    # ---------------------------------------------------------------- small things

    def _log_paths(self) -> dict[str, tuple[Path, int]]:
        return log_paths(self._core.table, self._options.run_dir)

    def _evidence(self) -> dict[str, Path]:
        """Logs that may be opened, by the name that evidence has for them."""
        return {name: path for name, (path, _) in {**self._watched.paths(), **self._log_paths()}.items()}

    def _before(self) -> dict[str, int]:
        """Log -> lines that it had before it was replaced or cut."""
        return {**self._watched.before(), **self._logs.before()}

    def _ages(self) -> dict[str, float]:
        """Source -> seconds since it last said something; a log speaks for itself, not for what it says."""
        if not (logs := self._watched.ages()):
            return self._ingest.ages()
        return {name: age for name, age in self._ingest.ages().items() if name != LOG_SOURCE} | logs

    def _see_logs(self, logs: Logs) -> None:
        self._verdicts.see_logs(logs)
        self._verdicts.refresh()

    def _hold_tether(self) -> None:
        if (held := self._options.tether) is None:
            return
        os.set_inheritable(held, False)  # it is not the trainer's
        os.set_blocking(held, False)

        def moved() -> None:
            self._loop.remove_reader(held)
            if not os.read(held, 1):
                self._core.event("run", "warn", "the process that owned this run is gone: stopping", "daemon")
                self._stop.set()
            os.close(held)

        self._loop.add_reader(held, moved)

    async def _measure_lag(self) -> None:
        shown = 0.0
        while True:
            before = self._loop.time()
            if before - shown > LIFE_S:
                shown = before
                runs.show_life(self._options.run_dir)
            await asyncio.sleep(LAG_S)
            self._lag = max(self._lag, self._loop.time() - before - LAG_S)

    def _take_lag(self) -> float:
        lag, self._lag = self._lag, 0.0
        return round(lag * 1000, 3)

    def _from_thread(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon is going, its log says it
            self._loop.call_soon_threadsafe(what)


async def serve(options: DaemonOptions, *, checks: Checks | None, fleet: MakeFleet = make_fleet) -> int:
    """Run a daemon over a run directory; returns its exit code.

    Raises RltopError when a daemon already runs there, the journal is of a newer rltop, or a socket cannot be bound.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            lock = runs.acquire_lock(options.run_dir)
            break
        except RltopError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
    try:
        scrape = HttpScrape()
        try:
            return await Daemon(options, checks=checks, scrape=scrape, fleet=fleet).run()
        finally:
            await scrape.close()
    finally:
        os.close(lock)


def _hook_options(config: Mapping[str, Any]) -> HookOptions:
    checks = config.get("checks")
    checks = checks if isinstance(checks, dict) else {}
    return HookOptions(
        on_fail=tuple(map(str, checks.get("on_fail") or ())),
        folder=str(Path(config["file"]).parent) if isinstance(config.get("file"), str) else None,
        webhook=str(checks.get("webhook") or ""),
        notify="warn" if checks.get("notify") == "warn" else "fail",
    )


def _without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """What others may read of the configuration: a webhook's URL is often a key."""
    found, checks, engines = dict(config), config.get("checks"), config.get("engines")
    if isinstance(checks, dict) and checks.get("webhook"):
        found["checks"] = {**checks, "webhook": "***"}
    if isinstance(engines, dict):
        plain = {**engines, "env": sorted(engines.get("env") or {})}  # names only
        found["engines"] = {**plain, "args": mask_command(list(engines.get("args") or []), load_key())}
    return found
