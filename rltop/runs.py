"""Where runs live and how they are found: run directories, their sockets, the registry, and who is alive.

A run is a directory, mode 0700, with `run.json` (mode 0600, written by its daemon once its sockets are bound) and
`lock`, held with flock by the daemon for as long as it lives: the kernel releases it however the daemon dies, so
liveness is never guessed from a process id, which may have been given to somebody else.

A run may lie anywhere (`RLTOP_DIR` in a batch job, another `XDG_STATE_HOME`), and whoever looks for it later comes in
through another login with another environment. So every daemon also leaves a link in one registry whose place depends
on nothing but the user id.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.errors import RltopError

SOCKET_NAMES = ("ingest", "view", "ctl")
MAX_SOCKET_PATH_BYTES = 100
"""A unix socket path may have 107 bytes on Linux; the rest is room for a proxy that adds a suffix."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade", "kelp", "lark")
_NETWORK_FS = frozenset(
    {"9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs"}
)
"""File systems on which SQLite's WAL (shared memory) or flock cannot be trusted. `fuse.*` counts too, see `fs_type`."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, alive or dead, as its `run.json` and its lock describe it."""

    name: str
    path: Path
    """The run directory."""
    pid: int
    """Process id of the daemon; of the last one when `alive` is false."""
    started: float
    """Wall clock, seconds since the epoch."""
    alive: bool
    """A daemon holds the lock right now."""
    sockets: dict[str, str]
    """`ingest`, `view`, `ctl` -> `ipc://…`. Empty while the daemon is still starting."""
    command: list[str]
    """The trainer's argv when the daemon started it, else the daemon's own."""
    version: str
    host: str = ""


# ---------------------------------------------------------------- directories


