"""The daemon's side of a fleet, in this process: engines as real processes, cells in a table, commands noted.

It stands in for the daemon in tests of the trainer's side; `tests/train/test_fleet_run.py` has the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.engines.launch import EngineProcess, EngineSpec, launch_engine
from rltop.protocol.messages import Accepted


@dataclass
class FakeFleet:
    """`fleet_rollouts.Link` over engines that it starts itself. Methods that change something may be called by any
    thread."""

    directory: Path
    changed: int = 0
    problem: str = ""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    model_path: str = ""
    first_state: str = "HEALTHY"
    saver: bool = False
    """Engines are started with SGLang's memory saver, as those of a colocated run are."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def engines(self) -> dict[str, Mapping[str, Any]]:
        with self.lock:
            return {name: dict(cell) for name, cell in self.cells.items()}

    def operation(self, op: str) -> Mapping[str, Any]:
        return {}

    def command(self, name: str, target: str = "", *, wait_s: float, **kw: Any) -> Accepted:
        assert name == "engines-start"
        self.sent.append((name, target, kw))
        slots = kw["args"]["slots"]
        self.model_path = slots[0]["model_path"]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda slot: self.launch(slot["id"], 1, self.first_state), slots))
        return Accepted("op-1")

    def send(self, name: str, target: str = "", *, wait_s: float, **kw: Any) -> None:
        assert name == "engine-synced"
        self.sent.append((name, target, kw))
        with self.lock:
            cell = self.cells[target]
            if cell["state"] == "STALE" and cell["generation"] == kw["if_gen"]:
                self.set(target, state="HEALTHY", weight_version=kw["args"]["version"])

    def set(self, name: str, **changes: Any) -> None:
        """Change a cell."""
        with self.lock:
            self.cells[name] = self.cells.get(name, {"id": name, "kind": "cpu"}) | changes
            self.changed += 1

    def launch(self, name: str, generation: int, state: str) -> None:
        """Start an engine and say so."""
        self.set(name, state="LOADING", generation=generation, url=None, weight_version="default")
        spec = EngineSpec(
            kind="cpu",
            model_path=Path(self.model_path),
            directory=self.directory / name / str(generation),
            run="fake",
            engine_id=name,
            generation=generation,
            args=("--enable-memory-saver",) if self.saver else (),
            env={"OMP_NUM_THREADS": "1"},
        )
        process = self.processes[name] = launch_engine(spec)
        self.set(name, state=state, url=process.url, pid=process.pid, log=str(process.log))

    def restart(self, name: str, *, told: bool = True) -> Callable[[], None]:
        """Kill an engine without warning; what is returned brings it back, stale. `told`: say that it died."""
        generation = self.cells[name]["generation"]
        if told:
            self.set(name, state="CRASHED", cause="killed by the test")
        self.kill(name)
        return lambda: self.launch(name, generation + 1, "STALE")

    def kill(self, name: str) -> None:
        """End an engine's processes; nobody is told."""
        process = self.processes.pop(name)
        process.kill()
        process.process.wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.stop(2.0)


@dataclass
class LocalManager:
    """`fleet_rollouts.Manager` over a manager in this process: a call runs in a thread, as it would in its actor."""

    manager: Any
    exchanges: list[tuple[Any, ...]] = field(default_factory=list)

    def ready(self) -> None:
        """It is there."""

    def call(self, method: str, *args: Any, watch: Sequence[Callable[[], None]] = (), every_s: float = 1.0) -> Any:
        done, result = threading.Event(), list[Any]()

        def work() -> None:
            try:
                result.append((True, getattr(self.manager, method)(*args)))
            except BaseException as error:
                result.append((False, error))
            done.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while not done.wait(every_s):
            for look in watch:
                look()
        thread.join()
        good, value = result[0]
        if not good:
            raise value
        return value

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.exchanges.append(args)
        return getattr(self.manager, method)(*args)
