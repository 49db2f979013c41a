"""Makes the samples of Relax in this folder: built from Relax's format strings, with values that are made up.

No run of Relax wrote these files. What a line, a dump or a row of JSON looks like was read in the source of
redai-infra/Relax, file by file, at the commits in `COMMITS`; line numbers, times and all values are invented. The dumps
need torch, the rest nothing.

    python tests/data/relax/make.py        # writes the files again; the same bytes each time, dumps apart
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

COMMITS: Mapping[str, str] = {
    "relax/utils/logging_utils.py": "34939e5d4d4fb75d527ced680b68c22be665507a",
    "relax/backends/megatron/model.py": "007b981ca80b6c76929dfc7021d2b41735f6de81",
    "relax/backends/megatron/data.py": "02c394deb7afa6c87f17f2051a2731ce8b77aaf4",
    "relax/backends/megatron/actor.py": "03c6b2f1c22706fd93a8395f3a0bc5b649be45ab",
    "relax/backends/megatron/checkpoint.py": "14958525fd7f8bbb037d9f097ef26218c1736cc8",
    "relax/utils/training/train_metric_utils.py": "64cff35b038e384558343c90e406381e450ed3b1",
    "relax/utils/training/train_dump_utils.py": "2765d18a5fa57b0c3b7b5f6d310d60ee6c1dfcec",
    "relax/utils/types.py": "2765d18a5fa57b0c3b7b5f6d310d60ee6c1dfcec",
    "relax/distributed/ray/rollout.py": "1103ab2e79929f3cacda1880e2bf2ac7b0186784",
    "relax/engine/rollout/sglang_rollout.py": "0169b689773ff47d5ff2726280be0a3b2b3dc8ba",
    "relax/backends/sglang/sglang_engine.py": "07d7905b627c49b1900270ff406f936d3c3488e2",
    "relax/utils/health_system.py": "933da2d12606d8d78a23efa5c6f386e2563e6d56",
    "relax/core/controller.py": "0f579fde04e5b02fd8b9374a9b4639a64081a021",
    "relax/core/service.py": "341a27b2e2899d1722130eb98bed57ccfbfb33e1",
    "relax/utils/autoscaler/autoscaler_service.py": "dc13305ab30af13b13e12027a44bfc67ebf6341d",
    "relax/utils/arguments.py": "05149ae1a61bb3373e614ccb04e5133e85938bb9",
    "scripts/entrypoint/ray-job.sh": "084a01ffa024ea6be92d3bf07343f8a56695305f",
}
HERE = Path(__file__).parent
BEGIN = datetime(2026, 11, 29, 9, 0, 0, tzinfo=UTC)
LEVELS = {"INFO": "1;37", "WARNING": "1;33", "ERROR": "1;31", "DEBUG": "1;36"}
DRIVER, MANAGER, TRAINER, ENGINE = "", "RolloutManager pid=4313", "MegatronTrainRayActor pid=900", "SGLangEngine pid=952"
SERVE = "ServeReplica:rollout:Rollout pid=811"
MODEL, LOAD, SAVE = "/models/Qwen3-4B/", "/exps/Qwen3-4B_mcore_8xgpu/", "/exps/Qwen3-4B_mcore_8xgpu/"
PROMPT = "<|im_start|>user\nWhat is six times seven?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Six times seven is forty-two, because seven groups of six things hold forty-two of them. Answer: 42"


class Log:
    """Lines of a job's output: what colorlog makes of a record, behind Ray's prefix where a worker wrote it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._at = BEGIN

    def say(self, who: str, name: str, line: int, text: str, level: str = "INFO", after: float = 1.0) -> None:
        """One record of a logger of Relax's."""
        self._at += timedelta(seconds=after)
        stamp = self._at.strftime("%Y-%m-%d %H:%M:%S")
        prefix = f"\x1b[36m({who})\x1b[0m " if who else ""
        self.lines.append(
            f"{prefix}\x1b[32m{stamp}\x1b[0m | \x1b[{LEVELS[level]}m{level}\x1b[0m | \x1b[36m{name}:{line}\x1b[0m "
            f"\x1b[{LEVELS[level]}m{text}\x1b[0m"
        )

    def write(self, name: str) -> None:
        """The file."""
        (HERE / name).write_text("\n".join(self.lines) + "\n", encoding="utf-8")


