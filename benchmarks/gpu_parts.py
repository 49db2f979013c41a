"""What `benchmarks.gpu` measures with one trainer and one engine: the push, the rollout, the train step."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_turns import overhead
from rltop.engines.client import EngineClient
from rltop.train.arguments import TrainConfig
from rltop.train.ports import EngineFacts
from rltop.train.rollout_manager import RolloutManager
from rltop.train.trainer_actor import TrainActor

PUSHES = 5
TURNS = 3
STEPS = 33
KERNELS, KERNEL_NAME = 40, 240
"""How many kernels of a step are told, and how much of a name: torch's elementwise kernels differ in their functor
only, which comes late in it."""
AS_WE_ASK = ("--return-logprob", "--disable-stream", "--disable-ignore-eos")
"""What makes `sglang.bench_serving` ask as the trainer's client does: log-probs, whole answers, an end at EOS."""


@contextlib.contextmanager
def awake(config: TrainConfig, trainer: TrainActor, *, weights_only: bool = False) -> Iterator[None]:
    """The trainer's memory is there inside, whoever has it otherwise."""
    if not config.offloads_train:
        yield
        return
    trainer.wake_up(weights_only)
    try:
        yield
    finally:
        trainer.sleep(True)


def push_alone(config: TrainConfig, trainer: TrainActor, engine: EngineFacts) -> dict[str, Any]:
    """The push without the comparison, in GB (10^9 bytes) per second."""
    from rltop.train.sync import named

    times = []
    with awake(config, trainer, weights_only=True), EngineClient(engine.url) as client:
        stages = trainer._backend.hf_stages()
        assert stages is not None, "one rank has everything"
        size = sum(tensor.nbytes for _, tensor in named(stages))
        version = client.weight_version()
        for _ in range(PUSHES):
            began = time.monotonic()
            match config.weight_transport:
                case "distributed":
                    trainer._in_groups(version)(engine.id, client, named(stages))
                case "tensor":
                    client.update_weights_from_shared(named(stages), version)
                case "disk":
                    raise ValueError("--weight-transport disk: a push by way of a disk measures the disk")
            times.append(time.monotonic() - began)
    rate = size / 1e9 / statistics.median(times)
    return {"transport": config.weight_transport, "bytes": size, "seconds": times, "gb_per_s": rate}


def rollout_beside_sglang(
    config: TrainConfig, manager: RolloutManager, engine: EngineFacts, work: Path, checkpoint: Path
) -> dict[str, Any]:
    """Tokens per second of rltop's client and of SGLang's own benchmark: one engine, the same prompts, in turns.

    `like_for_like` is the ratio with the same options on both sides (`AS_WE_ASK`); `beside_default` the one beside
    `bench_serving` as it is, which streams and asks for no log-probs.
    """
    with EngineClient(engine.url) as client:
        version = client.weight_version()
    shown = manager._task.prompts(0, config.rollout_batch_size)
    prompts = [one.prompt for one in manager._requests(0, "sample", shown, config.n_samples_per_prompt)]
    file = work / "prompts.jsonl"
    lines = [{"conversations": [{"content": prompt}, {"content": "x" * 8}]} for prompt in prompts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours: list[dict[str, float]] = []
    same: list[dict[str, float]] = []
    plain: list[dict[str, float]] = []

    def mine(turn: int) -> None:
        _flush(engine.url)
        batch = manager.generate(1000 + turn, version)
        ours.append(_rate(sum(len(sample.response_ids) for sample in batch.samples), batch.seconds))

    def theirs(into: list[dict[str, float]], *more: str) -> None:
        _flush(engine.url)
        into.append(_bench_serving(config, engine.url, file, len(prompts), checkpoint, *more))

    mine(0)
    ours.clear()  # the first batch of this size
    for turn in range(TURNS):
        if turn % 2:
            theirs(same, *AS_WE_ASK)
            mine(turn)
        else:
            mine(turn)
            theirs(same, *AS_WE_ASK)
    theirs(plain)
    mine(TURNS)
    by_name = {"ours": ours, "same": same, "plain": plain}
    middle = {name: statistics.median(one["tok_s"] for one in runs) for name, runs in by_name.items()}
    return {
        "like_for_like": middle["ours"] / middle["same"],
        "beside_default": middle["ours"] / middle["plain"],
        "requests": len(prompts),
        "most_tokens": config.rollout_max_response_len,
        "ours": ours,
        "bench_serving_same_options": same,
        "bench_serving_default": plain,
    }


def _rate(tokens: float, seconds: float) -> dict[str, float]:
    return {"tokens": tokens, "seconds": seconds, "tok_s": tokens / seconds}


def _flush(url: str) -> None:
    import httpx

    httpx.post(url + "/flush_cache", timeout=60, trust_env=False)


def _bench_serving(
    config: TrainConfig, url: str, prompts: Path, count: int, checkpoint: Path, *more: str
) -> dict[str, float]:
    port = url.rsplit(":", 1)[1]
    out = prompts.with_suffix(".out.jsonl")
    out.unlink(missing_ok=True)
    argv = [str(config.engine_python or sys.executable), "-m", "sglang.bench_serving", "--backend", "sglang"]
    argv += ["--host", "127.0.0.1", "--port", port, "--model", str(checkpoint), "--tokenizer", str(checkpoint)]
    argv += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(count)]
    argv += ["--sharegpt-output-len", str(config.rollout_max_response_len), "--output-file", str(out)]
    argv += ["--disable-tqdm", "--warmup-requests", "1", "--temperature", str(config.rollout_temperature), *more]
    env = os.environ | dict(text.split("=", 1) for text in config.engine_env)
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"bench_serving: {done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    (told,) = [json.loads(line) for line in out.read_text().splitlines()]
    return _rate(float(told["total_output_tokens"]), float(told["duration"]))


