"""Engines on this machine, synchronously: start, look, read, end, and see that nothing is left.

`LocalLauncher` puts one to work in a thread, `RayLauncher` one per slot in an actor on the engine's node. An engine is
started under a keeper (`rltop.engines.keeper`), which survives whoever uses this module, so every call works as well
for an engine that an earlier process started: what a `Host` remembers is only a cache, refilled from the record.

Failure policy. What cannot be started is one `RltopError`. Nothing is signalled by number alone: the leader and its
descendants are compared by birth, whoever carries the marker is ours, and strangers are named and left alone. Every
process of the machine is looked at once a second at most in `look`, and as often as needed in `kill` and `remains`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from rltop.engines import keeper, ports, processes
from rltop.engines.gpu_memory import Reader, read_gpus, visible
from rltop.engines.launcher import (
    DIRECTORY,
    LOG,
    PORT,
    RECORD,
    SHOWN,
    GpuUse,
    Launched,
    LaunchSpec,
    Look,
    Remains,
    marks,
)
from rltop.engines.processes import Ident, Table
from rltop.engines.spawn import start_engine
from rltop.errors import RltopError

TABLE_S = 1.0
"""How old the process table may be in `look`."""
RECORD_S = 2.0
"""From the end of a leader to its keeper's word about it; on a machine that is not crowded it is some milliseconds."""
KILL_S = 5.0
"""How long SIGKILL may take: a process inside a system call ends when that returns."""
KEEPER_S = 2.0
"""How long a keeper whose tree is gone may take to end before it counts as stuck."""
POLL_S = 0.02


@dataclass(slots=True)
class _Slot:
    """What is remembered of one engine."""

    launched: Launched
    record: dict[str, Any]
    descendants: dict[Ident, str] = field(default_factory=dict)
    """Every descendant ever seen, with its name."""
    gone_since: float | None = None
    """The leader was first seen gone, without a word of its keeper."""
    rows: Table = field(default_factory=dict)
    """The process table of the last look."""
    port: int = 0


