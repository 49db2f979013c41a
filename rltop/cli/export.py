"""`rltop export RUN --to csv|parquet|tensorboard`: a run's curves, events and verdicts for other programs.

A living run's journal is read as it is at one moment, a dead one's where it lies; behind ssh the same command runs
there and its rows come over the pipe. Values are those that were reported, to the last bit (TensorBoard's are float32).

Failure policy: a file appears under its name when it is whole; what was there before is never replaced without --force.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import fnmatch
import importlib
import json
import os
import shlex
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from rltop.cli.connect import Place, here
from rltop.cli.output import clean, note, plain
from rltop.client.targets import SshTarget, command_there, explain_end, parse_ssh_target
from rltop.daemon.past import open_past
from rltop.daemon.points import Curve, curves, points, rows
from rltop.errors import RltopError
from rltop.runs.lock import lock_holder

FORMATS = ("csv", "parquet", "tensorboard")
WHATS = ("series", "events", "checks")
SERIES = ("run", "attempt", "axis", "step", "name", "value", "time")
EVENTS = ("run", "eseq", "time", "kind", "level", "source", "text", "more")
CHECKS = ("run", "time", "id", "status", "was", "rollout", "step", "engine", "rank", "value", "cause")
LONGEST_FIELD = 1 << 24
"""Characters of a text that comes over ssh; Python's default of 131,072 is less than an event may have."""
BATCH = 65_536
"""Rows of one row group of a parquet file."""

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Query:
    """What is wanted, as typed."""

    to: str = "csv"
    what: tuple[str, ...] = ("series",)
    names: tuple[str, ...] = ()
    """Names or globs of metrics; none: all."""
    wide: bool = False
    attempts: bool = False
    """Points that a restart went over again, too."""
    output: Path | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header."""

    head: Sequence[str]
    rows: Iterable[Row]


def export(place: Place, query: Query) -> int:
    """Write it. Raises RltopError: unknown format, metric or run; a file in the way; a journal that cannot be read."""
    _check(query)
    targets = _targets(query)
    with _source(place, query) as tables:
        for what in query.what:
            target = targets[what]
            count = _write(tables(what), query.to, target, query.force)
            if target is not None:
                note(f"{target}: {count} rows")
            elif not count:
                note(f"the run has no {what} yet")
    return 0


def _check(query: Query) -> None:
    for value, known, flag in ((query.to, FORMATS, "--to"), *((what, WHATS, "--what") for what in query.what)):
        if value not in known:
            close = difflib.get_close_matches(value, known, n=1)
            what = f"there is no {value!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            do = f"{flag} {close[0] if close else next(iter(known))}"
            raise RltopError(what, where=flag, why=f"there are {', '.join(known)}", do=do)
    if query.wide and (query.to != "csv" or query.what != ("series",)):
        raise RltopError("only series as csv can be wide", where="--wide", do="--to csv --what series")
    if query.wide and query.attempts:
        raise RltopError("a wide table has one row per step", where="--attempts", why="attempts repeat steps")
    if query.to == "tensorboard" and query.what != ("series",):
        raise RltopError("TensorBoard has curves only", where="--what", do="--to csv --what events,checks")
    if query.to != "csv" and query.output is None:
        raise RltopError(
            f"{query.to} needs a place", where="-o", do="-o DIR" if query.to == "tensorboard" else "-o FILE"
        )
    if len(query.what) > 1 and query.output is None:
        raise RltopError("several tables do not go into one stream", where="--what", do="-o DIR")


def _targets(query: Query) -> dict[str, Path | None]:
    """Table -> file; None: stdout. Directories are made. Raises RltopError for a file that is in the way."""
    out = query.output
    if out is None or str(out) == "-":
        return dict.fromkeys(query.what)
    folder = len(query.what) > 1 or query.to == "tensorboard" or out.is_dir()
    if folder and out.exists() and not out.is_dir():
        raise RltopError("is a file, and a folder is needed", where=str(out), do="-o DIR")
    ending = {"csv": ".csv", "parquet": ".parquet"}.get(query.to, "")
    found: dict[str, Path | None] = {}
    for what in query.what:
        name = f"events.out.tfevents.0.{socket.gethostname()}.rltop" if query.to == "tensorboard" else what + ending
        path = out / name if folder else out
        if path.exists() and not query.force:
            raise RltopError("is there already", where=str(path), do="--force replaces it, or -o another place")
        found[what] = path
    try:
        (out if folder else out.parent).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RltopError("can not be written", where=str(out), why=error.strerror or str(error)) from None
    return found


# ---------------------------------------------------------------- rows of a run on this machine


@contextlib.contextmanager
def _source(place: Place, query: Query) -> Iterator[Callable[[str], Table]]:
    if place.remote:
        with contextlib.ExitStack() as stack:
            yield lambda what: _remote(place, query, what, stack)
        return
    run = here(place.target)
    with open_past(run.path, living=lock_holder(run.path) is not None) as past:
        # One moment of a run that goes on: points move from table to table while they are packed.
        past.connection.execute("BEGIN")
        chosen = _chosen(curves(past.connection), query.names)

        def table(what: str) -> Table:
            match what:
                case "series":
                    made = _wide if query.wide else _long
                    return made(past.connection, run.name, chosen, query)
                case "events":
                    return Table(EVENTS, _events(past.connection, run.name))
                case _:
                    return Table(CHECKS, _checks(past.connection, run.name))

        yield table


def _chosen(found: Sequence[Curve], names: Sequence[str]) -> list[Curve]:
    """The curves that are meant, in the order of the run. Raises RltopError for a name that nothing answers to."""
    if not names:
        return list(found)
    keys = [curve.key for curve in found]
    wanted: set[str] = set()
    for name in (name.removeprefix("metric/") for name in names):
        # A name is itself before it is a pattern: names may have brackets.
        hits = {name} & set(keys) or set(fnmatch.filter(keys, name))
        if not hits:
            close = difflib.get_close_matches(name, keys, n=3)
            raise RltopError(
                f"the run has no metric {name!r}",
                where="export",
                why=f"close ones: {', '.join(close)}" if close else f"it has {len(keys)} metrics",
                do="rltop get metrics",
            )
        wanted |= hits
    return [curve for curve in found if curve.key in wanted]


def _long(connection: sqlite3.Connection, run: str, chosen: Sequence[Curve], query: Query) -> Table:
    return Table(
        SERIES,
        (
            (run, point.attempt, curve.axis, _step(point.step), curve.key, point.value, point.time)
            for curve in chosen
            for point in points(connection, curve, every=query.attempts)
        ),
    )


def _wide(connection: sqlite3.Connection, run: str, chosen: Sequence[Curve], query: Query) -> Table:
    place = {curve.key: index for index, curve in enumerate(chosen)}

    def made() -> Iterator[Row]:
        for axis in sorted({curve.axis for curve in chosen}):
            mine = [curve for curve in chosen if curve.axis == axis]
            for step, time, cells in rows(connection, mine):
                row: list[Any] = [None] * len(chosen)
                for index, value in cells:
                    row[place[mine[index].key]] = value
                yield (run, axis, _step(step), time, *row)

    return Table(("run", "axis", "step", "time", *place), made())


def _step(step: float) -> float:
    return int(step) if step.is_integer() else step


def _events(connection: sqlite3.Connection, run: str) -> Iterator[Row]:
    found = connection.execute("SELECT eseq, t, kind, level, source, text, more FROM events ORDER BY eseq")
    for eseq, t, kind, level, source, text, more in found:
        told = "" if more is None else json.dumps(plain(msgspec.msgpack.decode(more)), ensure_ascii=False)
        yield run, eseq, t, kind, level, source, text, told


def _checks(connection: sqlite3.Connection, run: str) -> Iterator[Row]:
    """Every change of a verdict's status."""
    for t, id_, status, was, packed in connection.execute(
        "SELECT t, id, status, was, verdict FROM verdicts ORDER BY n"
    ):
        verdict = msgspec.msgpack.decode(packed)
        value = verdict.get("value")
        shown = value if isinstance(value, int | float | str) else json.dumps(plain(value), ensure_ascii=False)
        where = (verdict.get(name) for name in ("rollout", "step", "engine", "rank"))
        yield run, t, id_, status, was, *where, None if value is None else shown, verdict.get("cause", "")


