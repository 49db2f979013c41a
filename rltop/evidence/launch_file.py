"""One file that says with what arguments a run was started: a launch script, a list of flags, a printed table or
namespace, or Ray's runtime environment as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from rltop.checks.found import Document
from rltop.checks.observe import Args, Where
from rltop.errors import RltopError
from rltop.evidence.args import TABLE_START, ArgsBuilder, namespace, parse_args, parse_words, table_row
from rltop.evidence.launch_script import read_script
from rltop.evidence.pieces import is_binary
from rltop.evidence.settings import without_secret, without_unread
from rltop.evidence.sink import Sink

MOST = 4 << 20
_DO = "give the launch script, a file of flags, the arguments that the run printed, or the runtime environment as JSON"


def read_launch_file(path: Path, sink: Sink) -> None:
    """Put the arguments and the environment that a file holds into the sink.

    Raises RltopError (exit code 2): it cannot be read, or holds neither.
    """
    text, source = _text(path), path.name
    args, env = _read(text, source, path)
    if not args.flags and not env:
        raise RltopError("holds no arguments", where=str(path), why="there is no flag and no variable in it", do=_DO)
    if args.flags:
        sink.args.append(args)
    if env:
        sink.documents.append(Document("env", source, {name: without_secret(name, env[name]) for name in env}))
    sink.files.append(source)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST + 1)
    except OSError as error:
        raise RltopError("can not be read", where=str(path), why=error.strerror or str(error), do=_DO) from None
    if is_binary(data[:4096]):
        raise RltopError("is no text", where=str(path), do=_DO)
    if len(data) > MOST:
        raise RltopError("is too long for a launch", where=str(path), why="it has more than 4 MiB", do=_DO)
    return data.decode("utf-8", "replace")


def _read(text: str, source: str, path: Path) -> tuple[Args, dict[str, str]]:
    """Arguments and environment; empty where the text has none."""
    if text.lstrip().startswith("{"):
        return _json(text, source, path)
    if TABLE_START.search(text) or "Namespace(" in text:
        return _printed(text, source), {}
    launch = read_script(text, source, os.environ, directory=str(path.parent))
    words = ((word.text, word.line) for word in launch.words)
    found = parse_words(words, source) if launch.words else parse_args(text, source)
    known, _ = without_unread(found)
    return known, dict(launch.env)


def _json(text: str, source: str, path: Path) -> tuple[Args, dict[str, str]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise RltopError("is no JSON", where=f"{path}:{line}", why=str(error), do=_DO) from None
    values = found.get("env_vars")
    if isinstance(values, dict):
        return Args(), {str(name): str(value) for name, value in values.items()}
    flags = {str(name).lstrip("-").replace("-", "_"): value for name, value in found.items() if _plain(value)}
    return Args(flags, "", Where(source, 1)), {}


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list)


def _printed(text: str, source: str) -> Args:
    """Megatron's table, or a namespace, anywhere in the text."""
    builder = ArgsBuilder()
    for number, line in enumerate(text.splitlines(), 1):
        if row := table_row(line):
            builder.put(*row, number)
        elif "Namespace(" in line:
            for name, value in (namespace(line[line.find("Namespace(") :]) or {}).items():
                builder.put(name, value, number)
    return replace(builder.build(Where(source, 1)), repeats={})
