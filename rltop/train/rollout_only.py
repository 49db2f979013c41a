"""`--debug-rollout-only`: rollouts without a trainer. No Megatron process exists and no weights are ever sent.

The engines serve `--hf-checkpoint` as it is, so every rollout is sampled from the same weights. Rewards, pass rates and
lengths are logged here, under the names that slime's trainer uses (slime logs none of them in this mode).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rltop.train.arguments import TrainConfig
from rltop.train.loop import History, stand_ins
from rltop.train.narrator import Narrator
from rltop.train.ports import BASE_VERSION, BaseFacts, EngineFacts, EngineReply, Rollouts, SyncReport
from rltop.train.reports import report_dump, report_evaluation, report_generation, report_passrate
from rltop.train.sample import for_viewers, rollout_metrics

BACKEND = "none: rollout-only, no trainer"


@dataclass(frozen=True, slots=True)
class RolloutLoop:
    """One run over its engines."""

    config: TrainConfig
    rollouts: Rollouts
    narrator: Narrator
    history: History

    def run(self) -> None:
        """From the start of the engines to the last rollout. Raises RltopError."""
        with self.narrator.phase("start"):
            checkpoint = self.rollouts.checkpoint()
            self._report_run(checkpoint)
            self.rollouts.load(checkpoint)
            self._held(self.rollouts.start(BaseFacts(checkpoint, "")))
        for rollout_id in range(self.config.num_rollout):
            if rollout_id == 0 and self.config.evaluates_first:
                self._evaluate(rollout_id)
            self._rollout(rollout_id)
            if self.config.evaluates_after(rollout_id):
                self._evaluate(rollout_id)

    def _rollout(self, rollout_id: int) -> None:
        config, say = self.config, self.narrator
        with say.phase("rollout", rollout_id):
            batch = self.rollouts.generate(rollout_id, BASE_VERSION, self._held)
        if rollout_id == 0:
            say.first_sample(batch.samples[0])
        say.finished(batch.samples[-1])
        report_generation(say, config, batch)
        if batch.dumped is not None:
            report_dump(say, self.history, batch.dumped, rollout_id)
        metrics = rollout_metrics(batch.samples, None, log_probs=None, ref_log_probs=None)
        say.rollout_metrics("rollout", rollout_id, metrics)
        report_passrate(say, config, batch)
        views = for_viewers(batch.samples, None, group_size=config.n_samples_per_prompt)
        say.samples(rollout_id, views, len(batch.samples))
        self.history.rewards.append(metrics["rollout/raw_reward"])
        if not self.history.first_rollout:
            self.history.first_rollout.update(metrics)

    def _evaluate(self, rollout_id: int) -> None:
        with self.narrator.phase("eval", rollout_id):
            batch = self.rollouts.evaluate(rollout_id, BASE_VERSION, self._held)
        self.history.evaluations.append(report_evaluation(self.narrator, self.config, batch))
        if batch.dumped is not None:
            report_dump(self.narrator, self.history, batch.dumped, rollout_id)

    def _held(self, engines: Sequence[EngineFacts]) -> None:
        """Nobody pushes weights: an engine has those that it was started with, or cannot be asked."""
        held = {engine.id: engine.weight_version or BASE_VERSION for engine in engines}
        report = SyncReport(
            version=BASE_VERSION,
            digest="",
            transport="start",
            engines={name: EngineReply(ok=version == BASE_VERSION, version=version) for name, version in held.items()},
        )
        self.rollouts.took(report, engines, 0.0)

    def _report_run(self, checkpoint: str) -> None:
        config = self.config
        self.history.backend = BACKEND
        self.narrator.run(
            framework="rltop",
            args=config.as_args(),
            mode=config.mode,
            backend=BACKEND,
            start_rollout_id=0,
            fresh_start=True,
            num_rollout=config.num_rollout,
            vocab_size=vocab_size(Path(checkpoint)),
            injected_faults=list(config.inject),
            stand_ins=stand_ins(config),
        )
        self.narrator.log("info", f"rollout-only: the engines serve {checkpoint}, no trainer starts")
        unread = [flag for flag, value in (("--load", config.load), ("--save", config.save)) if value is not None]
        if unread:
            self.narrator.log("warn", f"rollout-only: {' and '.join(unread)} are of the trainer and not read")


def vocab_size(checkpoint: Path) -> int | None:
    """Of the checkpoint's config.json; None where it does not say it."""
    try:
        size = json.loads((checkpoint / "config.json").read_text()).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
