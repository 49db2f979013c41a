"""Every fault of the CPU engine, through a fleet and real processes: the right state, fingerprint and cause.

One fleet per group, one engine per fault, all at once, under load. The fleet's clock runs four times as fast as the
wall's, so that a hang (15 s of silence for a CPU engine) is found in four seconds. Crashed engines stay down
(`restart="never"`), so that what is asserted is the end. The first group runs in CI, the others with the soak tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import EngineSlot, Fleet, FleetPlan, FleetPolicy, Required, StartEngines, Stop
from rltop.engines.local import LocalLauncher
from rltop.engines.states import State

SPEED = 4.0
PATIENCE_S = 90.0
"""Wall clock, for all engines of a group on a busy machine."""
POLICY = FleetPolicy(restart="never", term_s=8.0, drain_s=8.0, start_s=900.0)
BASE = Required(version="default", source="base")
PROMPT = {"input_ids": [3, 4, 5, 6], "sampling_params": {"max_new_tokens": 64, "ignore_eos": True, "temperature": 1.0}}
NGRAM = ("--speculative-algorithm", "NGRAM")
MEMORY = ("--enable-memory-saver",)


class Ward:
    """One engine of the fleet as its viewers see it, and those who use it."""

    def __init__(self, case: Case, fleet: Fleet) -> None:
        self.case, self.fleet, self.id = case, fleet, case.name
        self.cell: dict[str, Any] = {}
        self.history: list[tuple[str, str]] = []
        """States and causes, each change once."""

    def shown(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        now = (str(cell["state"]), str(cell["cause"]))
        if not self.history or self.history[-1] != now:
            self.history.append(now)

    def was(self, state: State, cause: str = "") -> bool:
        return any(one == state and cause in why for one, why in self.history)

    def has(self, state: State) -> bool:
        return bool(self.cell) and self.cell["state"] == state

    @property
    def url(self) -> str:
        return str(self.cell["url"])

    def client(self) -> AsyncEngineClient:
        return AsyncEngineClient(self.url)

    async def until(self, what: Callable[[], Any]) -> None:
        """Fails with the engine's history when it does not come true in time."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"{self.id}: {self.history}"
            await asyncio.sleep(0.05)

    async def get(self, path: str) -> int:
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                return (await http.get(self.url + path, timeout=5)).status_code
            except httpx.HTTPError:
                return 0

    async def traffic(self) -> None:
        """Requests, one after the other, while it is in the rotation."""
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                if self.has(State.HEALTHY) or self.has(State.SUSPECT):
                    with contextlib.suppress(httpx.HTTPError):
                        await http.post(self.url + "/generate", json=PROMPT, timeout=60)
                await asyncio.sleep(0.02)


Act = Callable[[Ward], Awaitable[None]]


async def nothing(ward: Ward) -> None:
    """The fault comes by itself."""


async def loaded_from_disk(ward: Ward) -> None:
    async with ward.client() as client:
        with contextlib.suppress(Exception):
            await client.update_weights_from_disk(str(ward.cell["model_path"]), "9")


async def updated_while_retracted(ward: Ward) -> None:
    async with ward.client() as client:
        deadline = time.monotonic() + PATIENCE_S
        while True:  # the pause has to meet a request that runs; on a fast machine that takes a few tries
            await client.pause("retract")
            found = re.search(r"^sglang:num_retracted_reqs\S* (\S+)", await client.metrics_text(), re.MULTILINE)
            if found and float(found[1]) > 0:
                break
            assert time.monotonic() < deadline, f"{ward.id}: no request was met"
            await client.resume_generation()
            await asyncio.sleep(0.01)
        with contextlib.suppress(Exception):
            await client.update_weights_from_disk(str(ward.cell["model_path"]), "9")


async def released(ward: Ward) -> None:
    async with ward.client() as client:
        await client.pause("abort")
        await client.flush_cache()
        await client.release_memory()
    ward.fleet.released(ward.id)
    await ward.until(lambda: ward.has(State.OFFLOADED))


async def released_then_probed(ward: Ward) -> None:
    await released(ward)
    looks = time.monotonic() + 1.5
    while time.monotonic() < looks:  # rltop itself asks nothing that would kill it
        assert ward.has(State.OFFLOADED)
        await asyncio.sleep(0.05)
    await ward.get("/health")


async def released_and_resumed(ward: Ward) -> None:
    await released(ward)
    async with ward.client() as client:
        await client.resume_memory()
    ward.history.clear()
    ward.fleet.resumed(ward.id)
    await ward.until(lambda: ward.was(State.HEALTHY))
    async with ward.client() as client:
        await client.resume_generation()
        (answer,) = await client.generate({**PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}})
    assert set(answer["output_ids"]) != {0}, "it serves with the weights that its resume left behind"


