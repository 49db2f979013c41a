"""Engines that rltop owns, in all their states: four of them, one of somebody else, an operation, an A/B run."""

from __future__ import annotations

from typing import Any

from rltop.protocol.messages import LinesAnswer
from tests.tui.fake import NOW, FakeClient

WELL = {
    "process": (True, "3 of 3 processes", 0.4),
    "probe": (True, "/health 200 in 4 ms", 0.6),
    "progress": (True, "412 tokens in 1.0 s, 12 running", 0.6),
    "trainer": (True, "", 2.0),
    "log": (True, "", 1.0),
}


def signals(**more: tuple[bool | None, str, float]) -> dict[str, Any]:
    """The five signals of a well engine; keywords replace some: (ok, text, seconds ago)."""
    told = WELL | more
    return {name: {"ok": ok, "text": text, "t": NOW - ago} for name, (ok, text, ago) in told.items()}


def toggle(value: str | None, choices: str, **more: Any) -> dict[str, Any]:
    """One entry of a `toggles/<id>` value; keywords replace its fields."""
    base: dict[str, Any] = {
        "value": value,
        "wanted": value,
        "choices": choices.split(),
        "refused": {},
        "aliases": [],
        "verify": "/server_info",
        "sides": {},
    }
    return base | more


def toggles() -> dict[str, Any]:
    """A `toggles/<id>` value as on a dense model on the CPU."""
    eagle = "EAGLE needs --speculative-draft-model-path, and this model has no draft model"
    return {
        "cuda_graph": toggle("on", "on off"),
        "cuda_graph_padding": toggle("on", "on off", aliases=["cuda_graph off: it has no meaning then"]),
        "prefill_graph": toggle("off", "off", refused={"on": "this device has no prefill graph"}),
        "speculative": toggle("off", "off NGRAM", refused={"EAGLE": eagle}),
        "deepep": toggle("off", "off auto normal low_latency", sides={"engine": "off", "trainer": "off"}),
        "launch_blocking": toggle("off", "off on", verify="/proc/PID/environ"),
        "overlap_schedule": toggle("on", "on off"),
        "radix_cache": toggle("on", "on off", wanted="off"),
        "custom_all_reduce": toggle(None, "on off", wanted="on", verify=""),
        "dp_attention": toggle("off", "off on"),
        "hicache": toggle("off", "off on"),
        "chunked_prefill": toggle("8192", "off 2048 8192"),
        "attention_backend": toggle("torch_native", "torch_native intel_amx"),
        "mem_fraction_static": toggle("0.8", "0.8", free="a share between 0 and 1"),
        "core_dump": toggle("on", "on off", verify="/proc/PID/environ"),
    }


def owned(name: str, index: int, **more: Any) -> dict[str, Any]:
    """An `engine/<id>` value of a healthy engine of ours; keywords replace its fields."""
    base: dict[str, Any] = {
        "id": name,
        "url": f"http://127.0.0.1:{30000 + index}",
        "kind": "cpu",
        "state": "HEALTHY",
        "generation": 2,
        "pid": 4000 + index,
        "host": "box",
        "version": "0.1.0",
        "weight_version": "7",
        "model_path": "/models/tiny",
        "log": f"engines/{name}/2/stdout.log",
        "running": 12,
        "queued": 0,
        "tokens_per_s": 412.0,
        "token_usage": 0.42,
        "cuda_graph": True,
        "spec_accept_length": None,
        "seen": NOW - 0.6,
        "error": None,
        "owner": "rltop",
        "launcher": "local",
        "since": NOW - 340,
        "deadline": None,
        "cause": "",
        "fingerprint": None,
        "restarts": 0,
        "backoff_until": None,
        "stage": "",
        "pending": "",
        "signals": signals(),
        "toggles": {},
        "wanted": {},
        "ignored": [],
        "weight_digest": "a3f09c77e1b2",
        "arm": "",
        "previous_generation": 1,
    }
    return base | more


