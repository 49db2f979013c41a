"""A bounded queue and one daemon thread between a hook in somebody's training process and its `Reporter`.

A hook runs inline in the rollout or in an optimizer step, so all that it pays is one `put`: an append under a lock. The
thread packs and sends, and it alone imports zmq.

Failure policy: `put` never raises and never waits. What the queue cannot hold is dropped, the oldest first, and
counted; the next record tells the daemon how many went. Whatever goes wrong in the thread is counted in `errors`, its
last words in `last_error`, and the thread goes on. After a fork the child begins with an empty queue and a thread of
its own. At the end of the interpreter what is queued gets one second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltop.reporter import Reporter

LIMIT = 1000
"""Calls that wait here at most."""
CLOSE_S = 1.0

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _reporter(role: str, rank: int) -> Reporter:
    from rltop.reporter import Reporter

    return Reporter(role=role, rank=rank)


class Outbox:
    """Calls of the methods of one reporter, made by one thread of this process."""

    def __init__(
        self, role: str, rank: int, *, make: Callable[[str, int], Reporter] = _reporter, limit: int = LIMIT
    ) -> None:
        self.role = role
        self.rank = rank
        self.dropped = 0
        """Calls dropped so far because the queue was full."""
        self.errors = 0
        self.last_error = ""
        self._make = make
        self._limit = limit
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._queue: deque[Call] = deque()
        self._thread: threading.Thread | None = None
        self._reporter: Reporter | None = None
        self._told = self.dropped
        self._busy = False
        self._closed = False

    def put(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Have the thread call `method` of the reporter. The arguments must not change afterwards."""
        try:
            if self._pid != os.getpid():
                self._begin()  # what the parent had queued is the parent's to send
            with self._lock:
                if self._closed:
                    self.dropped += 1
                    return
                if len(self._queue) >= self._limit:
                    self._queue.popleft()
                    self.dropped += 1
                self._queue.append((method, args, kwargs))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=f"rltop-{self.role}", daemon=True)
                    self._thread.start()
            self._news.set()
        except Exception as error:  # no memory for a thread, an interpreter that ends: the caller must not notice
            self._failed(error)

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Give what is queued a bounded moment, then close the reporter."""
        if self._pid != os.getpid() or self._closed:
            return
        deadline = time.monotonic() + patience_s
        while (self._queue or self._busy) and self._thread is not None and self._thread.is_alive():
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        self._closed = True
        self._news.set()
        if self._thread is not None:
            self._thread.join(max(0.05, deadline - time.monotonic()))
        if self._reporter is not None:
            with contextlib.suppress(Exception):
                self._reporter.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        pid = self._pid
        while not self._closed and pid == os.getpid():
            self._news.wait()
            self._news.clear()
            while self._queue and not self._closed:
                self._busy = True
                try:
                    self._call(*self._queue.popleft())
                except Exception as error:
                    self._failed(error)
                finally:
                    self._busy = False

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._reporter is None:
            self._reporter = self._make(self.role, self.rank)
        if (lost := self.dropped - self._told) > 0:
            self._told += lost
            self._reporter.count_dropped(lost)
        getattr(self._reporter, method)(*args, **kwargs)

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        with contextlib.suppress(Exception):  # its text may be somebody's code
            self.last_error = f"{type(error).__name__}: {error}"
