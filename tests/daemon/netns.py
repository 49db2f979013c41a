"""Two hosts for tests: this one, and a network namespace behind a veth pair; or this one twice over TCP loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """Where the daemon listens, and how to run something on the other host."""

    listen: str
    """Address of this host that the other one reaches."""
    other: str
    """Address of the other host."""
    prefix: tuple[str, ...]
    """Put before a command line, it runs on the other host."""
    what: str
    """For the test's output."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """A namespace of its own where this process may make one; else loopback, and `what` says why."""
    why = "not root" if os.geteuid() else "" if shutil.which("ip") else "no `ip` (apt-get install iproute2)"
    if why:
        yield Hosts("127.0.0.1", "127.0.0.1", (), f"TCP loopback: {why}")
        return
    name, number = f"rltop-{os.getpid()}", os.getpid() % 250 + 1
    here, there = f"198.18.{number}.1", f"198.18.{number}.2"  # RFC 2544: for tests of networks
    try:
        _ip("netns", "add", name)
        _ip("link", "add", f"rt{number}a", "type", "veth", "peer", "name", f"rt{number}b", "netns", name)
        _ip("addr", "add", f"{here}/30", "dev", f"rt{number}a")
        _ip("link", "set", f"rt{number}a", "up")
        _ip("-n", name, "addr", "add", f"{there}/30", "dev", f"rt{number}b")
        _ip("-n", name, "link", "set", f"rt{number}b", "up")
    except (subprocess.CalledProcessError, OSError) as error:
        _remove(name)
        said = str(getattr(error, "stderr", "") or error).strip()
        yield Hosts("127.0.0.1", "127.0.0.1", (), f"TCP loopback: no network namespace here ({said})")
        return
    try:
        yield Hosts(here, there, ("ip", "netns", "exec", name), f"network namespace {name}, {there} -> {here}")
    finally:
        _remove(name)


def _remove(name: str) -> None:
    # The veth pair goes with the namespace.
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def run_there(hosts: Hosts, command: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command on the other host and wait for its end."""
    line = [*hosts.prefix, *command]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
