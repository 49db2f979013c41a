"""Attach over SSH through a real sshd: chatty profiles, no rltop on the PATH, cut connections, wrong keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rltop.client import Client, ssh_client
from rltop.client.session import FIRST_RETRY_S, LAST_RETRY_S
from rltop.errors import RltopError
from tests.client.router import SpecDaemon
from tests.client.waiting import until
from tests.daemon.util import Producer, Viewer, real_daemon
from tests.ssh.sshd import Sshd

PATIENCE_S = 60.0


def retries_take(attempts: int) -> float:
    """Seconds that the client waited in all before it made so many attempts, `session.FIRST_RETRY_S` doubling."""
    return sum(min(FIRST_RETRY_S * 2.0**number, LAST_RETRY_S) for number in range(attempts))


@contextlib.asynccontextmanager
async def attached(client: Client) -> AsyncIterator[Client]:
    task = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        await client.close()
        await task


async def test_a_chatty_profile_does_not_disturb_the_wire(sshd: Sshd, daemon: SpecDaemon) -> None:
    client = ssh_client("ssh://node7/cedar-1", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    async with attached(client):
        await client.wait_live(PATIENCE_S)
        assert client.mirror.state["run"]["name"] == "cedar-1"
        daemon.change(lambda model: model.set("phase", {"name": "update_weights"}))
        await until(client, lambda: client.mirror.state["phase"]["name"] == "update_weights")
        series = await client.series(["rollout/raw_reward"])
        assert len(series["rollout/raw_reward"]) == 2


async def test_rltop_that_is_not_on_the_remote_path_is_said(sshd: Sshd, daemon: SpecDaemon) -> None:
    async with attached(ssh_client("ssh://node7", ssh=sshd.ssh, ask=False)) as client:
        with pytest.raises(
            RltopError, match="node7: rltop is not on the remote PATH: use --remote-rltop PATH"
        ) as raised:
            await client.wait_live(PATIENCE_S)
        assert raised.value.exit_code == 1


async def test_a_run_that_is_not_there_names_those_that_are(sshd: Sshd, daemon: SpecDaemon) -> None:
    client = ssh_client("ssh://node7/nosuch", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    async with attached(client):
        with pytest.raises(RltopError, match=r"node7: there is no run 'nosuch'; known: cedar-1 \(alive\)"):
            await client.wait_live(PATIENCE_S)


async def test_a_key_that_is_not_accepted_is_one_sentence(sshd: Sshd, daemon: SpecDaemon) -> None:
    (sshd.folder / "authorized_keys").write_text("")
    client = ssh_client("ssh://node7", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    async with attached(client):
        with pytest.raises(RltopError, match=r"Permission denied \(publickey\).*use a key"):
            await client.wait_live(PATIENCE_S)


async def test_a_cut_connection_keeps_the_picture_and_is_back_within_five_seconds(
    sshd: Sshd, daemon: SpecDaemon
) -> None:
    client = ssh_client("ssh://node7/cedar-1", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    async with attached(client):
        await client.wait_live(PATIENCE_S)
        before = dict(client.mirror.state)
        sshd.cut()
        await until(client, lambda: client.status == "lost")
        last_frame, attempts = client.since, client.attempts
        assert client.problem.startswith("node7: ")
        assert client.mirror.state == before
        daemon.change(lambda model: model.set("phase", {"name": "eval"}))
        assert client.since == last_frame, "the age grows from the last frame, not from the last attempt"
        await until(client, lambda: client.status == "live")
        assert client.mirror.state["phase"]["name"] == "eval"
        assert client.since > last_frame
        assert retries_take(client.attempts - attempts) < 5, "waits of the client; the rest is ssh itself"


async def test_a_machine_that_can_not_be_reached_is_retried_until_it_can(sshd: Sshd, daemon: SpecDaemon) -> None:
    login = (sshd.folder / "login").read_text()
    (sshd.folder / "login").write_text("#!/bin/sh\nexit 255\n")
    client = ssh_client("ssh://node7/cedar-1", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    async with attached(client):
        await until(client, lambda: client.attempts >= 2)
        assert client.status == "connecting"
        assert client.problem == "node7: the connection was cut"
        (sshd.folder / "login").write_text(login)
        await until(client, lambda: client.status == "live")


async def test_a_dead_run_is_shown_from_its_journal(sshd: Sshd, runs_dir: Path) -> None:
    with real_daemon(runs_dir, "dead-1") as run, Producer(run) as producer, Viewer(run) as viewer:
        producer.send("run", {"framework": "rltop", "args": {}, "mode": "full", "start_rollout_id": 0})
        producer.metrics(7, rollout__raw_reward=0.25)
        producer.send("bye", {"reason": "done"})
        viewer.hello()
        viewer.until_event(kind="run", state="done")
    client = ssh_client("ssh://node7/dead-1", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False)
    async with attached(client):
        await client.wait_live(PATIENCE_S)
        assert client.mirror.state["archive"]["state"] == "done"
        assert client.mirror.state["metric/rollout/raw_reward"]["step"] == 7
        assert len((await client.series(["rollout/raw_reward"]))["rollout/raw_reward"]) == 1
    control = ssh_client("ssh://node7/dead-1", remote_rltop=sshd.rltop, ssh=sshd.ssh, ask=False, role="control")
    async with attached(control):
        with pytest.raises(RltopError, match="nothing to control"):
            await control.wait_live(PATIENCE_S)
