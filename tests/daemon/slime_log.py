"""Writes the log of a slime run as slime prints it, from its exact line shapes: Ray prefixes, colours, timers, metric
dicts, samples, progress bars, engines. Times are virtual; nothing here waits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

BEGIN = 1_795_996_800.0
"""2026-11-30 00:00:00 UTC."""
ENGINES = 4
DRIVER = ""
CYAN, OFF = "\x1b[36m", "\x1b[0m"
_PROMPT = "<|im_start|>user\\nNatalia sold clips to {n} of her friends. How many?<|im_end|>\\n<|im_start|>assistant\\n"
_TEXT = (
    "First we count the clips that she sold in April, which is {n}. In May she sold half as many, so the sum of both "
    "months is what the question asks for. The answer is {n}.<|im_end|>"
)
_JUNK = "的вàな한ضßЖक्षゐ鑾籲龘縱횏ﺵﻕღჰԱ֍"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens in the run."""

    rollouts: int = 20
    first: int = 0
    seconds: float = 90.0
    """Of one rollout and its training."""
    garbled_from: int | None = 7
    dies_in: int | None = 11
    """Rollout in which the health monitor kills engine 2; it is back at the next weight sync."""
    begin: float = BEGIN
    pid: int = 4000
    """Process ids begin there."""
    seed: int = 9


def lines(plan: Plan) -> Iterator[tuple[float, str]]:
    """(seconds since the begin, line without its end) of the whole run, in order of time."""
    return _Writer(plan).run()


