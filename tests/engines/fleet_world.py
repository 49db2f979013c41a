"""A world without processes for a fleet: a launcher and HTTP engines that obey a virtual clock, and their faults.

Everything a real engine does to its supervisor is here as a fact about `FakeProcess`: what it logs and when, what its
routes answer, how it ends, what it leaves behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import EngineSlot, Fleet, FleetPlan, FleetPolicy, Refused, Request, Required, StartEngines
from rltop.engines.launcher import GpuUse, Launched, LaunchSpec, Look, LostNode, Remains
from rltop.errors import RltopError
from tests.client.virtual import VirtualLoop

POLICY = FleetPolicy(drain_s=20, abort_s=2, term_s=10, kill_s=5, reclaim_s=10, start_s=60, stale_s=30, launch_s=20)


class NoThreads(VirtualLoop):
    """Work for threads is done at once: real time has no meaning here."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_fleet(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine on the virtual clock."""
    with asyncio.Runner(loop_factory=NoThreads) as runner:
        runner.run(main())


@dataclass
class Behaviour:
    """How the next processes behave."""

    load_s: float = 2.0
    capture_s: float = 1.0
    term_s: float = 0.5
    dies_loading: str = ""
    """Its last words; it then ends by itself."""
    never_ready: bool = False
    ignores_term: bool = False
    orphan: bool = False
    """A child that outlives it and holds the lock, and cannot be killed until `World.release_orphans`."""
    refuses_updates: bool = False
    deaf: bool = False
    """It takes its flags and does not do what they say."""


@dataclass
class FakeProcess:
    """One engine process."""

    spec: LaunchSpec
    pid: int
    born: float
    how: Behaviour
    alive: bool = True
    exit_code: int | None = None
    log: bytes = b""
    said: int = 0
    dies_at: float | None = None
    killed: bool = False
    orphan: bool = False
    version: str = "default"
    running: int = 0
    tokens: float = 0.0
    flowing: bool = True
    mute: bool = False
    slow_s: float = 0.0
    """Between a look at itself and the answer that says what was seen."""
    aborted: int = 0
    loads_asked: int = 0
    loaded: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return 40000 + self.pid

    def ready(self, now: float) -> bool:
        return self.alive and not self.how.never_ready and now - self.born >= self.how.load_s + self.how.capture_s

    def say(self, *lines: str) -> None:
        self.log += b"".join(f"[2026-11-30 00:00:00] {line}\n".encode() for line in lines)

    def live(self, now: float) -> None:
        """What it has done by now."""
        script: list[tuple[float, str]] = [
            (0.2, "Load weight begin. avail mem=10.00 GB"),
            (self.how.load_s, "Capture target prefill CUDA graph begin. backend=full, avail mem=9.00 GB"),
            (self.how.load_s, "Capture target decode CUDA graph begin. backend=full, bs=[1, 2], avail mem=9.00 GB"),
        ]
        if not self.how.never_ready:
            script.append((self.how.load_s + self.how.capture_s, "The server is fired up and ready to roll!"))
        while self.said < len(script) and now - self.born >= script[self.said][0] and self.alive:
            self.say(script[self.said][1])
            self.said += 1
        if self.alive and self.how.dies_loading and now - self.born >= self.how.load_s / 2:
            self.say(self.how.dies_loading)
            self.end(1)
        if self.alive and self.dies_at is not None and now >= self.dies_at:
            self.end(-15)

    def end(self, code: int) -> None:
        """It is gone."""
        if self.alive:
            self.alive, self.exit_code, self.orphan = False, code, self.how.orphan


