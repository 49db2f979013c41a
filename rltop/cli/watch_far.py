"""`rltop watch ssh://host --log FILE`: the daemon runs beside the log, the dashboard here.

`rltop watch … --headless --json` is run on the other machine, so everything that is typed is looked at there and its
mistakes are said there; then the dashboard attaches to the run that it printed. Without `--keep` the run is stopped
when the dashboard is left; a connection that is gone by then is said, and how to stop the run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from rltop.cli.connect import Place
from rltop.cli.output import note, print_json
from rltop.cli.watch import Subjects
from rltop.client.targets import SshTarget, command_there, explain_end, parse_ssh_target
from rltop.errors import RltopError
from rltop.tui.text import clean_lines

START_S = 180.0
"""A second factor may be typed meanwhile."""
STOP_S = 60.0

Run = Callable[[list[str], float], "subprocess.CompletedProcess[str]"]


def watch_far(
    place: Place,
    subjects: Subjects,
    *,
    name: str | None,
    control: bool,
    keep: bool,
    headless: bool,
    as_json: bool,
    ascii_only: bool,
    run: Run | None = None,
) -> int:
    """Start the run there, show it, stop it. Raises RltopError, also with what rltop there says."""
    if not headless:
        from rltop.cli.attach import require_terminal

        require_terminal("watch", "rltop watch ssh://HOST … --headless; then rltop attach ssh://HOST/RUN")
    far = _Far(place, run or _run)
    if far.there.run:
        do = f"rltop watch ssh://{far.there.host} … --name {far.there.run}"
        raise RltopError("the run there gets its name by --name", where=f"watch {place.target}", do=do)
    words = [*_words(subjects), *(["--name", name] if name else []), "--headless", "--json"]
    done = far(words, START_S)
    found = _answer(done.stdout)
    own = f"run {found['run']} goes on"  # said below, with this machine's commands
    for line in clean_lines(done.stderr):
        if line.strip() and not line.startswith(own):
            note(f"{far.where}: {line}")
    target = str(found["run"]) if place.via is not None else f"{(place.target or '').rstrip('/')}/{found['run']}"
    again = f"rltop attach {target}" + (f" --via {shlex.quote(place.via)}" if place.via is not None else "")
    if headless:
        note(f"{own}: {again}")
        if as_json:
            print_json({key: value for key, value in found.items() if key != "schema"})
        else:
            print(found["run"])
        return 0
    from rltop.cli.attach import attach

    shown = Place(target, remote_rltop=place.remote_rltop, via=place.via)
    try:
        return attach(shown, control=control, name="", fps=2.0, ascii_only=ascii_only)
    finally:
        if keep:
            note(f"{own}: {again}")
        else:
            _stop(far, str(found["run"]))


def _stop(far: _Far, name: str) -> None:
    try:
        far(["down", name], STOP_S)
    except RltopError as error:
        note(f"run {name} may go on there ({error}): rltop down {name} stops it")


def _words(subjects: Subjects) -> list[str]:
    words = ["watch"]
    for flag, values in (("--log", subjects.logs), ("--engine", subjects.engines)):
        for value in values:
            words += [flag, value]
    for flag, value in (("--ray", subjects.ray), ("--args", subjects.args)):
        words += [flag, value] if value else []
    return [*words, "--from", subjects.start]


def _answer(said: str) -> dict[str, Any]:
    """The object that rltop printed there; a shell's profile may have printed before it."""
    at = -1
    while (at := said.find("{", at + 1)) >= 0:
        try:
            found, _ = json.JSONDecoder().raw_decode(said[at:])
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("run"), str):
            return found
    raise RltopError(
        "rltop there did not say which run it started", where="watch", why=said.strip()[-300:] or "nothing"
    )


class _Far:
    """Runs rltop on the other machine and gives what it printed. Raises RltopError where it failed."""

    def __init__(self, place: Place, run: Run) -> None:
        target = place.target or ""
        self.there = SshTarget("", run=target) if place.via is not None else parse_ssh_target(target)
        self._via = place.via
        self.where = self._via.split()[0] if self._via and self._via.split() else self.there.host
        self._rltop = shlex.split(place.remote_rltop)
        self._run = run
        if not self._rltop:
            raise RltopError("the remote command is empty", where="--remote-rltop")

    def __call__(self, words: Sequence[str], patience_s: float) -> subprocess.CompletedProcess[str]:
        argv = command_there(self.there, [*self._rltop, *words], via=self._via)
        try:
            done = self._run(argv, patience_s)
        except FileNotFoundError:
            raise RltopError(f"{argv[0]} is not installed on this machine", where="watch", exit_code=1) from None
        except subprocess.TimeoutExpired:
            raise RltopError(f"no answer within {patience_s:.0f} s", where=self.where, exit_code=1) from None
        if done.returncode != 0:
            lost = explain_end(
                done.returncode, done.stderr, done.stdout, place=self.where, command=self._rltop[0], batch=False
            )
            code = done.returncode if done.returncode in (1, 2) else 1
            raise RltopError(lost.problem, where="watch", exit_code=code)
        return done


def _run(argv: list[str], patience_s: float) -> subprocess.CompletedProcess[str]:
    # stdin stays the terminal's: ssh asks there for what it needs.
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=patience_s, check=False)
