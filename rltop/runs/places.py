"""Where run directories, the registry and sockets lie. Pure paths, but for the 0700 directories that it makes.

A run may lie anywhere (`RLTOP_DIR` in a batch job, another `XDG_STATE_HOME`), and whoever looks for it later comes in
through another login with another environment. So the registry's place depends on nothing but the user id.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from rltop.errors import RltopError

SOCKET_NAMES = ("ingest", "view", "ctl")
MAX_SOCKET_PATH_BYTES = 100
"""A unix socket path may have 107 bytes on Linux; the rest is room for a proxy that adds a suffix."""
_NETWORK_FS = frozenset(
    {"9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs"}
)
"""File systems on which SQLite's WAL (shared memory) or flock cannot be trusted. `fuse.*` counts too, see `fs_type`."""


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


def candidates() -> list[Path]:
    if explicit := os.environ.get("RLTOP_DIR"):
        return [Path(explicit).expanduser().absolute()]
    found = []
    if state := os.environ.get("XDG_STATE_HOME"):
        found.append(Path(state) / "rltop")
    with contextlib.suppress(RuntimeError):  # no home directory at all
        found.append(Path.home() / ".local" / "state" / "rltop")
    return [*found, shared_base()]


def shared_base() -> Path:
    return Path(f"/var/tmp/rltop-{os.getuid()}")


def runs_root() -> Path:
    """Directory that holds new runs, made if need be: `$RLTOP_DIR/runs`, else `runs` under the first of
    `$XDG_STATE_HOME/rltop`, `~/.local/state/rltop`, `/var/tmp/rltop-<uid>` that is on a local disk and can be written.

    An explicit RLTOP_DIR is taken even on a network disk (the journal then does without WAL).
    Raises RltopError naming every place that was tried.
    """
    explicit = bool(os.environ.get("RLTOP_DIR"))
    tried = []
    for base in candidates():
        if not explicit and on_network_disk(base):
            tried.append(f"{base} is on a network disk ({fs_type(base)})")
            continue
        try:
            if base == shared_base():  # its parent is open to everybody; the others lie where the user decided
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
    return private_dir(private_dir(shared_base()) / "registry")


def socket_paths(run_dir: Path, temp: Path | None = None) -> dict[str, Path]:
    """Socket name -> path: in `sock/` of the run directory or, where that is longer than 100 bytes, under a per-user
    folder of the temporary directory (`temp`, default the system's). The folder is made, mode 0700."""
    folder = run_dir.absolute() / "sock"
    if _longest(folder) > MAX_SOCKET_PATH_BYTES:
        base = (temp or Path(tempfile.gettempdir())).absolute() / f"rltop-{os.getuid()}"
        if _longest(base / dir_digest(run_dir)) > MAX_SOCKET_PATH_BYTES:
            base = Path(f"/tmp/rltop-{os.getuid()}")
        private_dir(base)
        folder = base / dir_digest(run_dir)
    private_dir(folder)
    os.utime(folder)  # it is in use from now on: not a leftover, though nobody listens yet
    return {name: folder / f"{name}.sock" for name in SOCKET_NAMES}


def _longest(folder: Path) -> int:
    return max(len(os.fsencode(folder / f"{name}.sock")) for name in SOCKET_NAMES)


def dir_digest(run_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:12]
