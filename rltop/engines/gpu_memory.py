"""Which process holds how much memory on which GPU: asked of NVML, else of `nvidia-smi`, else of nobody.

Neither is a dependency. A driver that does not answer, or answers nonsense, is "nobody to ask": an engine is never held
up by it. In a container the driver may show no process, or processes under numbers of the host: then nothing of them
matches, and memory that is still held shows only as an engine that finds too little of it.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

SMI_S = 5.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory on a GPU."""

    index: int
    """In the driver's order (PCI bus)."""
    uuid: str
    pid: int
    mib: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at all GPUs."""

    source: Literal["nvml", "nvidia-smi", "none"]
    holders: tuple[Holder, ...] = ()


def read_gpus() -> Reading:
    """Everybody who holds GPU memory on this machine."""
    return _nvml() or _smi() or Reading("none")


def visible(holders: tuple[Holder, ...], devices: str | None) -> tuple[Holder, ...]:
    """Those on the devices that CUDA_VISIBLE_DEVICES names (indices or UUID prefixes); None: all of them."""
    if devices is None:
        return holders
    wanted = [word.strip() for word in devices.split(",") if word.strip()]
    if any(word.startswith("MIG-") for word in wanted):
        return holders  # parts of a device have UUIDs of their own; rather too many names than too few
    return tuple(
        holder
        for holder in holders
        if any(
            holder.uuid.startswith(word) if word.startswith("GPU-") else word == str(holder.index) for word in wanted
        )
    )


def _nvml() -> Reading | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, no driver, a driver of another version: pynvml has an error class for each
        return None
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(device)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                found.append(Holder(index, _text(uuid), int(process.pid), int(process.usedGpuMemory or 0) // _MIB))
        return Reading("nvml", tuple(found))
    except Exception:
        return None
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _smi() -> Reading | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    gpus = _query(program, "--query-gpu=index,uuid")
    apps = _query(program, "--query-compute-apps=gpu_uuid,pid,used_memory")
    if gpus is None or apps is None:
        return None
    return parse_smi(gpus, apps)


def _query(program: str, what: str) -> str | None:
    try:
        done = subprocess.run(
            [program, what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=SMI_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_smi(gpus: str, apps: str) -> Reading:
    """From `nvidia-smi`'s CSV: lines of `index, uuid` and of `gpu_uuid, pid, MiB`. Any other line is skipped."""
    index = {uuid: int(at) for at, uuid in _cells(gpus, 2) if at.isdigit()}
    found = [
        Holder(index[uuid], uuid, int(pid), int(mib) if mib.isdigit() else 0)
        for uuid, pid, mib in _cells(apps, 3)
        if uuid in index and pid.isdigit()
    ]
    return Reading("nvidia-smi", tuple(found))


def _cells(text: str, count: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == count]


Reader = Callable[[], Reading]
"""What `read_gpus` is, for whoever is given another one."""