def start(log: Log, *, load: str = "") -> None:
    """From the start to the first weight sync of a colocated job. load: what `--load` turned out to be."""
    say = log.say
    say(DRIVER, "relax.core.controller", 700, "Resource validation: required GPUs=8, cluster GPUs=8, colocate=True")
    say(DRIVER, "relax.core.service", 300, "  bundle    0, actual_bundle_index:    0, node: 10.0.0.1, gpu: 0")
    say(DRIVER, "relax.core.service", 60, "[rollout] Initializing service with num_gpus=8, actor_rollout_pgs=True")
    ports = {"host": "10.0.0.1", "port": 15000, "nccl_port": 15001, "dist_init_addr": "10.0.0.1:15002"}
    say(MANAGER, "relax.distributed.ray.rollout", 3410, f"Ports for engine 0: {ports}")
    say(
        MANAGER,
        "relax.distributed.ray.rollout",
        3480,
        "Router launched locally at 10.0.0.1:3517 (connection address: 10.0.0.1)",
    )
    say(MANAGER, "relax.distributed.ray.rollout", 3560, "[engine-init-barrier:default] waiting for 1 engines (timeout=3600s)")
    say(ENGINE, "relax.backends.sglang.sglang_engine", 430, "Launch HttpServerEngineAdapter at: 10.0.0.1:15000", after=2)
    say(MANAGER, "relax.distributed.ray.rollout", 3600, "[engine-init-barrier:default] all 1 engines ready", after=60)
    if load == "missing":
        text = f"args.load='{LOAD}' does not exist or is an empty directory. use args.hf_checkpoint"
        say(TRAINER, "relax.backends.megatron.checkpoint", 110, text, "WARNING")
    text = f"Load checkpoint from HuggingFace model into Megatron (requested_path=None, source_path={MODEL})"
    say(TRAINER, "relax.backends.megatron.checkpoint", 170, text)
    say(DRIVER, "relax.core.controller", 870, "All 2 services registered successfully: ['actor', 'rollout']")
    say(DRIVER, "relax.core.controller", 990, "Started 2 services in parallel: ['rollout', 'actor']")


def rollout_metrics(at: int) -> dict[str, Any]:
    """What RolloutManager prints as `perf N`."""
    return {
        "rollout/get_samples_time": 0.02,
        "rollout/response_len/mean": 155.5 + at,
        "rollout/response_len/median": 159.0,
        "rollout/response_len/max": 250,
        "rollout/response_len/min": 68,
        "rollout/image_count/mean": 0.0,
        "rollout/image_count/max": 0,
        "rollout/image_count/min": 0,
        "rollout/acc/mean": 0.25,
        "rollout/zero_std/count_-1.0": 1,
        "rollout/prefix_cache_hit_rate": 0.0,
        "rollout/avg_cached_tokens_per_sample": 0.0,
        "rollout/repetition_frac": 0.0,
        "rollout/truncated_ratio": 0.0625,
        "rollout/num_turn/mean": 1.0,
        "perf/rollout_time": 12.5,
        "perf/tokens_per_gpu_per_sec": 24.88,
        "perf/longest_sample_tokens_per_sec": 20.0,
    }


