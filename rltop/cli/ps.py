"""`rltop ps`: the runs of this user on this machine, with a glance at each: living ones asked, dead ones read."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rltop.checks.layout import wrap
from rltop.cli.connect import running
from rltop.cli.output import age, clean, note, number, print_json, size, table
from rltop.client import local_client
from rltop.errors import RltopError
from rltop.runs import RunInfo, list_runs
from rltop.runs.disk import disk_bytes

GLANCE_S = 2.0
"""Longest wait for the state of one living run; all are asked at once."""
REWARD = "metric/rollout/raw_reward"
GLANCE_KEYS = ("run", "phase", "checks", "engine/*", REWARD)
HEAD = ("run", "state", "rollout", "reward", "checks", "age", "size", "pid", "why")


def ps(*, as_json: bool, every: bool) -> int:
    """Print the runs, newest first; dead ones only with `every`."""
    runs = list_runs()
    shown = [run for run in runs if run.alive or every]
    rows = asyncio.run(_glance_at_all(shown))
    if as_json:
        print_json({"runs": rows})
        return 0
    now = time.time()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(lines([_cells(row, now) for row in rows], width)))
    if hidden := len(runs) - len(shown):
        note(f"{number(hidden)} dead: rltop ps --all")
    orphans = [row["run"] for row in rows if row["state"] == "orphaned"]
    if orphans:
        note(f"no daemon, but a trainer or engines that run on: {', '.join(orphans)} (rltop down NAME stops them)")
    return 0


def _cells(row: Mapping[str, Any], now: float) -> list[Any]:
    if row["alive"]:
        when = f"up {age(now - row['started'])}"
    else:
        when = f"{age(now - row['ended'])} ago" if row["ended"] else "-"
    return [
        *(row[key] for key in ("run", "state", "rollout", "reward")),
        verdict_words(row),
        when,
        size(row["bytes"]),
        row["pid"],
        row["problem"] or row["text"],
    ]


def verdict_words(row: Mapping[str, Any]) -> str | None:
    """`2 fail, 1 warn: train.nan`: the counts, and what they come from."""
    counts = row["verdicts"]
    if not counts:
        return None
    bad = [f"{counts[status]} {status}" for status in ("fail", "warn") if counts.get(status)]
    bad += [f"{len(row['muted'])} of them muted"] if row["muted"] else []
    if not bad:
        return "ok" if counts.get("pass") else "-"
    return ", ".join(bad) + (f": {', '.join(row['root_causes'])}" if row["root_causes"] else "")


def lines(rows: Sequence[Sequence[Any]], width: int | None) -> list[str]:
    """The table. In a terminal that is too narrow for it the last column goes below each row.

    width: cells of the terminal; None: a file or another program, which gets one line per run.
    """
    whole = table(HEAD, rows)
    if width is None or max(map(len, whole)) <= width:
        return whole
    found = []
    reasons = ["", *(row[-1] for row in rows)]
    for line, reason in zip(table(HEAD[:-1], [row[:-1] for row in rows]), reasons, strict=True):
        found.append(line if len(line) <= width else line[: width - 1] + "…")
        found += wrap(clean(number(reason)), "    ", width) if reason else []
    return found


async def _glance_at_all(runs: list[RunInfo]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*map(_glance, runs)))


async def _glance(run: RunInfo) -> dict[str, Any]:
    """One row, whatever happens to the run meanwhile."""
    row: dict[str, Any] = {
        "run": run.name,
        "alive": run.alive,
        "state": "no answer",
        "text": "",
        "attempt": None,
        "rollout": None,
        "reward": None,
        "fail": None,
        "warn": None,
        "verdicts": {},
        "root_causes": [],
        "muted": [],
        "started": run.started,
        "ended": None,
        "pid": run.pid if run.alive else None,
        "host": run.host,
        "version": run.version,
        "path": str(run.path),
        "bytes": await asyncio.to_thread(disk_bytes, run.path),
        "problem": None,
    }
    try:
        return row | (await _living(run) if run.alive else await asyncio.to_thread(_dead, run))
    except RltopError as error:
        return row | {"problem": error.what} | ({} if run.alive else {"state": "dead"})


async def _living(run: RunInfo) -> dict[str, Any]:
    async with running(local_client(run, want=GLANCE_KEYS)) as client:
        await client.wait_live(GLANCE_S)
        state = client.mirror.state
    facts = state.get("run") or {}
    text = "; ".join(filter(None, (facts.get("text", ""), *engine_trouble(state))))
    return {**_numbers(state), "state": facts.get("state", "waiting"), "text": text}


def engine_trouble(state: Mapping[str, Any]) -> list[str]:
    """What a person has to know of the run's own engines: those that hang, or that rltop does not start again."""
    found = []
    for key in sorted(key for key in state if key.startswith("engine/")):
        engine, name = state[key] or {}, key.removeprefix("engine/")
        if engine.get("owner") != "rltop":
            continue
        if engine.get("hung"):
            found.append(f"engine {name} hangs (rltop engine restart --engine {name})")
        elif engine.get("state") == "QUARANTINED":
            found.append(
                f"engine {name} crashes again and again, it is not started (rltop engine start --engine {name})"
            )
    return found


def _dead(run: RunInfo) -> dict[str, Any]:
    from rltop.daemon.past import end_of, open_past, state_of

    with open_past(run.path, migrated=False) as past:
        end = end_of(past.connection, run.path)
        state = state_of(past.connection, GLANCE_KEYS)
    return {**_numbers(state), "state": end.state, "text": end.text, "ended": end.ended}


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    checks = state.get("checks") or {}
    counts = checks.get("summary") or {}
    reward = state.get(REWARD) or {}
    phase = state.get("phase") or {}
    rollout = phase.get("rollout_id")
    return {
        "attempt": (state.get("run") or {}).get("attempt"),
        "rollout": rollout if rollout is not None else reward.get("step"),
        "reward": reward.get("value"),
        "fail": counts.get("fail"),
        "warn": counts.get("warn"),
        "verdicts": counts,
        "root_causes": list(checks.get("root_causes") or []),
        "muted": list(checks.get("muted") or []),
    }
