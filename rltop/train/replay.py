"""Steps beside those of the run that is replayed: leaves them with the dumps, finds them there, and compares.

A full run leaves its steps beside the rollouts that it saves; a train-only run compares its own with what it finds, or
leaves them where nobody did. What was found goes out as metrics of every step (`train/replay_loss`,
`train/replay_grad_norm`, and what each may differ by), of which the check `train.replay` makes its verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rltop.train.arguments import TrainConfig
from rltop.train.load_dump import dump_path
from rltop.train.narrator import Narrator
from rltop.train.ports import StepSample
from rltop.train.step_record import NAMES, Facts, Reference, digest_of, read_record, record_path, write_record
from rltop.train.tolerance import ModelSizes, Tolerance, tolerance

_EXACT = Tolerance(0.0, 0.0)


@dataclass(slots=True)
class Replay:
    """Of one run."""

    config: TrainConfig
    narrator: Narrator
    totals: dict[str, float]
    """Filled in: steps compared, the largest differences, whether all were within the tolerance and all bitwise."""
    _facts: Facts | None = field(init=False, default=None)
    _first: int = field(init=False, default=0)
    _sizes: ModelSizes | None = field(init=False, default=None)
    _updates: int = field(init=False, default=0)

    def begin(self, *, weights: str, backend: str, first: int, checkpoint: str) -> None:
        """weights: digest at the start of the run; first: its first rollout; checkpoint: with the model's sizes."""
        self._first, self._sizes = first, model_sizes(Path(checkpoint))
        self._facts = Facts.of(self.config, weights=weights, backend=backend)

    def rollout(self, rollout_id: int, samples: Sequence[StepSample]) -> Beside:
        """The steps to come on a rollout."""
        assert self._facts is not None, "begin() comes first"
        pattern = self.config.load_debug_rollout_data or self.config.rollout_dumps
        if pattern is None:
            return Beside(self, rollout_id, None)
        path = dump_path(pattern, rollout_id)
        path = record_path(path, rollout_id, shared=path == dump_path(pattern, rollout_id + 1))
        mine = Reference(path, rollout_id, self._first, len(samples), digest_of(samples), self._facts, [])
        beside = Beside(self, rollout_id, mine)
        if self.config.mode != "train-only":
            return beside  # the samples are new, so nobody has trained on them
        found = read_record(path)
        if isinstance(found, str):
            self.narrator.log("warn", f"Replay of rollout {rollout_id}: compared with nothing: {found}")
            beside.mine = None  # it stays as it is
        elif found is not None and found.content != mine.content and found.samples == mine.samples:
            self.narrator.log("warn", f"Replay of rollout {rollout_id}: {path} is of other samples, of an older dump")
        elif found is not None:
            beside.compare(found)
        return beside

    def tolerance(self, values: Mapping[str, float], tokens: int) -> Tolerance | None:
        """Of the next step, in another layout; None where the model's sizes are not known."""
        if self._sizes is None:
            return None
        lr, norm = values.get("lr", self.config.lr), values["grad_norm"]
        return tolerance(self._sizes, tokens=tokens, updates=self._updates, lr=lr, grad_norm=norm)


