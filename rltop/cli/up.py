"""`rltop up CONFIG.toml`: a daemon, and under it the trainer that the file describes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rltop import runs
from rltop.cli.extra import require_train
from rltop.cli.files import read_text
from rltop.cli.output import note, print_json
from rltop.cli.own_trainer import refusal
from rltop.cli.signals import held, raised
from rltop.cli.up_engines import generations, refuse_early_end, refuse_unstartable
from rltop.config import Place, UpConfig, parse_up
from rltop.errors import RltopError
from rltop.evidence.known import table_path, with_table
from rltop.keys import parse_listen
from rltop.runs import RunInfo
from rltop.runs.own_python import own_python

EARLY_S = 1.0
"""A trainer that ends within this time after its start has not started: a wrong path, a missing import."""


def up(path: Path, *, name: str | None, as_json: bool, ingest_tcp: str = "") -> int:
    """Start what the file says and return as soon as the daemon answers. The run's name goes to stdout.

    Raises RltopError with `file:line` for a wrong file, and what the start raises.
    """
    from rltop.daemon.slime_trainer import SlimeOptions
    from rltop.daemon.spawn import early_end, log_tail, start_daemon
    from rltop.daemon.supervisor import size_of
    from rltop.train.arguments import TrainConfig
    from rltop.train.flags import flag_names, negated_names

    if ingest_tcp:
        try:
            parse_listen(ingest_tcp)
        except ValueError as error:
            raise RltopError(
                "not an address to listen at", where=f"up: --ingest-tcp {ingest_tcp}", why=str(error)
            ) from None
    text = read_text(path, "can not read the file", do="rltop up FILE.toml: a file with a table [trainer] or [engines]")
    config = parse_up(text, where=str(path), trainer_flags=[*flag_names(TrainConfig), *negated_names(TrainConfig)])
    trainer = trainer_command(config, str(path))
    checks = dict(config.checks)
    if (crashes := table_path(checks, path.absolute().parent, where=f"{path} [checks]")) is not None:
        with_table(crashes)  # a table that can not be used is said here, not in the log of a daemon
        checks["known_crashes"] = str(crashes)
    if argv := config.checks.get("on_fail"):
        checks["on_fail"] = _hook(argv, path, text)
    refuse_unstartable(config.engines or {}, Place(str(path), text), config.env)
    known = name or config.name
    before = generations(runs.runs_root() / runs.check_name(known)) if known else {}
    log_from = size_of(runs.runs_root() / runs.check_name(known) / "trainer.log") if known else 0
    with raised(), _whole_or_nothing() as keep:
        with held():  # Ctrl-C in the middle of a start ends what was started, behind it
            run = start_daemon(
                name or config.name,
                trainer=trainer,
                env=config.env,
                ingest_tcp=ingest_tcp or config.ingest_tcp,
                config={
                    "file": str(path.absolute()),
                    "env": sorted(config.env),  # names only: values may be secrets
                    "checks": checks,
                    **({} if config.engines is None and config.command else {"engines": config.engines or {}}),
                },
            )
            keep(run)
        if not trainer:
            refuse_early_end(run, before, int((config.engines or {}).get("count", 1)))
        ended = early_end(run, within_s=EARLY_S, log_from=log_from) if trainer else None
        if ended is not None and ended.state != "done":
            log = run.path / "trainer.log"
            raise ended_at_once(run.name, log, ended.text, log_tail(log, log_from))
        keep(None)
    slime = SlimeOptions.of(config.engines or {})
    if as_json:
        more = {} if slime is None else {"slime_flags": slime.flags()}
        print_json({"run": run.name, "pid": run.pid, "path": str(run.path), "command": run.command, **more})
    else:
        print(run.name)
    state = "is up" if ended is None else "is up, its trainer is done already"
    note(f"run {run.name} {state}: rltop attach {run.name}   (rltop down {run.name} stops it)")
    if slime is not None:
        note("start slime, once they serve, with " + " ".join(slime.flags()))
    return 0


def ended_at_once(name: str, log: Path, how: str, tail: str) -> RltopError:
    """The error of a trainer that ended; one that said itself what is wrong, as rltop does, is told in its words."""
    what = f"the trainer of run {name!r} ended at once"
    if (own := _OWN_WORDS.search(tail)) is not None:
        do = own["do"] or f"less {log}"
        return RltopError(f"{what}: {own['head']}", where=str(log), why=own["why"] or how, do=do, exit_code=1)
    why = f"{how}; its log ends:\n{tail or '(it is empty)'}"
    return RltopError(what, where=str(log), why=why, do="mend that, or start its command by itself", exit_code=1)


_OWN_WORDS = re.compile(
    r"^rltop: (?P<head>[^\n]+)(?:\n  why: (?P<why>(?:(?!\n  do:  |\nrltop: ).)*))?(?:\n  do:  (?P<do>[^\n]+))?\s*\Z",
    re.MULTILINE | re.DOTALL,
)
"""An `RltopError` at the end of a log."""


@contextlib.contextmanager
def _whole_or_nothing() -> Iterator[Callable[[RunInfo | None], None]]:
    """What was started is stopped again when the block is left by an exception. The block says what that is."""
    from rltop.daemon.spawn import stop_daemon

    started: list[RunInfo | None] = [None]
    try:
        yield lambda run: started.__setitem__(0, run)
    except BaseException:
        if (run := started[0]) is not None:
            with held(lambda: note("still stopping …")):
                stop_daemon(run)
            note(f"run {run.name} is down again")
        raise


def trainer_command(config: UpConfig, where: str) -> list[str]:
    """argv of the trainer. What `rltop train` would refuse is refused first, so that a mistake names its line."""
    if not config.trainer:
        return []
    if config.command:
        return [_program(config, where), *config.command[1:]]
    from rltop.train.arguments import TrainConfig
    from rltop.train.flags import switch_names

    require_train("up")
    switches = switch_names(TrainConfig)
    for flag, word in itertools.pairwise(config.flags):
        if flag in switches and not word.startswith("--"):
            key = flag.removeprefix("--").replace("-", "_")
            place = f"{where}:{config.lines.get(flag, 1)}"
            raise RltopError(f"{key} must be true or false, not {word!r}", where=place, do=f"{key} = true")
    if (refused := refusal(config.flags, config.lines, where, {**os.environ, **config.env})) is not None:
        raise refused
    return [*own_python("rltop"), "train", *config.flags]


def _hook(argv: list[str], path: Path, text: str) -> list[str]:
    """`on_fail` as the daemon can run it from anywhere: a program with a `/` is seen from the configuration's folder.

    Raises RltopError with its line when there is none, or it may not be run.
    """
    program = Path(argv[0]).expanduser()
    if "/" in argv[0]:
        program = path.absolute().parent / program
    if shutil.which(program, path=os.environ.get("PATH")) is None:
        found = "/" in argv[0] and program.exists()
        raise RltopError(
            f"can not run on_fail: {argv[0]}",
            where=f"{path}:{Place(str(path), text).line('checks', 'on_fail')}",
            why=f"{program} is not executable" if found else f"there is no {program}",
            do=f"chmod +x {program}, or name an interpreter" if found else "a path is seen from the file's own folder",
        )
    return [str(program), *argv[1:]]


def _program(config: UpConfig, where: str) -> str:
    """The program of a `command`, looked for as the trainer's own environment would."""
    program = config.command[0]
    if shutil.which(program, path=config.env.get("PATH", os.environ.get("PATH"))) is None:
        line = config.lines.get("command")
        found = Path(program).exists() if "/" in program else False
        raise RltopError(
            f"can not start the trainer: {program}",
            where=where if line is None else f"{where}:{line}",
            why="it is not executable" if found else "there is no such program",
            do=f"chmod +x {program}, or name an interpreter" if found else "name it with its whole path",
        )
    return program
