"""`rltop ps`: the runs of this user on this machine, with a glance at each living one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rltop.cli.connect import running
from rltop.cli.output import age, note, number, print_json, table
from rltop.client import local_client
from rltop.errors import RltopError
from rltop.runs import RunInfo, list_runs

GLANCE_S = 2.0
"""Longest wait for the state of one living run; all are asked at once."""
GLANCE_KEYS = ("run", "phase", "checks", "metric/rollout/raw_reward")
HEAD = ("run", "state", "rollout", "reward", "fail", "warn", "age", "pid", "directory")


def ps(*, as_json: bool, every: bool) -> int:
    """Print the runs, newest first; dead ones only with `every`."""
    runs = list_runs()
    shown = [run for run in runs if run.alive or every]
    rows = asyncio.run(_glance_at_all(shown))
    if as_json:
        print_json({"runs": rows})
        return 0
    now = time.time()
    lines = table(
        HEAD, [[*(row[key] for key in HEAD[:6]), age(now - row["started"]), row["pid"], row["path"]] for row in rows]
    )
    print("\n".join(lines))
    if hidden := len(runs) - len(shown):
        note(f"{number(hidden)} dead: rltop ps --all")
    return 0


async def _glance_at_all(runs: list[RunInfo]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*map(_glance, runs)))


async def _glance(run: RunInfo) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": run.name,
        "alive": run.alive,
        "state": "no answer" if run.alive else "dead",
        "rollout": None,
        "reward": None,
        "fail": None,
        "warn": None,
        "started": run.started,
        "pid": run.pid if run.alive else None,
        "host": run.host,
        "version": run.version,
        "path": str(run.path),
    }
    if not run.alive:
        return row
    async with running(local_client(run, want=GLANCE_KEYS)) as client:
        try:
            await client.wait_live(GLANCE_S)
        except RltopError as error:
            return row | {"problem": error.what}
        state = client.mirror.state
    summary = (state.get("checks") or {}).get("summary") or {}
    return row | {
        "state": (state.get("run") or {}).get("state", "waiting"),
        "rollout": (state.get("phase") or {}).get("rollout_id"),
        "reward": (state.get("metric/rollout/raw_reward") or {}).get("value"),
        "fail": summary.get("fail"),
        "warn": summary.get("warn"),
    }
