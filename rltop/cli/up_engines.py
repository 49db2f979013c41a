"""`[engines]` of `rltop up`: engines that can not be launched fail the command, as a trainer does that dies at once.

What can be told before (arguments, model path, an interpreter without the server) is told before anything starts, with
its line. What only the server's process can tell (a module that it needs and that is not there) is told if it does so
within `EARLY_S`; later it is an event of the run, for the fleet tries again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltop.config import Place
from rltop.errors import RltopError
from rltop.runs import RunInfo

EARLY_S = 2.0
"""Python needs less to find that a module is missing; an engine that loads is not waited for."""
POLL_S = 0.05
_FAILED = frozenset({"CRASHED", "BACKOFF", "QUARANTINED"})
_UNDECIDED = frozenset({"STOPPED", "LAUNCHING", "LOADING", "RECLAIMING"})


def refuse_unstartable(table: Mapping[str, Any], place: Place, env: Mapping[str, str]) -> None:
    """Raises RltopError, with the line, for engines of the daemon's that no process could be made of.

    env: of the daemon. On other machines (`launcher = "ray"`) only the arguments are judged.
    """
    if "model_path" not in table:
        return
    # Not at the top: a run without engines of its own reads none of SGLang's tables.
    from rltop.daemon.engine_commands import Wrong, slots_of
    from rltop.daemon.engines import EngineOptions
    from rltop.engines.planning import problem_of

    options = EngineOptions.of({"engines": dict(table)})
    assert options is not None, "the table is there"
    try:
        slots = slots_of(options.slots)
    except Wrong as wrong:
        raise _refused(str(wrong), place.at("engines", "model_path"), wrong.rejected.do) from None
    for slot in slots:
        if (problem := problem_of(slot)) is not None:
            key = "args" if table.get("args") else "model_path"
            raise _refused(problem.why, place.at("engines", key), problem.do)
    if table.get("launcher", "local") == "local":
        _look_here(table, place, env)


def _look_here(table: Mapping[str, Any], place: Place, env: Mapping[str, str]) -> None:
    from rltop.engines.interpreter import unfit

    model, python = str(table["model_path"]), str(table.get("python") or "")
    path, cpu = Path(model), table.get("kind") == "cpu"
    if (path / "config.json").exists() or (path.exists() and not cpu):
        pass
    elif cpu or path.exists() or path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        # `owner/name` may be a model of the Hub, which SGLang fetches itself.
        why = f"{path} has no config.json" if path.exists() else f"there is no {path}"
        do = "model_path is a checkpoint's folder: config.json, tokenizer, *.safetensors"
        raise _refused(f"their checkpoint can not be read: {why}", place.at("engines", "model_path"), do)
    if python and shutil.which(python, path=env.get("PATH", os.environ.get("PATH"))) is None:
        why = f"python = {python}: {'it is not executable' if Path(python).exists() else 'there is no such program'}"
        do = "name the interpreter that has the server installed, with its whole path"
        raise _refused(why, place.at("engines", "python"), do)
    kind, given = table.get("kind", "sglang"), table.get("env") or {}
    python = python or sys.executable
    if (found := unfit(kind, python, {**os.environ, **env, **given})) is not None:
        key = "python" if table.get("python") else "kind" if "kind" in table else "model_path"
        do = "python = the interpreter that has the server installed, with its whole path"
        raise _refused(f"{python}: {found.why}", place.at("engines", key), do)


def _refused(why: str, where: str, do: str) -> RltopError:
    return RltopError("the engines can not be started", where=where, why=why, do=do)


def generations(run_dir: Path) -> dict[str, int]:
    """Engine -> its newest generation, by the slot files of a run; of a run that was never there nothing."""
    return {name: int(slot.get("generation") or 0) for name, slot in _slots(run_dir).items()}


def refuse_early_end(run: RunInfo, before: Mapping[str, int], count: int, *, within_s: float = EARLY_S) -> None:
    """Wait a moment for engines that die as soon as they are started. Raises RltopError when every one did.

    before: `generations` before the start; count: how many are started.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        new = {
            name: slot
            for name, slot in _slots(run.path).items()
            if int(slot.get("generation") or 0) > before.get(name, 0)
        }
        failed = [name for name, slot in new.items() if slot.get("state") in _FAILED]
        if len(failed) >= count:
            slot = new[failed[0]]
            log = run.path / "engines" / failed[0] / str(slot["generation"]) / "stdout.log"
            raise RltopError(
                f"the engines of run {run.name!r} ended at once",
                where=str(log),
                why=str(slot.get("cause") or slot.get("fingerprint")),
                do=f"less {log}",
            )
        if len(new) >= count and not any(slot.get("state") in _UNDECIDED for slot in new.values()):
            return
        time.sleep(POLL_S)


def _slots(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The slot files as they are; the fleet writes each whole, and they are only looked at."""
    found = {}
    for file in (run_dir / "engines").glob("*/slot.json"):
        try:
            slot = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(slot, dict):
            found[file.parent.name] = slot
    return found
