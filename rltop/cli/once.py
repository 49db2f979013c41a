"""`rltop attach --once`: one plain text picture of a run, or its snapshot as JSON, without a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rltop.checks.catalogue import STEP1
from rltop.cli.connect import Place, ask
from rltop.cli.output import age, clean, number, print_json, size, table
from rltop.client import Client, Mirror

STATUS_ORDER = {"fail": 0, "warn": 1, "info": 2, "pass": 3, "skip": 4}
EVENTS_SHOWN = 8


def print_once(place: Place, *, as_json: bool) -> int:
    """Connect, print, leave. Raises RltopError when the run can not be reached."""

    async def look(client: Client) -> Mirror:
        return client.mirror

    mirror = ask(place, look)
    if as_json:
        print_json(snapshot(mirror))
    else:
        print("\n".join(picture(mirror)))
    return 0


def snapshot(mirror: Mirror) -> dict[str, Any]:
    """The state table as it is, and where it comes from."""
    return {
        "run": mirror.run,
        "server": mirror.server,
        "epoch": mirror.epoch,
        "ver": mirror.ver,
        "time": mirror.server_time,
        "state": mirror.state,
        "events": list(mirror.events),
        "gaps": mirror.gaps,
    }


def group(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The keys below `prefix` (`metric/`), without it, in order."""
    return {key.removeprefix(prefix): value for key, value in sorted(state.items()) if key.startswith(prefix)}


def picture(mirror: Mirror) -> list[str]:
    """Lines: header, checks (worst first), engines, logs, newest metrics, newest events. Pure."""
    state, now = mirror.state, mirror.server_time
    sections = [
        _header(mirror),
        _checks(state),
        _engines(state, now),
        _logs(state, now),
        _metrics(state),
        _events(mirror),
    ]
    lines: list[str] = []
    for section in sections:
        if section:
            lines += [*([""] if lines else []), *section]
    return lines


def _header(mirror: Mirror) -> list[str]:
    run, phase, now = mirror.state.get("run", {}), mirror.state.get("phase", {}), mirror.server_time
    head = [f"run {mirror.run}", str(run.get("state", "waiting"))]
    head += [str(run[key]) for key in ("framework", "mode") if run.get(key)]
    if run.get("started"):
        head.append(f"for {age((run.get('ended') or now) - run['started'])}")
    lines = [clean("  ".join(head))]
    archive = mirror.state.get("archive")
    if archive:
        over = f"ended {age(now - archive['ended'])} ago" if archive.get("ended") else "has no daemon any more"
        lines.append(clean(f"  it {over}; this is what its journal holds: {archive.get('path', '')}"))
    if run.get("text"):
        lines.append(clean(f"  {run['text']}"))
    previous = mirror.state.get("previous")
    if previous and run.get("attempt", 1) > 1:
        bad = previous.get("root_causes") or []
        told = [
            str(previous.get("state", "")),
            str(previous.get("text") or ""),
            f"from {', '.join(bad)}" if bad else "",
        ]
        lines.append(clean(f"attempt {run['attempt']}; the one before: {', '.join(word for word in told if word)}"))
    if phase.get("name"):
        rollout = f"  rollout {phase['rollout_id']}" if phase.get("rollout_id") is not None else ""
        usual = f" (usually {number(phase['median_s'])} s)" if phase.get("median_s") is not None else ""
        lines.append(clean(f"phase {phase['name']}{rollout}  since {age(now - (phase.get('since') or now))}{usual}"))
    lines += [clean(f"backend {run['backend']}")] if run.get("backend") else []
    lines += [clean(f"stand-in: {text}") for text in run.get("stand_ins") or []]
    lines += [clean(f"injected fault: {text}") for text in run.get("injected_faults") or []]
    return lines