def put_engines(client: FakeClient) -> None:
    """One well, one stale, one crashed, one that ignores a flag, one of somebody else."""
    client.put("engine/0", owned("0", 0))
    client.put(
        "engine/1",
        owned(
            "1",
            1,
            state="STALE",
            since=NOW - 4,
            deadline=NOW + 56,
            weight_version="6",
            cause="holds version 6; version 7 comes with the trainer's next push",
            running=0,
            tokens_per_s=None,
        ),
    )
    client.put(
        "engine/2",
        owned(
            "2",
            2,
            state="BACKOFF",
            since=NOW - 7,
            backoff_until=NOW + 13,
            restarts=2,
            cause="illegal memory access in fused_moe_kernel, third time",
            fingerprint="ima:fused_moe_kernel:3f2a",
            running=None,
            queued=None,
            tokens_per_s=None,
            token_usage=None,
            signals=signals(
                process=(False, "scheduler gone, signal 3", 7.0),
                probe=(False, "connection refused", 2.0),
                progress=(None, "", 0.0),
                log=(False, "CUDA error: an illegal memory access was encountered", 7.0),
            ),
        ),
    )
    client.put("engine/3", owned("3", 3, ignored=["radix_cache"]))
    client.put(
        "engine/4",
        owned("4", 4, owner="other", launcher="", kind="sglang", version="0.5.23", previous_generation=None),
    )
    for index in range(4):
        client.put(f"toggles/{index}", toggles())
    client.put("weights", {"version": "7", "ok": True, "transport": "tensor", "elapsed_s": 0.2, "digest": "a3f0"})
    required = {"version": "7", "source": "trainer"}
    client.put("fleet", {"serving": 2, "total": 4, "keep": 1, "required": required, "safe_point": False, "ab": None})
    text = [f"[2026-11-30 00:00:{second:02d}] Decode batch. #running-req: 12" for second in range(60)]
    crash = ["Scheduler hit an exception: Traceback (most recent call last):", "CUDA error: an illegal memory access"]
    text.insert(30, 'INFO:     127.0.0.1:40000 - "POST /generate HTTP/1.1" 200 OK')
    for index in range(5):
        source = f"engines/{index}/2/stdout.log"
        client.logs[source] = LinesAnswer(source, 0, text + crash * (index == 2))


def put_operation(client: FakeClient) -> None:
    """A rolling change that has done one engine and loads the next."""
    stages = [
        ("engine 0: draining", 21.0),
        ("engine 0: drained 0.4 s, stopping", 20.6),
        ("engine 0: drained 0.4 s, stopped 1.2 s, loading", 19.4),
        ("engine 1: loading", 4.0),
    ]
    client.put("op/8", {"op": "8", "name": "engine-synced", "target": "0", "state": "done", "t": NOW - 1})
    client.put(
        "op/7",
        {
            "op": "7",
            "name": "engine-set",
            "target": "0,1",
            "engines": ["0", "1"],
            "state": "running",
            "stage": "engine 1: loading",
            "percent": 60.0,
            "who": "ana (unverified)",
            "reason": "is it the graph",
            "t": NOW - 21,
            "ended": None,
            "text": "",
            "stages": [{"t": NOW - ago, "text": words} for words, ago in stages],
        },
    )


def put_ab(client: FakeClient) -> None:
    """Two engines each way."""
    for index in range(4):
        cell = client.mirror.state[f"engine/{index}"]
        client.put(f"engine/{index}", cell | {"arm": "AABB"[index]})
    rows = [
        ("tokens/s", 412.0, 388.2, -23.8, -31.0, -16.5, 240),
        ("log-prob gap", 0.0012, 0.0013, 0.0001, -0.0002, 0.0004, 240),
        ("accept length", None, None, None, None, None, 0),
        ("crashes per hour", 2.1, 0.0, -2.1, -4.4, 0.1, 2),
    ]
    names = ("name", "a", "b", "diff", "low", "high", "n")
    ab = {
        "changes": {"cuda_graph": "off"},
        "since": NOW - 240,
        "rows": [dict(zip(names, row, strict=True)) for row in rows],
        "verdict": "B makes 5.8 % fewer tokens/s; no difference in the log-prob gap can be told",
    }
    client.put("fleet", client.mirror.state["fleet"] | {"ab": ab})
