"""A colocated run on one GPU: Megatron-Core and real SGLang take turns, in one process each and without Ray.

    python -m benchmarks.gpu --size tiny|0.6b --out DIR [--only PART,…] [flags of `rltop train`]

The trainer's actor and the rollout manager run in this process behind the ports that Ray's actors stand behind in
`rltop train`; the engine is a process of its own (`--engine-python`, `--engine-env`). Measured, each into DIR as JSON:
memory through the turns, the numbers of the first step, rollout throughput beside `sglang.bench_serving`, a train step
beside a bare Megatron-Core loop over the same micro-batches, the push of the weights. What fails says so and the rest
goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator, configure_console
from rltop.train.ports import EngineFacts, MemoryLook, Resync, RolloutBatch, StepSample, SyncReport
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
PARTS = ("run", "push", "rollout", "step")


def used_mib() -> int:
    """Memory in use on the first GPU, as the driver tells it; 0 without one."""
    try:
        argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


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


class Timed:
    """A reporter whose calls are timed: what rltop costs the trainer."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.seconds, self.calls = reporter, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.reporter, name)
        if not callable(found):
            return found

        def call(*args: Any, **kw: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*args, **kw)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return call


@dataclass
class Bench:
    """One engine, one trainer, and what is measured with them."""

    config: TrainConfig
    work: Path
    out: Path
    checkpoint: Path
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
            work: Mapping[str, Callable[[], Any]] = {
                "run": lambda: self._run(loop, trainer, notes, timed),
                "push": lambda: push_alone(trainer, rollouts),
                "rollout": lambda: rollout_beside_sglang(self.config, manager, rollouts, self.work, self.checkpoint),
                "step": lambda: step_beside_megatron(self.config, trainer),
            }
            try:
                for part in parts:
                    failed += self._part(part, work[part])
                if rollouts.facts:
                    self._keep_answers(rollouts.facts[0].url)
            finally:
                rollouts.stop()
                trainer.disconnect()
        return failed

    def _part(self, name: str, work: Callable[[], Any]) -> int:
        print(f"=== {name}", flush=True)
        try:
            self.found[name] = work()
        except Exception:
            self.found[name] = {"failed": traceback.format_exc()}
            print(self.found[name]["failed"], flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "found.json").write_text(json.dumps(self.found, indent=1, default=str))
        print(name, json.dumps(self.found[name], default=str)[:3000], flush=True)
        return int("failed" in self.found[name])

    def _run(self, loop: Loop, trainer: NotedTrainer, notes: Notes, timed: Timed) -> dict[str, Any]:
        began = time.monotonic()
        loop.run()
        history = loop.history
        return {
            "reporter": {"seconds": timed.seconds, "calls": timed.calls, "of_seconds": time.monotonic() - began},
            "backend": history.backend,
            "first_rollout": history.first_rollout,
            "steps": history.steps,
            "rewards": history.rewards,
            "mismatches": history.mismatches,
            "gaps": trainer.gaps,
            "memory": notes.rows,
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


def push_alone(trainer: NotedTrainer, rollouts: LocalRollouts) -> dict[str, Any]:
    """The push without the comparison, five times, in GB (10^9 bytes) per second."""
    from rltop.engines.client import EngineClient
    from rltop.train.sync import named

    trainer.wake_up(weights_only=True)
    stages = trainer._backend.hf_stages()
    assert stages is not None, "one rank has everything"
    size = sum(tensor.nbytes for _, tensor in named(stages))
    times = []
    with EngineClient(rollouts.facts[0].url) as client:
        version = client.weight_version()
        for _ in range(5):
            began = time.monotonic()
            client.update_weights_from_shared(named(stages), version)
            times.append(time.monotonic() - began)
    trainer.sleep(True)
    return {"bytes": size, "seconds": times, "gb_per_s": size / 1e9 / statistics.median(times)}


def rollout_beside_sglang(
    config: TrainConfig, manager: RolloutManager, rollouts: LocalRollouts, work: Path, checkpoint: Path
) -> dict[str, Any]:
    """Tokens per second of rltop's client and of SGLang's own benchmark: one engine, the same prompts, in turns."""
    from rltop.engines.client import EngineClient

    url = rollouts.facts[0].url
    with EngineClient(url) as client:
        version = client.weight_version()
    shown = manager._task.prompts(0, config.rollout_batch_size)
    requests = manager._requests(0, "sample", shown, config.n_samples_per_prompt)
    prompts = [request.prompt for request in requests]
    file = work / "prompts.jsonl"
    lines = [{"conversations": [{"content": prompt}, {"content": "x" * 8}]} for prompt in prompts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours: list[float] = []
    theirs: list[float] = []
    same_work: list[float] = []
    for at in range(2):
        _flush(url)
        batch = manager.generate(1000 + at, version)
        ours.append(sum(len(sample.response_ids) for sample in batch.samples) / batch.seconds)
        _flush(url)
        theirs.append(_bench_serving(config, url, file, len(prompts), checkpoint))
        _flush(url)
        same_work.append(_bench_serving(config, url, file, len(prompts), checkpoint, "--return-logprob"))
    return {
        "ours_tok_s": ours,
        "bench_serving_tok_s": theirs,
        "bench_serving_with_logprobs_tok_s": same_work,
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "ratio_with_logprobs": statistics.median(ours) / statistics.median(same_work),
        "requests": len(prompts),
    }


def _flush(url: str) -> None:
    import httpx

    httpx.post(url + "/flush_cache", timeout=60, trust_env=False)


def _bench_serving(config: TrainConfig, url: str, prompts: Path, count: int, checkpoint: Path, *more: str) -> float:
    import os

    port = url.rsplit(":", 1)[1]
    out = prompts.with_suffix(".out.jsonl")
    out.unlink(missing_ok=True)
    argv = [str(config.engine_python or sys.executable), "-m", "sglang.bench_serving", "--backend", "sglang"]
    argv += ["--host", "127.0.0.1", "--port", port, "--model", str(checkpoint), "--tokenizer", str(checkpoint)]
    argv += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(count)]
    argv += ["--sharegpt-output-len", str(config.rollout_max_response_len), "--output-file", str(out)]
    argv += ["--disable-tqdm", "--warmup-requests", "1", "--temperature", str(config.rollout_temperature), *more]
    env = os.environ | dict(text.split("=", 1) for text in config.engine_env)
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(f"bench_serving: {done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    (told,) = [json.loads(line) for line in out.read_text().splitlines()]
    return float(told["output_throughput"])


def step_beside_megatron(config: TrainConfig, trainer: NotedTrainer) -> dict[str, Any]:
    """Seconds of a train step and of a bare Megatron-Core loop (its own loss, schedule, optimizer) on the same
    micro-batches, in turns."""
    import torch

    from rltop.train.loss import LossConfig
    from rltop.train.megatron.batching import TrainSample

    trainer.wake_up()
    backend = trainer._backend
    prompt, response = 64, config.rollout_max_response_len
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, backend.shape.vocab_size, (config.step_size, prompt + response), generator=generator)
    samples = [TrainSample(tuple(row), response, advantage=float(at % 2) - 0.5) for at, row in enumerate(ids.tolist())]
    batches = backend._micro_batches(samples)

    def bare() -> None:
        ddp: Any = backend._ddp
        ddp.zero_grad_buffer()
        backend._optimizer.zero_grad()

        def forward_step(iterator: Any, model: Any) -> Any:
            micro = next(iterator)
            labels = torch.roll(micro.tokens, -1, dims=1)
            losses = model(micro.tokens, micro.positions, micro.mask, labels=labels)
            return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

        backend._megatron.forward_backward()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=backend._ddp,
            num_microbatches=len(batches),
            seq_length=max(micro.tokens.shape[1] for micro in batches),
            micro_batch_size=max(micro.tokens.shape[0] for micro in batches),
            forward_only=False,
        )
        backend._optimizer.step()

    def ours() -> None:
        backend.train_step(samples, LossConfig())

    timed: dict[str, list[float]] = {"bare": [], "ours": []}
    for turn in range(6):
        for name, work in (("bare", bare), ("ours", ours)):
            _settle(torch)
            began = time.monotonic()
            work()
            _settle(torch)
            if turn:  # the first of each compiles and allocates
                timed[name].append(time.monotonic() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    trainer.sleep(True)
    ratio = statistics.median(timed["ours"]) / statistics.median(timed["bare"])
    tokens = sum(micro.tokens.numel() for micro in batches)
    return timed | {"ratio": ratio, "micro_batches": len(batches), "tokens": tokens, "peak_gib": peak}


def _settle(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the number of parts that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    own, rest = parser.parse_known_args(argv)
    configure_console(sys.stdout)
    checkpoint = make_tiny_model(own.work / f"model-{own.size}", SIZES[own.size])
    config = replace(parse_args(rest), hf_checkpoint=checkpoint)
    own.work.mkdir(parents=True, exist_ok=True)
    return Bench(config, own.work, own.out, checkpoint).go(own.only.split(","))


if __name__ == "__main__":
    sys.exit(main())
