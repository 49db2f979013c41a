"""What `rltop watch` is to follow, checked before anything starts: logs, Ray, arguments."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rltop.daemon.watched_files import LogFiles, is_pattern, logs_in
from rltop.errors import RltopError
from rltop.evidence.pieces import how_packed, is_binary

DASHBOARD_PORT = 8265
HEAD = 4096
"""Bytes of a log that tell whether it is text."""
AskRay = Callable[[str], Awaitable[Any]]


def checked_logs(logs: Sequence[str], directory: Path) -> list[str]:
    """Absolute paths and patterns, each once. Raises RltopError (exit code 2) for a file that is not there and is no
    pattern, one that cannot be read or is packed, and a directory without logs."""
    found: list[str] = []
    for typed in logs:
        text = os.path.normpath(directory / os.path.expanduser(typed))
        _check_log(typed, text)
        if text not in found:
            found.append(text)
    return found


def _check_log(typed: str, text: str) -> None:
    where = f"watch --log {typed}"
    if not typed.strip():
        raise RltopError("an empty path is no log", where="watch --log", do="rltop watch --log FILE")
    if is_pattern(text):
        return
    path = Path(text)
    if path.is_dir():
        try:
            logs = logs_in(path)
        except OSError as error:
            raise RltopError("the directory can not be read", where=where, why=error.strerror or str(error)) from None
        if not logs:
            why = "no file in it is called *.log, *.err or *.out, nor as Ray calls its own"
            do = f"give the files, or a pattern whose files may come later: --log '{typed.rstrip('/')}/*.txt'"
            raise RltopError("the directory holds no log", where=where, why=why, do=do)
        return
    if not path.exists():
        do = "for a file that is still to come give a pattern: --log 'train*.log'"
        raise RltopError("there is no such file", where=where, do=do)
    if not path.is_file():
        why = "it is a pipe, a socket or a device, whose lines are there for one reader, and once"
        do = "let the run write a file (run … | tee train.log), and rltop watch --log train.log"
        raise RltopError("is neither a file nor a directory", where=where, why=why, do=do)
    try:
        with path.open("rb") as file:
            how = how_packed(file.read(16))
    except OSError as error:
        raise RltopError("can not be read", where=where, why=error.strerror or str(error)) from None
    if how:
        raise RltopError(
            f"is packed with {how[0]}", where=where, why="nobody writes to it any more", do="rltop check it"
        )


def log_doubts(logs: Sequence[str]) -> list[str]:
    """What is no mistake and yet will show nothing, one line each: patterns without a file, files that are no text.

    logs: as `checked_logs` gives them.
    """
    files = LogFiles(logs)
    found = [f"log {name} cannot be read: it is no text ({path})" for name, path in files.find().items() if _odd(path)]
    return found + [f"nothing matches {text} yet; it is looked for again" for text in files.without_files]


def _odd(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_binary(file.read(HEAD))
    except OSError:
        return False  # the daemon says it, if it is still so then


def checked_ray(place: str, directory: Path, ask: AskRay) -> str:
    """URL of Ray's dashboard, or absolute path of a file with the output of `ray status`. Raises RltopError: it is
    neither (exit code 2), or nobody answers there (1)."""
    import asyncio

    from rltop.daemon.watched_cluster import NODES, read_status

    where = f"watch --ray {place}"
    path = Path(os.path.normpath(directory / os.path.expanduser(place)))
    if "://" not in place and path.exists():
        try:
            read_status(path)
        except OSError as error:
            raise RltopError("is no output of `ray status`", where=where, why=str(error)) from None
        return str(path)
    url = _dashboard(place, where)
    try:
        asyncio.run(_asked(ask, f"{url}{NODES}?limit=1"))
    except OSError as error:
        do = "give the address of the dashboard (http://HEAD:8265), or a file with the output of `ray status`"
        raise RltopError("Ray does not answer", where=where, why=str(error), do=do, exit_code=1) from None
    return url


async def _asked(ask: AskRay, url: str) -> None:
    await ask(url)


def _dashboard(place: str, where: str) -> str:
    text = place if "://" in place else f"http://{place}"
    try:
        parts = urllib.parse.urlsplit(text)
        port, host = parts.port, parts.hostname
    except ValueError:
        port, host, parts = None, None, urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not host or port == 0 or any(c.isspace() for c in text):
        why = "http://HOST:PORT of Ray's dashboard, not ray:// nor the port of its GCS"
        raise RltopError(
            "this is no address of a dashboard", where=where, why=why, do="rltop watch --ray http://HEAD:8265"
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port or DASHBOARD_PORT}"


def checked_args(place: str, directory: Path) -> str:
    """Absolute path of a file with arguments. Raises RltopError (exit code 2) where it holds none."""
    from rltop.evidence.launch_file import read_launch_file
    from rltop.evidence.sink import Sink

    path = Path(os.path.normpath(directory / os.path.expanduser(place)))
    try:
        read_launch_file(path, Sink())
    except RltopError as error:
        error.where = f"watch --args {error.where}"
        raise
    return str(path)
