"""Ties a run to the process that owns it: a pipe that the kernel closes however that process dies.

`rltop demo` holds the writing end; its daemon watches the other one and stops the run when it is closed without a word.
A run that is to stay (`--keep`) is let go with one byte. Unlike a parent-death signal this does not depend on which
thread started the daemon, nor on who is whose parent.
"""

from __future__ import annotations

import contextlib
import os
from types import TracebackType


class Tether:
    """The owner's end. As a context: the run is stopped at the end of the block, unless `release` was called."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        """`reader` is for the daemon."""

    def release(self) -> None:
        """The run goes on without this process."""
        with contextlib.suppress(OSError):  # the daemon is gone already
            os.write(self._writer, b"k")

    def close(self) -> None:
        """Let go of both ends."""
        for descriptor in (self.reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __enter__(self) -> Tether:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
