"""A socket that takes records as the daemon does, for tests of producers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq


class Listener:
    """Binds, and keeps what comes."""

    def __init__(self, path: Path) -> None:
        self.address = f"ipc://{path}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(self.address)

    def take(self, last: str = "", *, within_s: float = 20.0, most: int = 100_000) -> list[dict[str, Any]]:
        """Records up to the first of kind `last` (else: what is there)."""
        found: list[dict[str, Any]] = []
        while len(found) < most and self._socket.poll(int(1000 * (within_s if last else 0.2))):
            found.append(msgpack.unpackb(self._socket.recv_multipart()[2], strict_map_key=False))
            if last and found[-1]["kind"] == last:
                break
        return found

    def close(self) -> None:
        """Unbind."""
        self._socket.close(linger=0)
        self._context.term()


@contextmanager
def listening(folder: Path) -> Iterator[Listener]:
    """A listener in a folder."""
    one = Listener(folder / "in.sock")
    try:
        yield one
    finally:
        one.close()


def python(script: Path | str, *args: str, ingest: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """A program with rltop on its path, attached to `ingest`."""
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RLTOP_", "RANK"))}
    env |= {"PYTHONPATH": str(root), **({"RLTOP_INGEST": ingest} if ingest else {}), **environ}
    argv = [sys.executable, *(["-c", script] if isinstance(script, str) else [str(script)]), *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)