def trained(at: int) -> dict[str, Any]:
    """What the trainer prints as `rollout N`."""
    return {
        "rollout/response_lengths": 155.5 + at,
        "rollout/total_lengths": 180.5 + at,
        "rollout/rewards": 0.0,
        "rollout/raw_reward": -0.5 + 0.25 * at,
        "rollout/truncated": 0.0625,
        "rollout/rollout_log_probs": -0.251 + 0.01 * at,
        "rollout/log_probs": -0.25 + 0.01 * at,
        "rollout/ref_log_probs": -0.25 + 0.008 * at,
        "rollout/advantages": 0.0,
        "rollout/returns": 0.0,
    }


def step_metrics(at: int) -> dict[str, Any]:
    """What the trainer prints as `step N`: two steps make a rollout."""
    return {
        "train/loss": 0.0125 if at else 0.0,
        "train/pg_loss": 0.0125 if at else 0.0,
        "train/entropy_loss": 0.4312 - 0.001 * at,
        "train/pg_clipfrac": 0.001 if at % 2 else 0.0,
        "train/ppo_kl": 0.0004 if at % 2 else 0.0,
        "train/kl_loss": 0.0001 * at,
        "train/ois": 1.0,
        "train/tis": 1.0003,
        "train/mismatch_kl": 0.0011,
        "train/grad_norm": 0.1873 + 0.01 * at,
        "train/lr-pg_0": 1e-06,
        "train/lr-pg_1": 1e-06,
        "train/step": at,
        "train/cur_epoch": (at + 1) / 1000,
    }


def perf(at: int) -> dict[str, Any]:
    """What the trainer prints as `perf N`."""
    return {
        "perf/train_get_data_time": 0.4,
        "perf/train_wait_time": 61.2,
        "perf/ref_log_probs_time": 4.1,
        "perf/log_probs_time": 4.0,
        "perf/actor_train_time": 21.7 + at,
        "perf/train_time": 30.6,
        "perf/sleep_time": 1.2,
        "perf/wake_up_time": 0.9,
        "perf/update_weights_time": 3.3,
        "perf/actor_train_tokens": 2888,
        "perf/actor_train_tflops": 12.5,
        "perf/actor_train_tok_per_s": 133.1,
        "perf/device_peak_tflops": 989.0,
        "perf/mfu/actor_train": 0.0126,
        "perf/step_time": 91.8,
        "perf/wait_time_ratio": 0.6667,
        "perf/step_token_per_s": 31.5,
    }


def turn(log: Log, at: int, *, evaluation: bool = False) -> None:
    """One rollout and the training on it."""
    say = log.say
    text = f"Starting rollout step {at}: target(commit)=4 (rollout_batch=4 + old=0), submit_target=4"
    say(MANAGER, "relax.engine.rollout.sglang_rollout", 690, text)
    reward = {"score": 1.0, "acc": True, "pred": "42"}
    text = f"First rollout sample: {[PROMPT + ANSWER]}, label: 42, reward: {reward}"
    say(MANAGER, "relax.engine.rollout.sglang_rollout", 740, text, after=9)
    say(MANAGER, "relax.engine.rollout.sglang_rollout", 860, f"Total yielded: 4/4 for step: {at}", after=3)
    text = f"Finish rollout: {[PROMPT + ANSWER]}, label: 42, reward: {reward}"
    say(MANAGER, "relax.engine.rollout.sglang_rollout", 880, text)
    say(MANAGER, "relax.engine.rollout.sglang_rollout", 640, "Abort request for ['http://10.0.0.1:15000']")
    say(MANAGER, "relax.engine.rollout.sglang_rollout", 900, f"Rollout fully completed for rollout_id: {at}.")
    where = f"{SAVE}rollout_result/train/{at}.jsonl"
    say(MANAGER, "relax.utils.training.train_dump_utils", 270, f"Saved rollout result (16 samples) to {where}")
    say(MANAGER, "relax.distributed.ray.rollout", 3790, f"perf {at}: {rollout_metrics(at)}")
    text = f"start to get rollout_id: {at} data from transfer queue for train with mcore."
    say(TRAINER, "relax.backends.megatron.actor", 560, text)
    memory = {"device": "0", "total_GB": 139.8, "free_GB": 131.2, "used_GB": 8.6, "allocated_GB": 0.5, "reserved_GB": 1.9}
    say(TRAINER, "relax.utils.memory_utils", 47, f"[Rank 0] Memory-Usage after wake_up: {memory}")
    say(TRAINER, "relax.backends.megatron.data", 470, f"rollout {at}: {trained(at)}", after=12)
    say(TRAINER, "relax.backends.megatron.data", 470, f"passrate {at}: {{'passrate/pass@1': 0.25, 'passrate/pass@4': 0.5}}")
    for one in (2 * at, 2 * at + 1):
        say(TRAINER, "relax.backends.megatron.model", 1520, f"step {one}: {step_metrics(one)}", after=10)
    say(TRAINER, "relax.utils.training.train_metric_utils", 95, f"perf {at}: {perf(at)}")
    if evaluation:
        found = {
            "eval/aime": 0.5,
            "eval/aime/response_len/mean": 152.5,
            "eval/aime/truncated_ratio": 0.0,
            "eval/aime-truncated_ratio": 0.0,
            "eval/aime-pass@1": 0.5,
        }
        say(MANAGER, "relax.distributed.ray.rollout", 3740, f"eval {at}: {found}", after=30)