def fs_type(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that `path` (or its nearest existing parent) lies on; "" when unknown.

    mounts: text in the format of /proc/mounts, default that file itself.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    target = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[1]))
        # Later lines are mounted over earlier ones at the same point, hence >=.
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def on_network_disk(path: Path, mounts: str | None = None) -> bool:
    """True where SQLite's WAL must not be used."""
    kind = fs_type(path, mounts)
    return kind in _NETWORK_FS or (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs")


def private_dir(path: Path) -> Path:
    """Make `path` (parents too) as a 0700 directory of this user, or check that it is one.

    Raises RltopError when it cannot be made, is a link, belongs to somebody else, or others may enter.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = path.lstat()
    except OSError as error:
        raise RltopError(
            "cannot make the directory", where=str(path), why=error.strerror or str(error), do="set RLTOP_DIR elsewhere"
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RltopError(
            "is not a directory of this user",
            where=str(path),
            why=f"owner uid {info.st_uid}, you are uid {os.getuid()}",
            do="remove it, or set RLTOP_DIR to a directory of yours",
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _candidates() -> list[Path]:
    if explicit := os.environ.get("RLTOP_DIR"):
        return [Path(explicit).expanduser().absolute()]
    found = []
    if state := os.environ.get("XDG_STATE_HOME"):
        found.append(Path(state) / "rltop")
    with contextlib.suppress(RuntimeError):  # no home directory at all
        found.append(Path.home() / ".local" / "state" / "rltop")
    return [*found, _shared_base()]


def _shared_base() -> Path:
    return Path(f"/var/tmp/rltop-{os.getuid()}")


def runs_root() -> Path:
    """Directory that holds new runs, made if need be: `$RLTOP_DIR/runs`, else `runs` under the first of
    `$XDG_STATE_HOME/rltop`, `~/.local/state/rltop`, `/var/tmp/rltop-<uid>` that is on a local disk and can be written.

    An explicit RLTOP_DIR is taken even on a network disk (the journal then does without WAL).
    Raises RltopError naming every place that was tried.
    """
    explicit = bool(os.environ.get("RLTOP_DIR"))
    tried = []
    for base in _candidates():
        if not explicit and on_network_disk(base):
            tried.append(f"{base} is on a network disk ({fs_type(base)})")
            continue
        try:
            if base == _shared_base():  # its parent is open to everybody; the others lie where the user decided
                private_dir(base)
            root = private_dir(base / "runs")
        except RltopError as error:
            if explicit:
                raise
            tried.append(f"{base}: {error.what} ({error.why})")
            continue
        if os.access(root, os.W_OK | os.X_OK):
            return root
        tried.append(f"{root} cannot be written")
    raise RltopError(
        "no place for run directories", why="; ".join(tried), do="set RLTOP_DIR to a directory on a local disk"
    )


def registry_dir() -> Path:
    """The per-user folder of links to all run directories on this machine; independent of the environment."""
    return private_dir(private_dir(_shared_base()) / "registry")


def register(run_dir: Path) -> None:
    """Leave a link to `run_dir` in the registry. Idempotent.

    Raises RltopError when the registry cannot be made, OSError when the link cannot.
    """
    link = registry_dir() / _digest(run_dir)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(run_dir.absolute(), target_is_directory=True)


def socket_paths(run_dir: Path, temp: Path | None = None) -> dict[str, Path]:
    """Socket name -> path: in `sock/` of the run directory or, where that is longer than 100 bytes, under a per-user
    folder of the temporary directory (`temp`, default the system's). The folder is made, mode 0700."""
    folder = run_dir.absolute() / "sock"
    if _longest(folder) > MAX_SOCKET_PATH_BYTES:
        base = (temp or Path(tempfile.gettempdir())).absolute() / f"rltop-{os.getuid()}"
        if _longest(base / _digest(run_dir)) > MAX_SOCKET_PATH_BYTES:
            base = Path(f"/tmp/rltop-{os.getuid()}")
        private_dir(base)
        folder = base / _digest(run_dir)
    private_dir(folder)
    return {name: folder / f"{name}.sock" for name in SOCKET_NAMES}


def _longest(folder: Path) -> int:
    return max(len(os.fsencode(folder / f"{name}.sock")) for name in SOCKET_NAMES)


def _digest(run_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:12]


# ---------------------------------------------------------------- names


def check_name(name: str) -> str:
    """`name` if it can be a run's name (a file name, a word in `ssh://host/name`); raises RltopError otherwise."""
    if not _NAME.fullmatch(name):
        raise RltopError(
            f"{name!r} cannot be the name of a run",
            why="a name has 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
            do="--name qwen3-4b-try2",
        )
    return name


def new_name(taken: Iterable[str]) -> str:
    """A name like `cedar-3`; the number grows by one from run to run and picks the word."""
    numbers = [int(found[1]) for name in taken if (found := re.fullmatch(r"[a-z]+-(\d{1,9})", name))]
    number = max(numbers, default=0) + 1
    return f"{_WORDS[(number - 1) % len(_WORDS)]}-{number}"


def make_run_dir(name: str | None, root: Path | None = None) -> Path:
    """The directory of run `name`, made if need be (an existing one is continued); None makes a new one."""
    root = root or runs_root()
    if name is not None:
        return private_dir(root / check_name(name))
    while True:
        path = root / new_name(entry.name for entry in root.iterdir())
        with contextlib.suppress(FileExistsError):  # somebody else took the name just now
            path.mkdir(mode=0o700)
            return path


# ---------------------------------------------------------------- liveness


def acquire_lock(run_dir: Path) -> int:
    """Take the run's lock for this process; returns the file descriptor, which must stay open. Its content is our pid.

    Raises RltopError when a daemon holds it or the disk takes nothing.
    """
    path = run_dir / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise RltopError("cannot lock the run directory", where=str(path), why=str(error)) from error
        raise RltopError(
            f"a daemon is already running for run {run_dir.name!r}",
            where=str(run_dir),
            why=f"process {holder or 'unknown'} holds {path.name}",
            do=f"rltop attach {run_dir.name}, or rltop down {run_dir.name} first",
        ) from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise _unwritable(path, error) from error
    return fd


def _unwritable(path: Path, error: OSError) -> RltopError:
    return RltopError(
        "cannot write in the run directory",
        where=str(path),
        why=error.strerror or str(error),
        do="make room on that disk, or set RLTOP_DIR elsewhere",
    )


def lock_holder(run_dir: Path) -> int | None:
    """Pid of the living daemon of a run; None when there is none. 0: alive, but it has not yet said its pid."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(fd, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    else:
        return None
    finally:
        os.close(fd)


# ---------------------------------------------------------------- looking


def write_run_json(run_dir: Path, fields: Mapping[str, Any]) -> None:
    """Write `run.json` atomically, mode 0600. Raises RltopError when the disk does not take it."""
    temporary = run_dir / "run.json.tmp"
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(dict(fields), file, indent=1, ensure_ascii=False)
            file.write("\n")
        temporary.replace(run_dir / "run.json")
    except OSError as error:
        raise _unwritable(run_dir / "run.json", error) from error


def read_run(run_dir: Path) -> RunInfo | None:
    """What is known about the run in `run_dir`; None when no daemon ever got as far as writing `run.json`."""
    try:
        raw = (run_dir / "run.json").read_text(encoding="utf-8")
        changed = (run_dir / "run.json").stat().st_mtime
    except OSError:
        return None
    try:
        fields = json.loads(raw)
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    holder = lock_holder(run_dir)
    sockets = fields.get("sockets")
    command = fields.get("command")
    return RunInfo(
        name=run_dir.name,
        path=run_dir,
        pid=holder or int(_number(fields.get("pid"), 0)),
        started=_number(fields.get("started"), changed),
        alive=holder is not None,
        sockets={str(k): str(v) for k, v in sockets.items()} if isinstance(sockets, dict) else {},
        command=[str(word) for word in command] if isinstance(command, list) else [],
        version=str(fields.get("version", "")),
        host=str(fields.get("host", "")),
    )


def _number(value: object, default: float) -> float:
    return value if isinstance(value, (int, float)) else default


def list_runs() -> list[RunInfo]:
    """All runs of this user on this machine, newest first, dead ones too.

    With RLTOP_DIR set only the runs in it; otherwise those in the default places and in the registry, whatever
    environment they were started with. Links to directories that are gone are removed from the registry.
    """
    folders: dict[Path, None] = {}
    for base in _candidates():
        with contextlib.suppress(OSError):
            folders.update(dict.fromkeys(entry.resolve() for entry in (base / "runs").iterdir() if entry.is_dir()))
    if not os.environ.get("RLTOP_DIR"):
        folders.update(dict.fromkeys(_registered()))
    found = [run for folder in folders if (run := read_run(folder)) is not None]
    return sorted(found, key=lambda run: run.started, reverse=True)


def _registered() -> list[Path]:
    try:
        links = list(registry_dir().iterdir())
    except (RltopError, OSError):
        return []  # no registry on this machine: then there is nothing in it
    found = []
    for link in links:
        target = link.resolve()
        try:
            ours = target.is_dir() and target.stat().st_uid == os.getuid()
        except OSError:
            ours = False
        if ours:
            found.append(target)
        else:
            with contextlib.suppress(OSError):
                link.unlink()
    return found


def find_run(name: str | None = None) -> RunInfo:
    """The run called `name`, alive or dead (a living one wins over a dead namesake); None: the newest living run.

    Raises RltopError that names the candidates, or the host on which the run's daemon lives.
    """
    runs = list_runs()
    living = [run for run in runs if run.alive]
    if name is None:
        if not living:
            dead = ", ".join(run.name for run in runs[:5])
            raise RltopError(
                "no run is alive",
                why=f"dead ones: {dead}" if dead else "no run was ever started here by this user",
                do="rltop demo, or rltop up CONFIG",
            )
        found = living[0]
    else:
        check_name(name)
        matching = [run for run in (*living, *runs) if run.name == name]
        if not matching:
            known = ", ".join(f"{run.name} ({'alive' if run.alive else 'dead'})" for run in runs[:8])
            raise RltopError(
                f"there is no run {name!r}", why=f"known: {known}" if known else "no run is known", do="rltop ps"
            )
        found = matching[0]
    here = socket.gethostname()
    if found.alive and found.host and found.host != here:
        raise RltopError(
            f"run {found.name!r} lives on another machine",
            where=str(found.path),
            why=f"its daemon is on {found.host}, this is {here}; unix sockets do not cross machines",
            do=f"rltop attach ssh://{found.host}/{found.name}",
        )
    return found
