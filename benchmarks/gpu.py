"""Runs with real SGLang and Megatron-Core on GPUs: trainer and engines in a process each, without Ray.

    python -m benchmarks.gpu --size tiny|0.6b --out DIR --work DIR [--only PART,…] [flags of `rltop train`]

The trainer's actor and the rollout manager run in this process behind the ports that Ray's actors stand behind in
`rltop train`; the engine is a process of its own (`--engine-python`, `--engine-env`). Colocated (`--colocate`) or on a
GPU each: `CUDA_VISIBLE_DEVICES=1` for this process and `--engine-env CUDA_VISIBLE_DEVICES=0` for the engine.

run: memory through the turns, the numbers of the first step. push: the weights alone. ab: turns with rltop on and off
(`gpu_turns`); same: the same on one batch again and again, ten times `--pairs`, also without an engine on what
`--load-debug-rollout-data` names. rollout: throughput beside `sglang.bench_serving`. step: a train step beside a bare
Megatron-Core loop over the same micro-batches; it needs no engine. resume: --save and --load (`gpu_resume`). push, ab,
same and rollout come after run. Each part goes into DIR/found.json as soon as it is there, and as one line of JSON to
standard output. What fails says so and the rest goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_parts import awake, push_alone, rollout_beside_sglang, step_beside_megatron
from benchmarks.gpu_resume import resume
from benchmarks.gpu_turns import Timed, on_and_off
from rltop.errors import RltopError
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.loop import History, Loop, version_for
from rltop.train.narrator import Narrator, configure_console
from rltop.train.ports import EngineFacts, MemoryLook, Resync, RolloutBatch, StepSample, SyncReport
from rltop.train.preflight import preflight
from rltop.train.rollout_manager import RolloutManager
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model
from rltop.train.trainer_actor import TrainActor
from tests.train.local import LocalRollouts

SIZES = {
    "tiny": TinyModelConfig(
        hidden_size=256, intermediate_size=768, num_layers=4, head_dim=64, max_positions=2048, vocab_rows=512, seed=1
    ),
    # The shape of Qwen3-0.6B: 0.596 billion parameters.
    "0.6b": TinyModelConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_positions=4096,
        rope_theta=1_000_000.0,
        vocab_rows=151_936,
        seed=1,
    ),
}
PARTS = ("run", "push", "ab", "same", "rollout", "step")
"""By default; `resume` brings runs of its own."""
ALONE = ("run", "step", "resume")
"""What needs no run before it. Nor does `same`, where samples are loaded and no engine is asked."""
TIMED = ("push", "ab", "same", "rollout", "step")
"""What other work on the machine would disturb."""
SAME_PAIRS = 10
"""How many times as many pairs on one batch as with rollouts."""


def needs_engine(part: str, config: TrainConfig) -> bool:
    """Whether the part is measured on an engine that `run` has started."""
    return part not in ALONE and not (part == "same" and config.mode == "train-only")


def used_mib() -> list[int]:
    """Memory in use on each of the machine's GPUs, as the driver tells it."""
    try:
        argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) for line in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