class FakeLauncher:
    """A launcher over fake processes. It outlives fleets, as processes outlive daemons."""

    name = "local"

    def __init__(self) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self.behaviour = Behaviour()
        self.lost = False
        self.start_delay = 0.05
        self.fail_start = ""
        self.stranger: GpuUse | None = None
        self.most_alive: dict[str, int] = {}

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def at(self, engine_id: str) -> FakeProcess:
        """The newest process of an engine."""
        return [one for one in self.processes.values() if one.spec.engine_id == engine_id][-1]

    def alive(self) -> list[FakeProcess]:
        return [one for one in self.processes.values() if one.alive]

    def _of(self, launched: Launched) -> FakeProcess:
        if self.lost:
            raise LostNode("the node is gone", where="n1")
        process = self.processes[launched.marker]
        process.live(self.now())
        return process

    async def start(self, spec: LaunchSpec) -> Launched:
        await asyncio.sleep(self.start_delay)
        if self.fail_start:
            raise RltopError(self.fail_start)
        holders = [one for one in self.processes.values() if one.spec.lock == spec.lock and (one.alive or one.orphan)]
        if holders:
            raise RltopError("engine still has a process", why=f"pid {holders[0].pid}")
        process = FakeProcess(spec, 100 + len(self.processes), self.now(), replace(self.behaviour))
        self.processes[spec.marker] = process
        return self.launched(process)

    def launched(self, process: FakeProcess) -> Launched:
        return Launched(
            marker=process.spec.marker,
            pid=process.pid,
            birth=f"b{process.pid}",
            keeper_pid=1,
            node="n1",
            host="127.0.0.1",
            directory=process.spec.directory,
            log=f"{process.spec.directory}/stdout.log",
            launcher="ray",  # its environment is not to be looked for in /proc
            started=process.born,
        )

    async def look(self, launched: Launched) -> Look:
        process = self._of(launched)
        return Look(
            alive=process.alive,
            exit_code=process.exit_code,
            ended=None,
            port=process.port if process.alive else 0,
            log_size=len(process.log),
            children=(),
            lock_held=process.alive or process.orphan,
        )

    async def read_log(self, launched: Launched, offset: int, limit: int) -> bytes:
        return self._of(launched).log[offset : offset + limit]

    async def terminate(self, launched: Launched) -> None:
        process = self._of(launched)
        if not process.how.ignores_term:
            process.dies_at = self.now() + process.how.term_s

    async def kill(self, launched: Launched) -> None:
        process = self._of(launched)
        process.killed = True
        process.end(-9)

    async def remains(self, launched: Launched) -> Remains:
        process = self._of(launched)
        held = ((process.pid + 5000, "orphan"),) if process.orphan else ()
        gpu = [self.stranger] if self.stranger else []
        gpu += [GpuUse(index=0, pid=process.pid + 5000, mib=800, name="orphan", ours=True)] if process.orphan else []
        alive = ((process.pid, "engine"),) if process.alive else ()
        return Remains(processes=alive + held, lock_holders=held, gpu=tuple(gpu), gpu_source="nvml")

    async def environ(self, launched: Launched) -> dict[str, str] | None:
        return None

    async def adopt(self, directory: str, marker: str) -> Launched | None:
        if self.lost:
            raise LostNode("the node is gone", where="n1")
        process = self.processes.get(marker)
        return None if process is None else self.launched(process)

    async def close(self) -> None:
        pass

    def release_orphans(self) -> None:
        for process in self.processes.values():
            process.orphan = False

    # ---------------------------------------------------------------- HTTP

    def http(self, url: str) -> AsyncEngineClient:
        return AsyncEngineClient(url, transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer, slow_s = self._seen(request)
        await asyncio.sleep(slow_s)
        return answer

    def _seen(self, request: httpx.Request) -> tuple[httpx.Response, float]:
        process = next((one for one in self.processes.values() if one.port == request.url.port), None)
        if process is not None:
            process.live(self.now())
        if process is None or not process.ready(self.now()) or process.mute or self.lost:
            raise httpx.ConnectError("refused")
        return self._respond(process, request), process.slow_s

    def _respond(self, process: FakeProcess, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        match request.url.path:
            case "/model_info":
                return httpx.Response(200, json={"weight_version": process.version, "model_path": "/m"})
            case "/server_info":
                return httpx.Response(200, json=self._server_info(process))
            case "/v1/loads":
                process.loads_asked += 1
                rank = {"num_running_reqs": process.running, "num_waiting_reqs": 0}
                return httpx.Response(200, json={"loads": [rank]})
            case "/metrics":
                if process.running and process.flowing:
                    process.tokens += 100
                text = f"sglang:num_running_reqs{{}} {process.running}\nsglang:num_queue_reqs{{}} 0\n"
                text += f'sglang:realtime_tokens_total{{mode="decode"}} {process.tokens}\n'
                return httpx.Response(200, text=text)
            case "/update_weights_from_disk" if process.how.refuses_updates:
                return httpx.Response(400, json={"success": False, "message": "no such path"})
            case "/update_weights_from_disk":
                process.version = str(body["weight_version"])
                process.loaded.append(str(body["model_path"]))
                return httpx.Response(200, json={"success": True, "message": ""})
            case "/weights_checker":
                return httpx.Response(200, json={"ranks": [{"per_gpu_checksum": f"digest of {process.version}"}]})
            case "/pause_generation" | "/continue_generation":
                return httpx.Response(200, json={})
            case "/abort_request":
                process.aborted += process.running
                process.running = 0
                return httpx.Response(200)
            case path:
                return httpx.Response(404, text=path)

    def _server_info(self, process: FakeProcess) -> dict[str, Any]:
        from rltop.engines.rules import judge

        args = () if process.how.deaf else process.spec.args
        fields = dict(judge(args, process.spec.env, version="0.5.23").fields)
        return {**fields, "sglang_version": "0.5.23"}


@dataclass
class World:
    """A fleet over fake engines, and what it told."""

    folder: Path
    policy: FleetPolicy = POLICY
    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    required: Required = field(default_factory=lambda: Required(version="default", source="base"))
    updating: bool = False
    lent: bool = False
    between: bool = True
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: list[tuple[str, str, str]] = field(default_factory=list)
    """(engine, before, after)"""
    told: list[tuple[str, str]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    shown: int = 0
    """Cells published."""
    leaving: Callable[[str], Awaitable[None]] | None = None

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        """A daemon's life: the fleet is cut off at the end, its engines go on."""
        fleet = Fleet(
            run="run",
            run_dir=self.folder,
            launchers={"local": self.launcher},
            http=self.launcher.http,
            policy=self.policy,
            clock=self.launcher.now,
            wall=lambda: self.launcher.now() + 1.8e9,
            publish=self._publish,
            event=self._event,
            required=lambda: self.required,
            updating=lambda: self.updating,
            safe_point=lambda: self.between,
            lent=lambda: self.lent,
            leaving=self.leaving,
        )
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(0)
        try:
            yield fleet
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not [text for _, text in self.told if "fault in the supervision" in text]

    def _publish(self, engine_id: str, cell: dict[str, Any] | None) -> None:
        self.shown += 1
        if cell is None:
            self.cells.pop(engine_id, None)
        else:
            self.cells[engine_id] = cell

    def _event(self, level: str, text: str, engine_id: str, before: str, after: str) -> None:
        self.told.append((level, text))
        if before != after:
            self.states.append((engine_id, before, after))

    def state(self, engine_id: str) -> str:
        return str(self.cells[engine_id]["state"])

    async def until(self, what: Callable[[], Any], limit_s: float = 2000.0) -> None:
        """Let virtual time pass until it is so."""
        end = self.launcher.now() + limit_s
        while not what():
            assert self.launcher.now() < end, (
                f"never: {[(key, cell['state'], cell['cause']) for key, cell in self.cells.items()]} {self.told[-5:]}"
            )
            await asyncio.sleep(0.02)

    async def until_state(self, engine_id: str, state: str, limit_s: float = 2000.0) -> None:
        seen = len(self.states)

        def there() -> bool:
            """It is so now, or was for a moment since."""
            if engine_id in self.cells and self.state(engine_id) == state:
                return True
            return any(who == engine_id and after == state for who, _, after in self.states[seen:])

        await self.until(there, limit_s)

    async def do(self, fleet: Fleet, request: Request) -> str:
        """Plan and carry out."""
        return await fleet.carry_out(planned(fleet, request), self.stages.append)

    async def start(self, fleet: Fleet, count: int, *, healthy: bool = True) -> None:
        """So many engines, named 0, 1, ..."""
        await self.do(fleet, StartEngines(slots=slots(count)))
        for number in range(count if healthy else 0):
            await self.until_state(str(number), "HEALTHY")


def slots(count: int) -> tuple[EngineSlot, ...]:
    return tuple(EngineSlot(id=str(number), kind="cpu", model_path="/m", python="py") for number in range(count))


def planned(fleet: Fleet, request: Request) -> FleetPlan:
    plan = fleet.plan(request)
    assert not isinstance(plan, Refused), plan
    return plan


def refused(fleet: Fleet, request: Request) -> Refused:
    plan = fleet.plan(request)
    assert isinstance(plan, Refused), plan
    return plan


def healthy_transitions(states: list[tuple[str, str, str]]) -> Iterator[str]:
    """States from which engines became HEALTHY."""
    return (before for _, before, after in states if after == "HEALTHY")
