"""What this machine has, before a launch: installed versions, ports that are taken, the Ray cluster it can reach.

Everything is bounded in time and answers with less, never with an error: no Ray, no rights to see other users' sockets
and a package that is not installed are ordinary.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Protocol

import psutil

from rltop.checks.found import RaySnapshot
from rltop.evidence.ray_status import parse

PACKAGES = (
    "rltop",
    "slime",
    "relax",
    "sglang",
    "sglang-router",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "flash-attn",
    "torch",
    "ray",
    "transformers",
    "safetensors",
)
"""Distributions whose versions matter to a run."""
RAY_PATIENCE_S = 15.0


class Host(Protocol):
    """Where a launch would happen. Tests pass their own."""

    def versions(self) -> Mapping[str, str]:
        """Installed distribution -> version, of `PACKAGES` and `python`."""

    def listeners(self, ports: Iterable[int]) -> Mapping[int, str]:
        """Port -> who listens on it (`python, pid 12`), of `ports`."""

    def ray(self, address: str) -> RaySnapshot | None:
        """The cluster's state; an empty address means the one that Ray finds by itself. None: none can be reached."""


class ThisHost:
    """The machine that rltop runs on."""

    def versions(self) -> Mapping[str, str]:
        """Versions in the environment of this Python."""
        found = {"python": ".".join(map(str, sys.version_info[:3]))}
        for name in PACKAGES:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    def listeners(self, ports: Iterable[int]) -> Mapping[int, str]:
        """By the kernel's table of sockets; without rights to see the owner it is `another process`."""
        wanted = set(ports)
        try:
            connections = psutil.net_connections("tcp")
        except (psutil.Error, OSError):
            return {}
        found: dict[int, str] = {}
        for connection in connections:
            port = connection.laddr.port if connection.laddr else None
            if connection.status == psutil.CONN_LISTEN and port in wanted:
                found[port] = _owner(connection.pid)
        return found

    def ray(self, address: str) -> RaySnapshot | None:
        """`ray status` of the installed Ray, in a process of its own: the library would connect this one."""
        program = shutil.which("ray")
        if program is None:
            return None
        argv = [program, "status", *(["--address", address] if address else [])]
        try:
            done = subprocess.run(
                argv, capture_output=True, timeout=RAY_PATIENCE_S, stdin=subprocess.DEVNULL, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        snapshot = parse(done.stdout.decode("utf-8", "replace"), "ray status")
        return snapshot if snapshot.usage or snapshot.nodes else None


def _owner(pid: int | None) -> str:
    if pid is None:
        return "another process"
    try:
        return f"{psutil.Process(pid).name()}, pid {pid}"
    except psutil.Error:
        return f"pid {pid}"