@dataclass
class Notes:
    """What happened to memory, in order."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, began: float, **more: Any) -> None:
        row = {"what": what, "seconds": round(time.monotonic() - began, 4), "used_mib": used_mib(), **more}
        self.rows.append(row)
        print("memory", row, flush=True)


class NotedTrainer(TrainActor):
    """Notes every nap, and keeps the actor's log-probs beside the engine's."""

    notes: Notes
    gaps: list[dict[str, float]]
    engine_values: list[list[float]]

    def sleep(self, weights: bool) -> list[MemoryLook]:
        began = time.monotonic()
        looks = super().sleep(weights)
        self.notes.note("trainer sleeps" + (", weights too" if weights else ""), began, look=dict(looks[0].after))
        return looks

    def wake_up(self, weights_only: bool = False) -> list[MemoryLook]:
        began = time.monotonic()
        looks = super().wake_up(weights_only)
        what = "trainer wakes its weights" if weights_only else "trainer wakes up"
        self.notes.note(what, began, look=dict(looks[0].after))
        return looks

    def log_probs(
        self, tokens: Sequence[tuple[int, ...]], response_lengths: Sequence[int], which: Literal["actor", "ref"]
    ) -> list[tuple[float, ...]]:
        values = super().log_probs(tokens, response_lengths, which)
        if which == "actor" and len(values) == len(self.engine_values):
            apart = [
                abs(ours - theirs)
                for mine, engine in zip(values, self.engine_values, strict=True)
                for ours, theirs in zip(mine, engine, strict=True)
            ]
            self.gaps.append({"mean": statistics.fmean(apart), "max": max(apart), "tokens": float(len(apart))})
            print("gap", self.gaps[-1], flush=True)
        return values

    def train_step(self, samples: Sequence[StepSample], rollout_id: int) -> dict[str, float]:
        began = time.monotonic()
        metrics = super().train_step(samples, rollout_id)
        print(f"step {rollout_id} {time.monotonic() - began:.3f} s {metrics}", flush=True)
        return metrics

    def publish(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        began = time.monotonic()
        report = super().publish(version, rollout_id, engines)
        replies = {name: [reply.ok, reply.version, reply.same, reply.message] for name, reply in report.engines.items()}
        self.notes.note("weights pushed and compared", began, version=version, replies=replies)
        return report


@dataclass
class NotedRollouts(LocalRollouts):
    """Notes when engines give memory away and take it."""

    notes: Notes = field(default_factory=Notes)
    trainer: NotedTrainer | None = None
    narrator: Narrator | None = None

    def start(self, base: Any) -> Sequence[EngineFacts]:
        began = time.monotonic()
        facts = super().start(base)
        self.notes.note("engines up", began)
        self._tell("HEALTHY")
        return facts

    def _tell(self, state: str) -> None:
        """As the Ray side does: a daemon that watches the run shall not ask a released engine anything."""
        if self.narrator is not None:
            for engine in self.facts:
                self.narrator.engine(engine, state)

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        batch = super().generate(rollout_id, version, resync)
        if self.trainer is not None:
            self.trainer.engine_values = [list(sample.rollout_log_probs) for sample in batch.samples]
        return batch

    def offload(self, *, late: bool = False) -> None:
        began = time.monotonic()
        self._tell("OFFLOADED")
        super().offload(late=late)
        self.notes.note("engines released", began, held=[str(one) for one in self.holdings()])

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        began = time.monotonic()
        super().onload(tags, no_update=no_update)
        self.notes.note(f"engines resumed {', '.join(tags)}", began)
        if "weights" not in tags:
            self._tell("HEALTHY")


@dataclass
class Bench:
    """One engine, one trainer, and what is measured with them."""

    config: TrainConfig
    work: Path
    out: Path
    checkpoint: Path
    pairs: int
    lock: Path | None
    found: dict[str, Any] = field(default_factory=dict)

    def go(self, parts: Sequence[str]) -> int:
        """Run and measure. Returns how many parts failed."""
        notes = Notes()
        trainer = NotedTrainer(self.config, str(self.work))
        trainer.notes, trainer.gaps, trainer.engine_values = notes, [], []
        manager = RolloutManager(self.config)
        rollouts = NotedRollouts(self.config, self.work, manager, notes=notes, trainer=trainer)
        failed = 0
        with Reporter(role="trainer", rank=0) as reporter:
            timed: Any = Timed(reporter)
            loop = Loop(
                config=self.config,
                trainer=trainer,
                rollouts=rollouts,
                narrator=Narrator(timed, time.monotonic),
                clock=time.monotonic,
                base_directory=self.work / "initial",
                history=History(),
            )
            rollouts.narrator = loop.narrator

            def turns(same_batch: bool) -> dict[str, Any]:
                # After the run's own rollouts, and `same` after those of `ab`: no rollout comes twice.
                first = self.config.num_rollout + (2 * self.pairs + 2 if same_batch else 0)
                pairs = self.pairs * (SAME_PAIRS if same_batch else 1)
                if rollouts.facts:  # a step that was measured alone changed the weights
                    with awake(self.config, trainer, weights_only=True):
                        loop._push(version_for(first), first)
                return on_and_off(loop, rollouts.facts, first, pairs, same_batch=same_batch)

            work: Mapping[str, Callable[[], Any]] = {
                "run": lambda: self._run(loop, trainer, notes, timed),
                "push": lambda: push_alone(self.config, trainer, rollouts.facts[0]),
                "ab": lambda: turns(False),
                "same": lambda: turns(True),
                "rollout": lambda: rollout_beside_sglang(
                    self.config, manager, rollouts.facts[0], self.work, self.checkpoint
                ),
                "step": lambda: self._step(trainer),
                "resume": lambda: resume(self.config, self.work / "resume"),
            }
            try:
                for part in parts:
                    if needs_engine(part, self.config) and not rollouts.facts:
                        failed += self._part(part, _nothing_runs)
                        continue
                    with quiet(self.lock if part in TIMED else None):
                        failed += self._part(part, work[part])
                if rollouts.facts:
                    self._keep_answers(rollouts.facts[0].url)
            finally:
                rollouts.stop()
                trainer.disconnect()
        return failed

    def _part(self, name: str, work: Callable[[], Any]) -> int:
        print(f"=== {name}", flush=True)
        began = time.monotonic()
        try:
            self.found[name] = work()
        except Exception:
            self.found[name] = {"failed": traceback.format_exc()}
            print(self.found[name]["failed"], flush=True)
        self.found[name]["part_s"] = round(time.monotonic() - began, 1)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "found.json").write_text(json.dumps(self.found, indent=1, default=str))
        line = {name: self.found[name] if name != "run" else self.found[name] | {"memory": "in found.json"}}
        print(f"RESULT {json.dumps(line, default=str)[:6000]}", flush=True)
        return int("failed" in self.found[name])

    def _step(self, trainer: NotedTrainer) -> dict[str, Any]:
        if not hasattr(trainer, "_backend"):
            trainer.load()
        return step_beside_megatron(self.config, trainer)

    def _run(self, loop: Loop, trainer: NotedTrainer, notes: Notes, timed: Timed) -> dict[str, Any]:
        began = time.monotonic()
        loop.run()
        history = loop.history
        return {
            "reporter": {"seconds": timed.seconds, "calls": timed.calls, "of_seconds": time.monotonic() - began},
            "perf": list(timed.perf),
            "backend": history.backend,
            "first_rollout": history.first_rollout,
            "steps": list(history.steps),
            "rewards": list(history.rewards),
            "mismatches": history.mismatches,
            "gaps": list(trainer.gaps),
            "memory": list(notes.rows),
        }

    def _keep_answers(self, url: str) -> None:
        """Answers of the real engine, for tests that compare the stand-in with it."""
        import httpx

        asked = {
            "server_info.json": ("GET", "/server_info", None),
            "model_info.json": ("GET", "/model_info", None),
            "metrics.prom": ("GET", "/metrics", None),
            "weights_checker_checksum.json": ("POST", "/weights_checker", {"action": "checksum"}),
        }
        for name, (method, path, body) in asked.items():
            answer = httpx.request(method, url + path, json=body, timeout=60, trust_env=False)
            (self.out / name).write_text(answer.text)


def _nothing_runs() -> Any:
    raise RuntimeError("no engine is up: the part `run`, which starts it, is missing or failed")


@contextlib.contextmanager
def quiet(lock: Path | None) -> Iterator[None]:
    """Alone on the machine among those that take this lock."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the number of parts that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model; 0.6b has Qwen3-0.6B's shape")
    parser.add_argument("--out", type=Path, required=True, help="folder for found.json and the engine's answers")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, logs and dumps")
    parser.add_argument("--only", type=_parts, default=PARTS, help=f"parts, in this order; default {','.join(PARTS)}")
    parser.add_argument("--pairs", type=int, default=6, help="turns of each side in ab, and ten times that in same")
    parser.add_argument("--lock", type=Path, help="held by parts that are timed: others that take it wait")
    own, rest = parser.parse_known_args(argv)
    configure_console(sys.stdout)
    try:
        config = parse_args(rest)
        wants_run = [part for part in own.only if needs_engine(part, config)]
        if wants_run and "run" not in own.only:
            parser.error(f"--only: {', '.join(wants_run)} needs the engine that `run` starts")
        own.work.mkdir(parents=True, exist_ok=True)
        checkpoint = make_tiny_model(own.work / f"model-{own.size}", SIZES[own.size])
        config = replace(config, hf_checkpoint=checkpoint)
        if {"run", "resume"}.intersection(own.only):
            preflight(config)
    except RltopError as error:
        parser.error(str(error))
    return Bench(config, own.work, own.out, checkpoint, own.pairs, own.lock).go(own.only)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in (*PARTS, *ALONE)]:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}; of {', '.join((*PARTS, 'resume'))}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