def restarts(log: Log) -> None:
    """An engine that is killed, a service that is restarted in place, and a restart of everything."""
    say = log.say
    health = "relax.utils.health_monitor"
    gone = "Exception: ray::SGLangEngine.health_generate() (pid=952, ip=10.0.0.1)"
    failed = "Health check failed for rollout engine 0"
    say(MANAGER, health, 190, f"{failed} (1/3 consecutive failures, will retry). {gone}", "WARNING", 30)
    say(MANAGER, health, 190, f"{failed} (2/3 consecutive failures, will retry). {gone}", "WARNING", 30)
    text = f"{failed} (3 consecutive failures, threshold=3). Killing actor. {gone}"
    say(MANAGER, health, 180, text, "ERROR", 30)
    say(MANAGER, "relax.distributed.ray.rollout", 590, "Recovered 1 dead rollout engines (worker_type=regular)", after=90)
    role, why = "reference", "RuntimeError: NCCL communicator was aborted"
    system, control, service = "relax.utils.health_system", "relax.core.controller", "relax.core.service"
    say(DRIVER, system, 290, f"Service {role} is unhealthy: {why}, triggering restart", "WARNING", 60)
    say(DRIVER, control, 610, f"Service '{role}' detected as unhealthy, initiating restart...", "WARNING")
    say(DRIVER, control, 1080, f"Restarting service '{role}'...")
    say(DRIVER, control, 1105, f"Restarting {role}, restart count: 1")
    say(DRIVER, service, 200, f"[{role}] Starting in-place restart...")
    say(DRIVER, service, 240, f"[{role}] Restored step to 1", after=30)
    say(DRIVER, control, 1125, f"Service '{role}' restarted successfully")
    say(DRIVER, system, 310, "Service actor heartbeat stale (timeout), triggering restart", "WARNING", 130)
    say(DRIVER, control, 610, "Service 'actor' detected as unhealthy, initiating restart...", "WARNING")
    say(DRIVER, control, 1105, "Restarting actor, restart count: 1")
    say(DRIVER, control, 1112, "Triggering global restart due to: actor failure", "WARNING")
    say(DRIVER, control, 1040, "Global restart completed, re-running training loop", after=240)


def fatal(log: Log) -> None:
    """An error after which Relax ends itself."""
    text = "Service actor reported FATAL error: ValueError: no column 'prompt'. Skipping restart and terminating process."
    log.say(DRIVER, "relax.utils.health_system", 280, text, "ERROR")
    text = "Fatal error from service 'actor': ValueError: no column 'prompt'"
    log.say(DRIVER, "relax.core.controller", 620, text, "ERROR")


