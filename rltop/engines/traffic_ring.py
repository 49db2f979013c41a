"""What was asked of the engines in the last minutes, on disk: `<run>/traffic/`, two segments of JSON lines.

    {"n": 7, "t": 1795971374.2, "engine": "0", "generation": 3, "body": {...}}      asked
    {"n": 7, "end": 1795971375.0, "ok": true}                                      answered, or not

A segment is full after half of the ring's bytes or after `KEEP_S`; the older one is then dropped. There is one writer
(a lock on the folder), in a thread of its own behind a short queue.

Failure policy: nothing here is waited for or raised while training. What was not kept (full disk, slow disk, a request
as large as the ring, another writer) is counted, with the newest reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rltop.evidence.crash_dumps import Flown

FOLDER = "traffic"
SEGMENTS = ("requests.1.jsonl", "requests.jsonl")
"""The older one, and the one that is written."""
KEEP_S = 300.0
"""SGLang's crash dump keeps as long."""
MOST_BYTES = 64 << 20
WAITING = 256
"""Lines between the callers and the disk."""
AGAIN_S = 10.0
"""After a write that failed: training must not pay for a full disk again and again."""


class Ring:
    """The writer. Any thread may call `request`."""

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int = MOST_BYTES,
        keep_s: float = KEEP_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._most_bytes, self._keep_s, self._wall = folder, most_bytes, keep_s, wall
        self.lost = 0
        """Lines that were not kept."""
        self.problem = ""
        """Why, the newest reason."""
        self._lines: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._guard = threading.Lock()
        self._next = 0
        self._lock = -1
        self._file = -1
        self._size, self._since, self._rest = 0, 0.0, 0.0
        self._thread: threading.Thread | None = None

    @contextmanager
    def request(self, engine: str, generation: int, body: Mapping[str, Any]) -> Iterator[None]:
        """A request, for as long as it is open. Only what it raises itself is raised."""
        number = self._put({"t": self._wall(), "engine": engine, "generation": generation, "body": body})
        ok = False
        try:
            yield
            ok = True
        finally:
            if number is not None:
                self._put({"n": number, "end": self._wall(), "ok": ok})

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits; then the folder is free for another writer."""
        thread = self._thread
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=timeout_s)
            thread.join(timeout_s)

    def _put(self, line: dict[str, Any]) -> int | None:
        """Returns the request's number; None: it was not kept."""
        with self._guard:
            if "n" not in line:
                self._next += 1
                line = {"n": self._next, **line}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="traffic-ring", daemon=True)
                self._thread.start()
        try:
            data = msgspec.json.encode(line) + b"\n"
        except (TypeError, ValueError) as error:
            self._not_kept(f"a request is no JSON: {error}")
            return None
        if len(data) > self._most_bytes // 2:
            self._not_kept("a request is larger than a segment of the ring")
            return None
        try:
            self._lines.put_nowait(data)
        except queue.Full:
            self._not_kept("the disk is slower than the requests")
            return None
        return int(line["n"])

    def _not_kept(self, why: str) -> None:
        with self._guard:
            self.lost += 1
            self.problem = why

    # ---------------------------------------------------------------- the writer's thread

    def _run(self) -> None:
        while (data := self._lines.get()) is not None:
            if self._rest and time.monotonic() < self._rest:
                self._not_kept(self.problem)
                continue
            try:
                self._write(data)
            except OSError as error:
                self._not_kept(f"{self._folder}: {error.strerror or error}")
                self._rest = time.monotonic() + AGAIN_S
                self._let_go()
            else:
                self._rest = 0.0
        self._let_go()
        if self._lock >= 0:
            os.close(self._lock)

    def _write(self, data: bytes) -> None:
        """Raises OSError."""
        if self._lock < 0:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise OSError("another process writes there") from None
            self._lock = lock
        now = time.monotonic()
        if self._file < 0 or self._size + len(data) > self._most_bytes // 2 or now - self._since > self._keep_s:
            self._turn(now)
        done = 0
        while done < len(data):
            done += os.write(self._file, data[done:])
        self._size += len(data)

    def _turn(self, now: float) -> None:
        """The written segment becomes the older one."""
        self._let_go()
        older, newer = (self._folder / name for name in SEGMENTS)
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)
        self._file = os.open(newer, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        self._size, self._since = 0, now

    def _let_go(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1


def read_ring(folder: Path, engine: str, generation: int) -> Sequence[Flown]:
    """What the ring has of one generation of an engine, in order. Torn lines and unreadable files have nothing."""
    asked: dict[int, dict[str, Any]] = {}
    ended: dict[int, float | None] = {}
    for line in _lines(folder):
        number = line.get("n")
        if not isinstance(number, int):
            continue
        if "body" in line and isinstance(line["body"], dict) and isinstance(line.get("t"), int | float):
            # A trainer that was started anew counts from 1: the newer request is meant.
            asked[number] = line
            ended.pop(number, None)
        elif isinstance(line.get("end"), int | float):
            ended[number] = float(line["end"]) if line.get("ok") else None
    found = [
        Flown(line["body"], float(line["t"]), ended.get(number))
        for number, line in asked.items()
        if line.get("engine") == engine and line.get("generation") == generation
    ]
    return sorted(found, key=lambda one: one.began)


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for name in SEGMENTS:
        try:
            file = (folder / name).open("rb")
        except OSError:
            continue
        with file:
            for raw in file:
                try:
                    value = msgspec.json.decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                if isinstance(value, dict):
                    yield value
