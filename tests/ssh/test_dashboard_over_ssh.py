"""`rltop attach ssh://…` as a person runs it: in a terminal, with plain `ssh` from the PATH."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import rltop
from tests.cli.terminal import terminal
from tests.client.router import SpecDaemon
from tests.daemon.util import Producer, real_daemon
from tests.evidence import dump_files
from tests.ssh.sshd import Sshd


def test_the_dashboard_is_painted_survives_a_cut_and_leaves_with_q(sshd: Sshd, daemon: SpecDaemon) -> None:
    argv = ("attach", "ssh://node7/cedar-1", "--remote-rltop", sshd.rltop)
    with terminal(*argv, env={"PATH": sshd.path_with_ssh}) as screen:
        screen.read_until("cedar-1", "live", "train.nan")
        assert "Welcome to node7" not in screen.text, "the remote profile must not reach the screen"
        with sshd.away():  # a new login may take less time than a frame: then nothing would be seen of the cut
            screen.read_until("lost", behind=len(screen.text))
        screen.read_until("live", behind=len(screen.text))
        screen.type("q")
        assert screen.end() == 0
    assert "\x1b[?1049l" in screen.raw, "the terminal is given back"


def test_dumps_are_read_on_the_other_machine(sshd: Sshd, runs_dir: Path, tmp_path: Path) -> None:
    dump_files.rollout(tmp_path / "kept" / "rollout_data" / "3.pt", 40)
    with real_daemon(runs_dir, "fir-1") as run, Producer(run) as trainer:
        trainer.send("run", {"framework": "slime", "args": {"dump_details": str(tmp_path / "kept")}})
        argv = ("attach", "ssh://node7/fir-1", "--remote-rltop", sshd.rltop)
        with terminal(*argv, env={"PATH": sshd.path_with_ssh}) as screen:
            screen.read_until("fir-1", "live", "slime")
            screen.type("d")
            screen.read_until("rltop dump", "rollout 3", "Sample 0, group 0", "answer 0 is 0")
            screen.type("qq")
            assert screen.end() == 0


def test_a_daemon_that_cannot_read_dumps_is_said(sshd: Sshd, daemon: SpecDaemon) -> None:
    argv = ("attach", "ssh://node7/cedar-1", "--remote-rltop", sshd.rltop)
    with terminal(*argv, env={"PATH": sshd.path_with_ssh}) as screen:
        screen.read_until("cedar-1", "live", "train.nan")
        screen.type("d")
        screen.read_until("older than this rltop")
        screen.type("qq")
        assert screen.end() == 0


def test_a_mistake_is_a_line_in_the_terminal_and_no_dashboard(sshd: Sshd, daemon: SpecDaemon) -> None:
    with terminal("attach", "ssh://node7/cedar-1", env={"PATH": sshd.path_with_ssh}) as screen:
        assert screen.end() == 1
    assert "rltop: node7: rltop is not on the remote PATH: use --remote-rltop PATH" in screen.text
    assert "\x1b[?1049h" not in screen.raw


def test_one_shot_commands_work_over_ssh(sshd: Sshd, daemon: SpecDaemon) -> None:
    env = {"PATH": sshd.path_with_ssh}
    once = rltop("attach", "--once", "ssh://node7", "--remote-rltop", sshd.rltop, env=env)
    assert (once.returncode, once.stderr) == (0, "")
    assert once.stdout.startswith("run cedar-1  running")
    got = rltop("get", "metrics", "--run", "ssh://node7/cedar-1", "--remote-rltop", sshd.rltop, env=env)
    assert got.returncode == 0
    assert "rollout/raw_reward" in got.stdout
