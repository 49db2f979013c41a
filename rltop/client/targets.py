"""Where a run is: on this machine, behind ssh, or behind any prefix that runs a command there and gives a byte pipe.

ssh is the operator's own: its config, agent, jump hosts and second factors work because it is their `ssh` that runs.
It may ask (password, host key) on the terminal only on the first connection, before a dashboard owns the terminal;
every later one runs in batch mode, detached from the terminal, and fails with a sentence instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rltop.client.session import Client
from rltop.client.transport import ConnectionLost, Dial, Transport
from rltop.errors import RltopError
from rltop.protocol.messages import Role
from rltop.runs import RunInfo, read_run
from rltop.runs.own_python import own_python

SSH_OPTIONS = ("-C", "-T", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes")
"""Compression (state shrinks 6 to 35 times), no remote terminal, and neither a RemoteCommand nor a forwarding that the
operator's config sets for interactive logins to this host."""
SYNC_S = 20.0
"""Longest wait for the remote side's first line when nobody can be asked for anything."""

_HOST = re.compile(r"[A-Za-z0-9_.:%\[\]][A-Za-z0-9_.:%\[\]-]*")
_USER = re.compile(r"[A-Za-z0-9_.+@\\][A-Za-z0-9_.+@\\-]*")


@dataclass(frozen=True, slots=True)
class SshTarget:
    """`ssh://[user@]host[:port]/[run]`."""

    host: str
    user: str = ""
    port: int | None = None
    run: str = ""
    """Empty: the newest living run there."""

    @property
    def destination(self) -> str:
        """As ssh takes it."""
        return f"{self.user}@{self.host}" if self.user else self.host


def parse_ssh_target(target: str) -> SshTarget:
    """Raises RltopError on what is not `ssh://[user@]host[:port]/[run]`, and on what ssh could take for an option."""
    form = "ssh://[user@]host[:port]/[run]"
    parts = urlsplit(target)
    try:
        port = parts.port
    except ValueError as error:
        raise RltopError("the port is not a number", where=target, why=str(error), do=f"write it as {form}") from None
    user, _, place = parts.netloc.rpartition("@")
    host = place.rpartition(":")[0] if port is not None else place.rstrip(":")
    if parts.scheme != "ssh" or not host or parts.query or parts.fragment:
        raise RltopError("this is not an ssh target", where=target, do=f"write it as {form}")
    if ":" in user:
        raise RltopError("a password does not belong here", where=target, do="ssh asks for it, or use a key")
    if not _HOST.fullmatch(host) or (user and not _USER.fullmatch(user)):
        raise RltopError("host or user has characters that no host or user has", where=target, do=f"write it as {form}")
    return SshTarget(host.strip("[]"), user, port, parts.path.strip("/"))


def local_client(
    run: RunInfo, *, role: Role = "view", name: str = "", fps: float = 2.0, want: Sequence[str] = ("*",)
) -> Client:
    """Client of a run on this machine, over its view or control socket; of a dead one over an archive of its own.

    Each connection looks anew: a daemon that goes while somebody looks leaves its journal to look at, and one that
    takes up the run is what counts again.
    """

    async def dial() -> Transport:
        from rltop.client.sockets import SocketTransport

        # A daemon that was started again may have other sockets, and may still be on its way.
        now = read_run(run.path) or run
        if not now.alive and role != "control":
            return await _open_archive(now)
        address = now.sockets.get("ctl" if role == "control" else "view")
        if address is None:
            raise ConnectionLost(f"the daemon of run {run.name} is still starting")
        return SocketTransport(address)

    return Client(dial, role=role, name=name, fps=fps, want=want)


async def _open_archive(run: RunInfo) -> Transport:
    """A process of our own that serves the run's journal."""
    from rltop.client.pipe import open_pipe

    def explain(status: int, stderr: str, noise: str) -> ConnectionLost:
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        said = _our_error(lines) or (lines[-1] if lines else f"the archive ended with status {status}")
        return ConnectionLost(said, final=True)

    argv = [*own_python("rltop"), "proxy", "--stdio", "--run-dir", str(run.path)]
    return await open_pipe(argv, explain, sync_timeout_s=None, own_session=True)