@dataclass(slots=True)
class Beside:
    """The steps of one rollout beside those of its reference."""

    replay: Replay
    rollout_id: int
    mine: Reference | None
    """This run's own steps, if they are to be left for others."""
    reference: Reference | None = None
    unlike: list[str] = field(default_factory=list)
    bitwise: bool = False
    """Whether the same bits are to be expected."""
    _steps: list[Mapping[str, float]] = field(default_factory=list)
    _worst: dict[str, float] = field(default_factory=dict)
    _allowed: Tolerance = _EXACT
    _outside: int = 0
    _same: int = 0

    def compare(self, reference: Reference) -> None:
        """Hold the steps against these."""
        assert self.mine is not None
        self.reference = reference
        self.unlike, self.bitwise = reference.differs(self.mine), reference.bitwise(self.mine)

    def step(self, values: Mapping[str, float], *, tokens: int) -> dict[str, float]:
        """Take a step; returns the metrics of the comparison, none without a reference. tokens: of its responses."""
        at = len(self._steps)
        self._steps.append({name: values[name] for name in NAMES if name in values})
        there = self.reference.steps[at] if self.reference and at < len(self.reference.steps) else None
        allowed = _EXACT if self.bitwise else self.replay.tolerance(values, tokens)
        self.replay._updates += 1
        if there is None or not all(name in there for name in NAMES):
            return {}
        metrics = {f"train/replay_{name}": there[name] for name in NAMES}
        if self.unlike or allowed is None:
            return metrics
        gaps = {
            "loss": gap(values["loss"], there["loss"]) / max(1.0, abs(there["loss"])),
            "grad_norm": gap(values["grad_norm"], there["grad_norm"]) / (abs(there["grad_norm"]) or 1.0),
        }
        self._worst = {name: max(self._worst.get(name, 0.0), value) for name, value in gaps.items()}
        self._allowed = Tolerance(
            max(self._allowed.loss, allowed.loss), max(self._allowed.grad_norm, allowed.grad_norm)
        )
        self._outside += gaps["loss"] > allowed.loss or gaps["grad_norm"] > allowed.grad_norm
        self._same += not any(gaps.values())
        return metrics | {
            "train/replay_loss_tolerance": allowed.loss * max(1.0, abs(there["loss"])),
            "train/replay_grad_norm_tolerance": allowed.grad_norm * abs(there["grad_norm"]),
        }

    def end(self) -> None:
        """The rollout's steps are done: leave them, or say how they compare."""
        say, words = self.replay.narrator.log, f"Replay of rollout {self.rollout_id}"
        if self.reference is None:
            self._leave()
            return
        where = self.reference.path
        if self.unlike:
            say("warn", f"{words}: not comparable with {where}: {'; '.join(self.unlike)}")
            return
        count, totals = len(self._steps), self.replay.totals
        if not self._worst:
            say("warn", f"{words}: not compared: the checkpoint's config.json does not say the model's sizes")
            return
        if len(self.reference.steps) != count:
            say("warn", f"{words}: {count} steps, {where} has {len(self.reference.steps)}")
        totals["steps"] = totals.get("steps", 0.0) + count
        totals["bitwise"] = totals.get("bitwise", 0.0) + self._same
        totals["outside"] = totals.get("outside", 0.0) + self._outside
        for name, value in self._worst.items():
            totals[f"{name}_gap"] = max(totals.get(f"{name}_gap", 0.0), value)
            allowed = self._allowed.loss if name == "loss" else self._allowed.grad_norm
            totals[f"{name}_tolerance"] = max(totals.get(f"{name}_tolerance", 0.0), allowed)
        say("error" if self._outside else "info", f"{words}: {self._told(where)}")

    def _told(self, where: Path) -> str:
        count = len(self._steps)
        if self._same == count:
            return f"loss and grad_norm of its {count} steps are those of {where}, bit for bit"
        told = (
            f"against {where} the loss differs by {self._worst['loss']:.3g} (tolerance {self._allowed.loss:.3g}), "
            f"grad_norm by {self._worst['grad_norm']:.3g} of itself (tolerance {self._allowed.grad_norm:.3g})"
        )
        if self.bitwise:
            told += "; the same layout on the same machine should give the same bits"
        elif self.reference is not None and self.mine is not None:
            told += f"; {self.reference.facts.layout} -> {self.mine.facts.layout}"
        return told + (f"; outside: {self._outside} of {count} steps" if self._outside else "")

    def _leave(self) -> None:
        replay = self.replay
        if self.mine is None or replay.config.load_debug_rollout_data_subsample is not None:
            return
        done = write_record(replace(self.mine, steps=self._steps))
        if done.problem:
            why = f"Could not leave the steps for replays in {done.path}: {done.problem}; the run goes on"
            replay.narrator.log("warn", why)
        elif replay.config.mode == "train-only":
            replay.narrator.log(
                "info", f"Replay of rollout {self.rollout_id}: the first one; its steps are in {done.path}"
            )


def gap(left: float, right: float) -> float:
    """Absolute difference; two numbers that are the same, NaN and Inf included, have none."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    difference = abs(left - right)
    return math.inf if math.isnan(difference) else difference


def model_sizes(checkpoint: Path) -> ModelSizes | None:
    """From the checkpoint's config.json; None where it does not say them."""
    try:
        config = json.loads((checkpoint / "config.json").read_text())
        return ModelSizes(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
