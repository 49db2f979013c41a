"""What rltop costs a turn of training: rollout, steps and sync with rltop on and off, in pairs. And what it costs the
part after the rollout alone, on one batch again and again: two rollouts never take the same time, two steps on the same
tokens nearly do.

On: a daemon takes the records, scrapes the engine and follows its log. Off: nobody is told anything and the daemon is
stopped (SIGSTOP), so that it costs nothing either. Trainer, engine and seeds are those of one run; the order within a
pair alternates. Random weights of a large vocabulary hardly ever end a response: the tokens of every turn say whether
the work was the same.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rltop.daemon.spawn import start_daemon, stop_daemon
from rltop.reporter import Reporter
from rltop.runs import RunInfo
from rltop.train.loop import Loop, version_for
from rltop.train.narrator import Narrator
from rltop.train.ports import EngineFacts, RolloutBatch

SETTLE_S = 0.5
"""For a daemon that was stopped to catch up, before the clock runs."""
DRAWS = 2_000
PARTS = ("rollout", "train", "step", "sync", "turn")
"""`step` is what of `train` the optimizer's steps took."""


class Timed:
    """A reporter whose calls are timed, and whose metrics of speed are kept: what rltop costs the trainer."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.seconds, self.calls = reporter, 0.0, 0
        self.perf: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.reporter, name)
        if not callable(found):
            return found

        def call(*args: Any, **kw: Any) -> Any:
            if name == "metrics" and args and any(key.startswith("perf/") for key in args[0]):
                self.perf.append({key: round(float(value), 4) for key, value in args[0].items()})
            began = time.perf_counter()
            try:
                return found(*args, **kw)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return call


@dataclass(slots=True)
class Leg:
    """The turns of one side."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PARTS})
    tokens: list[int] = field(default_factory=list)

    def turn(self, loop: Loop, rollout_id: int, batch: RolloutBatch | None = None) -> RolloutBatch:
        """One turn of the loop, timed in its three parts. With a batch there is no rollout: it is trained on again."""
        marks = [time.monotonic()]
        if batch is None:
            batch = loop._generate(rollout_id, first=False)
        marks.append(time.monotonic())
        perf = loop._train(replace(batch, rollout_id=rollout_id), marks[0])
        marks.append(time.monotonic())
        loop._sync(version_for(rollout_id + 1), rollout_id + 1, perf)
        marks.append(time.monotonic())
        for name, began, ended in zip(("rollout", "train", "sync"), marks, marks[1:], strict=False):
            self.parts[name].append(ended - began)
        self.parts["turn"].append(marks[-1] - marks[0])
        self.parts["step"].append(perf["perf/actor_train_time"])
        self.tokens.append(sum(len(sample.response_ids) for sample in batch.samples))
        return batch


def on_and_off(
    loop: Loop, engines: Sequence[EngineFacts], first: int, pairs: int, *, same_batch: bool = False
) -> dict[str, Any]:
    """`pairs` pairs of turns from rollout `first` on; with `same_batch` all of them train on the first one's samples.

    `overhead` is (on - off) / off of the medians, with the range that 95 % of resampled pairs give.
    """
    legs = {"on": Leg(), "off": Leg()}
    batch = None
    with (
        _daemon(engines) as run,
        Reporter(address=run.sockets["ingest"], run=run.name) as reporter,
        Reporter(address="") as silent,
    ):
        timed: Any = Timed(reporter)
        narrators = {"on": Narrator(timed, loop.clock), "off": Narrator(silent, loop.clock)}
        narrators["on"].run(framework="rltop", args={}, mode="full", backend="", stand_ins=[], injected_faults=[])
        for engine in engines:
            narrators["on"].engine(engine, "HEALTHY")
        rollout_id = first
        for pair in range(-1, pairs):  # the first pair warms up
            for name in ("on", "off") if pair % 2 else ("off", "on"):
                os.kill(run.pid, signal.SIGCONT if name == "on" else signal.SIGSTOP)
                time.sleep(SETTLE_S)
                leg = legs[name] if pair >= 0 else Leg()
                last = leg.turn(_with(loop, narrators[name]), rollout_id, batch)
                batch = last if same_batch else None
                rollout_id += 1
        dropped = reporter.dropped
    parts = [name for name in PARTS if not (same_batch and name == "rollout")]
    return {
        "pairs": pairs,
        "overhead": {name: overhead(legs["on"].parts[name], legs["off"].parts[name]) for name in parts},
        "on": legs["on"].parts,
        "off": legs["off"].parts,
        "tokens": {name: leg.tokens for name, leg in legs.items()},
        "reporter": {"seconds": timed.seconds, "calls": timed.calls, "dropped": dropped},
    }


def _with(loop: Loop, narrator: Narrator) -> Loop:
    """The same loop, where it stands, with another voice."""
    other = copy.copy(loop)
    object.__setattr__(other, "narrator", narrator)
    return other


def overhead(on: Sequence[float], off: Sequence[float]) -> dict[str, float]:
    """(on - off) / off of the medians; `low` and `high` hold 95 % of what resampled pairs give."""
    draw, pairs = random.Random(0), list(zip(on, off, strict=True))

    def of(chosen: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in chosen) / statistics.median(b for _, b in chosen) - 1

    found = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return {"median": of(pairs), "low": found[DRAWS // 40], "high": found[-DRAWS // 40 - 1]}


@contextmanager
def _daemon(engines: Sequence[EngineFacts]) -> Iterator[RunInfo]:
    run = start_daemon(None, config={"watch": {"logs": [engine.log for engine in engines]}})
    try:
        yield run
    finally:
        os.kill(run.pid, signal.SIGCONT)
        stop_daemon(run)
