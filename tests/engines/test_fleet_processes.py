"""Random operations and kills against real engine processes: the CPU engine, its keeper, its child, and the fleet.

Each sequence is drawn from a seed. Whatever it does, these hold at every moment: at most one engine process per slot;
HEALTHY only after STALE or SUSPECT; every operation ends. And afterwards, once it is calm: every slot is where its goal
says, and when all are stopped nothing is left: no process, no lock, no listening port.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltop.engines.launcher import MARKER

PATIENCE_S = 150.0
ENGINE = "rltop.train.cpu_engine"


class Sequence:
    """One random life of a small fleet."""

    def __init__(self, seed: int, folder: Path, model: Path, count: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.run = f"seq-{seed}-{os.getpid()}"
        self.model = model
        self.names = [str(number) for number in range(count)]
        self.driver: subprocess.Popen[str] | None = None
        self.numbers = itertools.count(1)
        self.sent: dict[int, str] = {}
        self.lost: set[int] = set()
        """Operations whose fleet was killed: nobody is left to tell how they ended."""
        self.trail: list[str] = []

    # ---------------------------------------------------------------- the fleet's process

    def begin(self) -> None:
        """A new fleet process over the same folder."""
        command = [sys.executable, "-m", "tests.engines.fleet_driver", self.run, str(self.folder)]
        with (self.folder / "driver.err").open("a") as errors:
            self.driver = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, stderr=errors)

    def end_fleet(self) -> None:
        """kill -9, reaped."""
        if self.driver is not None and self.driver.stdin is not None:
            self.driver.kill()
            self.driver.wait()
            self.driver.stdin.close()

    def send(self, name: str, **fields: Any) -> int:
        """Ask for something; the answer comes later."""
        number = next(self.numbers)
        self.sent[number] = name
        self.say(f"{name} {fields}")
        self._write({"do": name, "number": number, **fields})
        return number

    def _write(self, order: dict[str, Any]) -> None:
        assert self.driver is not None
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps(order) + "\n")
        self.driver.stdin.flush()

    def kill_fleet(self) -> None:
        """kill -9 of the loop itself, and a new one."""
        self.say("kill -9 of the fleet")
        self.end_fleet()
        ended = {row[2] for row in self.told("done")}
        self.lost |= self.sent.keys() - ended
        self.begin()

    def say(self, text: str) -> None:
        self.trail.append(f"{time.time():.2f} {text}")

    # ---------------------------------------------------------------- what is seen

    def told(self, kind: str) -> list[list[Any]]:
        """Lines of one kind so far."""
        file = self.folder / "told.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if row[1] == kind]

    def cells(self) -> dict[str, dict[str, Any]]:
        """The newest cell of every engine."""
        return {row[2]: row[3] for row in self.told("cell") if row[3] is not None}

    def left(self) -> list[psutil.Process]:
        """Every living process of this run's engines: whoever carries its marker."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARKER, "").startswith(f"{self.run}/")
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def engines(self) -> dict[str, list[psutil.Process]]:
        """Slot -> its living engine processes: those that run the engine, not its keeper and not its child."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self.left():
            try:
                # It leads its session; a child between fork and exec looks like it otherwise.
                if process.cmdline()[1:4] == ["-P", "-m", ENGINE] and os.getsid(process.pid) == process.pid:
                    found.setdefault(process.environ()[MARKER].split("/")[1], []).append(process)
            except (psutil.Error, OSError, KeyError):  # it ends, or becomes another program
                continue
        return found

    def check(self) -> None:
        """What holds at every moment."""
        for slot, processes in self.engines().items():
            assert len(processes) <= 1, f"engine {slot} has processes {[one.pid for one in processes]}"
        for _, _, engine_id, before, after, text in self.told("event"):
            assert "fault in the supervision" not in text
            if after == "HEALTHY" and before != after:
                assert before in ("STALE", "SUSPECT"), f"engine {engine_id}: {before} -> HEALTHY"

    def until(self, what: Callable[[], Any], why: str) -> None:
        """Wait, and check all the while."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            self.check()
            assert self.driver is not None
            assert self.driver.poll() is None, f"the fleet ended: {(self.folder / 'driver.err').read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{why}: {self.picture()}"
            time.sleep(0.05)

    def picture(self) -> str:
        """For whoever reads of a failure."""
        cells = {name: (cell["state"], cell["generation"], cell["cause"]) for name, cell in self.cells().items()}
        events = [row[5] for row in self.told("event")][-15:]
        return "\n".join([str(cells), *self.trail, *events])

    def ended(self, number: int) -> bool:
        """The operation has ended, or nobody is left to tell."""
        return number in self.lost or any(row[2] == number for row in self.told("done"))

    # ---------------------------------------------------------------- the life

    def step(self) -> None:
        """One operation or one kill, at a random moment of whatever is under way."""
        pick = self.rng.randrange(10)
        targets = [self.rng.choice(self.names)]
        match pick:
            case 0 | 1:
                self.send("set", targets=targets, changes={"radix_cache": self.rng.choice(["on", "off"])})
            case 2:
                self.send("restart", mode="at-once")
            case 3:
                self.send("stop", targets=targets)
            case 4:
                self.send("start", targets=targets)
            case 5:
                self.send("revert", targets=targets)
            case 6:
                self.say("cancel")
                self._write({"cancel": True})
            case 7:
                self.kill_fleet()
            case _:
                self.kill_something(targets[0])
        self.check()
        time.sleep(self.rng.choice([0.0, 0.2, 0.8, 2.0]))  # the moment is part of what is drawn
        self.check()

    def kill_something(self, slot: str) -> None:
        """kill -9 of an engine, its child or its keeper."""
        for process in self.engines().get(slot, []):
            try:
                victim = self.rng.choice([process, process, *process.children(), process.parent()])
                assert victim is not None
                ours = victim.environ().get(MARKER, "").startswith(f"{self.run}/") or "keeper.py" in str(
                    victim.cmdline()
                )
                if ours:
                    self.say(f"kill -9 of {victim.pid} ({' '.join(victim.cmdline())[:60]}) of engine {slot}")
                    victim.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue

    def live(self, steps: int) -> None:
        """Start, be wild, be calm, stop; then nothing may be left."""
        self.begin()
        declared = [{"id": name, "kind": "cpu", "model_path": str(self.model)} for name in self.names]
        number = self.send("have", slots=declared)
        self.until(lambda: self.ended(number), "the engines did not start")
        for _ in range(steps):
            self.step()
        self.until(lambda: all(self.ended(one) for one in self.sent), f"an operation never ended: {self.sent}")
        self.until(self._calm, "a slot never came to its goal")
        number = self.send("stop-all")
        self.until(lambda: self.ended(number), "not everything was stopped")
        self.until(lambda: not self.left(), f"left: {self.left()}")
        for name in self.names:
            with (self.folder / "engines" / name / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _calm(self) -> bool:
        """Each slot serves or is stopped, as its file says it should."""
        cells = self.cells()
        for name in self.names:
            record = json.loads((self.folder / "engines" / name / "slot.json").read_text())
            wanted = "HEALTHY" if record["goal"]["run"] else "STOPPED"
            if cells.get(name, {}).get("state") != wanted or record["state"] != wanted:
                return False
            if record["goal"]["run"] and record["generation"] < record["goal"]["generation"]:
                return False
            if record["config"] != record["running"] and record["goal"]["run"]:
                return False
        return True


@contextmanager
def a_life(seed: int, folder: Path, model: Path, count: int) -> Iterator[Sequence]:
    """Whatever becomes of the test, nothing of it stays."""
    life = Sequence(seed, folder, model, count)
    try:
        yield life
    except BaseException:
        print(f"seed {seed}\n{life.picture()}")
        raise
    finally:
        life.end_fleet()
        for process in life.left():
            process.kill()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_and_operations_leave_every_slot_whole(seed: int, tmp_path: Path, model_path: Path) -> None:
    with a_life(seed, tmp_path, model_path, 1) as life:
        life.live(steps=4)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_random_lives_of_real_processes(seed: int, tmp_path: Path, model_path: Path) -> None:
    with a_life(seed, tmp_path, model_path, 2) as life:
        life.live(steps=12)