def autoscaler(log: Log) -> None:
    """The autoscaler adds an engine; later one is taken away, and one is evicted by the platform."""
    say = log.say
    scaler, manager = "relax.utils.autoscaler.autoscaler_service", "relax.distributed.ray.rollout"
    replica = "ServeReplica:autoscaler:AutoscalerService pid=77"
    say(replica, scaler, 200, "AutoscalerService initialized: min=2, max=8, enabled=True")
    cycle = "[Autoscaler] Evaluation cycle: engines={}, running_reqs={}, queue_reqs={}, token_usage={:.2%}, throughput={:.1f} tok/s"
    say(replica, scaler, 300, cycle.format(2, 64, 31, 0.9125, 5120.5), after=10)
    text = (
        "[Autoscaler] SCALE-OUT triggered: token_usage above 0.85 for 30s, delta=+1, "
        "triggered_conditions=['token_usage'], active_engines=2, pending_scale_out=0"
    )
    say(replica, scaler, 330, text)
    say(replica, scaler, 300, cycle.format(3, 60, 0, 0.55, 7680.0), after=120)
    text = "[Autoscaler] SCALE-IN triggered: all engines idle, delta=-1, triggered_conditions=['token_usage', 'queue_depth']"
    say(replica, scaler, 340, text, after=600)
    say(MANAGER, manager, 2710, "[ScaleIn] Draining 1 engines for 30.0s (force=False): ['group_2_engine_0']")
    say(MANAGER, manager, 2560, "[ScaleIn] Removed engine group_2_engine_0", after=35)
    text = "[Eviction] Detected 1 evicted engine(s), processing as scale-in: [('default', 'group_1_engine_0')]"
    say(MANAGER, manager, 3010, text, after=60)
    say(MANAGER, manager, 3060, "[Eviction] Engine group_1_engine_0 removed from engine group")
    say(MANAGER, manager, 3070, "[Eviction] Server 'default' now has 1 live engine(s) across 1 group(s)")


def plain() -> None:
    """What a process prints where colorlog is not installed: another layout, one colour for the line. LOG_LEVEL=DEBUG,
    for only then there are timers."""
    lines = [":job_id:01000000", ":actor_name:MegatronTrainRayActor"]
    for second, file, line, colour, text in (
        (0, "timer.py", 120, "36", "Timer actor_train start"),
        (21, "model.py", 1520, "32", f"step 0: {step_metrics(0)}"),
        (22, "timer.py", 140, "36", "Timer actor_train end (elapsed: 21.7s)"),
    ):
        stamp = (BEGIN + timedelta(seconds=second)).strftime("%Y-%m-%d %H:%M:%S")
        lines.append(f"\033[{colour}m[{stamp}] {file}:{line} - {text}\033[0m")
    (HERE / "worker-plain.err").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sample(index: int) -> dict[str, Any]:
    """One Sample as `to_dict` gives it: four groups of four, the last answer of a group is wrong."""
    right = index % 4 != 3
    tokens = [100, 101, 102, 103, *range(200, 205 + index % 3), 300 + index]
    length = len(tokens) - 4
    return {
        "group_index": index // 4,
        "index": index,
        "prompt": PROMPT,
        "tokens": tokens,
        "rollout_tokens": [],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": ANSWER if right else ANSWER.replace("42", "41"),
        "response_length": length,
        "label": "42",
        "reward": {"score": 1.0 if right else -1.0, "acc": right, "pred": "42" if right else "41"},
        "custom_advantage": None,
        "loss_mask": [1] * length,
        "weight_versions": ["1"],
        "rollout_log_probs": [-0.25 - 0.001 * at for at in range(length)],
        "rollout_log_probs_mask": None,
        "rollout_routed_experts": None,
        "remove_sample": False,
        "abort_count": 0,
        "teacher_log_probs": None,
        "status": "completed" if index else "truncated",
        "metadata": {},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": dict.fromkeys(
            ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct", "completion_token_num"), 0
        ),
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 4},
    }


