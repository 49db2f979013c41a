"""`rltop engine logs`: the end of an engine's log, and with -f what it says from then on, over its restarts."""

from __future__ import annotations

import asyncio
from typing import Any

from rltop.cli.connect import Place, running
from rltop.cli.engine import WANT
from rltop.cli.output import clean, note
from rltop.client import Client
from rltop.errors import RltopError

EVERY_S = 0.5


def logs(place: Place, engine: str, *, follow: bool, lines: int) -> int:
    """Print. Raises RltopError: no such engine, it has no log that can be shown, the run can not be reached."""
    return asyncio.run(_logs(place, engine, follow=follow, lines=lines))


async def _logs(place: Place, engine: str, *, follow: bool, lines: int) -> int:
    client = place.client(want=WANT, fps=10.0)
    async with running(client):
        await client.wait_live(place.patience_s)
        cell = client.mirror.state.get(f"engine/{engine}")
        if cell is None:
            known = [key.removeprefix("engine/") for key in client.mirror.state if key.startswith("engine/")]
            why = f"there are {', '.join(sorted(known))}" if known else "the run has no engines"
            raise RltopError(f"no such engine: {engine!r}", where="engine logs", why=why, do="rltop engine list")
        source = _log(cell)
        answer = await client.lines(source, 0, before=max(lines, 1))
        if answer.why and answer.end < 0:
            raise RltopError(f"the log of engine {engine} can not be shown", where=source, why=answer.why, exit_code=1)
        for line in answer.lines[-lines:] if lines else []:
            print(clean(line))
        if follow:
            await _follow(client, engine, source, answer.end)
    return 0


async def _follow(client: Client, engine: str, source: str, end: int) -> None:
    """Until Ctrl-C. A new generation has a log of its own."""
    while True:
        answer = await client.lines(source, 0, start=end)
        for line in answer.lines:
            print(clean(line), flush=True)
        if answer.end >= 0:
            end = answer.end
        if answer.lines:
            continue
        cell = client.mirror.state.get(f"engine/{engine}") or {}
        if cell.get("log") and cell["log"] != source:
            source, end = str(cell["log"]), 0
            note(f"engine {engine}: generation {cell.get('generation')} ({cell.get('state')})")
        await asyncio.sleep(EVERY_S)


def _log(cell: dict[str, Any]) -> str:
    if not cell.get("log"):
        why = "others run it, and it tells no log" if cell.get("owner") == "other" else "it was not started yet"
        raise RltopError(f"engine {cell.get('id')} has no log", where="engine logs", why=why, exit_code=1)
    return str(cell["log"])
