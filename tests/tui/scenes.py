"""Pictures of runs for the tests, the byte budget and the eye.

By hand: `python -m tests.tui.scenes NAME [--ascii] [--control]` shows one in this terminal.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from rltop.protocol.messages import LinesAnswer, Tick
from rltop.tui.app import RltopApp
from rltop.tui.model import Clocks
from tests.bisect import stories
from tests.tui.engine_scenes import put_ab, put_engines, put_operation, signals, toggles
from tests.tui.fake import NOW, FakeClient, series, stamp

GAP = "train/train_rollout_logprob_abs_diff"


def verdict(name: str, status: str, **more: Any) -> dict[str, Any]:
    """A `check/<id>` value; keywords replace its fields."""
    base: dict[str, Any] = {"id": name, "status": status, "confidence": "high", "since": NOW - 240, "cause": ""}
    empty: dict[str, Any] = dict.fromkeys(("rollout", "step", "engine", "rank", "value", "threshold"))
    lists: dict[str, Any] = {key: [] for key in ("evidence", "advice", "consequence_of", "refs")}
    return base | empty | lists | more


def evidence(source: str, text: str) -> dict[str, Any]:
    return {"source": source, "line": None, "text": text}


def passing() -> list[dict[str, Any]]:
    """The step-1 checks of a good run, in the words of the checks."""
    return [
        verdict("train.nan", "pass", value={"bad_steps": 0}, threshold=0, cause="No NaN or Inf in 43 steps."),
        verdict(
            "train.grad-high",
            "pass",
            value={"grad_norm": 0.226, "first": 0.412},
            threshold={"warn": 10, "fail": 1000},
            cause="The gradient norm is 0.226; no spike among the newest steps.",
        ),
        verdict("train.grad-zero", "pass", value={"grad_norm": 0.226}, threshold={"steps": 2}, cause="It is not zero."),
        verdict("kl.on-policy", "skip", cause="One step per rollout: ppo_kl is 0 by construction."),
        verdict(
            "logprob.ref-equal",
            "pass",
            value={"mean_difference": 0.0, "kl_loss": 0.0},
            threshold={"equal": 1e-8, "fail": 5e-3},
            cause="Actor and reference are equal before the first update.",
        ),
        verdict(
            "logprob.magnitude",
            "pass",
            value={"mean": -0.31, "abs": 0.31, "from": "rollout/log_probs"},
            threshold={"warn": 0.7, "fail": 3.0},
            cause="The text is likely under the model: -0.31 nat per token.",
        ),
        verdict(
            "logprob.train-rollout",
            "pass",
            value={"last": 0.0012, "largest": 0.0014},
            threshold={"warn": 0.1, "fail": 1.0},
            cause="Trainer and engine agree: the gap is 0.0012 nat per token, at most 0.0014.",
        ),
        verdict(
            "rollout.text",
            "pass",
            value={"pattern": None, "bad": 0, "of": 4},
            threshold={"warn": 0.05, "fail": 0.3},
            cause="4 of 4 responses read as language.",
        ),
    ]


def engine(name: str, index: int = 0, **more: Any) -> dict[str, Any]:
    """An `engine/<id>` value of a healthy SGLang engine; keywords replace its fields."""
    base: dict[str, Any] = {
        "id": name,
        "url": f"http://127.0.0.1:{30000 + index}",
        "kind": "sglang",
        "state": "HEALTHY",
        "generation": 1,
        "pid": 4000 + index,
        "host": f"gpu-{index // 8:02d}",
        "version": "0.5.23",
        "weight_version": "42",
        "model_path": "/models/tiny",
        "log": f"engines/{name}/1/stdout.log",
        "running": 12,
        "queued": 0,
        "tokens_per_s": 1830.0,
        "token_usage": 0.42,
        "cuda_graph": True,
        "spec_accept_length": 2.71,
        "seen": NOW - 0.6,
        "error": None,
    }
    return base | more


def curves(count: int = 200, seed: int = 7) -> dict[str, list[float]]:
    """Curves of a run that learns."""
    rng = random.Random(seed)

    def wave(scale: float) -> float:
        return rng.gauss(0, scale)

    steps = range(count)
    return {
        "rollout/raw_reward": [min(1, max(0, 0.32 + 0.56 * (1 - math.exp(-i / 14)) + wave(0.035))) for i in steps],
        "train/kl_loss": [0.0 if i == 0 else 0.0009 * i**0.7 * (1 + wave(0.15)) for i in steps],
        "train/grad_norm": [0.412 * math.exp(-i / 60) * (1 + abs(wave(0.18))) for i in steps],
        "rollout/response_len/mean": [11 + 5 * math.sin(i / 9) + wave(0.6) for i in steps],
        GAP: [0.0009 * (1 + abs(wave(0.2))) for i in steps],
        "train/entropy_loss": [1.9 * math.exp(-i / 30) + 0.3 + wave(0.03) for i in steps],
    }


def feed_curves(client: FakeClient, values: dict[str, list[float]]) -> None:
    """History and newest value of each curve."""
    for name, column in values.items():
        client.history[name] = series(column)
        client.metric(name, len(column) - 1, column[-1], sum(not math.isfinite(value) for value in column))


def samples() -> dict[str, Any]:
    """The `samples` key: four sums, one of them wrong."""
    sums = [(3, 4), (12, 9), (40, 2), (7, 7)]
    return {
        "rollout_id": 42,
        "total": 64,
        "samples": [
            {
                "index": index,
                "group_index": 0,
                "prompt": f"user: {a} + {b} =",
                "response": str(a + b + (index == 0)),
                "response_length": 3,
                "reward": float(index != 0),
                "label": str(a + b),
                "status": "completed",
                "finish_reason": "stop",
                "weight_version": "42",
                "engine": "0",
            }
            for index, (a, b) in enumerate(sums)
        ],
    }


RUN: dict[str, Any] = {
    "name": "night-shift",
    "framework": "rltop",
    "mode": "full",
    "state": "running",
    "started": NOW - 300,
    "ended": None,
    "backend": "megatron-core 0.16.1, local spec, cpu/gloo, fp32, padded micro-batches",
    "num_rollout": 60,
    "start_rollout_id": 0,
    "fresh_start": True,
    "stand_ins": ["CPU engine"],
    "injected_faults": [],
    "args": {"n_samples_per_prompt": 8, "rollout_batch_size": 8, "kl_loss_coef": 0.001, "lr": 0.001, "seed": 7},
}
SOURCE = {
    "role": "trainer",
    "rank": 0,
    "host": "box",
    "pid": 4242,
    "records": 1204,
    "lost": 0,
    "dropped": 0,
    "last": NOW - 0.2,
}


def fresh(client: FakeClient) -> None:
    """Nothing came yet."""


def healthy(client: FakeClient) -> None:
    """A small run on the CPU engine, learning."""
    client.put("run", RUN)
    client.put("phase", {"name": "train", "rollout_id": 42, "since": NOW - 0.8, "median_s": 1.1, "open": ["train"]})
    sync = {"version": "42", "ok": True, "transport": "tensor", "elapsed_s": 0.21, "digest": "a3f09c77e1"}
    client.put("weights", sync | {"engines": {"0": {"ok": True}}})
    client.put("trainer", {"pid": 4242, "state": "running", "exit_code": None, "log": "trainer.log"})
    client.put("samples", samples())
    client.put("source/trainer/0", SOURCE)
    unknown: dict[str, Any] = {"cuda_graph": None, "spec_accept_length": None}
    client.put("engine/0", engine("0", kind="cpu", version="0.1.0", host="box", tokens_per_s=412.0, **unknown))
    for item in passing():
        client.put(f"check/{item['id']}", item)
    client.put("checks", {"root_causes": [], "summary": {"pass": 7, "skip": 1}})
    feed_curves(client, {name: column[:43] for name, column in curves().items()})
    for name, value in (("rollout_time", 1.92), ("step_time", 3.3), ("update_weights_time", 0.21)):
        client.metric(f"perf/{name}", 42, value)
    for text in ("daemon 0.1.0 listens", "trainer started, pid 4242", "engine 0 is up: CPU engine"):
        client.event(text)
    client.event("version 1 on 1 of 1 engines", kind="weights", version="1", ok=True)
    for index in range(34, 43):
        client.event(f"rollout {index}: reward {0.7 + index / 400:.2f}, 64 samples, 0 truncated")
    client.event("kl.on-policy: skip. One step per rollout: ppo_kl is 0 by construction.", kind="verdict")
    client.connect()


def failing(client: FakeClient) -> None:
    """Engine weights with two layers swapped at a sync, a NaN, a spike, lost records, old weights, missed events."""
    healthy(client)
    faults = ["engine weights: layers 0 and 1 swapped at sync 30", "NaN gradient at step 33"]
    client.put("run", RUN | {"injected_faults": faults})
    values = {name: column[:43] for name, column in curves().items()}
    values[GAP][30:] = [0.21 + 0.02 * math.sin(i) for i in range(13)]
    values["train/grad_norm"][33] = math.nan
    values["train/grad_norm"][36] = 14.2
    values["rollout/raw_reward"][31:] = [max(0.0, value - 0.5) for value in values["rollout/raw_reward"][31:]]
    feed_curves(client, values)
    for item in failures():
        client.put(f"check/{item['id']}", item)
    client.put("checks", {"root_causes": ["train.nan", "logprob.train-rollout"], "summary": {"pass": 3, "fail": 2}})
    client.put("source/trainer/0", SOURCE | {"lost": 12})
    client.put("engine/0", client.mirror.state["engine/0"] | {"weight_version": "41"})
    client.event("logprob.train-rollout: pass -> fail, 0.213 > 0.1", level="error", kind="verdict")
    client.event("rollout.text: pass -> warn", level="warn", kind="verdict")
    client.event("train.nan: pass -> fail", level="error", kind="verdict")
    client.event("records 811 to 822 of trainer/0 never came", level="warn", kind="loss", count=12)
    client.mirror.gaps.append((9, 11))


def failures() -> list[dict[str, Any]]:
    """Two root causes with one consequence each."""
    return [
        verdict(
            "logprob.train-rollout",
            "fail",
            rollout=30,
            step=30,
            value={"last": 0.199, "largest": 0.231},
            threshold={"warn": 0.1, "fail": 1.0},
            cause="engine 0 disagrees with the trainer since weight sync 30: the gap jumped from 0.001 to 0.21",
            evidence=[
                evidence(f"{GAP}@30", "0.00094 at step 29, 0.213 at step 30"),
                evidence("weights", "version 30 over tensor, digest a3f09c77e1 on the trainer, 77b1e0 on engine 0"),
            ],
            advice=["--check-weight-update-equal", "rltop dump diff dumps/train_30.pt dumps/rollout_30.pt"],
            refs=["D1.2", "W"],
        ),
        verdict(
            "rollout.text",
            "warn",
            rollout=31,
            value={"pattern": "salad", "bad": 3, "of": 4},
            threshold={"warn": 0.05, "fail": 0.3},
            cause="3 of 4 responses are word salad since rollout 31",
            consequence_of=["logprob.train-rollout"],
            evidence=[evidence("samples", "qq qq the the 7 7")],
        ),
        verdict(
            "train.nan",
            "fail",
            rollout=33,
            step=33,
            value={"quantity": "grad_norm", "value": "NaN", "reached_weights": False},
            threshold="finite",
            cause="grad_norm was NaN once, at step 33",
            evidence=[evidence("train/grad_norm@33", "nan")],
            advice=["--save-debug-rollout-data 'dumps/{rollout_id}.pt'"],
        ),
        verdict(
            "train.grad-high",
            "warn",
            rollout=36,
            step=36,
            value={"grad_norm": 14.2, "median": 0.24},
            threshold={"warn": 10, "fail": 1000},
            cause="grad_norm is 14.2 at step 36, where the median of the steps before is 0.24",
            consequence_of=["train.nan"],
        ),
    ]


def fleet(client: FakeClient) -> None:
    """A slime run with 64 SGLang engines, some of them unwell."""
    healthy(client)
    client.put("run", RUN | {"framework": "slime", "stand_ins": [], "name": "qwen3-moe-grpo"})
    client.mirror.run = "qwen3-moe-grpo"
    required = {"version": "42", "source": "trainer"}
    client.put("fleet", {"serving": 60, "total": 64, "keep": 32, "required": required, "safe_point": False, "ab": None})
    for index in range(64):
        client.put(f"toggles/{index}", toggles())
    fleet_round(client, 0)


def fleet_round(client: FakeClient, number: int, share: float = 1.0) -> None:
    """New numbers for the first `share` of the 64 engines; after round 0 also a point for every chart and an event.

    The other engines were scraped as well, they only have no news.
    """
    rng = random.Random(number)
    seen = client.server_now - 0.5
    for index in range(64):
        known = client.mirror.state.get(f"engine/{index}")
        down = index == 5
        value = known if known and index >= 64 * share else fleet_engine(index, rng)
        client.put(f"engine/{index}", value if down else value | {"seen": seen})
    if number:
        for name, column in curves().items():
            client.metric(name, 42 + number, column[42 + number])
        client.event(f"rollout {42 + number}: reward {rng.uniform(0.1, 0.9):.2f}")


def fleet_engine(index: int, rng: random.Random) -> dict[str, Any]:
    """One of the fleet at some moment; five of them have something wrong, always the same."""
    state = {5: "CRASHED", 17: "STALE", 23: "SUSPECT", 40: "CAPTURING"}.get(index, "HEALTHY")
    down = state == "CRASHED"
    load: dict[str, Any] = {
        "running": 0 if down else rng.randint(8, 48),
        "queued": rng.choice([0, 0, 0, 2, 7]),
        "tokens_per_s": None if down else rng.uniform(1200, 2400),
        "token_usage": rng.uniform(0.2, 0.98),
        "spec_accept_length": rng.uniform(2.2, 3.1),
        "seen": NOW - 95,
        "error": "connection refused" if down else None,
    }
    version = "41" if index in (17, 31) else "42"
    generation = 3 if down else 1
    life: dict[str, Any] = {
        "owner": "other" if index == 31 else "rltop",
        "launcher": "ray",
        "since": NOW - (3600 if state == "HEALTHY" else 40),
        "cause": {
            "CRASHED": "illegal memory access in fused_moe_kernel",
            "STALE": "holds version 41; version 42 comes with the trainer's next push",
            "SUSPECT": "no progress for 12 s with 8 running requests",
        }.get(state, ""),
        "restarts": 2 if down else 0,
        "signals": signals(process=(not down, "", 0.5), progress=(state != "SUSPECT", "", 0.5)),
    }
    return engine(str(index), index, state=state, weight_version=version, generation=generation, **load, **life)


def engines(client: FakeClient) -> None:
    """A run that owns four engines, and watches one of somebody else."""
    healthy(client)
    put_engines(client)


def operation(client: FakeClient) -> None:
    """The same, while a rolling change goes on."""
    engines(client)
    put_operation(client)


def ab_run(client: FakeClient) -> None:
    """The same, half of the engines each way."""
    engines(client)
    put_ab(client)


def bisecting(client: FakeClient) -> None:
    """A bisection in the middle, on two of the engines."""
    engines(client)
    client.put("bisect", stories.running())
    trial = stories.running()["trials"][2]["log"]
    client.logs[trial] = LinesAnswer(trial, 0, ["Decode batch.", "CUDA error: an illegal memory access"])


def bisected(client: FakeClient) -> None:
    """A bisection that found two toggles, after sixty trials over eight toggles."""
    engines(client)
    more = ["radix_cache", "prefill_graph", "attention_backend", "custom_all_reduce"]
    trials = [
        stories.trial(
            n, stories.TOGGLES[2:] if n % 3 else ["speculative", "deepep"], "crashed" if n % 3 else "quiet", n
        )
        for n in range(1, 61)
    ]
    rows = [row | {"on": [*row["on"], *more], "started": NOW - 9000 + 60 * row["n"]} for row in trials]
    client.put("bisect", stories.found(trials=rows, toggles=[*stories.TOGGLES, *more]))


def hostile(client: FakeClient) -> None:
    """Text that tries to get out: markup, escape sequences, wide, combining and invisible characters."""
    healthy(client)
    client.event(
        "[bold red]not markup[/] \x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2Jcleared \x9b31m\x08\x07", level="warn"
    )
    client.event("你好，世界 e\u0301e\u0301 🙂 \u202eevil\u202c zero\u200bwidth\ttab\nsecond line", level="warn")
    client.put("run", RUN | {"name": "[blink]名前\x1b[5m", "injected_faults": ["[/]\x1b[0m"]})
    hostname = "主机主机主机主机"
    client.put("engine/[x]", engine("[x]\x1b[7m", 1, state="HEAL\x1bTHY", host=hostname, error="\x1b[1mboom"))
    advice = ["\x1b]52;c;eA==\x07rm -r /"]
    cause = "[link=x]原因\x1b[0m"
    client.put("check/x.[y]", verdict("x.[y]", "fail", value="\x1b[31m1", cause=cause, advice=advice))


def lost(client: FakeClient) -> None:
    """The healthy run; the connection goes once the first picture is there."""
    healthy(client)

    def gone() -> None:
        client.lose("ssh: Connection reset by peer")
        client.now += 34

    client.after = gone


def crash(client: FakeClient) -> None:
    """A fault in the dashboard itself, right after the first picture."""
    healthy(client)

    class Broken(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            raise RuntimeError("planted crash")

    def fault() -> None:
        client.mirror.state = Broken(client.mirror.state)
        client.put("run", RUN)

    client.after = fault


SCENES: dict[str, Callable[[FakeClient], None]] = {
    "fresh": fresh,
    "healthy": healthy,
    "failing": failing,
    "fleet": fleet,
    "engines": engines,
    "operation": operation,
    "ab": ab_run,
    "bisecting": bisecting,
    "bisected": bisected,
    "hostile": hostile,
    "lost": lost,
    "crash": crash,
}


def _by_hand(name: str, *, control: bool, ascii_only: bool) -> int:
    client = FakeClient()
    client.mirror.role = "control" if control else "view"
    SCENES[name](client)
    start = time.monotonic() - client.now
    clocks = Clocks(lambda: time.monotonic() - start, lambda: NOW, stamp)

    async def alive() -> None:
        rounds = 0
        while True:
            await asyncio.sleep(1)
            client.now = clocks.monotonic()
            if client.status != "live":
                continue
            rounds += 1
            if rounds == 1:
                client.after()
            client.since = client.now
            if name == "fleet":
                fleet_round(client, rounds)
            client.mirror.server_time = client.server_now
            client.mirror.tick = Tick(client.mirror.server_time, 1.0, {"trainer/0": 0.2}, 1)

    client.body = alive
    return RltopApp(client, control=control, ascii_only=ascii_only, clocks=clocks).run() or 0


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    sys.exit(
        _by_hand(words[0] if words else "healthy", control="--control" in sys.argv, ascii_only="--ascii" in sys.argv)
    )
