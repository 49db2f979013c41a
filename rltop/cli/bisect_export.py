"""`rltop bisect export`: a bisection as a bug report that can be sent, or as data; no daemon is needed.

The engine's arguments and the log of the crash come from the run directory, over ssh through the daemon or the archive.
Everything is scrubbed before it is put together (`rltop.runs.scrub`).

Failure policy: what cannot be read is left out, and the report says what and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import rltop
from rltop.bisect.export import Evidence, as_markdown
from rltop.bisect.export_json import as_json
from rltop.bisect.story import Story
from rltop.bisect.story_of import story_of
from rltop.cli.bisect_find import Found, find
from rltop.cli.connect import Place, running
from rltop.cli.output import note, print_json
from rltop.client import Client
from rltop.errors import RltopError
from rltop.evidence.access import without_access
from rltop.runs.scrub import Scrub

if TYPE_CHECKING:
    from rltop.daemon.bisect_record import Record, TrialRow

MODULES = {"sglang": "sglang.launch_server", "cpu": "rltop.train.cpu_engine", "null": "rltop.train.null_engine"}
BEFORE, AFTER = 12, 64
"""Lines of the log around the first fault."""
LONGEST_LINE = 300
LONGEST_TRACEBACK = 80
"""Lines from its head to the error."""
_COUNTS = re.compile(r"coredump: SM \d+/\d+ has finished state collection$")
PAGES = 400
"""Most answers that a file is read in over ssh."""


def export(place: Place, bisection: str, *, to: Literal["md", "json"], file: Path | None) -> int:
    """Print, or write `file`. Raises RltopError: there is no such bisection, the file cannot be written."""
    found = find(place, bisection)
    if found.chosen:
        note(f"bisection {found.story.id} of run {found.run} ({found.chosen})")
    if found.gone:
        note(f"it is not over: {found.gone}")
    story, evidence = gathered(place, found)
    if file is None:
        if to == "json":
            print_json({key: value for key, value in as_json(story, evidence).items() if key != "schema"})
        else:
            print(as_markdown(story, evidence), end="")
        return 0
    text = as_markdown(story, evidence) if to == "md" else json.dumps(as_json(story, evidence), indent=2) + "\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RltopError(
            "the report cannot be written",
            where=str(file),
            why=error.strerror or str(error),
            do="-o another FILE",
            exit_code=1,
        ) from error
    note(f"{file}: {len(text.splitlines())} lines; read it before you send it")
    return 0


def gathered(place: Place, found: Found) -> tuple[Story, Evidence]:
    """Story and evidence, scrubbed."""
    files, missing = _files(place, found)
    record = found.record or _decoded(files.get("record"), missing)
    crash = _mapping(files.get("crash"))
    scrub = Scrub(hosts=_hosts(found, crash), users=_users())
    story = story_of(scrubbed(found.cell, scrub)) or found.story
    versions = {name: str(version) for name, version in (crash.get("versions") or {}).items() if version}
    if record is not None and record.subject.version:
        versions.setdefault("sglang", record.subject.version)
    versions["rltop"] = rltop.__version__
    lines = _command_lines(record, crash)
    evidence = Evidence(
        kind=record.subject.kind if record is not None else "",
        versions={name: scrub.text(version) for name, version in versions.items()},
        argv=scrub.argv(lines.everything),
        crashed=scrub.argv(lines.crashed),
        smallest=scrub.argv(lines.smallest),
        smallest_on=lines.smallest_on,
        crashes_min=_crashes(record),
        env=scrub.environment(record.ground.config.env) if record is not None else {},
        pins=[scrub.text(pin) for pin in _pins(record)],
        values=_values(record, scrub),
        log=[scrub.text(line) for line in excerpt(files.get("log", b""), crash.get("crash") or {})],
        missing=[scrub.text(text) for text in missing],
    )
    return story, evidence


def scrubbed(value: Any, scrub: Scrub) -> Any:
    """A value of the state with every text in it scrubbed; keys stay."""
    match value:
        case str():
            return scrub.text(value)
        case Mapping():
            return {key: scrubbed(item, scrub) for key, item in value.items()}
        case list() | tuple():
            return [scrubbed(item, scrub) for item in value]
        case _:
            return value


def _hosts(found: Found, crash: Mapping[str, Any]) -> list[str]:
    mine = {socket.gethostname(), socket.gethostname().partition(".")[0], *found.hosts}
    return [name for name in (*mine, str(crash.get("node") or "")) if name]


def _users() -> list[str]:
    names = set()
    with contextlib.suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    with contextlib.suppress(RuntimeError):
        names.add(Path.home().name)
    return [name for name in names if name]


# ---------------------------------------------------------------------- arguments


@dataclass(frozen=True, slots=True)
class _Lines:
    """Command lines that were run, but for `everything`, which all of them were made from. Empty: not known."""

    everything: Sequence[str] = ()
    crashed: Sequence[str] = ()
    smallest: Sequence[str] = ()
    smallest_on: Sequence[str] = ()


def _command_lines(record: Record | None, crash: Mapping[str, Any]) -> _Lines:
    if record is None:
        return _Lines()
    from rltop.engines.ground import arm

    subject, base = record.subject, record.ground
    head = ["python", "-m", MODULES.get(subject.kind, subject.kind), "--model-path", subject.model_path]
    args = crash.get("args")
    first = [*head, *(map(str, args) if isinstance(args, list) else subject.config.args)]
    rows = [row for row in record.trials if row.counts and row.outcome == "crashed"]
    least = min(rows, key=lambda row: (len(_on(row)), row.n), default=None)
    if least is None or set(_on(least)) == set(base.toggles):
        return _Lines([*head, *base.config.args], first)
    made = arm(subject, base, [name for name in base.toggles if name not in least.asked_on])
    ran = [*head, *made.config.args] if made.config is not None else []
    return _Lines([*head, *base.config.args], first, ran, _on(least) if ran else ())


def _on(row: TrialRow) -> tuple[str, ...]:
    return row.asked_on if row.on is None else row.on


def _crashes(record: Record | None) -> list[float | None]:
    """The hunted one, those of its kind before it, and those of engines that served on, in minutes of service."""
    if record is None:
        return []
    scale, first = record.time_scale, record.crash.minutes
    others = [*(minutes for _, minutes in record.earlier), *(one.minutes for one in record.outside)]
    return [None if first is None else first * scale, *(minutes * scale for minutes in others)]


def _pins(record: Record | None) -> list[str]:
    """Written out in every arm."""
    from rltop.engines.pins import shared

    return [] if record is None else shared(record.ground.pins, record.ground.toggles)


def _values(record: Record | None, scrub: Scrub) -> dict[str, tuple[str, str]]:
    """What `on` and `off` stand for; a draft model may be a path."""
    if record is None:
        return {}
    ground = record.ground
    return {name: (scrub.text(ground.on.get(name, "")), ground.off.get(name, "off")) for name in ground.toggles}


# ---------------------------------------------------------------------- files of the run


def _files(place: Place, bisection: Found) -> tuple[dict[str, bytes], list[str]]:
    """record, crash, log: their bytes as far as they can be had; and what can not, with why."""
    story, root = bisection.story, bisection.path
    folder = f"engines/{story.crash.engine}/{story.crash.generation}"
    names = {"crash": f"{folder}/crash.json", "log": f"{folder}/crash.log"}
    if root is None:
        names = {"record": f"bisect/{story.id}/record.json", **names}
        found = asyncio.run(_fetched(place, names))
    else:
        found = {key: _read(root / name) for key, name in names.items()}
    missing = [f"{names[key]} is not there: {told}" for key, told in found.items() if isinstance(told, str)]
    return {key: data for key, data in found.items() if isinstance(data, bytes)}, missing


def _read(file: Path) -> bytes | str:
    try:
        return file.read_bytes()
    except OSError as error:
        return error.strerror or str(error)


async def _fetched(place: Place, names: Mapping[str, str]) -> dict[str, bytes | str]:
    async with running(place.client(want=("run",))) as client:
        await client.wait_live(place.patience_s)
        return {key: await _asked(client, name) for key, name in names.items()}


async def _asked(client: Client, name: str) -> bytes | str:
    """A file of the run directory in pages; why not, where it cannot be had."""
    lines: list[str] = []
    end = 0
    for _ in range(PAGES):
        try:
            answer = await client.lines(name, 0, start=end)
        except RltopError as error:
            return error.why or error.what
        if answer.why and answer.end < 0:
            return answer.why
        lines += answer.lines
        if not answer.lines or answer.end <= end:
            break
        end = answer.end
    last = await client.lines(name, 0, before=1)  # the one that no newline ends
    if last.end > end:
        lines += last.lines
    return "\n".join(lines).encode()


def _decoded(data: bytes | None, missing: list[str]) -> Record | None:
    if data is None:
        return None
    import msgspec

    from rltop.daemon.bisect_record import Record

    try:
        return msgspec.json.decode(data, type=Record)
    except ValueError as error:
        missing.append(f"its record cannot be read ({error}): no arguments")
        return None


def _mapping(data: bytes | None) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(data or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


def excerpt(data: bytes, crash: Mapping[str, Any]) -> list[str]:
    """The lines around the first one that the crash was recognised by; without any, the last ones.

    Left out are access lines of requests that went well, most of which are rltop's own readings, and those in which a
    core dump counts the multiprocessors of the GPU (132 of an H200).
    """
    kept = [line for line in without_access(data.decode(errors="replace").splitlines()) if not _COUNTS.search(line)]
    lines = [line[:LONGEST_LINE] for line in kept]
    at = None
    number = crash.get("line")
    for one in crash.get("evidence") or ():
        source, _, rest = str(one).partition(":")
        told, _, text = rest.partition(": ")
        if source and told == str(number) and text:
            at = next((index for index, line in enumerate(lines) if line.startswith(text[:LONGEST_LINE])), None)
    if at is None:
        return lines[-AFTER:]
    return lines[max(0, _traceback(lines, at) - BEFORE) : at + AFTER]


def _traceback(lines: Sequence[str], at: int) -> int:
    """Where the traceback that ends in this line begins; the line itself where there is none."""
    for index in range(at, max(-1, at - LONGEST_TRACEBACK), -1):
        if "Traceback (most recent call last)" in lines[index]:
            return index
    return at