async def stopped(ward: Ward) -> None:
    request = Stop(targets=(ward.id,), reason="test", who="test")
    # Until all engines have come up, or failed to, their start holds them.
    await ward.until(lambda: isinstance(ward.fleet.plan(request), FleetPlan))
    plan = ward.fleet.plan(request)
    assert isinstance(plan, FleetPlan)
    await ward.fleet.carry_out(plan, lambda stage: None)


async def main_killed(ward: Ward) -> None:
    os.kill(int(ward.cell["pid"]), signal.SIGKILL)


async def scheduler_killed(ward: Ward) -> None:
    (child,) = [one for one in psutil.Process(int(ward.cell["pid"])).children() if "schedul" in one.name()]
    child.kill()


async def asked_for_health(ward: Ward) -> None:
    """A hung engine's health route says that all is well."""
    await ward.until(lambda: ward.was(State.SUSPECT, "hung: no token"))
    assert await ward.get("/health_generate") == 200


@dataclass(frozen=True)
class Case:
    name: str
    fault: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    act: Act = nothing
    early: bool = False
    """The engine never becomes healthy: `act` is not waited for it."""
    state: State = State.CRASHED
    fingerprint: str = ""
    cause: str = ""
    before: tuple[State, str] | None = None
    """A state, with words of its cause, that must have come before the last one."""
    cell: dict[str, Any] = field(default_factory=dict)
    survives: bool = False
    """It was never ended: same process, same generation."""


CI = (
    Case(
        "ima",
        "ima:batch=30",
        fingerprint="ima/decode",
        cause="Illegal memory access on the GPU",
        before=(State.CRASHED, "it is dying"),
    ),
    Case(
        "hang",
        "hang:batch=30",
        act=asked_for_health,
        state=State.SUSPECT,
        cause="though its routes answer",
        before=(State.SUSPECT, "no token for over"),
        survives=True,
    ),
    Case(
        "slow-prefill",
        "slow-prefill:seconds=2",
        state=State.SUSPECT,
        cause="slow prefill",
        survives=True,
    ),
    Case("start-dies", "start-dies", early=True, fingerprint="child/load", cause="was killed (SIGKILL)"),
    Case("main-killed", act=main_killed, fingerprint="silent/serve", cause="signal 9 while it served"),
    Case("scheduler-killed", act=scheduler_killed, fingerprint="child/", cause="was killed (SIGKILL)"),
)
DEATHS = (
    Case(
        "ima-kernel",
        "ima:batch=30",
        env={"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1"},
        fingerprint="ima/",
        cause="in kernel injected_oob_kernel",
    ),
    Case("oom", "oom:batch=30", fingerprint="oom/", cause="Out of GPU memory"),
    Case("oom-load", "oom:while=load", early=True, fingerprint="oom/load", cause="while weights were loaded"),
    Case("nccl", "nccl-timeout:batch=30", fingerprint="nccl/", cause="A collective did not end"),
    Case("watchdog", "watchdog:batch=30,seconds=2", fingerprint="hang/", cause="SGLang's watchdog saw no progress"),
    Case("port", "port-in-use", early=True, fingerprint="port/", cause="was already in use"),
    Case(
        "ngram-update",
        "ngram-update-dies",
        args=NGRAM,
        act=loaded_from_disk,
        fingerprint="update/update",
        cause="cannot take weights that way",
    ),
    Case(
        "retract-update",
        "retract-update-dies",
        act=updated_while_retracted,
        fingerprint="update/update",
        cause="paused requests held the cache",
    ),
    Case(
        "released",
        "health-kills-released",
        args=MEMORY,
        act=released_then_probed,
        fingerprint="released/released",
        cause="while its memory was released",
        before=(State.OFFLOADED, ""),
    ),
)
LIVES = (
    Case(
        "ngram-stall",
        "ngram-stall:seconds=2",
        args=NGRAM,
        state=State.SUSPECT,
        cause="NGRAM compiles its sampler",
        survives=True,
    ),
    Case("probe-fails", "probe-fails", state=State.HEALTHY, survives=True),
    Case(
        "flag-ignored",
        "flag-ignored:toggle=radix_cache",
        args=("--disable-radix-cache",),
        state=State.HEALTHY,
        cell={"ignored": ["radix_cache"]},
        survives=True,
    ),
    Case(
        "slow-start",
        "slow-start:seconds=3",
        state=State.HEALTHY,
        before=(State.LOADING, ""),
        survives=True,
    ),
    Case(
        "token-zero",
        "token-zero",
        args=MEMORY,
        act=released_and_resumed,
        state=State.HEALTHY,
        before=(State.STALE, ""),
        survives=True,
    ),
    Case("drain-stuck", "drain-stuck", act=stopped, state=State.STOPPED, before=(State.STOPPING, "")),
    Case("orphan", "orphan:seconds=600", act=stopped, state=State.STOPPED, before=(State.RECLAIMING, "")),
)
WEIGHTS = (
    Case("holds", state=State.HEALTHY, cause="", before=(State.STALE, ""), survives=True),
    Case(
        "update-refused",
        "update-refused",
        early=True,
        state=State.STALE,
        cause="cannot load weight version '7'",
        survives=True,
    ),
)


