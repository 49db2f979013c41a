"""What the loops say of a rollout, an evaluation and a dump, in slime's lines and as records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltop.train.arguments import TrainConfig
from rltop.train.dump import Dumped
from rltop.train.narrator import Narrator
from rltop.train.ports import RolloutBatch
from rltop.train.sample import evaluation_metrics, generation_metrics, pass_rates, without_weights

if TYPE_CHECKING:
    from rltop.train.loop import History

DUMPS_LOST = "perf/dumps_lost"
"""Metric: dumps of the run that could not be written so far."""


def report_generation(narrator: Narrator, config: TrainConfig, batch: RolloutBatch) -> None:
    """The line `perf N` of the rollout side; before it, which engines answer as if they had no weights."""
    for engine, (how, count) in without_weights(batch.samples).items():
        narrator.log(
            "error",
            f"Engine {engine} {how} in all {count} samples of rollout {batch.rollout_id}: "
            "it has no weights. Was its memory resumed without an update?",
        )
    metrics = generation_metrics(
        batch.samples,
        group_size=config.n_samples_per_prompt,
        seconds=batch.seconds,
        engines=config.rollout_num_engines,
    )
    narrator.rollout_metrics("perf", batch.rollout_id, metrics | dict(batch.extra))


def report_passrate(narrator: Narrator, config: TrainConfig, batch: RolloutBatch) -> None:
    """The line `passrate N`."""
    rates = pass_rates([sample.reward for sample in batch.samples], config.n_samples_per_prompt)
    narrator.rollout_metrics("passrate", batch.rollout_id, {f"passrate/{name}": value for name, value in rates.items()})


def report_evaluation(narrator: Narrator, config: TrainConfig, batch: RolloutBatch) -> float:
    """The line `eval N`; returns the mean reward."""
    metrics = evaluation_metrics(
        batch.dataset, batch.samples, group_size=config.n_samples_per_eval_prompt, passrate=config.log_passrate
    )
    narrator.rollout_metrics("eval", batch.rollout_id, metrics)
    return metrics[f"eval/{batch.dataset}"]


def report_dump(narrator: Narrator, history: History, dumped: Dumped, rollout_id: int) -> None:
    """Where a dump went. One that could not be written is said loudly and counted, and the run goes on."""
    if not dumped.problem:
        narrator.log("info", f"Saved {dumped.path}")
        return
    history.dumps_lost += 1
    narrator.log(
        "error",
        f"Could not save {dumped.path}: {dumped.problem}. The run goes on without it ({history.dumps_lost} lost so "
        "far); is the disk full?",
    )
    narrator.rollout_metrics("perf", rollout_id, {DUMPS_LOST: float(history.dumps_lost)})
