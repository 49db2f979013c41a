"""Answers `dumps?` and `dump-page?`: the dumps of this run on the daemon's machine, read in a process of their own.

A dump is foreign data of any size. Its reader is a child (`python -m rltop.daemon.dump_pages`) with a limit on its
memory, started by the first question and ended when nobody asks any more, so neither the loop nor the daemon's memory
notices it. Read are only the dumps that the run's arguments name and those in `<run>/dumps`.

Failure policy: a child that dies or takes too long is an answer that says so, and the next question gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rltop.daemon.state import StateTable
from rltop.errors import RltopError
from rltop.evidence.dump_find import DumpRef, Known, find_dumps, joined, order
from rltop.evidence.dump_pages import DumpPages, listed
from rltop.protocol.messages import DumpPageAnswer, DumpPageQuery, DumpsAnswer, DumpsQuery
from rltop.runs.own_python import own_python

ANSWER_S = 8.0
"""Longest wait for the child; a client waits for 10 s."""
IDLE_S = 60.0
"""Nobody asked for so long: the child ends."""
MOST_WAITING = 32
MEMORY_BYTES = 2 << 30
"""Of the child, without the files that it maps."""
MOST_ANSWER_BYTES = 12 << 20
MOST_DUMPS = 10_000
_ROLLOUT_ARGS = ("save_debug_rollout_data", "load_debug_rollout_data")
LISTED_S = 2.0
"""So long a list of the dumps is good."""
_LEN = struct.Struct(">I")


class Places(msgspec.Struct, frozen=True):
    """Where a run's dumps lie, and what reads its tokens."""

    rollouts: list[str]
    """Patterns of rollout dumps, and directories of `--dump-details`."""
    trains: list[str]
    """Patterns of train dumps."""
    checkpoints: list[str] = []
    """Directories with a `tokenizer.json`."""


Question = tuple[Places, DumpPageQuery | None]
"""(where, the page that is wanted: None for the list)."""


def run_args(table: StateTable) -> Mapping[str, Any]:
    """The arguments of the run's record `run`, as far as they are known."""
    run = table.get("run")
    args = run.get("args") if isinstance(run, Mapping) else None
    return args if isinstance(args, Mapping) else {}


def places(args: Mapping[str, Any], run_dir: Path, cwd: Path) -> Places:
    """Where a run's dumps lie, from the arguments of its record `run`.

    cwd: what relative paths are relative to.
    """

    def named(key: str) -> list[str]:
        value = args.get(key)
        return [str(cwd / Path(value).expanduser())] if isinstance(value, str) and value.strip() else []

    rollouts = [one for key in _ROLLOUT_ARGS for one in named(key)]
    trains = named("save_debug_train_data")
    rollouts += named("dump_details")
    rollouts.append(str(run_dir / "dumps"))
    return Places([*dict.fromkeys(rollouts)], [*dict.fromkeys(trains)], named("hf_checkpoint"))


class DumpReader:
    """The daemon's side. args: the run's arguments as they are known now."""

    def __init__(self, run_dir: Path, args: Callable[[], Mapping[str, Any]], *, answer_s: float = ANSWER_S) -> None:
        self._run_dir, self._args, self._answer_s = run_dir, args, answer_s
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._asked_at = 0.0
        self._idle: asyncio.Task[None] | None = None

    async def dumps(self, query: DumpsQuery) -> DumpsAnswer:
        """Which dumps there are."""
        raw, why = await self._ask(None)
        return msgspec.msgpack.decode(raw, type=DumpsAnswer) if raw else DumpsAnswer(why=why)

    async def page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """A page of one of them."""
        raw, why = await self._ask(query)
        return msgspec.msgpack.decode(raw, type=DumpPageAnswer) if raw else DumpPageAnswer(query.path, why=why)

    async def close(self) -> None:
        """End the child."""
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.gather(self._idle, return_exceptions=True)
        await self._end()

    async def _ask(self, query: DumpPageQuery | None) -> tuple[bytes, str]:
        """(the child's answer, why there is none)."""
        if self._waiting >= MOST_WAITING:
            return b"", "too many questions about dumps are waiting: ask again"
        self._waiting += 1
        try:
            async with self._lock:
                return await self._asked(query)
        finally:
            self._waiting -= 1

    async def _asked(self, query: DumpPageQuery | None) -> tuple[bytes, str]:
        whole = False
        try:
            async with asyncio.timeout(self._answer_s):
                cwd = await asyncio.to_thread(_started_in, self._run_dir)
                where = places(self._args(), self._run_dir, cwd)
                child = await self._running()
                assert child.stdin is not None
                assert child.stdout is not None
                question = msgspec.msgpack.encode((where, query))
                child.stdin.write(_LEN.pack(len(question)) + question)
                await child.stdin.drain()
                (size,) = _LEN.unpack(await child.stdout.readexactly(_LEN.size))
                answer = await child.stdout.readexactly(size)
                whole = True
                return answer, ""
        except TimeoutError:
            return b"", f"reading it took longer than {self._answer_s:g} s: is the disk slow?"
        except (asyncio.IncompleteReadError, OSError) as error:
            code = await self._gone()
            told = f"exit code {code}" if code is not None else str(error)
            return b"", f"the process that reads dumps died ({told}): the file is damaged, or needs too much memory"
        finally:
            if not whole:
                await self._end()  # whatever it still sends would be taken for the next answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *own_python("rltop.daemon.dump_pages"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=1 << 20,
            )
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_task(self._until_idle())
        self._asked_at = asyncio.get_running_loop().time()
        return self._child

    async def _until_idle(self) -> None:
        """End the child once nobody has asked for a while."""
        loop = asyncio.get_running_loop()
        while self._child is not None:
            await asyncio.sleep(max(0.0, self._asked_at + IDLE_S - loop.time()))
            if loop.time() >= self._asked_at + IDLE_S:
                async with self._lock:
                    await self._end()

    async def _gone(self) -> int | None:
        if self._child is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return await self._child.wait()
        return None

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()


