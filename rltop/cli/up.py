"""`rltop up CONFIG.toml`: a daemon, and under it the trainer that the file describes."""

from __future__ import annotations

import sys
from pathlib import Path

from rltop.cli.extra import require_train
from rltop.cli.output import note, print_json
from rltop.config import UpConfig, parse_up
from rltop.errors import RltopError


def up(path: Path, *, name: str | None, as_json: bool) -> int:
    """Start what the file says and return as soon as the daemon answers. The run's name goes to stdout.

    Raises RltopError with `file:line` for a wrong file, and what the start raises.
    """
    from rltop.daemon.spawn import start_daemon
    from rltop.train.arguments import TrainConfig
    from rltop.train.flags import flag_names

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RltopError("can not read the file", where=str(path), why=str(error)) from None
    config = parse_up(text, where=str(path), trainer_flags=flag_names(TrainConfig))
    run = start_daemon(
        name or config.name,
        trainer=trainer_command(config, str(path)),
        env=config.env,
        config={"file": str(path.absolute()), "env": sorted(config.env)},  # names only: values may be secrets
    )
    if as_json:
        print_json({"run": run.name, "pid": run.pid, "path": str(run.path), "command": run.command})
    else:
        print(run.name)
    note(f"run {run.name} is up: rltop attach {run.name}   (rltop down {run.name} stops it)")
    return 0


def trainer_command(config: UpConfig, where: str) -> list[str]:
    """argv of the trainer; the flags of `rltop train` are checked first, so that a mistake names its line."""
    if config.command:
        return list(config.command)
    from rltop.train.arguments import parse_args

    require_train("up")
    try:
        parse_args(config.flags)
    except RltopError as error:
        flag = error.where.split()[0].partition("=")[0] if error.where else ""
        line = config.lines.get(flag)
        if line is None:
            raise
        raise RltopError(error.what, where=f"{where}:{line}: {error.where}", why=error.why, do=error.do) from None
    return [sys.executable, "-m", "rltop", "train", *config.flags]
