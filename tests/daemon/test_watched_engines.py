"""Engines that logs name: one cell each however they are named, dead with a cause, alive again in a new generation."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.checks.found import LogEvent
from rltop.daemon.others import LOST_S, NAMED, Others
from rltop.daemon.watched_engines import NamedEngines
from rltop.evidence.logs import LogScan
from rltop.evidence.pieces import Splitter
from tests.daemon.fakes import FakeCore

PORTS = "(RolloutManager pid=4) rollout.py:911 - Ports for engine {0}: {{'host': '{1}', 'port': {2}}}"
IMA = "(SGLangEngine pid=52, ip=10.0.0.1) RuntimeError: CUDA error: an illegal memory access was encountered"
CRASH = "(SGLangEngine pid=52, ip=10.0.0.1) Subprocess scheduler_0 (pid=77) crashed with exit code -9"
ADAPTER = "(SGLangEngine pid=52, ip=10.0.0.1) sglang_engine.py:173 - Launch HttpServerEngineAdapter at: 10.0.0.1:15000"
KILLED = "(RolloutManager pid=4) health_monitor.py:153 - Health check failed for rollout engine {0}. Killing actor."
UP = "[2026-03-01 10:00:0{1}] INFO:     Uvicorn running on http://0.0.0.0:{0} (Press CTRL+C to quit)"
ARGS = "[2026-03-01 10:00:00] server_args=ServerArgs(model_path='/m', host='0.0.0.0', port={0}, node_rank=0)"


class Fleet:
    """Engines of logs over a core without sockets."""

    def __init__(self, urls: tuple[str, ...] = ()) -> None:
        self.core = FakeCore()
        self.others = Others(self.core, urls)
        self.others.begin()
        self.engines = NamedEngines(self.core, self.others)

    def say(self, *lines: str, log: str = "train.log") -> None:
        def told(event: LogEvent) -> None:
            self.engines.see(event, rollout=3)

        scan = LogScan(log, live=True, told=told)
        for start, pieces in Splitter().feed("".join(f"{line}\n" for line in lines).encode()):
            scan.feed(start, pieces)
        scan.settle()

    def cell(self, engine: str) -> dict[str, Any]:
        found: dict[str, Any] = self.core.table.get(f"engine/{engine}") or {}
        return found

    def all(self) -> dict[str, tuple[str, str, int]]:
        cells = {key.removeprefix("engine/"): self.core.table.get(key) for key in self.core.table.keys("engine/")}
        return {name: (cell["url"], cell["state"], cell["generation"]) for name, cell in cells.items()}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_an_engine_that_is_named_in_two_ways_is_one(fleet: Fleet) -> None:
    fleet.say(PORTS.format(0, "10.0.0.1", 15000), PORTS.format(1, "10.0.0.1", 15040), ADAPTER)
    assert fleet.all() == {
        "0": ("http://10.0.0.1:15000", NAMED, 1),
        "1": ("http://10.0.0.1:15040", NAMED, 1),
    }


def test_a_fault_and_a_death_of_its_process_are_its_crash_and_its_cause(fleet: Fleet) -> None:
    fleet.say(PORTS.format(0, "10.0.0.1", 15000), ADAPTER, IMA, "calm", CRASH)
    cell = fleet.cell("0")
    assert cell["state"] == "CRASHED"
    assert "illegal memory access was encountered (train.log:3); then its process ended (train.log:5" in cell["cause"]
    assert [(one["number"], one["generation"], one["rollout"]) for one in cell["crashes"]] == [(1, 1, 3)]
    fleet.say(CRASH)
    assert len(fleet.cell("0")["crashes"]) == 1, "a death is told once"


def test_a_kill_of_the_health_monitor_and_a_recovery_elsewhere(fleet: Fleet) -> None:
    fleet.say(PORTS.format(0, "h", 15000), PORTS.format(1, "h", 15040), KILLED.format(1))
    assert fleet.cell("1")["state"] == "CRASHED"
    fleet.say(PORTS.format(1, "h", 15900))
    assert fleet.all()["1"] == ("http://h:15900", NAMED, 2)
    assert len(fleet.cell("1")["crashes"]) == 1
    assert [event["level"] for event in fleet.core.events("engine")] == ["info", "info", "error", "info"]


def test_a_recovery_without_addresses_brings_back_as_many_as_it_says(fleet: Fleet) -> None:
    fleet.say(*(PORTS.format(at, "h", 15000 + at) for at in range(3)), KILLED.format(0), KILLED.format(2))
    fleet.say("rollout.py:305 - Recovered 1 dead rollout engines (worker_type=regular)")
    assert [state for _, state, _ in fleet.all().values()].count("CRASHED") == 1


def test_a_server_s_own_log_names_it_and_its_next_start(fleet: Fleet) -> None:
    fleet.say(ARGS.format(30000), UP.format(30000, 1), log="sglang.log")
    assert fleet.all() == {"0": ("http://127.0.0.1:30000", NAMED, 1)}
    fleet.say(ARGS.format(30000), UP.format(30000, 2), log="sglang.log")
    assert fleet.all() == {"0": ("http://127.0.0.1:30000", NAMED, 2)}
    fleet.say(ARGS.format(31000), UP.format(31000, 2), log="other_sglang.log")
    assert sorted(fleet.all()) == ["0", "1"]


def test_an_engine_of_the_command_line_keeps_its_place() -> None:
    fleet = Fleet(("http://10.0.0.1:15040",))
    fleet.say(PORTS.format(0, "10.0.0.1", 15000), PORTS.format(1, "10.0.0.1", 15040))
    assert {name: url for name, (url, _, _) in fleet.all().items()} == {
        "0": "http://10.0.0.1:15040",
        "log-0": "http://10.0.0.1:15000",
    }
    fleet.say(KILLED.format(0))
    assert fleet.cell("log-0")["state"] == "CRASHED"
    assert fleet.cell("0")["state"] == "SUSPECT"


async def test_an_engine_that_nobody_reaches_is_named_and_never_lost(fleet: Fleet) -> None:
    fleet.say(PORTS.format(0, "far", 15000))
    fleet.core.update("engine/0", error="ConnectError")
    fleet.core.time += LOST_S * 3
    await fleet.others.once()
    assert fleet.cell("0")["state"] == NAMED
    assert "does not answer from here: ConnectError" in fleet.cell("0")["cause"]


async def test_an_engine_that_answered_is_judged_as_any_other(fleet: Fleet) -> None:
    fleet.say(PORTS.format(0, "near", 15000))
    fleet.core.update("engine/0", seen=fleet.core.time, error=None)
    await fleet.others.once()
    assert fleet.cell("0")["state"] == "HEALTHY"
    fleet.core.time += LOST_S
    fleet.core.update("engine/0", error="ConnectError")
    await fleet.others.once()
    assert fleet.cell("0")["state"] == "LOST"
    fleet.say(KILLED.format(0))
    await fleet.others.once()
    assert fleet.cell("0")["state"] == "CRASHED", "what the log says stands"


@pytest.mark.parametrize(
    "line",
    [
        "Ports for engine 0: {'host': 'h', 'port': 99999999}",
        "Ports for engine 0: {'host': 'h', 'port': True}",
        "Ports for engine 0: {'host': 'h'}",
        "Ports for engine 0: {'host': ",
        "Uvicorn running on http://:",
        "server_args=ServerArgs(model_path='/m')",
    ],
)
def test_half_an_address_names_nothing(fleet: Fleet, line: str) -> None:
    fleet.say(line)
    assert fleet.all() == {}
