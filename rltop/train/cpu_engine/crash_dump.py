"""SGLang's crash dump, as the stand-ins write it: the requests of the last five minutes and those in flight.

The file has SGLang's shape and class names (managers/tokenizer_manager.py of 0.5.14); whoever unpickles it needs
SGLang, as for SGLang's own. Only with `--crash-dump-folder`. Used in the HTTP thread alone.

Failure policy: what can not be written is a line in the log; the engine dies as it would have.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rltop.evidence.crash_dumps import singles

LOGGER = logging.getLogger("rltop.cpu_engine")
KEEP_S = 300.0
"""SGLang's."""


class CrashDump:
    """Remembers requests for the dump."""

    def __init__(self, folder: str, server_args: Mapping[str, Any], *, wall: Callable[[], float] = time.time) -> None:
        """folder: empty: nothing is remembered or written."""
        self._folder, self._server_args, self._wall = folder, server_args, wall
        self._finished: deque[tuple[dict[str, Any], Any, float, float]] = deque()
        self._open: dict[int, tuple[list[dict[str, Any]], float]] = {}
        self._next = 0

    @contextmanager
    def request(self, body: Any) -> Iterator[Callable[[Any], None]]:
        """A request for as long as it is open; call what it yields with the answers."""
        if not self._folder or not isinstance(body, dict):
            yield lambda answers: None
            return
        began, number = self._wall(), self._next
        self._next += 1
        parts = list(singles(body))
        self._open[number] = (parts, began)
        told: list[Any] = []
        try:
            yield told.append
        finally:
            del self._open[number]
            if told:
                answers = told[0] if isinstance(told[0], list) else [told[0]]
                now = self._wall()
                self._finished.extend((part, one, began, now) for part, one in zip(parts, answers, strict=False))
                while self._finished and now - self._finished[0][3] >= KEEP_S:
                    self._finished.popleft()

    def write(self) -> Path | None:
        """The dump's file; None: there was nothing to write, or it could not be written."""
        if not self._folder:
            return None
        LOGGER.error("Dumping requests before crash. self.crash_dump_folder=%r", self._folder)
        now = self._wall()
        flying = [
            (part, {"text": "", "meta_info": {"finish_reason": None}}, began, now)
            for parts, began in self._open.values()
            for part in parts
        ]
        rows = [*self._finished, *flying]
        if not rows:
            return None
        name = f"crash_dump_{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}.pkl"
        path = Path(self._folder) / os.getenv("HOSTNAME", socket.gethostname()) / name
        try:
            data = _pickled(rows, self._server_args)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except (OSError, pickle.PicklingError, TypeError, ValueError, RecursionError) as error:
            LOGGER.error("Failed to write the crash dump %s: %s", path, error)
            return None
        LOGGER.error(
            "Dumped %d finished and %d unfinished requests before crash to %s", len(self._finished), len(flying), path
        )
        return path


class _GenerateReqInput:
    """Stands for SGLang's class."""


class _ServerArgs:
    """Stands for SGLang's class."""


_NAMES: Mapping[type, tuple[str, str]] = {
    _GenerateReqInput: ("sglang.srt.managers.io_struct", "GenerateReqInput"),
    _ServerArgs: ("sglang.srt.server_args", "ServerArgs"),
}


_PurePickler: Any = pickle._Pickler  # the one of pickle's two that can be changed


class _Pickler(_PurePickler):  # type: ignore[misc]  # typeshed does not know its methods
    """Writes the stand-ins of SGLang's classes under SGLang's names."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """As in the base class, but for the two."""
        names = _NAMES.get(obj) if isinstance(obj, type) else None
        if names is None:
            super().save_global(obj, name)
            return
        for part in names:
            self.save(part)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def _object_of(made: Any, fields: Mapping[str, Any]) -> Any:
    made.__dict__.update(fields)
    return made


def _pickled(rows: list[tuple[dict[str, Any], Any, float, float]], server_args: Mapping[str, Any]) -> bytes:
    requests = [
        (_object_of(_GenerateReqInput(), {"rid": uuid.uuid4().hex, **body}), answer, began, ended)
        for body, answer, began, ended in rows
    ]
    value = {
        "server_args": _object_of(_ServerArgs(), server_args),
        "requests": requests,
        "launch_command": " ".join(sys.argv),
    }
    written = io.BytesIO()
    _Pickler(written, protocol=4).dump(value)
    return written.getvalue()
