"""The checks on caches, proxies, ports, stalls, collectives and what nobody owns, on log events of invented runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import Document, HttpCall, LogEvent, LogSource
from rltop.checks.observe import Observations, PhaseEvent, Where
from rltop.checks.rules.host_proxy import bypassed
from tests.checks.build import event, in_order, obs, rollout, train, verdict


def seen(*events: LogEvent, **more: Any) -> Observations:
    return obs(events=in_order(*events), logs=(LogSource("train.log"),), **more)


def trace(exception: str, message: str = "", *frames: str, **more: Any) -> LogEvent:
    parts = tuple((frame, 5, "load") for frame in frames)
    fields: dict[str, Any] = {"owner": "trainer", "actor": "MegatronTrainRayActor"}
    return event(
        "traceback", f"{exception}: {message}", exception=exception, message=message, frames=parts, **fields | more
    )


# -- host.inductor-cache


def broken_entry(**more: Any) -> LogEvent:
    return trace("json.decoder.JSONDecodeError", "Extra data", "torch/_inductor/runtime/autotune_cache.py", **more)


def test_ranks_that_read_a_broken_compile_cache_entry_race_for_it() -> None:
    env = Document("env", "env.txt", {"TORCHINDUCTOR_CACHE_DIR": "/nfs/ind"}, lines={"TORCHINDUCTOR_CACHE_DIR": 2})
    found = verdict(
        "host.inductor-cache", seen(broken_entry(rank=5, pid=1), broken_entry(rank=2, pid=2), documents=(env,))
    )
    assert (found.status, found.value["ranks"], found.value["cache_dir"]) == ("fail", [2, 5], "/nfs/ind")
    assert "race" in found.cause
    assert (found.evidence[-1].source, found.evidence[-1].line) == ("env.txt", 2)


def test_an_entry_that_is_broken_at_every_launch_is_corrupt() -> None:
    found = verdict("host.inductor-cache", seen(broken_entry(rank=2, time=5.0), broken_entry(rank=2, time=900.0)))
    assert (found.status, found.rank) == ("fail", 2)
    assert "corrupt" in found.cause


def test_other_json_errors_are_not_the_compiler_s() -> None:
    other = trace("json.decoder.JSONDecodeError", "Expecting value", "/w/reward.py")
    quiet = seen(other)
    assert verdict("host.inductor-cache", quiet).status == "pass"
    assert verdict("host.unexplained", quiet).status == "fail"
    wrapped = trace("torch._dynamo.exc.BackendCompilerFailed", "backend='inductor' raised: JSONDecodeError: x", rank=1)
    assert verdict("host.inductor-cache", seen(wrapped)).status == "fail"
    assert verdict("host.inductor-cache", Observations()).status == "skip"


# -- host.hf-cache-race


def absent(**more: Any) -> LogEvent:
    path = "/root/.cache/huggingface/modules/transformers_modules/m/modeling_m.py"
    return trace("FileNotFoundError", f"[Errno 2] No such file or directory: '{path}'", **more)


def fine(**more: Any) -> LogEvent:
    return event("loaded", "loaded config", owner="trainer", actor="MegatronTrainRayActor", **more)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([fine(pid=1), absent(pid=2), absent(pid=3)], "fail"),
        ([fine(pid=1), absent(pid=2), absent(pid=3, time=90.0)], "pass"),
        ([fine(pid=1), absent(pid=2)], "pass"),
        ([fine(pid=1), absent(pid=2, repeated=3)], "fail"),
        ([absent(pid=1), absent(pid=2), absent(pid=3)], "pass"),
        ([fine(pid=1), *(trace("FileNotFoundError", "/data/x.json", pid=p) for p in (2, 3))], "pass"),
        (
            [fine(pid=1), *(trace("OSError", "404 Client Error models--a--b huggingface/hub", pid=p) for p in (2, 3))],
            "pass",
        ),
    ],
)
def test_several_processes_fail_on_one_cache_while_a_sibling_gets_through(events: list[LogEvent], status: str) -> None:
    found = verdict("host.hf-cache-race", seen(*events))
    assert found.status == status, found
    if status == "pass" and len(events) > 1 and events[0].kind == "traceback":
        assert "permanent" in found.cause


# -- host.proxy

PROXY: dict[str, Any] = {
    "http_proxy": "http://user:secret@10.9.9.9:3128",
    "no_proxy": "localhost,127.0.0.1,.cluster.local",
}
UP = event("engine_stage", owner="engine", stage="ready", edge="")


def answer(status: int, server: str = "", url: str = "http://10.0.0.4:15000/health_generate") -> HttpCall:
    return HttpCall("/health_generate", status, server=server, url=url, where=Where("probe.jsonl", 1, "row"))


@pytest.mark.parametrize(
    ("env", "calls", "events", "status", "sure"),
    [
        (PROXY, [answer(403, "squid/6.1")], [UP], "fail", "high"),
        (PROXY, [answer(503)], [UP], "fail", "medium"),
        (PROXY, [answer(503)], [], "info", "high"),
        (PROXY, [answer(200)], [UP], "info", "high"),
        (PROXY | {"no_proxy": "10.0.0.0/8"}, [answer(503)], [UP], "info", "high"),
        ({"PATH": "/bin"}, [answer(503)], [UP], "pass", "high"),
        (None, [answer(403, "squid/6.1")], [UP], "fail", "high"),
        (None, [answer(200)], [UP], "skip", "high"),
    ],
)
def test_a_proxy_that_answers_for_the_engine(
    env: dict[str, Any] | None, calls: list[HttpCall], events: list[LogEvent], status: str, sure: str
) -> None:
    documents = () if env is None else (Document("env", "env.txt", env),)
    found = verdict("host.proxy", seen(*events, documents=documents, http=tuple(calls)))
    assert (found.status, found.confidence) == (status, sure), found
    assert "secret" not in str(found)


def test_a_client_that_says_that_a_proxy_stood_between() -> None:
    env = Document("env", "env.txt", {"http_proxy": "http://p:3128", "no_proxy": "localhost"})
    why = "(Caused by ProxyError('Unable to connect to proxy', OSError('Tunnel connection failed: 403 Forbidden')))"
    to_engine = trace("ProxyError", f"Max retries exceeded with url: http://10.0.0.4:15000/health_generate {why}")
    found = verdict("host.proxy", seen(UP, to_engine, documents=(env,)))
    assert (found.status, found.value["hosts"]) == ("fail", ["10.0.0.4"])
    elsewhere = trace("ProxyError", f"host='api.example.com': Max retries exceeded with url: /graphql {why}")
    assert verdict("host.proxy", seen(UP, elsewhere, documents=(env,))).status == "info"


def test_no_proxy_covers_names_domains_and_networks() -> None:
    assert bypassed("10.1.2.3", "10.0.0.0/8")
    assert bypassed("a.b.c", ".b.c")
    assert bypassed("a.b.c", "*")
    assert not bypassed("10.1.2.3", "10.1.2.4,localhost")
    assert not bypassed("ab.c", "b.c")


# -- engine.port, engine.not-ready


def taken(port: int | None, **more: Any) -> LogEvent:
    return event("port_in_use", "address already in use", owner="engine", actor="SGLangEngine", port=port, **more)


def test_a_port_that_cannot_be_bound_is_named_with_its_range() -> None:
    found = verdict("engine.port", seen(taken(42000, node="n7", pid=5)))
    assert (found.status, found.value["port"], found.value["ephemeral"]) == ("fail", 42000, True)
    assert "n7" in found.cause
    limits = Document("ip_local_port_range", "range.txt", text="50000\t60999")
    outside = verdict("engine.port", seen(taken(42000), documents=(limits,)))
    assert (outside.value["ephemeral"], outside.threshold) == (False, {"ephemeral_range": [50000, 60999]})
    unknown = verdict("engine.port", seen(taken(None)))
    assert (unknown.status, unknown.confidence) == ("fail", "medium")
    assert verdict("engine.port", seen(replace(taken(42000), owner="trainer"))).status == "pass"
    assert verdict("engine.port", Observations()).status == "skip"


def refused(**more: Any) -> LogEvent:
    return event("retry", owner="rollout", refused=True, url="http://h:15000", path="/get_model_info", **more)


def test_a_port_in_a_log_of_a_server_that_ended_is_the_server_s() -> None:
    unnamed = event("port_in_use", "Port 15002 is already in use", owner="trainer", port=15002)
    assert verdict("engine.port", seen(unnamed)).status == "pass"
    ended = event("death", "Server process terminated unexpectedly", owner="trainer", how="server")
    assert verdict("engine.port", seen(unnamed, ended)).value["port"] == 15002


def test_a_refused_connection_alone_is_no_port_conflict() -> None:
    alone = verdict("engine.port", seen(refused()))
    assert (alone.status, alone.confidence) == ("warn", "low")
    assert verdict("engine.port", seen(refused(), UP)).status == "pass"
    died = seen(refused(), UP, refused(), event("death", owner="engine", how="server"))
    assert verdict("engine.port", died).status == "pass"


def no_workers(**more: Any) -> LogEvent:
    fields: dict[str, Any] = {"status": 503, "no_workers": True, "url": "http://r:1/generate", "path": "/generate"}
    return event("retry", owner="rollout", **fields | more)


def stage(name: str, **more: Any) -> LogEvent:
    return event("engine_stage", name, owner="engine", stage=name, edge="", **more)


EMPTY = Document("router_workers", "router_workers.json", {"workers": []})
FULL = Document("router_workers", "router_workers.json", {"workers": [{"url": "http://e"}]})
ANSWERED = event("http", '10.0.0.1:5 - "POST /generate"', owner="engine", path="/generate", status=200)


@pytest.mark.parametrize(
    ("events", "documents", "status"),
    [
        ([stage("load"), no_workers()], [], "warn"),
        ([no_workers(), stage("capture")], [EMPTY], "warn"),
        ([no_workers(), no_workers()], [EMPTY], "warn"),
        ([no_workers(), no_workers()], [FULL], "pass"),
        ([stage("ready"), ANSWERED, no_workers()], [], "pass"),
        ([no_workers(), stage("ready"), ANSWERED], [], "warn"),
        ([stage("ready", time=10.0), no_workers(time=100.0)], [EMPTY], "warn"),
        ([stage("ready", time=10.0), no_workers(time=400.0)], [EMPTY], "fail"),
        ([stage("ready", time=10.0), no_workers(time=400.0)], [FULL], "pass"),
        ([stage("load")], [], "pass"),
    ],
)
def test_requests_that_come_before_the_engines(events: list[LogEvent], documents: list[Document], status: str) -> None:
    found = verdict("engine.not-ready", seen(*events, documents=tuple(documents)))
    assert found.status == status, found
    if status == "fail":
        assert "versions" in found.cause


def test_an_engine_that_is_not_ready_is_not_dead() -> None:
    report = evaluate(seen(stage("load"), no_workers(), documents=(EMPTY,)))
    assert {v.id for v in report.verdicts if v.status in ("warn", "fail")} == {"engine.not-ready"}
    assert verdict("engine.not-ready", Observations()).status == "skip"


# -- cluster.stall


def timer(name: str, edge: str, time: float, **more: Any) -> LogEvent:
    fields: dict[str, Any] = {"owner": "trainer", "actor": "MegatronTrainRayActor", "pid": 4}
    return event("timer", name=name, edge=edge, time=time, **fields | more)


def rounds(count: int, took: float = 40.0, name: str = "actor_train") -> list[LogEvent]:
    found = []
    for i in range(count):
        found += [timer(name, "start", 100.0 * i), timer(name, "end", 100.0 * i + took, elapsed_s=took)]
    return found


def poll(time: float) -> LogEvent:
    return event("http", '"GET /metrics"', owner="engine", path="/metrics", status=200, time=time)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([*rounds(4), timer("actor_train", "start", 500.0), poll(1200.0)], "fail"),
        ([*rounds(4), timer("actor_train", "start", 500.0), poll(1050.0)], "pass"),
        ([*rounds(4, took=90.0), timer("actor_train", "start", 500.0), poll(1300.0)], "pass"),
        ([*rounds(2), timer("actor_train", "start", 500.0), poll(2200.0)], "pass"),
        ([*rounds(2), timer("actor_train", "start", 500.0), poll(2400.0)], "warn"),
        ([*rounds(4), poll(9000.0)], "pass"),
        (
            [*rounds(4), timer("actor_train", "start", 500.0), trace("ValueError", pid=4, time=510.0), poll(1200.0)],
            "pass",
        ),
        ([event("placement_wait", gpus=8, available=2, registered=4, elapsed_s=1900.0)], "warn"),
        ([event("placement_wait", gpus=8, available=2, registered=4, elapsed_s=900.0)], "pass"),
        ([event("decode", owner="engine", queue_req=3, time=0.0), poll(200.0), poll(400.0)], "fail"),
        ([event("decode", owner="engine", queue_req=3, time=0.0), poll(200.0)], "pass"),
        ([event("decode", owner="engine", queue_req=0, time=0.0), poll(900.0)], "pass"),
        (
            [
                event("decode", owner="engine", queue_req=3, time=0.0),
                event("http", path="/pause_generation", status=200, time=5.0),
                poll(900.0),
            ],
            "pass",
        ),
    ],
)
def test_one_side_stopped_moving(events: list[LogEvent], status: str) -> None:
    assert verdict("cluster.stall", seen(*events)).status == status


def test_a_stall_names_phase_side_history_and_what_the_engines_do() -> None:
    found = verdict("cluster.stall", seen(*rounds(5), timer("actor_train", "start", 700.0), poll(8000.0)))
    assert found.value == {
        "phase": "actor_train",
        "open_s": 7300.0,
        "median_s": 40.0,
        "count": 5,
        "side": "trainer",
        "process": "MegatronTrainRayActor (pid 4)",
    }
    assert "the engines are not the problem" in found.cause
    waits = verdict(
        "cluster.stall", seen(*rounds(5, name="train_wait"), timer("train_wait", "start", 700.0), poll(8000.0))
    )
    assert waits.value["side"] == "rollout side"


def test_a_phase_with_finished_steps_moves() -> None:
    events = [*rounds(4), timer("actor_train", "start", 500.0), poll(1200.0)]
    step = replace(train(9, loss=0.1), time=1100.0)
    assert verdict("cluster.stall", obs(step, events=in_order(*events))).status == "pass"


def test_phases_of_a_source_without_timers_count_too() -> None:
    phases = [PhaseEvent("train", "enter", time=10.0 * i) for i in range(1)]
    row = replace(rollout(0, truncated_ratio=0.0), time=4000.0)
    assert verdict("cluster.stall", obs(row, phases=tuple(phases))).status == "warn"
    assert verdict("cluster.stall", obs(row, phases=tuple(phases), live=True)).status == "skip"


def live(*events: LogEvent, still: float, phases: tuple[PhaseEvent, ...] = (), **more: Any) -> Observations:
    """A live run in which nothing has moved for `still` seconds. Its logs have a clock of their own."""
    fields: dict[str, Any] = {"live": True, "now": 9_000_000.0, "moved": 9_000_000.0 - still}
    return replace(seen(*events), phases=phases, **fields | more)


@pytest.mark.parametrize(
    ("events", "still", "status"),
    [
        ([*rounds(4), timer("actor_train", "start", 500.0)], 601.0, "fail"),
        ([*rounds(4), timer("actor_train", "start", 500.0)], 599.0, "pass"),
        ([*rounds(4, took=90.0), timer("actor_train", "start", 500.0)], 899.0, "pass"),
        ([*rounds(4, took=90.0), timer("actor_train", "start", 500.0)], 901.0, "fail"),
        ([*rounds(2), timer("actor_train", "start", 500.0)], 1799.0, "pass"),
        ([*rounds(2), timer("actor_train", "start", 500.0)], 1801.0, "warn"),
        ([*rounds(4)], 9000.0, "pass"),
        ([*rounds(4), timer("actor_train", "start", 500.0), trace("ValueError", pid=4, time=510.0)], 900.0, "pass"),
        ([event("decode", owner="engine", queue_req=3, time=0.0)], 301.0, "fail"),
        ([event("decode", owner="engine", queue_req=3, time=0.0)], 299.0, "pass"),
        # the engine is quiet because it is the trainer's turn
        ([event("decode", owner="engine", queue_req=3, time=0.0), timer("actor_train", "start", 1.0)], 301.0, "pass"),
        ([event("decode", owner="engine", queue_req=3, time=0.0), timer("train_wait", "start", 1.0)], 301.0, "fail"),
    ],
)
def test_a_live_run_stands_still_when_nothing_moves(events: list[LogEvent], still: float, status: str) -> None:
    assert verdict("cluster.stall", live(*events, still=still)).status == status


def test_a_live_stall_is_judged_by_the_daemon_s_clock_alone() -> None:
    """Logs in another time zone, ahead or behind, neither cause nor hide a stall."""
    for zone in (-7 * 3600.0, 0.0, 9_000_000.0, 9_100_000.0):
        events = [
            replace(one, time=(one.time or 0.0) + zone) for one in (*rounds(4), timer("train_wait", "start", 500.0))
        ]
        found = verdict("cluster.stall", live(*events, still=1900.0))
        assert (found.status, found.value["open_s"], found.value["side"]) == ("warn", 1900.0, "rollout side")
        assert "in which nothing moved" in found.cause
        assert verdict("cluster.stall", live(*events, still=20.0)).status == "pass"


def test_phases_of_a_live_run_without_logs_count() -> None:
    phases = [
        PhaseEvent("train", edge, time=10.0 * i, elapsed_s=5.0 if edge == "leave" else None)
        for i in range(4)
        for edge in ("enter", "leave")
    ]
    opened = (*phases, PhaseEvent("train", "enter", time=40.0))
    assert verdict("cluster.stall", live(still=700.0, phases=opened)).status == "fail"
    assert verdict("cluster.stall", live(still=700.0, phases=tuple(phases))).status == "pass"
    assert verdict("cluster.stall", live(still=700.0, phases=opened, live=False)).status == "fail", "ended, still true"
    assert verdict("cluster.stall", live(still=700.0, phases=opened, now=None)).status == "skip"


# -- train.collective


def watchdog(rank: int, done: int | None, **more: Any) -> LogEvent:
    data: dict[str, Any] = {"op": "ALLGATHER", "group": "1(tp)", "rank_in_group": rank}
    if done is not None:
        data |= {"completed": done, "enqueued": done + 4}
    return event("collective", owner="trainer", rank=rank, **data | more)


def test_the_rank_that_completed_least_holds_the_others_up() -> None:
    found = verdict("train.collective", seen(watchdog(0, 500), watchdog(6, 498), watchdog(2, 500)))
    assert (found.status, found.rank, found.confidence) == ("fail", 6, "high")
    assert found.value["ranks"]["6"] == {"enqueued": 502, "completed": 498}


def test_without_a_rank_that_is_behind_the_culprit_is_unknown() -> None:
    even = verdict("train.collective", seen(watchdog(0, 500), watchdog(2, 500, repeated=5)))
    assert (even.status, even.rank, even.confidence) == ("fail", None, "low")
    assert "unknown" in even.cause
    assert "Ray hid" in even.cause
    alone = verdict("train.collective", seen(watchdog(3, None, seq=77)))
    assert (alone.rank, alone.confidence) == (None, "low")
    assert verdict("train.collective", seen(replace(watchdog(0, 1), owner="engine"))).status == "pass"
    assert verdict("train.collective", Observations()).status == "skip"


def test_groups_are_judged_apart() -> None:
    mixed = seen(watchdog(0, 500), watchdog(1, 400, group="2(dp)"), watchdog(0, 401, group="2(dp)"))
    found = [v for v in evaluate(mixed).verdicts if v.id == "train.collective"]
    assert [(v.value["group"], v.rank) for v in found] == [("1(tp)", None), ("2(dp)", 1)]


# -- host.unexplained


def test_an_error_that_no_check_owns_is_shown_with_its_own_frame() -> None:
    lost = trace("KeyError", "'tokens'", "/site-packages/torch/x.py", "/w/my_reward.py", rank=4)
    found = verdict("host.unexplained", seen(lost))
    assert (found.status, found.rank, found.confidence) == ("fail", 4, "low")
    assert "KeyError" in found.cause
    assert found.evidence[0].line == 1


def test_an_error_that_the_run_survives_needs_no_explanation() -> None:
    lost = replace(trace("KeyError"), time=5.0)
    step = replace(train(3, loss=0.1), time=9.0)
    assert verdict("host.unexplained", obs(step, events=(lost,))).status == "pass"


def test_what_another_check_owns_is_not_unexplained() -> None:
    access = event("ima", owner="engine", fault="illegal memory access")
    both = seen(access, trace("RuntimeError", "Connection closed by peer", owner="engine"))
    found = verdict("host.unexplained", both)
    assert (found.status, "engine.ima" in found.cause) == ("pass", True)


@pytest.mark.parametrize(
    "harmless",
    [
        event("memory_saver", "out of memory (may not be an issue)", benign=True),
        event("traceback", "ConnectionError: /freeze_gc", exception="ConnectionError", message="/freeze_gc"),
        event("job_end", "Job 'x' succeeded", state="succeeded"),
        event("overflow", "Grad overflow on iteration"),
    ],
)
def test_benign_lines_need_no_explanation(harmless: LogEvent) -> None:
    assert verdict("host.unexplained", seen(harmless)).status == "pass"


def test_a_job_that_ends_badly_without_a_word_is_shown() -> None:
    found = verdict("host.unexplained", seen(event("job_end", "Job 'raysubmit_1' failed", state="failed")))
    assert found.status == "fail"
    assert verdict("host.unexplained", Observations()).status == "skip"


# -- train.skipped-steps

NO_CHECK: dict[str, Any] = {"no_check_for_nan_in_loss_and_grad": True}


def norms(*values: float, **more: Any) -> Observations:
    return obs(*(train(i, on=0, rollout=i, loss=0.1, grad_norm=v) for i, v in enumerate(values)), **more)


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "flags", "status"),
    [
        ([0.2, NAN, 0.2], NO_CHECK, "info"),
        ([0.2, NAN, NAN, 0.2], NO_CHECK, "info"),
        ([0.2, NAN, NAN, math.inf, 0.2], NO_CHECK, "warn"),
        ([0.2] * 3, NO_CHECK, "pass"),
        ([0.2, NAN, 0.2], {"lr": 1}, "pass"),
        (([0.2] * 7 + [NAN]) * 7, NO_CHECK, "warn"),
        (([0.2] * 14 + [NAN]) * 4, NO_CHECK, "info"),
    ],
)
def test_skipped_steps_are_counted_in_a_row_and_among_the_newest(
    values: list[float], flags: dict[str, Any], status: str
) -> None:
    seen_ = norms(*values, flags=flags)
    assert verdict("train.skipped-steps", seen_).status == status
    if flags is NO_CHECK:
        assert verdict("train.nan", seen_).status == "pass"


def test_skipped_steps_are_named() -> None:
    found = verdict("train.skipped-steps", norms(0.2, NAN, NAN, NAN, 0.2, flags=NO_CHECK))
    assert (found.value["first_step"], found.value["last_step"], found.value["in_a_row"]) == (1, 3, 3)
    assert verdict("train.skipped-steps", Observations()).status == "skip"
    verl = replace(norms(NAN), args=replace(norms(NAN).args, framework="verl"))
    assert verdict("train.skipped-steps", verl).status == "pass"


def iteration(step: int, scale: float, skipped: int = 1) -> LogEvent:
    return event("iteration", owner="trainer", step=step, scale=scale, skipped=skipped, nans=0)


@pytest.mark.parametrize(
    ("lines", "flags", "status"),
    [
        ([iteration(i, 2.0 ** (20 - i)) for i in range(6)], {}, "info"),
        ([iteration(i, 2.0 ** (20 - i)) for i in range(12)], {}, "warn"),
        ([iteration(i, 2.0 ** (3 - i)) for i in range(3)], {"min_loss_scale": 2.0}, "warn"),
        ([iteration(i, 1024.0, skipped=0) for i in range(6)], {}, "skip"),
    ],
)
def test_overflows_of_fp16_lower_the_scale(lines: list[LogEvent], flags: dict[str, Any], status: str) -> None:
    assert verdict("train.skipped-steps", seen(*lines, flags=flags)).status == status


# -- train.collapse


def course(rewards: list[float], **late: float) -> list[Any]:
    rows = []
    for i, reward in enumerate(rewards):
        last = i >= len(rewards) - 5
        rows.append(rollout(i, raw_reward=reward, repetition_frac=late.get("repetition_frac", 0.0) if last else 0.0))
        entropy = late.get("entropy_loss", 0.5) if last else 0.5
        kl = late.get("kl_loss", 0.01) if last else 0.01
        rows.append(train(i, on=0, rollout=i, loss=0.1, entropy_loss=entropy, kl_loss=kl))
    return rows


FALL = [0.6] * 15 + [0.1] * 5


@pytest.mark.parametrize(
    ("rows", "status", "words"),
    [
        (course(FALL, entropy_loss=0.01), "fail", "entropy fell"),
        (course(FALL, kl_loss=4.0), "fail", "kl_loss rose"),
        (course(FALL, kl_loss=0.09), "pass", "neither KL"),
        (course(FALL, repetition_frac=0.8), "fail", "repeat themselves"),
        (course(FALL), "pass", "neither KL"),
        (course([0.6] * 20, entropy_loss=0.01), "pass", "holds"),
        (course([0.6] * 15 + [0.4] * 5, entropy_loss=0.01), "pass", "holds"),
        (course([0.6] * 6, entropy_loss=0.01), "skip", "10 rollouts"),
        (course([0.0] * 20, entropy_loss=0.01), "pass", "holds"),
    ],
)
def test_a_collapse_needs_a_fall_of_the_reward_and_a_sign(rows: list[Any], status: str, words: str) -> None:
    found = verdict("train.collapse", obs(*rows))
    assert (found.status, words in found.cause) == (status, True), found


def test_a_fall_that_another_check_explains_is_no_collapse() -> None:
    rows = course(FALL, entropy_loss=0.01)
    assert verdict("train.collapse", obs(*rows)).rollout == 15
    access = event("ima", owner="engine", fault="illegal memory access")
    assert verdict("train.collapse", obs(*rows, events=(access,))).status == "pass"
    assert verdict("train.collapse", obs(*rows, mode="rollout-only")).status == "skip"


# -- logprob.drift


def gaps(*values: float, segment: int = 0) -> list[Any]:
    rows = [train(i, on=0, rollout=i, loss=0.1, train_rollout_logprob_abs_diff=v) for i, v in enumerate(values)]
    return [replace(row, segment=segment) for row in rows]


RISING = [0.01 + 0.004 * i for i in range(16)]


@pytest.mark.parametrize(
    ("values", "status"),
    [
        (RISING, "warn"),
        (RISING[:9], "skip"),
        ([0.02] * 16, "pass"),
        ([0.001 + 0.0001 * i for i in range(16)], "pass"),
        ([0.02] * 15 + [3.0], "pass"),
        ([0.3 + 0.1 * i for i in range(16)], "pass"),
        (list(reversed(RISING)), "pass"),
        ([0.02, 0.09] * 8, "pass"),
    ],
)
def test_the_gap_grows_over_a_run_that_began_clean(values: list[float], status: str) -> None:
    assert verdict("logprob.drift", obs(*gaps(*values))).status == status


def test_a_drift_tells_its_ends_and_never_crosses_a_restart() -> None:
    found = verdict("logprob.drift", obs(*gaps(*RISING)))
    assert (found.value["first"], found.value["last"]) == (0.01, pytest.approx(0.07))
    assert [e.source.split("@")[1] for e in found.evidence][::2] == ["0", "15"]
    halves = [*gaps(*RISING[:8]), *gaps(*RISING[8:], segment=1)]
    assert verdict("logprob.drift", obs(*halves)).status == "skip"


def test_of_a_multiplicative_error_only_the_smoothed_trend_counts() -> None:
    def errors(*values: float) -> Observations:
        return obs(*(train(i, on=0, rollout=i, loss=0.1, token_mult_prob_error=v) for i, v in enumerate(values)))

    assert verdict("logprob.drift", errors(*[1.2] * 10, 400.0, *[1.2] * 5)).status == "pass"
    assert verdict("logprob.drift", errors(*(1.1 + 0.05 * i for i in range(16)))).status == "warn"
    assert verdict("logprob.drift", Observations()).status == "skip"


# -- other frameworks, and runs without arguments


def test_numbers_that_come_back_are_a_skip_only_where_the_framework_skips_by_itself() -> None:
    line = Where("verl.log", 4, "step:1 - actor/grad_norm:nan - actor/pg_loss:0.1")
    verl = norms(0.2, NAN, 0.2, 0.3)
    verl = replace(verl, metrics=tuple(replace(row, where=line) for row in verl.metrics))
    assert verdict("train.nan", verl).status == "pass"
    assert verdict("train.skipped-steps", verl).value["first_step"] == 1
    stays = obs(*(train(i, loss=NAN if i else 0.1, grad_norm=NAN if i else 0.2) for i in range(4)))
    assert verdict("train.nan", stays).status == "fail"
    without = norms(0.2, NAN, 0.2, 0.3)
    assert (verdict("train.nan", without).status, verdict("train.nan", without).step) == ("fail", 1)
    assert verdict("train.skipped-steps", without).status == "pass", "nobody said that a step was skipped"
    told = norms(0.2, NAN, 0.2, flags={"lr": 1e-6})
    assert verdict("train.nan", told).status == "fail"


def test_verl_s_ppo_kl_is_a_mean_over_updates() -> None:
    row = replace(train(1, loss=0.1, ppo_kl=4e-4), where=Where("a.log", 1, "step:1 - actor/ppo_kl:0.0004"))
    assert verdict("kl.on-policy", obs(row, rollout(1, log_probs=-0.3))).status == "skip"
    named = replace(row, where=Where("a.log", 1, "step 1: {'train/ppo_kl': 0.0004}"))
    assert verdict("kl.on-policy", obs(named, rollout(1, log_probs=-0.3))).status == "warn"


def test_tokens_are_found_under_the_names_that_trainers_use() -> None:
    rows = []
    for i, tokens in enumerate([1000, 2600, 1400, 3100]):
        row = train(i, on=0, loss=0.1, grad_norm=0.002 * tokens)
        rows.append(replace(row, values={**row.values, "tokens_per_microbatch": float(tokens)}))
    assert verdict("train.grad-scale", obs(*rows)).status == "fail"


def test_an_engine_that_runs_out_of_memory_is_the_root_of_its_death() -> None:
    lost = event("oom", owner="engine", tried_gb=2.0, free_gb=0.1)
    report = evaluate(seen(lost, event("death", owner="trainer", how="sigquit")))
    assert report.root_causes == ("engine.oom",)
    (died,) = (v for v in report.verdicts if v.id == "engine.died")
    assert died.consequence_of == ("engine.oom",)
    assert "the trainer" not in died.cause
