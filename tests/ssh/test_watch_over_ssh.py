"""`rltop watch ssh://host --log FILE` through a real sshd: the daemon is over there, beside the log."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.connect import Place
from rltop.cli.watch import Subjects
from rltop.cli.watch_far import watch_far
from rltop.client import ssh_client
from rltop.daemon.spawn import stop_daemon
from rltop.errors import RltopError
from rltop.runs import find_run
from tests.client.waiting import until
from tests.daemon.slime_log import Plan, text
from tests.ssh.sshd import Sshd

PATIENCE_S = 60.0
HEADLESS: dict[str, Any] = {"control": False, "keep": False, "headless": True, "as_json": False, "ascii_only": False}


def test_a_log_over_there_is_watched_from_here(
    sshd: Sshd, runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train of today.log"
    log.write_text(text(Plan(rollouts=2, dies_in=None)))

    def ssh(argv: list[str], patience_s: float) -> subprocess.CompletedProcess[str]:
        words = [*sshd.ssh, *argv[1:]]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    place = Place("ssh://node7", remote_rltop=sshd.rltop)
    with pytest.raises(RltopError, match="node7: watch --log /none: there is no such file") as raised:
        watch_far(place, Subjects(logs=["/none"]), name=None, run=ssh, **HEADLESS)
    assert raised.value.exit_code == 2
    assert watch_far(place, Subjects(logs=[str(log)]), name="far-1", run=ssh, **HEADLESS) == 0
    assert capsys.readouterr().out == "far-1\n"
    try:
        asyncio.run(_sees(sshd))
    finally:
        stop_daemon(find_run("far-1"))


async def _sees(sshd: Sshd) -> None:
    client = ssh_client("ssh://node7/far-1", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    task = asyncio.ensure_future(client.run())
    try:
        await client.wait_live(PATIENCE_S)
        await until(client, lambda: "metric/train/grad_norm" in client.mirror.state)
        assert client.mirror.state["log/train of today.log"]["state"] == "followed"
    finally:
        await client.close()
        await task
