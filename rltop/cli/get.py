"""`rltop get WHAT`: facts of a run for scripts, as a table or as JSON."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rltop.cli.connect import Place, ask
from rltop.cli.once import (
    ENGINE_HEAD,
    METRIC_HEAD,
    check_rows,
    engine_rows,
    event_line,
    group,
    metric_rows,
    picture,
    snapshot,
    status_words,
)
from rltop.cli.output import note, print_json, table
from rltop.client import Client, Series
from rltop.errors import RltopError


@dataclass(frozen=True, slots=True)
class Query:
    """What was asked for, as typed."""

    what: str
    args: tuple[str, ...] = ()
    lo: float | None = None
    hi: float | None = None
    buckets: int = 200
    """Most points per series."""
    window: int = 2
    """Steps on both sides of `around STEP`."""
    limit: int = 200
    """Most events."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The same facts for programs and for people."""

    data: dict[str, Any]
    lines: list[str]


def get(place: Place, query: Query, *, as_json: bool) -> int:
    """Ask and print. Raises RltopError: unknown WHAT or metric, wrong arguments, the run can not be reached."""
    answering = _answering(query)

    async def session(client: Client) -> tuple[str, Answer]:
        answer = await answering(client, query)
        return client.mirror.run, answer

    run, answer = ask(place, session)
    if as_json:
        print_json({"run": run, "what": query.what, **answer.data})
    elif answer.lines:
        print("\n".join(answer.lines))
    return 0


def _answering(query: Query) -> Callable[[Client, Query], Awaitable[Answer]]:
    answering = WHATS.get(query.what)
    if answering is None:
        close = difflib.get_close_matches(query.what, WHATS, n=1)
        raise RltopError(
            f"no such thing to get: {query.what!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            where="get",
            why=f"there are {', '.join(WHATS)}",
            do="rltop get --help",
        )
    wanted = {"series": "metric names", "around": "one step"}.get(query.what)
    if query.args and wanted is None:
        raise RltopError(f"{query.what} takes no further words", where="get", why=f"got {' '.join(query.args)}")
    if wanted is not None and (not query.args or (query.what == "around" and len(query.args) != 1)):
        raise RltopError(
            f"{query.what} needs {wanted}",
            where="get",
            do="rltop get series rollout/raw_reward, or rltop get around 12",
        )
    if query.what == "around" and not query.args[0].lstrip("-").isdigit():
        raise RltopError(f"{query.args[0]!r} is not a step", where="get around", do="rltop get around 12")
    return answering


async def _snapshot(client: Client, query: Query) -> Answer:
    return Answer(snapshot(client.mirror), picture(client.mirror))


async def _metrics(client: Client, query: Query) -> Answer:
    state = client.mirror.state
    return Answer({"metrics": group(state, "metric/")}, table(METRIC_HEAD, metric_rows(state)))


async def _checks(client: Client, query: Query) -> Answer:
    checks = check_rows(client.mirror.state)
    keys = ("id", "value", "threshold", "rollout", "cause")
    lines = table(("status", *keys), [[status_words(check), *(check.get(key) for key in keys)] for check in checks])
    summary = client.mirror.state.get("checks") or {}
    return Answer(
        {"checks": checks, "root_causes": summary.get("root_causes", []), "summary": summary.get("summary", {})}, lines
    )


async def _engines(client: Client, query: Query) -> Answer:
    state, now = client.mirror.state, client.mirror.server_time
    return Answer({"engines": group(state, "engine/")}, table(ENGINE_HEAD, engine_rows(state, now)))


async def _events(client: Client, query: Query) -> Answer:
    page = await client.events(lo=int(query.lo or 0), hi=None if query.hi is None else int(query.hi), limit=query.limit)
    if page.more:
        note(
            f"only the newest {len(page.events)} events are shown: ask for more with --limit, or --hi for earlier ones"
        )
    return Answer({"events": page.events, "more": page.more}, [event_line(event) for event in page.events])


async def _series(client: Client, query: Query) -> Answer:
    known = [key.removeprefix("metric/") for key in client.mirror.state if key.startswith("metric/")]
    keys = [key.removeprefix("metric/") for key in query.args]
    found = await client.series(keys, query.lo, query.hi, query.buckets)
    for key in keys:
        if key not in found:
            close = difflib.get_close_matches(key, known, n=3)
            raise RltopError(
                f"the run has no metric {key!r}",
                where="get series",
                why=f"close ones: {', '.join(close)}" if close else f"it has {len(known)} metrics",
                do="rltop get metrics",
            )
    lines = []
    for key, series in found.items():
        rows = list(zip(series.step, series.lo, series.hi, series.last, series.nan, strict=True))
        lines += [key, *table(("step", "min", "max", "last", "nan"), rows, indent="  ")]
    return Answer({"series": {key: columns(series) for key, series in found.items()}}, lines)


def columns(series: Series) -> dict[str, list[Any]]:
    """Columns of one series, as in the wire's `series` answer."""
    return {
        "step": list(series.step),
        "min": list(series.lo),
        "max": list(series.hi),
        "last": list(series.last),
        "nan": list(series.nan),
    }


async def _around(client: Client, query: Query) -> Answer:
    """Every metric at STEP and `window` steps on both sides, on the axis that each metric has."""
    step = int(query.args[0])
    state = client.mirror.state
    keys = list(group(state, "metric/"))
    span = 2 * query.window + 1
    found = await client.series(keys, step - query.window, step + query.window, span) if keys else {}
    steps = list(range(step - query.window, step + query.window + 1))
    rows: dict[str, dict[int, float]] = {
        key: {int(at): last for at, last in zip(series.step, series.last, strict=True)} for key, series in found.items()
    }
    lines = table(
        ["metric", "axis", *map(str, steps)],
        [[key, _axis(state, key), *(row.get(at) for at in steps)] for key, row in rows.items() if row],
    )
    data = {key: {"axis": _axis(state, key), "values": row} for key, row in rows.items() if row}
    return Answer({"step": step, "window": query.window, "metrics": data}, lines)


def _axis(state: Mapping[str, Any], key: str) -> str:
    return str((state.get(f"metric/{key}") or {}).get("axis", ""))


WHATS: Mapping[str, Callable[[Client, Query], Awaitable[Answer]]] = {
    "snapshot": _snapshot,
    "metrics": _metrics,
    "series": _series,
    "checks": _checks,
    "engines": _engines,
    "events": _events,
    "around": _around,
}
