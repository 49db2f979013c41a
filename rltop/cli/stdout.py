"""stdout that says when it fails: a full disk or a closed descriptor is told from every other `OSError`.

stdout is data: a command whose answer could not be written has failed, whatever it did before.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


class StdoutLost(Exception):
    """What was written to stdout did not get there. Its text says why."""


class _Raw(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise  # the reader had enough: no fault
        except OSError as error:
            raise StdoutLost(error.strerror or str(error)) from None


def watch_stdout() -> None:
    """Put a stdout over descriptor 1 that raises `StdoutLost`. A stdout that somebody put in its place is left alone.

    Raises StdoutLost when it is closed already: `print` would drop everything and say nothing.
    """
    old = sys.__stdout__
    if sys.stdout is None:
        raise StdoutLost("it is closed")
    if old is None or sys.stdout is not old:
        return
    unbuffered = old.line_buffering or getattr(old, "write_through", False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Raw(old.fileno(), "wb", closefd=False)),
        encoding=old.encoding,
        errors="backslashreplace",  # a terminal that cannot show a letter is no reason to lose the line
        line_buffering=unbuffered,
    )


def forget_stdout() -> None:
    """Let what is still buffered go: the interpreter flushes once more at its end and must not meet the broken file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