def step_beside_megatron(config: TrainConfig, trainer: TrainActor) -> dict[str, Any]:
    """Seconds of a train step and of a bare Megatron-Core loop (its own loss, schedule, optimizer) on the same
    micro-batches, in turns."""
    with awake(config, trainer):
        return _steps(config, trainer)


def _steps(config: TrainConfig, trainer: TrainActor) -> dict[str, Any]:
    import torch

    from rltop.train.loss import LossConfig
    from rltop.train.megatron.batching import TrainSample

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
    for turn in range(STEPS):
        for name, work in (("bare", bare), ("ours", ours)) if turn % 2 else (("ours", ours), ("bare", bare)):
            _settle(torch)
            began = time.monotonic()
            work()
            _settle(torch)
            if turn:  # the first of each compiles and allocates
                timed[name].append(time.monotonic() - began)
    profiles = {"bare": _profile(torch, bare), "ours": _profile(torch, ours)}
    waits = {"bare": _waits(torch, bare), "ours": _waits(torch, ours)}
    tokens = sum(micro.tokens.numel() for micro in batches)
    return timed | {
        "ratio": statistics.median(timed["ours"]) / statistics.median(timed["bare"]),
        "above_one": overhead(timed["ours"], timed["bare"]),
        "waits": waits,
        "micro_batches": len(batches),
        "tokens": tokens,
        "peak_gib": {name: profile.peak_gib for name, profile in profiles.items()},
        "gpu_ms": {name: profile.milliseconds for name, profile in profiles.items()},
        "kernels": {name: profile.kernels for name, profile in profiles.items()},
    }


def _waits(torch: Any, work: Callable[[], None]) -> dict[str, int]:
    """Where the host waited for the GPU in one step, and how often: `file:line` -> times."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter("/".join(Path(one.filename).parts[-2:]) + f":{one.lineno}" for one in seen)
    return dict(places.most_common())


class Profile(NamedTuple):
    """Where one step's time on the GPU goes, and how much memory torch held at most. Kernels that run beside each other
    both count."""

    milliseconds: float
    peak_gib: float
    kernels: list[tuple[str, float, int]]
    """Name, milliseconds, launches; the longest first."""


def _profile(torch: Any, work: Callable[[], None]) -> Profile:
    if not torch.cuda.is_available():
        return Profile(0.0, 0.0, [])
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
    except RuntimeError as error:  # a machine that lets nobody profile: the times above stand all the same
        return Profile(0.0, 0.0, [(f"no profile: {error}"[:200], 0.0, 0)])
    peak = torch.cuda.max_memory_allocated() / 2**30
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1000
    told = [(_name(row.key), round(row.self_device_time_total / 1000, 2), row.count) for row in rows[:KERNELS]]
    return Profile(round(total, 2), round(peak, 3), told)


def _name(kernel: str) -> str:
    """A kernel's name without the namespaces that all have."""
    for prefix in ("void ", "at::native::", "(anonymous namespace)::"):
        kernel = kernel.replace(prefix, "")
    return kernel[:KERNEL_NAME]


def _settle(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