def summary(index: int, dataset: str = "") -> dict[str, Any]:
    """One line of `rollout_result/{train,eval}/N.jsonl`."""
    one = sample(index)
    length, total = one["response_length"], len(one["tokens"])
    record = {
        "rollout_id": 0,
        "sample_index": index,
        "prompt": one["prompt"],
        "response": one["response"],
        "reward": one["reward"],
        "prompt_length": total - length,
        "response_length": length,
        "total_length": total,
        "prompt_token_count": total - length,
        "response_token_count": length,
        "response_token_ids": one["tokens"][-length:],
        "total_token_count": total,
        "image_count": 0,
        "image_token_count": 0,
        "multimodal_token_count": 0,
        "agent_turns": 1,
        "status": one["status"],
        "group_index": one["group_index"],
        "response_rollout_log_probs": one["rollout_log_probs"],
        "label": one["label"],
    }
    return record | ({"dataset": dataset} if dataset else {})


def dumps() -> None:
    """`--dump-details` of one rollout of two ranks, and the lines that are always written."""
    import torch

    for folder in ("rollout_data", "train_data"):
        (HERE / "dumps" / folder).mkdir(parents=True, exist_ok=True)
    samples = [sample(index) | {"decoded_tokens": [f"t{one}" for one in sample(index)["tokens"]]} for index in range(16)]
    torch.save({"rollout_id": 0, "samples": samples}, HERE / "dumps" / "rollout_data" / "0.pt")
    for rank in (0, 1):
        rows = []
        for place, index in enumerate(range(rank, 16, 2)):  # each rank counts its own samples from 0
            one = sample(index)
            log_probs = [value + 0.002 for value in one["rollout_log_probs"]]
            rows.append(
                {
                    "sample_index": place,
                    "tokens": one["tokens"],
                    "loss_masks": one["loss_mask"],
                    "total_lengths": len(one["tokens"]),
                    "response_lengths": one["response_length"],
                    "rewards": 0.5 if index % 4 != 3 else -1.5,
                    "raw_reward": one["reward"]["score"],
                    "truncated": int(one["status"] == "truncated"),
                    "rollout_log_probs": one["rollout_log_probs"],
                    "log_probs": log_probs,
                    "ref_log_probs": log_probs,
                    "advantages": [0.5 if index % 4 != 3 else -1.5] * one["response_length"],
                    "decoded_tokens": [f"t{token}" for token in one["tokens"]],
                }
            )
        torch.save({"rollout_id": 0, "rank": rank, "samples": rows}, HERE / "dumps" / "train_data" / f"0_{rank}.pt")


def lines() -> None:
    """The lines of JSON that Relax always writes below `--save`."""
    for folder, rows in (
        ("train", [summary(index) for index in range(16)]),
        ("eval", [summary(index, "aime") for index in range(2)]),
    ):
        (HERE / "save" / "rollout_result" / folder).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (HERE / "save" / "rollout_result" / folder / "0.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """All files."""
    log = Log()
    start(log)
    for at in range(3):
        turn(log, at, evaluation=at == 1)
    text = f"successfully saved checkpoint from iteration       2 to {SAVE} [ t 1/2, p 1/1 ]"
    log.lines.append(f"\x1b[36m({TRAINER})\x1b[0m   {text}")
    log.write("job.log")
    log = Log()
    start(log, load="missing")
    turn(log, 0)
    log.write("job-load-missing.log")
    log = Log()
    start(log)
    turn(log, 0)
    turn(log, 1)
    restarts(log)
    start(log)
    turn(log, 1)
    log.write("job-restarts.log")
    log = Log()
    start(log)
    fatal(log)
    log.write("job-fatal.log")
    log = Log()
    start(log)
    turn(log, 0)
    autoscaler(log)
    log.write("job-autoscaler.log")
    plain()
    lines()
    dumps()


if __name__ == "__main__":
    main()
