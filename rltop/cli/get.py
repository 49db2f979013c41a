"""`rltop get WHAT`: facts of a run for scripts, as a table or as JSON."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
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

MOST_AT_ONCE = 500
"""Series of one question, as the protocol has it."""


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
    for bound in (query.lo, query.hi):
        if bound is not None and not isfinite(bound):
            raise RltopError(f"{bound} is not a step", where="--lo, --hi")
    if query.lo is not None and query.hi is not None and query.lo > query.hi:
        raise RltopError("--lo is above --hi", where="get", why=f"{query.lo:g} > {query.hi:g}: nothing lies between")
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
    keys = _named(query.args, known)
    found: dict[str, Series] = {}
    for start in range(0, len(keys), MOST_AT_ONCE):
        part = keys[start : start + MOST_AT_ONCE]
        found |= await client.series(part, query.lo, query.hi, query.buckets, exact=True)
    for key in keys:
        if key not in found:
            raise _unknown(key, known)
    lines = []
    for key, series in found.items():
        made = columns(series)
        lines += [key, *table(tuple(made), list(zip(*made.values(), strict=True)), indent="  ")]
    return Answer({"series": {key: columns(series) for key, series in found.items()}}, lines)


def _named(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names of metrics, a pattern (`train/*`) in place of those that it fits. Raises RltopError: it fits none."""
    keys: dict[str, None] = {}
    for word in (word.removeprefix("metric/") for word in words):
        # A name is itself before it is a pattern: names may have brackets.
        pattern = word not in known and any(sign in word for sign in "*?[")
        hits = fnmatch.filter(known, word) if pattern else [word]
        if not hits:
            raise _unknown(word, known)
        keys |= dict.fromkeys(sorted(hits) if pattern else hits)
    return list(keys)


def _unknown(name: str, known: Sequence[str]) -> RltopError:
    close = difflib.get_close_matches(name, known, n=3)
    return RltopError(
        f"the run has no metric {name!r}",
        where="get series",
        why=f"close ones: {', '.join(close)}" if close else f"it has {len(known)} metrics",
        do="rltop get metrics",
    )


def columns(series: Series) -> dict[str, list[Any]]:
    """Columns of one series, as in the wire's `series` answer; exact, with `value`, where every bucket is one point."""
    if series.value is None:
        wide = {"min": series.lo, "max": series.hi, "last": series.last}
        return {"step": list(series.step), **{name: list(one) for name, one in wide.items()}, "nan": list(series.nan)}
    values = list(series.value)
    finite = [value if isfinite(value) else nan for value in values]
    steps, bad = list(series.step), list(series.nan)
    return {"step": steps, "min": finite, "max": finite, "last": finite, "nan": bad, "value": values}


async def _names(client: Client, query: Query) -> Answer:
    """What was renamed, and by which row of the table of names."""
    names = client.mirror.state.get("names") or {}
    head = ("name", "reported as", "framework", "axis", "scale", "source")
    rows = [
        [name, *(row.get(key) for key in ("reported", "framework", "axis", "scale", "source"))]
        for name, row in sorted(names.items())
    ]
    return Answer({"names": names}, table(head, rows) if rows else [])


async def _sources(client: Client, query: Query) -> Answer:
    """Who reports, and what of it was lost; of a fleet the sums of every role first."""
    state = client.mirror.state
    roles, sources = group(state, "sources/"), group(state, "source/")
    counted = ("records", "lost", "dropped", "malformed", "unknown")
    lines = []
    if roles:
        rows = [[role, *(cell.get(key) for key in ("count", "hosts", *counted))] for role, cell in roles.items()]
        lines += [*table(("role", "sources", "hosts", *counted), rows), ""]
    rows = [[name, *(cell.get(key) for key in ("host", "pid", *counted))] for name, cell in sources.items()]
    return Answer({"sources": sources, "roles": roles}, [*lines, *table(("source", "host", "pid", *counted), rows)])


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
    "names": _names,
    "sources": _sources,
    "checks": _checks,
    "engines": _engines,
    "events": _events,
    "around": _around,
}