def _started_in(run_dir: Path) -> Path:
    """The directory in which the run was started, as its manifest says; the run directory without one."""
    try:
        cwd = msgspec.json.decode((run_dir / "manifest.json").read_bytes()).get("cwd")
    except (OSError, msgspec.DecodeError, AttributeError):
        return run_dir
    return Path(cwd) if isinstance(cwd, str) and cwd.startswith("/") else run_dir


# ---------------------------------------------------------------- the child


class Child:
    """Answers questions one after another."""

    def __init__(self, pages: DumpPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._refs: list[DumpRef] = []
        self._of: Places | None = None
        self._at = 0.0
        self._seen: Known = {}

    def answer(self, where: Places, query: DumpPageQuery | None) -> bytes:
        """The encoded answer."""
        self._pages.checkpoints = [Path(one) for one in where.checkpoints]
        if query is None:
            return msgspec.msgpack.encode(listed(self._known(where, ""), [*where.rollouts, *where.trains]))
        ref = next((one for one in self._known(where, query.path) if str(one.path) == query.path), None)
        if ref is None:
            why = "it is not one of this run's dumps"
            return msgspec.msgpack.encode(DumpPageAnswer(query.path, why=why))
        encoded = msgspec.msgpack.encode(self._pages.answer(ref, query))
        if len(encoded) > MOST_ANSWER_BYTES:
            why = f"the answer of {len(encoded)} bytes is more than a message holds"
            return msgspec.msgpack.encode(DumpPageAnswer(query.path, why=why))
        return encoded

    def _known(self, where: Places, path: str) -> list[DumpRef]:
        """The run's dumps. Of a path that was among them the last time the list is not made again."""
        same = self._of == where
        fresh = same and self._clock() - self._at < LISTED_S
        if not fresh and not (same and any(str(one.path) == path for one in self._refs)):
            self._refs, self._of = known_dumps(where.rollouts, where.trains, self._seen), where
            if len(self._seen) > 4 * MOST_DUMPS:
                self._seen.clear()
            self._at = self._clock()
        return self._refs


def known_dumps(rollouts: list[str], trains: list[str], seen: Known | None = None) -> list[DumpRef]:
    """The dumps that lie where the run's arguments say; train dumps joined to their rollouts, alone where there are
    none. seen: as `known` of `find_dumps`."""
    trained = _found(trains, seen)
    listed = {ref.path: ref for ref in reversed(joined(_found(rollouts, seen), trained))}
    used = {path for ref in listed.values() for path in ref.train}
    alone = {ref.path: ref for ref in trained if ref.path not in used}
    return sorted((alone | listed).values(), key=order)[:MOST_DUMPS]


def _found(names: list[str], seen: Known | None) -> list[DumpRef]:
    out: list[DumpRef] = []
    for name in names:
        with contextlib.suppress(RltopError, OSError, ValueError):  # nothing there yet, or nothing that can be listed
            out += find_dumps(name, seen)
    return out


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Length-prefixed questions in, answers out, until the daemon closes the pipe."""
    os.nice(5)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    child = Child(DumpPages())
    while head := source.read(_LEN.size):
        (size,) = _LEN.unpack(head)
        where, query = msgspec.msgpack.decode(source.read(size), type=Question)
        answer = child.answer(where, query)
        sink.write(_LEN.pack(len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