def check_rows(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Verdicts, the worst first, then by id."""
    found = group(state, "check/").values()
    return sorted(found, key=lambda check: (STATUS_ORDER.get(check.get("status", ""), 5), check.get("id", "")))


def status_words(check: Mapping[str, Any]) -> str:
    """`fail`, or `fail (muted)`: it stays in the list, and somebody has said that it is known."""
    return f"{check.get('status')}" + (" (muted)" if check.get("muted") else "")


def told_checks(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of `check_rows` those worth a line: every one that was measured, and the set `step1` also when it was not."""
    return [check for check in check_rows(state) if check.get("status") != "skip" or check.get("id") in STEP1]


def _checks(state: Mapping[str, Any]) -> list[str]:
    checks = told_checks(state)
    if not checks:
        return []
    keys = ("id", "value", "threshold", "cause")
    lines = table(("check", *keys), [[status_words(check), *(check.get(key) for key in keys)] for check in checks])
    if left := len(check_rows(state)) - len(checks):
        lines.append(f"{left} more were not measured: rltop get checks")
    if roots := (state.get("checks") or {}).get("root_causes"):
        lines.append(clean(f"root cause: {', '.join(map(str, roots))}"))
    return lines


def engine_rows(state: Mapping[str, Any], now: float) -> list[list[Any]]:
    """id, kind, state, running, queued, tokens/s, token usage, weight version, age of the last scrape in seconds."""
    keys = ("id", "kind", "state", "running", "queued", "tokens_per_s", "token_usage", "weight_version")
    return [
        [*(engine.get(key) for key in keys), age(now - engine["seen"]) if engine.get("seen") else None]
        for engine in group(state, "engine/").values()
    ]


ENGINE_HEAD = ("engine", "kind", "state", "running", "queued", "tok/s", "usage", "weights", "seen")


def _engines(state: Mapping[str, Any], now: float) -> list[str]:
    rows = engine_rows(state, now)
    return table(ENGINE_HEAD, rows) if rows else []


def _logs(state: Mapping[str, Any], now: float) -> list[str]:
    """One line for each log that is watched."""
    rows = [[name, log.get("lines"), log_words(log, now)] for name, log in group(state, "log/").items()]
    return table(("log", "lines", "how it is"), rows) if rows else []


def log_words(log: Mapping[str, Any], now: float) -> str:
    """`last 12s ago`, `cannot be read: it is no text`; what was left out and what is still to be read."""
    last, state = log.get("last"), log.get("state")
    ago = f"last {age(max(0.0, now - last))} ago" if isinstance(last, int | float) and log.get("lines") else ""
    match state:
        case "missing":
            words = ["not there yet"]
        case "gone":
            words = ["the file is gone", ago]
        case "unreadable":
            words = [f"cannot be read: {log.get('problem')}"]
        case _:
            words = [ago or "empty"]
    words += [f"{size(log['behind'])} still to read"] if log.get("behind") else []
    words += [f"{log['dropped']} lines left out"] if log.get("dropped") else []
    return ", ".join(filter(None, words))


def metric_rows(state: Mapping[str, Any]) -> list[list[Any]]:
    """name, step, newest value, count of NaN and Inf so far."""
    return [
        [name, metric.get("step"), metric.get("value"), metric.get("nan", 0)]
        for name, metric in group(state, "metric/").items()
    ]


METRIC_HEAD = ("metric", "step", "value", "nan")


def _metrics(state: Mapping[str, Any]) -> list[str]:
    rows = metric_rows(state)
    return table(METRIC_HEAD, rows) if rows else []


def event_line(event: Mapping[str, Any]) -> str:
    """One event on one line, its time as a clock here shows it."""
    t = event.get("t")
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(t)) if isinstance(t, int | float) else "-"
    head = f"{event.get('eseq', ''):>6}  {when:14}  {event.get('level', ''):5}  {event.get('kind', ''):8}"
    return clean(f"{head}  {event.get('text', '')}")


def _events(mirror: Mirror) -> list[str]:
    newest = list(mirror.events)[-EVENTS_SHOWN:]
    return ["events", *map(event_line, newest)] if newest else []