# ---------------------------------------------------------------- rows of a run behind ssh


def _remote(place: Place, query: Query, what: str, stack: contextlib.ExitStack) -> Table:
    """The table as the rltop there writes it, as csv. What it says on stderr is kept for the error."""
    target = place.target or ""
    there = SshTarget("", run=target) if place.via is not None and "://" not in target else parse_ssh_target(target)
    rltop = shlex.split(place.remote_rltop)
    if not rltop:
        raise RltopError("the remote command is empty", where="--remote-rltop")
    args = ["export", *([there.run] if there.run else []), "--to", "csv", "--what", what]
    args += ["--wide"] * query.wide + ["--attempts"] * query.attempts
    args += [word for name in query.names for word in ("--name", name)]
    batch = not sys.stdin.isatty()
    argv = command_there(there, [*rltop, *args], via=place.via, batch=batch)
    said = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))  # noqa: SIM115
    try:
        child = stack.enter_context(
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=said, text=True, encoding="utf-8", errors="replace")
        )
    except OSError as error:
        raise RltopError("can not be started", where=argv[0], why=error.strerror or str(error), exit_code=1) from None
    stack.callback(child.terminate)
    heads = {
        "series": "run,axis,step" if query.wide else "run,attempt,axis",
        "events": "run,eseq",
        "checks": "run,time",
    }
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(_after_noise(cast(IO[str], child.stdout), heads[what]))

    def ended() -> RltopError:
        said.seek(0)
        place_ = place.via or there.host
        why = explain_end(child.wait(), said.read(), "", place=place_, command=rltop[0], batch=batch)
        return RltopError("the other side did not export it", where="export", why=str(why), exit_code=1)

    if (head := next(reader, None)) is None:
        raise ended()
    # As csv they go on as they came; the other formats want numbers.
    parsed = {} if query.to == "csv" else {**_PARSED, **({"value": float} if what == "series" else {})}
    ways = [parsed.get(name, str) for name in head]

    def made() -> Iterator[Row]:
        for row in reader:
            yield [way(cell) if cell else None for way, cell in zip(ways, row, strict=True)]
        if child.wait():
            raise ended()

    return Table(head, made())