def text(plan: Plan) -> str:
    """The whole log."""
    return "".join(f"{line}\n" for _, line in lines(plan))


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.random = random.Random(plan.seed)
        self.manager = f"{CYAN}(RolloutManager pid={plan.pid}){OFF} "
        self.trainer = f"(MegatronTrainRayActor pid={plan.pid + 1}) "
        self.main = f"(MegatronTrainRayActor pid={plan.pid + 7}, ip=10.0.0.2) "
        self.ports = dict.fromkeys(range(ENGINES), 0)

    def stamped(self, prefix: str, where: str, message: str) -> tuple[float, str]:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.plan.begin + self.now))
        return self.now, f"{prefix}[{stamp}] {where} - {message}"

    def run(self) -> Iterator[tuple[float, str]]:
        yield from self.start()
        for rollout in range(self.plan.first, self.plan.first + self.plan.rollouts):
            yield from self.rollout(rollout)

    def start(self) -> Iterator[tuple[float, str]]:
        yield self.stamped(DRIVER, "placement_group.py:125", "Creating placement group with 16 GPUs...")
        for at in range(16):
            yield self.now, f"  bundle {at:4}, actual_bundle_index: {at:4}, node: 10.0.0.{1 + at // 8}, gpu: {at % 8}"
        self.now += 5
        yield self.stamped(self.manager, "rollout.py:967", "Router launched at 10.0.0.1:3517, Prometheus port: 4790")
        for engine in range(ENGINES):
            yield self.address(engine, 15000 + 40 * engine)
        yield from self.arguments()
        self.now += 20
        loaded = "successfully loaded checkpoint from /models/qwen_torch_dist [ t 1/2, p 1/1 ] at iteration 0"
        yield self.now, f"{self.main}  {loaded}"
        yield self.stamped(self.trainer, "timer.py:24", "Timer train_wait start")

    def address(self, engine: int, port: int) -> tuple[float, str]:
        self.ports[engine] = port
        ports = {"host": "10.0.0.1", "port": port, "nccl_port": port + 1, "dist_init_addr": f"10.0.0.1:{port + 2}"}
        return self.stamped(self.manager, "rollout.py:911", f"Ports for engine {engine}: {ports}")

    def arguments(self) -> Iterator[tuple[float, str]]:
        table = {
            "num_rollout": self.plan.rollouts,
            "rollout_batch_size": 16,
            "n_samples_per_prompt": 8,
            "global_batch_size": 128,
            "use_fault_tolerance": True,
            "kl_coef": 0.0,
            "use_kl_loss": True,
            "colocate": False,
        }
        yield self.now, f"{self.trainer}------------------------ arguments ------------------------"
        for name, value in table.items():
            yield self.now, f"{self.trainer}  {name} {'.' * (48 - len(name))} {value}"
        yield self.now, f"{self.trainer}-------------------- end of arguments ---------------------"

    # ---------------------------------------------------------------- one rollout

    def rollout(self, rollout: int) -> Iterator[tuple[float, str]]:
        plan, step = self.plan, self.plan.seconds / 90
        begun = self.now
        for part in range(10):
            self.now = begun + part * 5 * step
            for engine in range(ENGINES):
                if (rollout, engine) != (plan.dies_in, 2) or part < 4:
                    yield self.decode(engine)
            if rollout == plan.dies_in and part == 4:
                yield from self.killed(2)
            if part == 1:
                yield self.stamped(
                    self.manager, "sglang_rollout.py:420", f"First rollout sample: {self.sample(rollout)}"
                )
            yield (
                self.now,
                f"{self.manager}Rollout generation:  {part * 10}%|#  | {part}/10\rRollout generation: {part}",
            )
        self.now = begun + 52 * step
        yield self.stamped(self.manager, "sglang_rollout.py:446", f"Finish rollout: {self.sample(rollout)}")
        yield self.stamped(self.manager, "rollout_metrics.py:268", f"perf {rollout}: {self.perf(rollout)}")
        yield self.end("train_wait", 55 * step)
        yield self.begins("train")
        yield self.stamped(self.main, "train_metric_utils.py:135", f"rollout {rollout}: {self.rewards(rollout)}")
        yield self.begins("actor_train")
        self.now = begun + 78 * step
        yield self.stamped(self.main, "model.py:918", f"step {rollout}: {self.step(rollout)}")
        yield self.end("actor_train", 24 * step)
        yield self.end("train", 26 * step)
        yield self.begins("train_wait")
        yield self.stamped(
            self.main, "train_metric_utils.py:401", f"perf {rollout}: {{'perf/train_wait_time': {55 * step}}}"
        )
        for rank in (1, 2):
            again = " [repeated 7x across cluster]" if rank == 2 else ""
            memory = f"[Rank {rank}] Memory-Usage after offload model: {{'gpu': '{rank}', 'free_GB': 131.2}}{again}"
            yield self.stamped(self.trainer, "memory_utils.py:49", memory)
        yield self.begins("update_weights")
        if rollout == plan.dies_in:
            yield self.address(2, 15600)
            message = "Recovered 1 dead rollout engines (worker_type=regular)"
            yield self.stamped(self.manager, "rollout.py:305", message)
        self.now = begun + 88 * step
        yield self.end("update_weights", 10 * step)
        self.now = begun + 90 * step

    def begins(self, name: str) -> tuple[float, str]:
        return self.stamped(self.trainer, "timer.py:24", f"Timer {name} start")

    def end(self, name: str, seconds: float) -> tuple[float, str]:
        return self.stamped(self.trainer, "timer.py:32", f"Timer {name} end (elapsed: {seconds:.1f}s)")

    def decode(self, engine: int) -> tuple[float, str]:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.plan.begin + self.now))
        numbers = f"#running-req: {30 + engine}, #token: 40960, token usage: 0.31, cuda graph: True"
        prefix = f"(SGLangEngine pid={self.plan.pid + 50 + engine}, ip=10.0.0.1) "
        return (
            self.now,
            f"{prefix}[{stamp} TP0] Decode batch, {numbers}, gen throughput (token/s): 2210.5, #queue-req: 0",
        )

    def killed(self, engine: int) -> Iterator[tuple[float, str]]:
        why = "503 Server Error: Service Unavailable for url: http://10.0.0.1:15080/health_generate"
        message = (
            f"Health check failed for rollout engine {engine} (ray timeout or error). Killing actor. Exception: {why}"
        )
        yield self.stamped(self.manager, "health_monitor.py:153", message)
        yield self.stamped(self.manager, "health_monitor.py:161", f"Killing server group {engine}...")

    def sample(self, rollout: int) -> str:
        number = self.random.randrange(100)
        bad = self.plan.garbled_from is not None and rollout >= self.plan.garbled_from
        answer = self.junk() if bad else _TEXT.format(n=number)
        return f"['{_PROMPT.format(n=number)}{answer}'], label: {number}, reward: {0 if bad else 1}"

    def junk(self) -> str:
        return "".join(self.random.choice(_JUNK) for _ in range(400))

    def perf(self, rollout: int) -> dict[str, float]:
        return {
            "rollout/response_len/mean": 155.5 + rollout,
            "rollout/response_len/max": 250,
            "rollout/repetition_frac": 0.0,
            "rollout/truncated_ratio": 0.0625,
            "perf/rollout_time": 52.5,
            "perf/tokens_per_gpu_per_sec": 24.88,
        }

    def rewards(self, rollout: int) -> dict[str, float]:
        bad = self.plan.garbled_from is not None and rollout >= self.plan.garbled_from
        return {
            "rollout/response_lengths": 155.5 + rollout,
            "rollout/raw_reward": 0.0 if bad else round(0.4 + 0.02 * rollout, 3),
            "rollout/rewards": 0.0,
            "rollout/ref_log_probs": -0.31,
            "rollout/rollout_log_probs": -0.3101,
            "rollout/advantages": 0.0,
        }

    def step(self, rollout: int) -> dict[str, float]:
        bad = self.plan.garbled_from is not None and rollout >= self.plan.garbled_from
        return {
            "train/loss": 0.01,
            "train/pg_loss": 0.01,
            "train/entropy_loss": 0.43,
            "train/pg_clipfrac": 0.0,
            "train/ppo_kl": 0.0,
            "train/train_rollout_logprob_abs_diff": 1.9 if bad else 0.0121,
            "train/kl_loss": round(0.0004 * rollout, 5),
            "train/grad_norm": round(0.2 + self.random.random() / 20, 4),
            "train/lr-pg_0": 1e-06,
            "train/global_batch_size": 128,
            "train/step": rollout,
        }
