"""The GRPO loop: rollout, log-prob passes, advantages, optimizer steps, weight sync, next rollout.

It runs over two ports (`Trainer`, `Rollouts`) and knows nothing of Ray, torch or HTTP. In train-only mode the samples
come out of dumps and the half that needs engines (start, weight sync, evaluation) does not happen; a run without a
trainer is `rltop.train.rollout_only`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rltop.engines.weight_findings import told
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.narrator import Narrator
from rltop.train.ports import (
    BASE_VERSION,
    EngineFacts,
    RolloutBatch,
    Rollouts,
    StepSample,
    SyncReport,
    Trainer,
    TrainerFacts,
)
from rltop.train.replay import Replay
from rltop.train.reports import report_dump, report_evaluation, report_generation, report_passrate
from rltop.train.resume import TRACKER
from rltop.train.sample import Sample, for_viewers, rollout_metrics
from rltop.train.swap import Swap

CPU_ENGINE_STAND_IN = "CPU engine: rltop's own server behind SGLang's HTTP API, not SGLang"


@dataclass(slots=True)
class History:
    """What the run has done so far. The only thing of the loop that changes."""

    backend: str = ""
    rewards: list[float] = field(default_factory=list)
    """Mean raw reward per rollout."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of every optimizer step, without prefix."""
    first_rollout: dict[str, float] = field(default_factory=dict)
    """Metrics of the run's first rollout: rollout 0, or the one after the checkpoint."""
    syncs: int = 0
    mismatches: list[str] = field(default_factory=list)
    """Weight versions after which an engine held something else than the trainer."""
    dumps_lost: int = 0
    """Dumps that could not be written."""
    evaluations: list[float] = field(default_factory=list)
    """Mean reward per evaluation."""
    replay: dict[str, float] = field(default_factory=dict)
    """Of a run whose steps were compared with those of another run on the same dumps: see `Replay`."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One run over its two sides."""

    config: TrainConfig
    trainer: Trainer
    rollouts: Rollouts
    narrator: Narrator
    clock: Callable[[], float]
    base_directory: Path
    """Where the base checkpoint goes."""
    history: History
    replay: Replay = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replay", Replay(self.config, self.narrator, self.history.replay))

    @property
    def swap(self) -> Swap:
        """Who has the devices."""
        return Swap(self.config, self.trainer, self.rollouts, self.narrator, self.clock)

    def run(self) -> None:
        """Everything from the start of the backend to the last sync. Raises RltopError."""
        first = self._start()
        waiting_since = self.clock()
        for rollout_id in range(first, self.config.num_rollout):
            if rollout_id == 0 and self.config.evaluates_first:
                self._evaluate(0, version_for(0))
            batch = self._generate(rollout_id, first=rollout_id == first)
            trained = self._train(batch, waiting_since)
            waiting_since = self.clock()
            if self.config.saves_after(rollout_id):
                trained["perf/save_model_time"] = self._save(rollout_id)
            self._sync(version_for(rollout_id + 1), rollout_id + 1, trained)
            if self.config.evaluates_after(rollout_id):
                self._evaluate(rollout_id, version_for(rollout_id + 1))
        if self.config.save_dir is not None:
            with self.narrator.phase("save"), self.swap.weights_awake():
                self.trainer.save(str(self.config.save_dir / "final"))

    def _start(self) -> int:
        """Everything up to engines that hold the trainer's weights. Returns the first rollout to come."""
        with self.narrator.phase("start"):
            facts = self.trainer.load()
            self.history.backend = facts.backend
            self.rollouts.load(facts.checkpoint)
            first = 0 if facts.loaded_iteration is None else facts.loaded_iteration + 1
            self._report_run(facts, first)
            if self.config.cold_start_steps and facts.loaded_iteration is None:
                with self.narrator.phase("cold_start"):
                    losses = self.trainer.cold_start(self.rollouts.demonstrations())
                self.narrator.log("info", f"Cold start: {len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
            base = self.trainer.freeze_base(str(self.base_directory) if self._keeps_base else "")
            self.replay.begin(weights=base.digest, backend=facts.backend, first=first, checkpoint=facts.checkpoint)
            if self._train_only:
                return first
            self.swap.begin()
            engines = self.rollouts.start(base)
            if self.config.check_weight_update_equal:
                self._prove(engines, first)
            elif not first:
                # Rollout 0 must be sampled from the trainer's own initial weights, under SGLang's name for them.
                self._report_sync(self.trainer.verify(engines), engines, first_rollout=0, seconds=0.0)
        if first and not self.config.check_weight_update_equal:
            # What the interrupted run did after its last rollout; the samples to come require this version.
            self._push(version_for(first), first)
        self.swap.begun()
        return first

    @property
    def _train_only(self) -> bool:
        return self.config.mode == "train-only"

    @property
    def _keeps_base(self) -> bool:
        """Whether anybody reads the first weights: engines, a resumed run, or whoever gave the directory."""
        return not self._train_only or self.config.save is not None or self.config.save_dir is not None

    def _generate(self, rollout_id: int, *, first: bool) -> RolloutBatch:
        """The samples of a rollout, from the engines or out of a dump."""
        with self.narrator.phase("rollout", rollout_id):
            version = version_for(rollout_id)
            batch = self.rollouts.generate(rollout_id, version, functools.partial(self._resync, rollout_id))
        if first:
            self.narrator.first_sample(batch.samples[0])
        self.narrator.finished(batch.samples[-1])
        if batch.source:
            # slime's: a loaded rollout has no metrics of its generation.
            self.narrator.log("info", f"Rollout {rollout_id}: {len(batch.samples)} samples from {batch.source}")
        else:
            report_generation(self.narrator, self.config, batch)
        if batch.dumped is not None:
            report_dump(self.narrator, self.history, batch.dumped, rollout_id)
        return batch

    def _evaluate(self, rollout_id: int, version: str) -> None:
        with self.narrator.phase("eval", rollout_id):
            batch = self.rollouts.evaluate(rollout_id, version, functools.partial(self._resync_to, version))
        self.history.evaluations.append(report_evaluation(self.narrator, self.config, batch))
        if batch.dumped is not None:
            report_dump(self.narrator, self.history, batch.dumped, rollout_id)

    def _report_run(self, facts: TrainerFacts, first: int) -> None:
        """The record `run`, and what was loaded in the words of slime and Megatron."""
        config, say = self.config, self.narrator.log
        self.narrator.run(
            framework="rltop",
            args=config.as_args(),
            mode=config.mode,
            backend=facts.backend,
            start_rollout_id=first,
            fresh_start=facts.loaded_iteration is None,
            num_rollout=config.num_rollout,
            vocab_size=facts.vocab_size,
            injected_faults=list(config.inject),
            stand_ins=stand_ins(config),
        )
        dump = config.load_debug_rollout_data
        if dump is not None and dump.format(rollout_id=0) == dump.format(rollout_id=1) and config.num_rollout > 1:
            say(
                "warn", f"--load-debug-rollout-data {dump} has no {{rollout_id}}: every rollout trains on the same file"
            )
        if facts.loaded_iteration is not None:
            where = f"{config.load} [ t 1/{config.layout.tensor}, p 1/{config.layout.pipeline} ]"
            say("info", f"successfully loaded checkpoint from {where} at iteration {facts.loaded_iteration}")
            return
        if config.load is not None:
            say(
                "warn",
                f"--load {config.load} holds no checkpoint (no {TRACKER}): "
                f"a fresh start at rollout 0 from {facts.checkpoint}",
            )
        say("info", f"Load checkpoint from HuggingFace model into Megatron: {facts.checkpoint}")

    def _save(self, rollout_id: int) -> float:
        """Save the trainer's state; returns the seconds it took."""
        config, started = self.config, self.clock()
        with self.narrator.phase("save", rollout_id):
            self.narrator.log(
                "info", f"saving checkpoint at iteration {rollout_id:7d} to {config.save} in torch_dist format"
            )
            self.trainer.save_checkpoint(rollout_id)
            where = f"{config.save} [ t 1/{config.layout.tensor}, p 1/{config.layout.pipeline} ]"
            self.narrator.log("info", f"successfully saved checkpoint from iteration {rollout_id:7d} to {where}")
        return self.clock() - started

    def _train(self, batch: RolloutBatch, waiting_since: float) -> dict[str, float]:
        """Log-prob passes and optimizer steps on one rollout. Returns the perf metrics so far."""
        config, samples, rollout_id = self.config, batch.samples, batch.rollout_id
        started = self.clock()
        perf = {"perf/train_wait_time": started - waiting_since}
        self.swap.to_trainer(rollout_id, perf)
        log_probs = self._pass("actor", batch, perf) if config.runs_actor_pass else None
        ref_log_probs = self._pass("ref", batch, perf) if config.use_kl_loss else None
        advantages = self.trainer.advantages([s.reward for s in samples])
        metrics = rollout_metrics(samples, advantages, log_probs=log_probs, ref_log_probs=ref_log_probs)
        self.narrator.rollout_metrics("rollout", rollout_id, metrics)
        if config.log_passrate:
            report_passrate(self.narrator, config, batch)
        views = for_viewers(samples, log_probs, group_size=config.n_samples_per_prompt)
        self.narrator.samples(rollout_id, views, len(samples))
        self.history.rewards.append(metrics["rollout/raw_reward"])
        if not self.history.first_rollout:
            self.history.first_rollout.update(metrics)
        step_samples = [
            StepSample(
                tokens=sample.tokens,
                response_length=len(sample.response_ids),
                advantage=advantages[at],
                rollout_log_probs=sample.rollout_log_probs or None,
                log_probs=log_probs[at] if log_probs is not None else None,
                ref_log_probs=ref_log_probs[at] if ref_log_probs is not None else None,
                loss_mask=sample.loss_mask,
            )
            for at, sample in enumerate(samples)
        ]
        self._steps(batch, step_samples, perf)
        self._dump_training(rollout_id, samples)
        perf["perf/train_time"] = self.clock() - started
        perf["perf/step_time"] = perf["perf/train_wait_time"] + perf["perf/train_time"]
        perf["perf/wait_time_ratio"] = perf["perf/train_wait_time"] / max(perf["perf/step_time"], 1e-9)
        return perf

    def _pass(
        self, which: Literal["actor", "ref"], batch: RolloutBatch, perf: dict[str, float]
    ) -> list[tuple[float, ...]]:
        name = "log_probs" if which == "actor" else "ref_log_probs"
        started = self.clock()
        with self.narrator.phase(name, batch.rollout_id):
            result = self.trainer.log_probs(
                [s.tokens for s in batch.samples],
                [len(s.response_ids) for s in batch.samples],
                which,
            )
        perf[f"perf/{name}_time"] = self.clock() - started
        return result

    def _steps(self, batch: RolloutBatch, samples: Sequence[StepSample], perf: dict[str, float]) -> None:
        """The optimizer steps of one rollout, in the order of the samples."""
        rollout_id, config, started = batch.rollout_id, self.config, self.clock()
        size = config.step_size if config.fixed_step_size else len(samples)
        steps = len(samples) // size
        beside = self.replay.rollout(rollout_id, samples)
        with self.narrator.phase("train", rollout_id):
            for step_id in range(steps):
                step = rollout_id * steps + step_id
                part = samples[step_id * size : (step_id + 1) * size]
                values = self.trainer.train_step(part, rollout_id)
                self.history.steps.append(values)
                named = _named(values, size) | beside.step(values, tokens=sum(s.response_length for s in part))
                self.narrator.step_metrics(step, named, rollout_id=rollout_id, step_in_rollout=step_id)
                if config.ci_save_grad_norm or config.ci_load_grad_norm:
                    self._grad_norm_file(rollout_id, step_id, values["grad_norm"])
        beside.end()
        perf["perf/actor_train_time"] = self.clock() - started
        perf["perf/actor_train_tok_per_s"] = sum(len(s.tokens) for s in samples) / max(
            perf["perf/actor_train_time"], 1e-9
        )

    def _grad_norm_file(self, rollout_id: int, step_id: int, grad_norm: float) -> None:
        kept = self.trainer.grad_norm_file(rollout_id, step_id, grad_norm)
        if kept is not None and kept.problem:
            report_dump(self.narrator, self.history, kept, rollout_id)

    def _dump_training(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        if self.config.train_dumps is not None:
            with self.narrator.phase("save_train_data", rollout_id):
                dumped = self.trainer.save_train_data(rollout_id, samples)
            report_dump(self.narrator, self.history, dumped, rollout_id)

    def _sync(self, version: str, first_rollout: int, perf: dict[str, float]) -> None:
        """Weights to the engines, then the line `perf N` of the rollout that ends here."""
        if not self._train_only:
            self.swap.before_push(first_rollout - 1, perf)
            perf["perf/update_weights_time"] = self._push(version, first_rollout)
            self.swap.after_push(first_rollout - 1, perf)
        self.narrator.rollout_metrics("perf", first_rollout - 1, perf)

    def _push(self, version: str, first_rollout: int) -> float:
        """Weights to the engines that are there, and what each holds then; returns the seconds it took."""
        started = self.clock()
        with self.narrator.phase("update_weights", first_rollout - 1):
            engines = self.rollouts.loaded()
            report = self.trainer.publish(version, first_rollout - 1, engines)
        seconds = self.clock() - started
        self._report_sync(report, engines, first_rollout=first_rollout, seconds=seconds)
        return seconds

    def _prove(self, engines: Sequence[EngineFacts], first: int) -> None:
        """The first sync, to engines whose weights are random. Raises RltopError if one does not hold what was sent.

        Right on a resume too: the engines start from the weights that the trainer loaded, not from --hf-checkpoint.
        """
        version, started = version_for(first), self.clock()
        with self.narrator.phase("update_weights", first - 1):
            report = self.trainer.prove(version, first - 1, engines)
        self._report_sync(report, engines, first_rollout=first, seconds=self.clock() - started)
        sides = {"the trainer": told(report.source, 8)} if report.source else {}
        for name, reply in report.engines.items():
            if reply.same is False or not (reply.ok or reply.gone):  # one that refused is random now
                sides[f"engine {name}"] = told(reply.findings, 8) if reply.findings else reply.message
        if sides:
            raise RltopError(
                f"{' and '.join(sides)}: not the weights that should be there",
                where=f"--check-weight-update-equal, weights version {report.version!r}",
                why="\n       ".join(f"{side}: {found}" for side, found in sides.items()),
                do='docs/debug.md, "Are the weights the same?", says what each kind points to',
                exit_code=1,
            )
        if unseen := [name for name, reply in report.engines.items() if reply.same is None and not reply.gone]:
            self.narrator.log("warn", f"--check-weight-update-equal cannot compare engine {', '.join(unseen)}")
        notes = sorted({reply.message for reply in report.engines.values() if reply.same and reply.message})
        self.narrator.log(
            "info",
            f"Weights version {report.version!r} checked after reset_tensors: every tensor of "
            f"{sum(reply.same is True for reply in report.engines.values())} engines is equal"
            + (f" ({'; '.join(notes)})" if notes else ""),
        )

    def _resync(self, rollout_id: int, engines: Sequence[EngineFacts]) -> None:
        """The weights of a rollout that is running to engines that came back: they do not change before its end."""
        self._resync_to(version_for(rollout_id), engines)

    def _resync_to(self, version: str, engines: Sequence[EngineFacts]) -> None:
        started, rollout_id = self.clock(), 0 if version == BASE_VERSION else int(version)
        with self.narrator.phase("update_weights", rollout_id), self.swap.weights_awake():
            # The first weights are those that it was started from; an engine of an earlier trainer may hold others.
            report = self.trainer.verify(engines) if version == BASE_VERSION else None
            if report is None or not _hold(report):
                report = self.trainer.publish(version, rollout_id - 1, engines)
        self._report_sync(report, engines, first_rollout=rollout_id, seconds=self.clock() - started, again=True)

    def _report_sync(
        self,
        report: SyncReport,
        engines: Sequence[EngineFacts],
        *,
        first_rollout: int,
        seconds: float,
        again: bool = False,
    ) -> None:
        """Different weights are shouted about. An engine that did not take them ends the run if nobody brings it back.

        again: these weights were pushed before, to others.
        """
        self.narrator.weights(report, first_rollout=first_rollout, seconds=seconds)
        self.rollouts.took(report, engines, seconds)
        if not again:
            self.history.syncs += 1
        pushed = [layer for stage in report.layers for layer in stage]
        if sorted(pushed) != list(range(len(pushed))):
            self.narrator.log(
                "warn" if report.planted else "error",
                f"Weights version {report.version!r} were pushed with layer ids "
                f"{' | '.join(', '.join(map(str, stage)) for stage in report.layers)} (pipeline stages between bars): "
                "they should count on from stage to stage" + (" (injected)" if report.planted else ""),
            )
        for name, reply in report.engines.items():
            if not reply.ok or reply.version != report.version:
                if self.rollouts.supervised:
                    why = reply.message or f"it holds version {reply.version!r}"
                    self.narrator.log(
                        "warn",
                        f"Engine {name} did not take the weights of version {report.version!r} and gets no requests "
                        f"before it did: {why}",
                    )
                    continue
                raise RltopError(
                    f"engine {name} did not take the weights of version {report.version!r}",
                    where=f"rollout {first_rollout}",
                    why=reply.message or f"it holds version {reply.version!r}",
                    do="the engine's log says more; its samples would come from an older policy, so the run stops",
                    exit_code=1,
                )
            if reply.same is False:
                if report.version not in self.history.mismatches:
                    self.history.mismatches.append(report.version)
                self.narrator.log(
                    "warn" if report.planted else "error",
                    f"Engine {name} holds other weights than the trainer as version {report.version!r}: "
                    f"{reply.message}; first rollout from them: {first_rollout}"
                    + (" (injected)" if report.planted else ""),
                )


def version_for(rollout_id: int) -> str:
    """Weight version that a rollout is sampled from: SGLang's `default` first, then one more after every sync."""
    return BASE_VERSION if rollout_id == 0 else str(rollout_id)


def stand_ins(config: TrainConfig) -> list[str]:
    """Parts of this run that stand in for the real thing, in words for people."""
    return [CPU_ENGINE_STAND_IN] if config.engine == "cpu" and config.engine_count else []


def _named(values: Mapping[str, float], batch: int) -> dict[str, float]:
    """slime's names: `train/loss`, ..., the learning rate as `train/lr-pg_0`."""
    named = {f"train/{'lr-pg_0' if name == 'lr' else name}": value for name, value in values.items()}
    return named | {"train/global_batch_size": float(batch)}


def _hold(report: SyncReport) -> bool:
    """Whether every engine that answered holds the version of the report, as far as can be seen."""
    return report.ok and all(reply.gone or reply.version == report.version for reply in report.engines.values())
