"""What a launcher does: start, watch and end the process tree of one generation of one engine slot, on some machine.

A launcher knows processes, never health: it does not talk to the engine. `rltop.engines.local` runs engines on this
machine, `rltop.engines.ray_launcher` in bundles of a Ray placement group; both put `rltop.engines.host` to work, the
one here, the other in an actor there.

Failure policy. What cannot be started is one `RltopError`. `LostNode` means that the machine itself is gone, so nothing
about the processes can be known or done. Any other `RltopError` of `look`, `read_log`, `terminate`, `kill` or `remains`
means "no answer this time" and says nothing about the engine: ask again. Nothing is ever signalled by its number alone:
a process is ours by birth (pid and start time) or by its marker.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rltop.errors import RltopError

MARKER = "RLTOP_ENGINE"
"""Environment variable of every process of an engine: `<run>/<id>/<generation>`."""

DIRECTORY = "RLTOP_ENGINE_DIR"
"""Environment variable beside it: the generation's directory. Two runs of one name, under different roots, are two."""

SHOWN = ("CUDA_", "SGLANG_", "SGL_", "NCCL_", "NVSHMEM_", "TORCH_", "PYTORCH_", "TRITON_", "OMP_")
"""Prefixes of the environment variables that may leave an engine's machine."""

LOG = "stdout.log"
NOTHING = "it printed nothing"
"""What an error says of an engine whose log is empty."""
CRASH_DUMP = "--crash-dump-folder"
"""SGLang's: at its end it writes the requests of its last five minutes there."""
CRASH_DUMP_FOLDER = "crash_dump"
"""In the generation's directory."""
RECORD = "record.json"
PORT = "port"


Kind = Literal["cpu", "null", "sglang"]
"""What is started: the CPU engine, the null engine (both rltop's stand-ins), or SGLang."""
STAND_INS: frozenset[str] = frozenset({"cpu", "null"})
"""They bind a free port themselves, die with `--parent-pid`, and are cheap to ask for a checksum."""


class LostNode(RltopError):
    """The machine of an engine is gone (Ray: its node is dead). A new placement may be tried."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_lost, (self.what, self.where, self.why, self.do, self.exit_code))


def _lost(what: str, where: str, why: str, do: str, exit_code: int) -> LostNode:
    return LostNode(what, where=where, why=why, do=do, exit_code=exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One generation of one slot. Plain data: it is stored in the slot's file and sent to other machines."""

    run: str
    engine_id: str
    generation: int
    kind: Kind
    model_path: str
    directory: str
    """`<run_dir>/engines/<id>/<generation>` on the engine's host; receives `stdout.log`, `record.json` and `port`."""
    lock: str
    """`<run_dir>/engines/<id>/lock`: an flock that is free only when every process of the slot is gone. The keeper
    holds it until then, and the engine inherits the descriptor in case the keeper is killed."""
    python: str
    """Interpreter that has the server installed."""
    host: str = "127.0.0.1"
    """Address to bind. In a Ray bundle the default becomes the node's own address."""
    port: int = 0
    """0: a stand-in binds a free one itself; for SGLang one is chosen and kept free before the start."""
    args: tuple[str, ...] = ()
    """The server's argv without `--model-path`, `--host`, `--port` and `--enable-metrics`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the environment of the launcher's process."""
    unset: tuple[str, ...] = ()
    """Variables that the engine must not inherit (`CUDA_LAUNCH_BLOCKING` off)."""
    place: Mapping[str, Any] | None = None
    """Ray: `{"placement_group": name, "bundle": index}` of a group that somebody made, or
    `{"resources": {"CPU": 1, "GPU": 2}}` for a group of the launcher's own. None: one CPU."""

    @property
    def marker(self) -> str:
        """Value of `RLTOP_ENGINE`."""
        return f"{self.run}/{self.engine_id}/{self.generation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """An engine that was started, by this process or an earlier one."""

    marker: str
    pid: int
    """Leader of the engine's session and process group: SGLang's main process."""
    birth: str
    """Boot id and start in clock ticks: with `pid` it names one process for ever."""
    keeper_pid: int
    """Its parent, which writes down how it ended (0: not known)."""
    node: str
    """Name of the machine, for people."""
    node_id: str = ""
    """Ray's id of it."""
    host: str
    """Address under which the HTTP API is reached (the port comes with `Look.port`)."""
    directory: str
    log: str
    launcher: Literal["local", "ray"]
    started: float
    """Wall clock, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is seen of an engine's processes at one glance."""

    alive: bool
    """The leader runs (a zombie does not)."""
    exit_code: int | None
    """How the leader ended; negative: the signal. None while it runs, and when nobody knows (its keeper was killed)."""
    ended: float | None
    """Wall clock, seconds."""
    port: int
    """0: not known yet."""
    log_size: int
    """Bytes."""
    children: tuple[tuple[int, str], ...]
    """Living descendants of the engine other than its leader, orphans included: (pid, name). Refreshed about once a
    second, and at once when the leader is gone."""
    lock_held: bool
    """Somebody holds the slot's lock: no new generation can start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """Memory that a process holds on a GPU."""

    index: int
    pid: int
    mib: int
    name: str
    """Of the process; "" when it cannot be seen."""
    ours: bool
    """It belongs to this engine (also when it is gone and the driver has not given its memory back yet)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """What is left of an engine after its end. Takes a look at every process: not for every tick."""

    processes: tuple[tuple[int, str], ...] = ()
    """(pid, name) of this engine's living processes."""
    lock_holders: tuple[tuple[int, str], ...] = ()
    """(pid, name) of who holds the slot's lock, the keeper included; pid 0: somebody who cannot be seen."""
    port_holder: str = ""
    """Who listens on the engine's port, in words; "" when it is free. A stranger may have taken it by now."""
    gpu: tuple[GpuUse, ...] = ()
    """Who holds memory on the GPUs that the engine could see. A process that is not ours is named, never killed.
    Other engines of the run, and its trainer, are left out: that they share a GPU is nothing to wait for or to tell."""
    gpu_source: Literal["nvml", "nvidia-smi", "none"] = "none"
    """Where `gpu` comes from; "none": there is no GPU, or nobody to ask."""

    @property
    def clean(self) -> bool:
        """Nothing of this engine is left and its lock is free. What strangers hold (GPU memory, the port) is told, but
        it will not go away by waiting for this engine."""
        return not (self.processes or self.lock_holders or any(use.ours for use in self.gpu))


