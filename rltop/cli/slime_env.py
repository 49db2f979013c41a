"""`rltop slime-env`: the Ray runtime env that attaches a slime job, as one line of JSON.

    ray job submit --runtime-env-json "$(rltop slime-env --start my-run)" -- python3 train.py …
    rltop attach my-run

The job brings rltop along (`py_modules`), so that every node can import the hook; `--path` and `--installed` are for
clusters on which it lies already. The engines' and the trainers' environment gets the address of the daemon and nothing
else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rltop
from rltop import keys as key_files
from rltop import runs
from rltop.cli.files import read_text
from rltop.cli.output import note, print_json
from rltop.errors import RltopError
from rltop.integrations import preflight as checks
from rltop.runs import RunInfo

CHAIN = "RLTOP_SLIME_SETUP_PATH"
KEY = "slime"
WHERE = "slime-env"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for."""

    run: str | None = None
    """A living run; None: the newest."""
    start: str | None = None
    """Begin a run of this name that owns nothing and waits for records."""
    ingest_tcp: str = ""
    key_file: Path | None = None
    merge: str = ""
    path: str = ""
    installed: bool = False
    preflight: bool = False
    ray: str = "auto"


def slime_env(wanted: Wanted, *, as_json: bool) -> int:
    """Print it. Raises RltopError."""
    if wanted.path and wanted.installed:
        raise RltopError("--path and --installed exclude each other", where=WHERE)
    merged = read_env(wanted.merge) if wanted.merge else {}
    run, started = _run(wanted)
    try:
        ingest = ingest_of(run, wanted.key_file)
        env, notes = with_hook(merged, run=run.name, ingest=ingest, path=wanted.path, installed=wanted.installed)
        nodes = []
        if wanted.preflight:
            nodes = checks.preflight(env, address=wanted.ray, ingest=ingest)
            checks.refuse(nodes)
            notes.append(f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} can import the hook and reach the daemon")
    except BaseException:
        if started:
            from rltop.daemon.spawn import stop_daemon

            stop_daemon(run)
        raise
    for text in notes:
        note(text)
    if as_json:
        print_json({"run": run.name, "runtime_env": env, "notes": notes, "nodes": [asdict(node) for node in nodes]})
    else:
        print(json.dumps(env))
    return 0


def _run(wanted: Wanted) -> tuple[RunInfo, bool]:
    """The run to stream into, and whether it was begun here."""
    if wanted.start is None:
        if wanted.ingest_tcp:
            raise RltopError("--ingest-tcp goes with --start: a daemon listens from its start on", where=WHERE)
        run = runs.find_run(wanted.run)
        if not run.alive:
            do = f"rltop slime-env --start {run.name}"
            raise RltopError(f"run {run.name!r} has no living daemon", where=WHERE, why="nothing would listen", do=do)
        return run, False
    if wanted.run is not None:
        raise RltopError("--run and --start exclude each other", where=WHERE)
    from rltop.daemon.spawn import start_daemon

    if wanted.ingest_tcp:
        try:
            key_files.parse_listen(wanted.ingest_tcp)
        except ValueError as error:
            where = f"{WHERE}: --ingest-tcp {wanted.ingest_tcp}"
            raise RltopError("not an address to listen at", where=where, why=str(error)) from None
    run = start_daemon(wanted.start, config={"watch": {"engines": []}}, ingest_tcp=wanted.ingest_tcp)
    note(f"run {run.name} waits for records: rltop attach {run.name}   (rltop down {run.name} stops it)")
    return run, True


def ingest_of(run: RunInfo, key_file: Path | None) -> str:
    """The value of RLTOP_INGEST: the unix socket for workers of this machine, and TCP with a key for all others."""
    local = run.sockets.get("ingest", "")
    folder = run.path / "keys"
    listen = key_files.read_listen(folder)
    if listen is None:
        if key_file is not None:
            raise RltopError(
                f"run {run.name!r} does not listen on TCP, so no key is of use",
                where=f"{WHERE}: --key-file",
                do="rltop slime-env --start NAME --ingest-tcp HOST:PORT",
            )
        return local
    if key_file is None:
        path = key_files.known_client(folder, KEY) or key_files.add_client(folder, KEY)
    else:
        path = key_file.absolute()
        if not path.is_file():
            path = key_files.add_client(folder, path.stem, path)
        elif key_files.read_pair(path).public not in key_files.clients(folder):
            do = f"rltop keys {path.stem} --out NEWFILE --run {run.name}"
            raise RltopError("run does not know this key", where=str(path), why=f"it is not of {run.name!r}", do=do)
    return " ".join(filter(None, (local, key_files.Ingest(listen[0], listen[1], path).url())))


def read_env(given: str) -> dict[str, Any]:
    """A runtime env from JSON, or from a file of JSON or YAML. Raises RltopError."""
    text, where = given, "--merge"
    if not given.lstrip().startswith("{"):
        where = given
        do = "--merge FILE.yaml, FILE.json or the JSON itself"
        text = read_text(Path(given), "cannot read the runtime env", do=do)
    try:
        env = _yaml(text) if where.endswith((".yaml", ".yml")) else json.loads(text)
    except ValueError as error:
        raise RltopError("not a runtime env", where=where, why=str(error), do="JSON, as Ray takes it") from None
    if not isinstance(env, dict) or not isinstance(env.get("env_vars", {}), dict):
        raise RltopError("not a runtime env", where=where, why="it must be a map, and env_vars in it a map too")
    return env


def with_hook(
    given: Mapping[str, Any], *, run: str, ingest: str, path: str, installed: bool
) -> tuple[dict[str, Any], list[str]]:
    """The runtime env with the hook in it, and what people should know. Nothing that was there is lost."""
    env, notes = dict(given), []
    variables = {str(name): str(value) for name, value in dict(given.get("env_vars") or {}).items()}
    for name, value in (("RLTOP_INGEST", ingest), ("RLTOP_RUN", run)):
        if variables.get(name, value) != value:
            notes.append(f"{name} was {variables[name]} and is now {value}")
        variables[name] = value
    if path:
        known = variables.get("PYTHONPATH", "")
        if path not in known.split(":"):
            # Behind theirs: no module of the job is shadowed by one that happens to lie there.
            variables["PYTHONPATH"] = f"{known}:{path}" if known else path
    elif not installed:
        modules = list(given.get("py_modules") or [])
        package = str(Path(rltop.__file__).parent)
        env["py_modules"] = modules if package in modules else [*modules, package]
    hook = given.get("worker_process_setup_hook")
    if hook is not None and not isinstance(hook, str):
        raise RltopError("the setup hook that is there cannot be kept", where="--merge", why="it is not a dotted path")
    if hook and hook != checks.HOOK:
        variables[CHAIN] = hook
        notes.append(f"the setup hook {hook} runs after rltop's ({CHAIN})")
    env |= {"env_vars": variables, "worker_process_setup_hook": checks.HOOK}
    if path and not (Path(path) / "rltop").is_dir():
        # It may lie on the nodes alone: that is what --path is for.
        notes.append(f"there is no {path.rstrip('/')}/rltop on this machine: it must be there on every node")
    if "curve://" not in ingest:
        notes.append("only workers on this machine reach the daemon; for others: --start NAME --ingest-tcp HOST:PORT")
    return env, notes


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("YAML needs PyYAML, which is not installed here: give JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
