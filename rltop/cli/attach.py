"""`rltop attach`: the dashboard on a run, here or behind ssh.

Behind ssh the first connection is made before the dashboard takes the terminal, so that ssh can ask for a password, a
second factor or a host key, and so that a mistake (no such host, no rltop there) is one line and an exit code.
From then on nothing ends the dashboard but its user.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rltop.cli.connect import Place, running
from rltop.cli.output import note
from rltop.client import Client
from rltop.errors import RltopError
from rltop.protocol.messages import Role

if TYPE_CHECKING:
    from rltop.tui.app import RltopApp


def attach(place: Place, *, control: bool, name: str, fps: float, ascii_only: bool) -> int:
    """Show the dashboard until its user leaves; returns its exit code.

    Raises RltopError: no terminal (exit code 2), no such run, the other machine can not be reached (1).
    """
    started = time.perf_counter()
    # Imports make objects by the ten thousand and no garbage: collecting at the default 700 is 6 % of the first paint.
    gc.set_threshold(50_000)
    require_terminal("attach", "rltop attach --once prints the state, rltop get … --json is for scripts")
    role: Role = "control" if control else "view"
    client = place.client(role=role, name=name, fps=fps)

    def dashboard() -> RltopApp:
        from rltop.tui.app import RltopApp

        title = place.target or ""
        return RltopApp(client, control=control, fps=fps, ascii_only=ascii_only, started=started, title=title)

    if place.remote:
        return asyncio.run(_connect_then_show(client, place, dashboard))
    return show(dashboard())


async def _connect_then_show(client: Client, place: Place, dashboard: Callable[[], RltopApp]) -> int:
    note(f"connecting to {place.target or place.via} …")
    async with running(client):
        await client.wait_live(place.patience_s)
        code = await dashboard().run_async()
    return code or 0


def show(app: RltopApp) -> int:
    """Run the dashboard; returns its exit code."""
    return app.run() or 0


def require_terminal(command: str, instead: str) -> None:
    """Raise RltopError (exit code 2) where a dashboard can not be shown."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RltopError("the dashboard needs a terminal", where=command, why="stdin or stdout is not one", do=instead)
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise RltopError("the dashboard needs a terminal", where=command, why="TERM is not set or dumb", do=instead)