def _after_noise(lines: Iterable[str], first: str) -> Iterator[str]:
    """Lines from the header on: a shell profile may print before it."""
    begun = False
    for line in lines:
        begun = begun or line.startswith(first)
        if begun:
            yield line


_PARSED: Mapping[str, Callable[[str], Any]] = {
    "attempt": int,
    "eseq": int,
    "time": float,
    "step": lambda cell: _step(float(cell)),
}


# ---------------------------------------------------------------- files


def _write(table: Table, to: str, path: Path | None, force: bool) -> int:
    """Write a table; returns the count of its rows."""
    if path is None:
        return _csv(table, sys.stdout)
    with _whole(path, force) as temporary:
        match to:
            case "csv":
                with temporary.open("w", encoding="utf-8", newline="") as text:
                    return _csv(table, text)
            case "parquet":
                return _parquet(table, temporary)
            case _:
                return _tensorboard(table, temporary)


@contextlib.contextmanager
def _whole(path: Path, force: bool) -> Iterator[Path]:
    """A file beside `path` that takes its name at the end, and is gone when it does not come to that."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        if path.exists() and not force:  # somebody made it meanwhile
            raise RltopError("is there already", where=str(path), do="--force replaces it")
        temporary.replace(path)
    except OSError as error:
        raise RltopError("can not be written", where=str(path), why=error.strerror or str(error), exit_code=1) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _csv(table: Table, file: IO[str]) -> int:
    writer, count = csv.writer(file, lineterminator="\n"), 0
    writer.writerow(table.head)
    for row in table.rows:
        writer.writerow([_cell(value) for value in row])
        count += 1
    return count


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return plain(value)
    return clean(value) if isinstance(value, str) else value


def _parquet(table: Table, path: Path) -> int:
    try:
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise RltopError("parquet needs pyarrow", where="--to parquet", do="pip install pyarrow, or --to csv") from None
    kinds = {"attempt": arrow.int32(), "eseq": arrow.int64(), "step": arrow.float64(), "time": arrow.float64()}
    kinds |= {"value": arrow.float64()} if tuple(table.head) == SERIES else {}
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in table.head])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        batch: list[Row] = []
        for row in table.rows:
            batch.append(row)
            if len(batch) == BATCH:
                writer.write_table(_arrow(arrow, schema, batch))
                count += len(batch)
                batch = []
        writer.write_table(_arrow(arrow, schema, batch))
    return count + len(batch)


def _arrow(arrow: Any, schema: Any, batch: Sequence[Row]) -> Any:
    columns = list(zip(*batch, strict=True)) or [()] * len(schema)
    made = [
        [None if value is None else str(value) for value in column] if field.type == arrow.string() else list(column)
        for field, column in zip(schema, columns, strict=True)
    ]
    return arrow.table(made, schema=schema)


def _tensorboard(table: Table, path: Path) -> int:
    from rltop.cli.tfevents import EventFile

    count, time = 0, 0.0
    with path.open("wb") as file:
        events = EventFile(file, started=0.0)
        for _, _, _, step, name, value, at in table.rows:
            time = at if at is not None else time
            events.scalar(name, int(step), value, time)
            count += 1
    return count