class Host:
    """Everything about engines on one machine. Safe to use from several threads."""

    def __init__(
        self,
        *,
        launcher: Literal["local", "ray"] = "local",
        node: str = "",
        node_id: str = "",
        reach: str = "",
        tether: Ident | None = None,
        environ: Mapping[str, str] | None = None,
        gpus: Reader = read_gpus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """node: name of this machine, for people. node_id: Ray's id of it. reach: address to bind and to be reached at
        where a spec says only 127.0.0.1. tether: a process after whose end the engines end too (Ray's raylet: without
        it nobody manages them). environ: what engines inherit; by default this process's environment.
        """
        self._launcher = launcher
        self._node = node or socket.gethostname()
        self._node_id = node_id
        self._reach = reach
        self._tether = tether
        self._environ = dict(os.environ if environ is None else environ)
        self._gpus = gpus
        self._clock = clock
        self._slots: dict[str, _Slot] = {}
        self._table: Table = {}
        self._table_at = float("-inf")
        self._mutex = threading.Lock()

    # ------------------------------------------------------------------ start

    def start(self, spec: LaunchSpec) -> Launched:
        """Start a generation; returns when its process exists. Raises RltopError as `Launcher.start` says."""
        bind = self._reach if self._reach and spec.host == "127.0.0.1" else spec.host
        told = start_engine(spec, bind=bind, environ=self._environ, tether=self._tether)
        return self._remember(Path(spec.directory), told).launched

    # ------------------------------------------------------------------ look

    def look(self, launched: Launched) -> Look:
        """A glance at the processes and the size of the log."""
        slot = self._slot(launched)
        leader = Ident(launched.pid, launched.birth)
        alive = processes.alive(leader) or self._unsettled(slot)
        children = self._children(slot, fresh=not alive)
        lock = slot.record.get("lock")
        code, ended = slot.record.get("code"), slot.record.get("ended")
        return Look(
            alive=alive,
            exit_code=code if isinstance(code, int) and not alive else None,
            ended=float(ended) if isinstance(ended, int | float) and not alive else None,
            port=self._port_of(slot),
            log_size=_size(Path(launched.log)),
            children=children,
            lock_held=isinstance(lock, str) and processes.locked(Path(lock)),
        )

    def _unsettled(self, slot: _Slot) -> bool:
        """The leader is gone and its keeper, who knows how, is about to say it: until then it counts as alive."""
        if "code" not in slot.record:
            found = _read(Path(slot.launched.directory))
            if found.get("marker") == slot.launched.marker and "code" in found:
                slot.record = found
        kept = _keeper_of(slot.record)
        if "code" in slot.record or kept is None or not processes.alive(kept):
            return False
        if slot.gone_since is None:
            slot.gone_since = self._clock()
        return self._clock() - slot.gone_since < RECORD_S

    def _children(self, slot: _Slot, *, fresh: bool) -> tuple[tuple[int, str], ...]:
        rows = self._rows(fresh=fresh)
        self._note(slot, rows)
        living = [one for one in slot.descendants if one.pid in rows and _is(rows, one)]
        return tuple(sorted((one.pid, slot.descendants[one]) for one in living))

    def _rows(self, *, fresh: bool) -> Table:
        with self._mutex:
            if fresh or self._clock() - self._table_at > TABLE_S:
                self._table, self._table_at = processes.table(), self._clock()
            return self._table

    def _note(self, slot: _Slot, rows: Table) -> None:
        """Remember who is below the leader, or below its keeper: there are those whose parent died."""
        if rows is slot.rows:
            return
        slot.rows = rows
        leader = Ident(slot.launched.pid, slot.launched.birth)
        roots = [one for one in (leader, _keeper_of(slot.record)) if one is not None]
        roots += list(slot.descendants)
        for pid in processes.below(rows, [one.pid for one in roots if one.pid in rows and _is(rows, one)]):
            one = rows[pid].ident
            if one != leader:  # its name anew each time: SGLang's children name themselves after a while
                slot.descendants[one] = processes.name(pid) or rows[pid].name

    def _port_of(self, slot: _Slot) -> int:
        if not slot.port:
            told = slot.record.get("port")
            slot.port = told if isinstance(told, int) else 0
        if not slot.port:
            with contextlib.suppress(OSError, ValueError):
                slot.port = int((Path(slot.launched.directory) / PORT).read_text(encoding="ascii"))
        return slot.port

    def read_log(self, launched: Launched, offset: int, limit: int) -> bytes:
        """A piece of its output; b"" when there is none."""
        try:
            with open(launched.log, "rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RltopError("cannot read the engine's log", where=launched.log, why=str(error)) from error

    # ------------------------------------------------------------------ end

    def terminate(self, launched: Launched) -> None:
        """SIGTERM to the leader, if it lives; and SIGCONT, because one that is stopped does not take a SIGTERM."""
        self._note(self._slot(launched), self._rows(fresh=True))
        leader = Ident(launched.pid, launched.birth)
        if processes.send(leader, signal.SIGTERM):
            processes.send(leader, signal.SIGCONT)

    def kill(self, launched: Launched) -> None:
        """SIGKILL to all of it, and wait until it is gone, `KILL_S` at most."""
        slot = self._slot(launched)
        deadline = self._clock() + KILL_S
        while (left := self._family(slot)) and self._clock() < deadline:
            # The leader first: its end shall be this one, and not what it does about a child's.
            for one in sorted(left, key=lambda one: one.pid != launched.pid):
                processes.send(one, signal.SIGKILL)
            time.sleep(POLL_S)
        self._end_keeper(slot)

    def _family(self, slot: _Slot) -> set[Ident]:
        """Every living process of this engine, its keeper left out."""
        launched = slot.launched
        rows = self._rows(fresh=True)
        self._note(slot, rows)
        leader = Ident(launched.pid, launched.birth)
        found = {one for one in slot.descendants if one.pid in rows and _is(rows, one)}
        if launched.pid in rows and _is(rows, leader):
            # While the leader lives, the number of its session is nobody else's.
            found |= {row.ident for row in rows.values() if row.session == launched.pid and not row.zombie}
        kept = _keeper_of(slot.record)
        return (found | processes.marked(marks(launched.marker, launched.directory))) - ({kept} if kept else set())

    def _end_keeper(self, slot: _Slot) -> None:
        """It ends by itself when its tree is gone; one that does not (stopped, stuck) would hold the lock for ever."""
        kept = _keeper_of(slot.record)
        deadline, killed = self._clock() + KEEPER_S, False
        while kept is not None and processes.alive(kept):
            if self._clock() > deadline:
                if killed or self._family(slot) or not processes.send(kept, signal.SIGKILL):
                    return
                deadline, killed = self._clock() + KILL_S, True
            time.sleep(POLL_S)

    def remains(self, launched: Launched) -> Remains:
        """What is left: processes, the lock, the port, GPU memory."""
        slot = self._slot(launched)
        left = self._family(slot)
        rows = self._rows(fresh=False)
        lock = Path(str(slot.record.get("lock", "")))
        port = self._port_of(slot)
        reading = self._gpus()
        family = left | set(slot.descendants) | {Ident(launched.pid, launched.birth)}
        return Remains(
            processes=tuple(sorted((one.pid, _name(slot, one)) for one in left)),
            lock_holders=processes.named_holders(lock) if processes.locked(lock) else (),
            port_holder=_listener(launched.host, port),
            gpu=tuple(
                GpuUse(
                    index=holder.index,
                    pid=holder.pid,
                    mib=holder.mib,
                    name=processes.name(holder.pid),
                    ours=_owns(family, holder.pid, rows),
                )
                for holder in visible(reading.holders, slot.record.get("gpus"))
                if _owns(family, holder.pid, rows) or not _neighbour(holder.pid, launched)
            ),
            gpu_source=reading.source,
        )

    def environ(self, launched: Launched) -> dict[str, str] | None:
        """Of the leader, from the kernel: what it was really given."""
        leader = Ident(launched.pid, launched.birth)
        try:
            found = psutil.Process(launched.pid).environ()
        except psutil.Error:
            return None
        return {name: found[name] for name in found if name.startswith(SHOWN)} if processes.alive(leader) else None

    # ------------------------------------------------------------------ adoption

    def adopt(self, directory: str, marker: str) -> Launched | None:
        """The engine with that marker, dead or alive; None when nothing was started there."""
        record = _read(Path(directory))
        if record.get("marker") == marker and isinstance(record.get("pid"), int):
            return self._remember(Path(directory), record).launched
        living = processes.marked(marks(marker, directory))
        if not living:
            return None
        return self._remember(Path(directory), _reconstructed(marker, living, Path(directory))).launched

    def _slot(self, launched: Launched) -> _Slot:
        slot = self._slots.get(launched.marker)
        if slot is None or slot.launched.birth != launched.birth:
            record = _read(Path(launched.directory))
            if record.get("marker") != launched.marker:
                record = {"marker": launched.marker, "keeper": launched.keeper_pid}
            slot = self._slots[launched.marker] = _Slot(launched, record)
        return slot

    def _remember(self, directory: Path, record: dict[str, Any]) -> _Slot:
        launched = Launched(
            marker=str(record["marker"]),
            pid=int(record["pid"]),
            birth=str(record.get("birth", "")),
            keeper_pid=int(record.get("keeper", 0)),
            node=self._node,
            node_id=self._node_id,
            host=str(record.get("host", "127.0.0.1")),
            directory=str(directory),
            log=str(directory / LOG),
            launcher=self._launcher,
            started=float(record.get("started", 0.0)),
        )
        slot = self._slots[launched.marker] = _Slot(launched, record)
        return slot


# ---------------------------------------------------------------------- records and processes


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keeper_of(record: Mapping[str, Any]) -> Ident | None:
    pid, born = record.get("keeper"), record.get("keeper_birth")
    return Ident(pid, born) if isinstance(pid, int) and isinstance(born, str) and born else None


def _is(rows: Table, one: Ident) -> bool:
    row = rows[one.pid]
    return row.ident == one and not row.zombie


def _reconstructed(marker: str, living: set[Ident], directory: Path) -> dict[str, Any]:
    """A record for an engine whose own was never written (a full disk), from the processes that carry its marker."""
    rows = processes.table()
    found: dict[str, Any] = {"marker": marker, "pid": 0, "birth": "", "lock": str(directory.parent / "lock")}
    for one in living:
        parent = rows.get(rows[one.pid].parent) if one.pid in rows else None
        # Only a keeper's child is a leader: an orphan may lead a session too.
        if parent is not None and rows[one.pid].session == one.pid and _keeps(parent.ident.pid, marker):
            kept = {"keeper": parent.ident.pid, "keeper_birth": parent.ident.birth}
            return {**found, "pid": one.pid, "birth": one.birth, **kept}
    return found  # the leader is dead, or nobody can say who it is: what is left can still be ended


def _keeps(pid: int, marker: str) -> bool:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(word.endswith(Path(keeper.__file__).name) for word in words) and any(marker in word for word in words)


def _name(slot: _Slot, one: Ident) -> str:
    return processes.name(one.pid) or slot.descendants.get(one, "")


def _listener(host: str, port: int) -> str:
    if not port:
        return ""
    try:
        ports.bind(host, port).close()
    except RltopError as error:
        return error.why
    return ""


def _owns(family: set[Ident], pid: int, rows: Table) -> bool:
    """A number that one of ours had and nobody has now is ours: the driver is still giving its memory back."""
    return any(one.pid == pid and (pid not in rows or rows[pid].ident == one) for one in family)


def _neighbour(pid: int, launched: Launched) -> bool:
    """Another engine of the same run, or its trainer: they may share a GPU, and nobody waits for them.

    SGLang's children write their title over their environment (seen on 0.5.14): then that of whoever started them says
    whose they are.
    """
    engines = os.path.realpath(Path(launched.directory).parents[1])
    try:
        process = psutil.Process(pid)
        line = [process, *process.parents()]
    except psutil.Error:
        return False
    for one in line:
        with contextlib.suppress(psutil.Error, OSError):
            environ = one.environ()
            trainer = os.path.join(os.path.realpath(environ.get("RLTOP_RUN_DIR", "/")), "engines", "")
            if any(path.startswith(engines + os.sep) for path in (environ.get(DIRECTORY, ""), trainer)):
                return True
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