def ssh_client(
    target: str,
    *,
    remote_rltop: str = "rltop",
    via: str | None = None,
    role: Role = "view",
    name: str = "",
    fps: float = 2.0,
    want: Sequence[str] = ("*",),
    ask: bool | None = None,
    ssh: Sequence[str] = ("ssh",),
) -> Client:
    """Client of a run on another machine. Raises RltopError on a target that can not be one.

    target: `ssh://[user@]host[:port]/[run]`; with `via` also just a run name, or empty.
    remote_rltop: the command there, one path or several words (`docker exec -i trainer rltop`).
    via: command prefix instead of ssh; it is executed without a shell.
    ask: whether the first connection may prompt on the terminal; None = there is one.
    ssh: the ssh program and options before ours.
    """
    dial = pipe_dial(target, remote_rltop=remote_rltop, via=via, role=role, ask=ask, ssh=ssh)
    return Client(dial, role=role, name=name, fps=fps, want=want)


def pipe_dial(
    target: str, *, remote_rltop: str, via: str | None, role: Role, ask: bool | None, ssh: Sequence[str]
) -> Dial:
    """The connection of `ssh_client`."""
    there = SshTarget("", run=target) if via is not None and "://" not in target else parse_ssh_target(target)
    proxy = ["proxy", "--stdio", "--role", role, *([there.run] if there.run else [])]
    words = shlex.split(remote_rltop)
    if not words:
        raise RltopError("the remote command is empty", where="--remote-rltop")
    place = via.split()[0] if via and via.split() else there.host
    may_ask = _has_terminal() if ask is None else ask

    def argv(batch: bool) -> list[str]:
        return command_there(there, [*words, *proxy], via=via, ssh=ssh, batch=batch)

    def explain(status: int, stderr: str, noise: str) -> ConnectionLost:
        return explain_end(status, stderr, noise, place=place, command=words[0], batch=batch)

    batch = False

    async def dial() -> Transport:
        from rltop.client.pipe import open_pipe

        nonlocal may_ask, batch
        batch, may_ask = not may_ask, False
        return await open_pipe(argv(batch), explain, sync_timeout_s=SYNC_S if batch else None, own_session=batch)

    return dial


def command_there(
    there: SshTarget, words: Sequence[str], *, via: str | None, ssh: Sequence[str] = ("ssh",), batch: bool = False
) -> list[str]:
    """The command line that runs `words` on the other machine. batch: ssh must not ask for anything."""
    if via is not None:
        return [*shlex.split(via), *words]
    port = ["-p", str(there.port)] if there.port is not None else []
    mode = ["-o", "BatchMode=yes"] if batch else []
    return [*ssh, *SSH_OPTIONS, *mode, *port, "--", there.destination, _shell(words)]


def explain_end(status: int, stderr: str, noise: str, *, place: str, command: str, batch: bool) -> ConnectionLost:
    """What the end of the child process means for the operator. Pure.

    status: exit status, negative for a signal. stderr, noise: what the child wrote to stderr and before the magic line.
    place, command: host (or prefix) and the rltop that was started there. batch: ssh was not allowed to ask.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    ours = _our_error(lines)
    said = lines[-1] if lines else ""
    missing = status == 127 or "executable file not found" in stderr
    if ours:
        problem = ours
    elif missing and "/" in command:
        problem = (
            f"there is no {command} there: use --remote-rltop PATH with the path that `command -v rltop` tells there"
        )
    elif missing:
        problem = f"{command} is not on the remote PATH: use --remote-rltop PATH (`command -v rltop` there tells it)"
    elif status == 126:
        problem = f"{command} may not be executed there: {said or 'permission denied'}"
    elif status == 255 and batch and "Permission denied" in said:
        problem = f"{said} (ssh can not ask for a password here: use a key, an agent or a ControlMaster)"
    elif status == 255 or status < 0:
        problem = f"connection ended: {said}" if said else "the connection was cut"
    else:
        said = said or (f"it only printed {noise.strip()[-200:]!r}" if noise.strip() else "it said nothing")
        problem = f"{command} ended with status {status}: {said}"
    return ConnectionLost(f"{place}: {problem}", final=True)


def _our_error(lines: Sequence[str]) -> str:
    """The error that the remote rltop printed (`rltop: what`, `why: …`), as one sentence; empty when there is none."""
    starts = [number for number, line in enumerate(lines) if line.startswith("rltop: ")]
    if not starts:
        return ""
    what, *more = lines[starts[-1] :]
    why = [line.removeprefix("why:").strip() for line in more if line.startswith("why:")]
    return "; ".join([what.removeprefix("rltop: "), *why])


def _shell(words: Sequence[str]) -> str:
    """Words as one line for the remote login shell; a leading `~/` is left for it to expand."""
    return " ".join("~/" + shlex.quote(word[2:]) if word.startswith("~/") else shlex.quote(word) for word in words)


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