@pytest.mark.parametrize(
    ("group", "version"),
    [
        pytest.param(CI, "default", id="ci"),
        pytest.param(DEATHS, "default", id="deaths", marks=pytest.mark.soak),
        pytest.param(LIVES, "default", id="lives", marks=pytest.mark.soak),
        pytest.param(WEIGHTS, "7", id="weights", marks=pytest.mark.soak),
    ],
)
async def test_every_fault_is_detected_with_its_state_fingerprint_and_cause(
    group: tuple[Case, ...], version: str, model_path: Path, tmp_path: Path
) -> None:
    required = BASE if version == "default" else Required(version=version, source="disk", path=str(model_path))
    launcher = LocalLauncher()
    wards: dict[str, Ward] = {}
    events: list[tuple[str, str, str]] = []
    fleet = Fleet(
        run=f"faults-{tmp_path.name}-{os.getpid()}",
        run_dir=tmp_path,
        launchers={"local": launcher},
        http=AsyncEngineClient,
        policy=POLICY,
        clock=lambda: time.monotonic() * SPEED,
        wall=time.time,
        publish=lambda name, cell: wards[name].shown(cell) if cell else None,
        event=lambda level, text, name, before, after: events.append((level, name, text)),
        required=lambda: required,
        updating=lambda: False,
    )
    wards = {case.name: Ward(case, fleet) for case in group}
    loop = asyncio.create_task(fleet.run())
    begun = asyncio.create_task(begin(fleet, group, model_path))
    users = [asyncio.create_task(ward.traffic()) for ward in wards.values()]
    try:
        ended = await asyncio.gather(*(live(ward) for ward in wards.values()), return_exceptions=True)
        wrong = [f"{type(error).__name__}: {error}" for error in ended if isinstance(error, BaseException)]
        assert not wrong, "\n".join(wrong)
        if "hang" in wards:
            assert any(name == "hang" and level == "error" for level, name, _ in events), events
    finally:
        for task in (*users, begun):
            task.cancel()
        await asyncio.gather(*users, begun, return_exceptions=True)
        await fleet.stop_all(lambda stage: None)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await launcher.close()
    left = [one.pid for one in psutil.process_iter() if fleet_marker(one, tmp_path)]
    assert not left, f"processes of the fleet are left: {left}"


async def begin(fleet: Fleet, group: tuple[Case, ...], model_path: Path) -> None:
    slots = tuple(
        EngineSlot(
            id=case.name,
            model_path=str(model_path),
            args=("--random-seed", "1", *case.args),
            env={"RLTOP_CPU_ENGINE_FAULTS": case.fault, "RLTOP_CPU_ENGINE_CRASH_S": "2", **case.env},
        )
        for case in group
    )
    plan = fleet.plan(StartEngines(slots=slots, reason="test", who="test"))
    assert isinstance(plan, FleetPlan), plan
    # Some of them never serve: how this ends is told by the engines' own states.
    with contextlib.suppress(Exception):
        await fleet.carry_out(plan, lambda stage: None)


async def live(ward: Ward) -> None:
    """From the start of an engine to what its fault makes of it."""
    case = ward.case
    if not case.early:
        await ward.until(lambda: ward.was(State.HEALTHY))
        await case.act(ward)
    await ward.until(lambda: ended_well(ward))
    if case.before is not None:
        assert ward.was(*case.before), f"{ward.id}: {ward.history}"
    if case.survives:
        assert ward.cell["generation"] == 1
        assert not ward.was(State.CRASHED), f"{ward.id}: {ward.history}"
        assert psutil.pid_exists(int(ward.cell["pid"]))
    if case.fault and case.state in (State.CRASHED, State.SUSPECT):
        assert f"rehearsal: the fault {case.fault.partition(':')[0]} was injected" in ward.cell["cause"] or ward.was(
            case.state, "rehearsal"
        ), f"{ward.id}: {ward.history}"


def ended_well(ward: Ward) -> bool:
    """What the case says has come true."""
    case, cell = ward.case, ward.cell
    if not cell or not str(cell["fingerprint"] or "").startswith(case.fingerprint):
        return False
    seen = ward.was(case.state, case.cause) if case.state is State.SUSPECT else ward.has(case.state)
    words = case.state is State.SUSPECT or case.cause in str(cell["cause"])
    return seen and words and all(cell[key] == value for key, value in case.cell.items())


def fleet_marker(process: psutil.Process, tmp_path: Path) -> bool:
    """The process carries the marker of this test's fleet."""
    try:
        marker = process.environ().get("RLTOP_ENGINE", "")
    except psutil.Error:
        return False
    return marker.startswith(f"faults-{tmp_path.name}-{os.getpid()}/")
