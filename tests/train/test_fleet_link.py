"""The line to the daemon, against a daemon made from `docs/protocol.md`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rltop.errors import RltopError
from rltop.runs import acquire_lock, make_run_dir, read_run
from rltop.train.fleet_link import FleetLink
from rltop.train.narrator import LOGGER
from tests.client.model import ModelDaemon
from tests.client.router import SpecDaemon, spec_daemon

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))


def engine(state: str) -> Callable[[ModelDaemon], None]:
    return lambda model: model.set("engine/0", {"id": "0", "state": state, "generation": 1, "url": "http://h:1"})


def wait_for(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.01)


def state(link: FleetLink) -> Any:
    return link.engines().get("0", {}).get("state")


def test_cells_arrive_and_change() -> None:
    with spec_daemon(fill=engine("LOADING")) as (daemon, run), FleetLink(run.sockets["ctl"]) as link:
        wait_for(lambda: state(link) == "LOADING", "the first picture")
        assert link.problem == ""
        seen = link.changed
        daemon.change(engine("HEALTHY"))
        wait_for(lambda: state(link) == "HEALTHY", "the change")
        assert link.changed > seen


def test_a_command_is_answered() -> None:
    with spec_daemon(fill=engine("LOADING")) as (daemon, run), FleetLink(run.sockets["ctl"]) as link:
        assert link.command("engines-start", args={"slots": []}, wait_s=30).op == "op-1"
        daemon.change(lambda model: model.set("op/op-1", {"op": "op-1", "state": "failed", "text": "no such model"}))
        wait_for(lambda: link.operation("op-1").get("text") == "no such model", "the operation")
        assert link.operation("op-2") == {}


def test_the_last_picture_outlives_the_daemon_and_the_next_one_is_found() -> None:
    run_dir = make_run_dir("cedar-1")
    lock = acquire_lock(run_dir)
    first, second = (SpecDaemon(run_dir, engine(state)) for state in ("HEALTHY", "STALE"))
    first.start()
    run = read_run(run_dir)
    assert run is not None
    with FleetLink(run.sockets["ctl"], run_dir) as link:
        wait_for(lambda: state(link) == "HEALTHY", "the first picture")
        first.stop()
        wait_for(lambda: link.problem, "the end of the daemon")
        assert state(link) == "HEALTHY"
        second.start()
        wait_for(lambda: state(link) == "STALE" and not link.problem, "the next daemon")
    second.stop()
    os.close(lock)


def test_without_a_daemon_a_command_says_so_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltop.client.session.ANSWER_S", 0.1)
    with FleetLink(f"ipc://{tmp_path}/nobody") as link:
        with pytest.raises(RltopError, match="no answer to 'cmd'") as caught:
            link.command("engines-start", wait_s=0.3)
        assert "the daemon is not running" in caught.value.why


def test_what_is_sent_without_waiting_tells_of_its_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    monkeypatch.setattr("rltop.client.session.ANSWER_S", 0.1)
    with caplog.at_level(logging.INFO, LOGGER), FleetLink(f"ipc://{tmp_path}/nobody") as link:
        link.send("engine-synced", "0", wait_s=0.1, if_gen=2)
        wait_for(lambda: "engine-synced 0: " in caplog.text, "the line")