def marks(marker: str, directory: str | Path) -> dict[str, str]:
    """What the environment of every process of an engine says; together they are nobody else's on this machine."""
    return {MARKER: marker, DIRECTORY: os.path.realpath(directory)}


def server_argv(kind: Kind, python: str, args: Sequence[str], port_file: Path, env: Mapping[str, str]) -> list[str]:
    """The command of a server. Metrics are always on; a stand-in also writes the port that it found.

    env: what the engine gets on top of its launcher's environment. No server imports what happens to lie in the current
    directory: see `own_python`. SGLang does where its settings name modules of the user's, and where it is not known
    that the interpreter has `-P`. PYTHONSAFEPATH would be no remedy: every program below the engine would inherit it.
    """
    match kind:
        case "cpu" | "null":
            module = f"rltop.train.{kind}_engine"
            return [python, "-P", "-m", module, "--enable-metrics", "--port-file", str(port_file), *args]
        case "sglang":
            safe = ["-P"] if has_safe_path(python) and not _names_modules(args, env) else []
            return [python, *safe, "-m", "sglang.launch_server", "--enable-metrics", *args]


_MODULE_FLAGS = ("--custom-weight-loader", "--forward-hooks")
_MODULE_VARIABLES = ("SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE")
"""SGLang's settings that name Python modules: as by hand, they may lie in the current directory."""


def _names_modules(args: Sequence[str], env: Mapping[str, str]) -> bool:
    flags = {word.partition("=")[0] for word in args}
    return not flags.isdisjoint(_MODULE_FLAGS) or any(env.get(name, os.environ.get(name)) for name in _MODULE_VARIABLES)


def has_safe_path(python: str) -> bool:
    """Whether this interpreter is known to have `-P` (3.11 and later). It is not run: it may be a script that enters a
    container first."""
    found = shutil.which(python)
    if found is None:
        return False
    if found == sys.executable:
        return True
    version = re.search(r"^version(?:_info)?\s*=\s*(\d+)\.(\d+)", _text(Path(found).parent.parent / "pyvenv.cfg"), re.M)
    version = version or re.fullmatch(r"python(\d+)\.(\d+)", os.path.basename(os.path.realpath(found)))
    return version is not None and (int(version[1]), int(version[2])) >= (3, 11)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class Launcher(Protocol):
    """Processes of engines, wherever they run. Raises as the module says."""

    name: str

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start a generation. Returns when the process exists, long before it serves.

        Raises RltopError: the slot's lock is held (by an orphan, or another start), the port is taken, the directory
        or the interpreter cannot be used.
        """
        ...

    async def look(self, launched: Launched) -> Look:
        """A glance, cheap enough for every 0.25 s. Raises LostNode when the machine is gone."""
        ...

    async def read_log(self, launched: Launched, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes of its output from byte `offset` on; b"" at the end, and when there is none."""
        ...

    async def terminate(self, launched: Launched) -> None:
        """SIGTERM to the leader alone (SGLang takes a scheduler that was terminated beside it for a crash)."""
        ...

    async def kill(self, launched: Launched) -> None:
        """SIGKILL to the leader, its session, every descendant seen so far, the keeper's orphans and whoever carries
        the marker. Returns when they are gone or after a few seconds: `remains` says. Safe to repeat."""
        ...

    async def remains(self, launched: Launched) -> Remains:
        """What is left of it."""
        ...

    async def environ(self, launched: Launched) -> dict[str, str] | None:
        """What the leader has in its environment of what changes an engine (`SHOWN`): never a secret of others. None
        when it cannot be seen, or is no longer that process."""
        ...

    async def adopt(self, directory: str, marker: str) -> Launched | None:
        """The engine that an earlier process started there, found by marker and birth, never by pid alone.

        Dead or alive: `look` says which, and how it ended. None: no such engine was ever started there. LostNode: it
        was started on a machine that is gone.
        """
        ...

    async def close(self) -> None:
        """Let go of what the launcher itself holds. The engines go on."""
        ...
