"""ssh targets, the command line that is run, and what its end means for the operator."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rltop.client import ConnectionLost, parse_ssh_target, ssh_client
from rltop.client.targets import explain_end, pipe_dial
from rltop.errors import RltopError


@pytest.mark.parametrize(
    ("target", "destination", "port", "run"),
    [
        ("ssh://node7", "node7", None, ""),
        ("ssh://node7/", "node7", None, ""),
        ("ssh://me@node7:2222/cedar-1", "me@node7", 2222, "cedar-1"),
        ("ssh://me@corp.example@gate.example/x", "me@corp.example@gate.example", None, "x"),
        ("ssh://[fe80::1%eth0]:22/x", "fe80::1%eth0", 22, "x"),
        ("ssh://my_alias", "my_alias", None, ""),
    ],
)
def test_targets(target: str, destination: str, port: int | None, run: str) -> None:
    parsed = parse_ssh_target(target)
    assert (parsed.destination, parsed.port, parsed.run) == (destination, port, run)


@pytest.mark.parametrize(
    "target",
    [
        "node7",
        "ssh://",
        "ssh:///run",
        "ssh://-oProxyCommand=x/run",
        "ssh://-l@host",
        "ssh://h:99999/x",
        "ssh://h:x/y",
        "ssh://me:secret@host",
        "ssh://ho st/x",
        "ssh://$(id)/x",
        "http://host/x",
    ],
)
def test_what_is_no_target_is_refused_before_ssh_sees_it(target: str) -> None:
    with pytest.raises(RltopError):
        ssh_client(target)


def echo_argv(tmp_path: Path) -> Path:
    """A program that writes its arguments to a file, one a line."""
    program = tmp_path / "fake-ssh"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {shlex.quote(str(tmp_path / 'argv'))}\nexit 255\n")
    program.chmod(0o755)
    return program


async def test_the_remote_command_is_quoted_for_the_remote_shell(tmp_path: Path) -> None:
    dial = pipe_dial(
        "ssh://me@node7:2222/cedar-1",
        remote_rltop="~/my\\ venv/bin/rltop",
        via=None,
        role="control",
        ask=True,
        ssh=[str(echo_argv(tmp_path))],
    )
    with pytest.raises(ConnectionLost):
        await dial()
    first = (tmp_path / "argv").read_text().splitlines()
    assert first[-4:-2] == ["2222", "--"]
    assert first[-2] == "me@node7"
    assert first[-1] == "~/'my venv/bin/rltop' proxy --stdio --role control cedar-1"
    assert "BatchMode=yes" not in first, "the first connection may ask"
    with pytest.raises(ConnectionLost):
        await dial()
    assert "BatchMode=yes" in (tmp_path / "argv").read_text().splitlines(), "later ones may not"


async def test_via_runs_a_prefix_without_a_shell(tmp_path: Path) -> None:
    dial = pipe_dial(
        "cedar-1",
        remote_rltop="rltop",
        via=f"{echo_argv(tmp_path)} exec -i 'my pod' --",
        role="view",
        ask=False,
        ssh=["ssh"],
    )
    with pytest.raises(ConnectionLost):
        await dial()
    words = ["exec", "-i", "my pod", "--", "rltop", "proxy", "--stdio", "--role", "view", "cedar-1"]
    assert (tmp_path / "argv").read_text().splitlines() == words


async def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    dial = pipe_dial("", remote_rltop="rltop", via=str(tmp_path / "no"), role="view", ask=False, ssh=["ssh"])
    with pytest.raises(ConnectionLost, match="is not installed on this machine"):
        await dial()


async def test_the_pipe_speaks_behind_noise_and_its_end_tells_stderr(tmp_path: Path) -> None:
    program = tmp_path / "remote.py"
    program.write_text(
        "import sys\n"
        "from rltop.protocol.codec import STDIO_MAGIC, encode, to_pipe\n"
        "from rltop.protocol.messages import Ping\n"
        "out = sys.stdout.buffer\n"
        "out.write(b'Welcome to node7! \\x00 RLTOP?\\n' + STDIO_MAGIC + to_pipe(encode('pong', Ping(), re='1')))\n"
        "out.flush()\n"
        "sys.stdin.buffer.read(4)\n"
        "sys.exit('rltop: the daemon of run cedar-1 went away')\n"
    )
    via = shlex.join([sys.executable, str(program)])
    dial = pipe_dial("", remote_rltop="rltop", via=via, role="view", ask=False, ssh=["ssh"])
    transport = await dial()
    assert (await transport.receive())[0] == b"RL1"
    await transport.send([b"RL1", b"", b""])
    with pytest.raises(ConnectionLost, match="the daemon of run cedar-1 went away") as raised:
        await transport.receive()
    assert raised.value.final is False, "it worked before, so it is worth another try"
    await transport.close()


@pytest.mark.parametrize(
    ("status", "stderr", "noise", "problem"),
    [
        (
            127,
            "bash: line 1: rltop: command not found\n",
            "",
            "n7: rltop is not on the remote PATH: use --remote-rltop",
        ),
        (1, 'exec: "rltop": executable file not found in $PATH: unknown', "", "n7: rltop is not on the remote PATH"),
        (2, "noise\nrltop: there is no run 'x' (known: cedar-1 (alive))\n", "", "n7: there is no run 'x' (known"),
        (255, "ssh: Could not resolve hostname n7\r\n", "", "n7: connection ended: ssh: Could not resolve hostname n7"),
        (255, "me@n7: Permission denied (publickey).", "", "use a key, an agent or a ControlMaster"),
        (-9, "", "", "n7: the connection was cut"),
        (126, "sh: rltop: Permission denied", "", "n7: rltop may not be executed there: sh: rltop: Permission denied"),
        (0, "", "Account locked.\n", "n7: rltop ended with status 0: it only printed 'Account locked.'"),
        (1, "", "", "n7: rltop ended with status 1: it said nothing"),
    ],
)
def test_the_end_of_the_remote_side_is_one_sentence(status: int, stderr: str, noise: str, problem: str) -> None:
    lost = explain_end(status, stderr, noise, place="n7", command="rltop", batch=True)
    assert problem in lost.problem
    assert "\n" not in lost.problem


def test_a_missing_path_is_named() -> None:
    lost = explain_end(127, "sh: 1: /opt/rltop: not found", "", place="n7", command="/opt/rltop", batch=True)
    assert "there is no /opt/rltop there: use --remote-rltop PATH" in lost.problem
