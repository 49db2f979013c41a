"""Says what the run does, twice: to rltop's daemon as records, and on standard error as the lines that slime prints.

The daemon's side may be absent or die at any time (`Reporter` is inert then); the lines stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from rltop.reporter import Reporter
from rltop.train.ports import EngineFacts, SyncReport
from rltop.train.sample import Sample

LOGGER = "rltop.train"
_TIMER_NAMES = {"train": "actor_train", "save": "save_model"}
"""Phases that slime's timers call otherwise."""


def configure_console(stream: TextIO) -> None:
    """Lines of the run in slime's format on `stream`, once; libraries' loggers are left alone."""
    logger = logging.getLogger(LOGGER)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] %(filename)s:%(lineno)d - %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@dataclass(frozen=True, slots=True)
class Narrator:
    """The run's only voice. `clock` gives monotonic seconds."""

    reporter: Reporter
    clock: Callable[[], float]

    def run(self, **facts: Any) -> None:
        """Facts of the run (`RunPayload`)."""
        self.reporter.run(**facts)
        self._line(f"Training backend: {facts['backend']}")
        for name in facts["stand_ins"]:
            self._line(f"Stand-in: {name}")
        for name in facts["injected_faults"]:
            self._line(f"Injected fault: {name}", level=logging.WARNING)

    @contextmanager
    def phase(self, name: str, rollout_id: int | None = None) -> Iterator[None]:
        """A phase and its timer lines."""
        timer = _TIMER_NAMES.get(name, name)
        started = self.clock()
        self._line(f"Timer {timer} start")
        with self.reporter.phase(name, rollout_id):
            yield
        self._line(f"Timer {timer} end (elapsed: {self.clock() - started:.1f}s)")

    def rollout_metrics(
        self, word: Literal["rollout", "perf", "eval", "passrate"], rollout_id: int, values: Mapping[str, float]
    ) -> None:
        """A line `rollout N: {...}`, `perf N: {...}`, `eval N: {...}` or `passrate N: {...}`."""
        self.reporter.metrics(dict(values), step=rollout_id, axis="rollout", rollout_id=rollout_id)
        self._line(f"{word} {rollout_id}: {dict(values)}")

    def step_metrics(self, step: int, values: Mapping[str, float], *, rollout_id: int, step_in_rollout: int) -> None:
        """A line `step N: {...}` of one optimizer step."""
        self.reporter.metrics(
            dict(values), step=step, axis="train", rollout_id=rollout_id, step_in_rollout=step_in_rollout
        )
        self._line(f"step {step}: {dict(values) | {'train/step': step}}")

    def first_sample(self, sample: Sample) -> None:
        """What slime prints of the first finished sample of the run."""
        self._sample("First rollout sample", sample)

    def finished(self, sample: Sample) -> None:
        """What slime prints at the end of a rollout."""
        self._sample("Finish rollout", sample)

    def samples(self, rollout_id: int, samples: Sequence[Mapping[str, Any]], total: int) -> None:
        """A few samples for viewers."""
        self.reporter.samples(rollout_id, [dict(sample) for sample in samples], total)

    def engine(self, facts: EngineFacts, state: str) -> None:
        """An engine's state changed."""
        self.reporter.engine(
            id=facts.id,
            url=facts.url,
            kind=facts.kind,
            state=state,
            generation=facts.generation,
            pid=facts.pid,
            host=facts.host,
            version=facts.version,
            weight_version=facts.weight_version,
            model_path=facts.model_path,
            log=facts.log,
        )
        self._line(f"Engine {facts.id} ({facts.kind}, pid {facts.pid}) at {facts.url}: {state}")

    def trouble(self, engine: str, generation: int, why: str) -> None:
        """A call to an engine failed; empty: it answers again."""
        self.reporter.engine(id=engine, generation=generation, trouble=why)

    def weights(self, report: SyncReport, *, first_rollout: int, seconds: float) -> None:
        """A weight sync ended."""
        self.reporter.weights(
            version=report.version,
            rollout_id=first_rollout,
            ok=report.ok,
            transport=report.transport,
            engines={
                name: {"ok": r.ok, "version": r.version, "message": r.message, "digest": r.digest, "same": r.same}
                | ({"gone": True} if r.gone else {})
                | ({"differing": r.differing, "findings": [one.as_dict() for one in r.findings]} if r.findings else {})
                for name, r in report.engines.items()
            },
            digest=report.digest,
            elapsed_s=seconds,
            layers=[list(ids) for ids in report.layers],
            checked=report.checked,
            findings=[one.as_dict() for one in report.source],
        )

    def memory(self, rank: int, when: str, sizes: Mapping[str, float | str]) -> None:
        """slime's line of a rank's device memory."""
        self._line(f"[Rank {rank}] Memory-Usage {when}: {dict(sizes)}")

    def log(self, level: Literal["info", "warn", "error"], text: str) -> None:
        """One line for people."""
        self.reporter.log(level, text)
        self._line(text, level={"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}[level])

    def bye(self, reason: Literal["done", "failed", "interrupted"], text: str = "") -> None:
        """The run ends."""
        self.reporter.bye(reason, text)
        self._line(f"Run {reason}" + (f": {text}" if text else ""))

    def _sample(self, words: str, sample: Sample) -> None:
        self._line(f"{words}: {[sample.prompt + sample.response]}, label: {sample.label}, reward: {sample.reward}")

    def _line(self, text: str, *, level: int = logging.INFO) -> None:
        logging.getLogger(LOGGER).log(level, text, stacklevel=1)
