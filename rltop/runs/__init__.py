"""Runs on this machine: where they lie (`places`), what they are called (`names`), who is alive (`lock`), and how they
are listed and found (`registry`). What is used everywhere is exported here."""

from rltop.runs.lock import acquire_lock, lock_holder, show_life
from rltop.runs.names import check_name, make_run_dir, new_name
from rltop.runs.places import (
    MAX_SOCKET_PATH_BYTES,
    SOCKET_NAMES,
    dir_digest,
    fs_type,
    on_network_disk,
    private_dir,
    registry_dir,
    runs_root,
    shared_base,
    socket_paths,
)
from rltop.runs.registry import RunInfo, find_run, list_runs, mark_rehearsal, read_run, register, write_run_json

__all__ = [
    "MAX_SOCKET_PATH_BYTES",
    "SOCKET_NAMES",
    "RunInfo",
    "acquire_lock",
    "check_name",
    "dir_digest",
    "find_run",
    "fs_type",
    "list_runs",
    "lock_holder",
    "make_run_dir",
    "mark_rehearsal",
    "new_name",
    "on_network_disk",
    "private_dir",
    "read_run",
    "register",
    "registry_dir",
    "runs_root",
    "shared_base",
    "show_life",
    "socket_paths",
    "write_run_json",
]
