"""The checks on GPU faults, memory, deaths and health, on log events of invented runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import Document, HttpCall, LogEvent, LogSource, Row
from rltop.checks.known import KnownCrash, fingerprint, normalise, version_key
from rltop.checks.observe import Observations, Where
from rltop.checks.verdict import Verdict
from tests.checks.build import event, in_order, obs, rollout, sample, train, verdict

ACCESS = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def ima(**fields: Any) -> LogEvent:
    data: dict[str, Any] = {"fault": "illegal memory access", "owner": "engine"}
    return event("ima", ACCESS, **data | fields)


def seen(*events: LogEvent, **more: Any) -> Observations:
    return obs(events=in_order(*events), logs=(LogSource("train.log"),), **more)


def stage(name: str, edge: str = "", **more: Any) -> LogEvent:
    return event("engine_stage", name, owner="engine", stage=name, edge=edge, **more)


def batch(kind: str = "decode", text: str = "", **more: Any) -> LogEvent:
    return event(kind, text, owner="engine", **more)


def frames(*names: str) -> tuple[tuple[str, int, str], ...]:
    return tuple((f"/x/sglang/srt/{name.split(':')[0]}", 7, name.split(":")[1]) for name in names)


# -- engine.ima


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([stage("capture", "begin"), ima()], "capture"),
        ([stage("load", "begin"), ima()], "load"),
        ([stage("ready"), batch(), ima(frames=frames("graph_runner.py:replay"))], "replay"),
        ([ima(frames=frames("cuda_graph_runner.py:capture_one_batch_size"))], "capture"),
        ([stage("ready"), batch("prefill"), ima()], "prefill"),
        ([stage("ready"), batch("decode", "Decode batch, cuda graph: True"), ima()], "decode (CUDA graph)"),
        ([stage("ready"), batch(), event("release"), event("resume"), ima()], "first request after wake-up"),
        ([stage("ready"), batch(), event("release"), event("resume"), batch("prefill"), ima()], "prefill"),
        ([ima()], "serving"),
    ],
)
def test_the_phase_of_an_engine_s_fault(events: list[LogEvent], phase: str) -> None:
    found = verdict("engine.ima", seen(*events))
    assert (found.status, found.value["phase"]) == ("fail", phase)


def test_the_earliest_access_over_all_ranks_is_the_fault_and_the_rest_its_cascade() -> None:
    peer = event("ima", "NCCL watchdog: illegal memory access", owner="engine", rank=0, source="rank0.log")
    first = ima(rank=3, source="rank3.log", repeated=2)
    found = verdict("engine.ima", seen(stage("ready"), batch(avail_gb=9.5), first, peer))
    assert (found.rank, found.value["free_gb"], found.value["later_reports"]) == (3, 9.5, 1)
    assert found.evidence[0].source == "rank3.log"
    assert "rank 3" in found.cause
    assert any("RAY_DEDUP_LOGS=0" in advice for advice in found.advice)


def test_what_a_dying_process_repeats_is_no_fault_of_its_own() -> None:
    last = ima(**{"from": "terminate"})
    found = verdict("engine.ima", seen(ima(rank=1), last))
    assert found.value["later_reports"] == 1
    assert found.rank == 1


def test_an_xid_of_the_hardware_ends_the_search_for_toggles() -> None:
    hardware = verdict("engine.ima", seen(ima(), event("xid", owner="host", xid=48)))
    assert "hardware" in hardware.cause
    assert not any("speculative" in advice for advice in hardware.advice)
    software = verdict("engine.ima", seen(ima(), event("xid", owner="host", xid=31)))
    assert "software fault" in software.cause
    assert any("speculative" in advice for advice in software.advice)


def test_a_fault_in_capture_has_a_short_ladder_and_launch_blocking_goes_with_graphs_off() -> None:
    capture = verdict("engine.ima", seen(stage("capture", "begin"), ima()))
    assert capture.advice[0].startswith("CUDA graph off")
    assert len(capture.advice) < 6
    serving = verdict("engine.ima", seen(stage("ready"), batch(), ima()))
    (blocking,) = (advice for advice in serving.advice if "CUDA_LAUNCH_BLOCKING" in advice)
    assert "graphs off" in blocking
    assert not any("mem-fraction" in advice for advice in serving.advice)


@pytest.mark.parametrize("source", ["server", "flags"])
def test_the_ladder_leaves_out_what_is_off(source: str) -> None:
    flags = {"sglang_speculative_algorithm": "EAGLE", "sglang_disable_cuda_graph": True}
    printed = {"speculative_algorithm": "EAGLE", "disable_cuda_graph": "True", "enable_dp_attention": "False"}
    start = event("engine_stage", "server_args=ServerArgs(...)", owner="engine", stage="start", switches=printed)
    if source == "server":
        one = verdict("engine.ima", seen(start, batch(), ima()))
    else:
        one = verdict("engine.ima", seen(batch(), ima(), flags=flags))
    told = "\n".join(one.advice)
    assert "speculative decoding off" in told
    assert "overlap schedule off" in told
    for gone in ("CUDA graph off", "DeepEP", "DP attention", "hierarchical"):
        assert gone not in told
    unknown = "\n".join(verdict("engine.ima", seen(batch(), ima())).advice)
    assert all(step in unknown for step in ("CUDA graph off", "DeepEP", "DP attention", "hierarchical"))


@pytest.mark.parametrize(("graphs", "told"), [("FFF", False), ("FTF", True), ("", True)])
def test_the_ladder_leaves_out_graphs_that_no_batch_ran_in(graphs: str, told: bool) -> None:
    lines = [batch("decode", f"Decode batch, cuda graph: {one == 'T'}") for one in graphs]
    prefill = batch("prefill", "Prefill batch, cuda graph: False")
    one = verdict("engine.ima", seen(stage("ready"), prefill, *lines, ima()))
    assert any(advice.startswith("CUDA graph off") for advice in one.advice) is told


def test_the_owner_of_the_first_fault_decides_which_side_is_judged() -> None:
    mine = ima(
        owner="trainer", actor="MegatronTrainRayActor", pid=9, frames=(("/x/megatron/core/a.py", 1, "backward"),)
    )
    both = seen(mine, ima(), flags={"moe_enable_deepep": True, "sglang_speculative_algorithm": "EAGLE"})
    trainer = verdict("train.ima", both)
    assert (trainer.status, trainer.value["phase"]) == ("fail", "train step")
    assert not any("--sglang" in advice for advice in trainer.advice)
    assert any("--moe-enable-deepep" in advice for advice in trainer.advice)
    assert verdict("engine.ima", both).status == "pass"
    assert verdict("train.ima", seen(ima(), mine)).status == "pass"
    assert verdict("engine.ima", seen(batch())).status == "pass"
    assert verdict("engine.ima", Observations()).status == "skip"
    assert verdict("train.ima", Observations()).status == "skip"


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([ima(owner="trainer", frames=(("slime/x/actor.py", 3, "compute_log_prob"),))], "log-prob"),
        ([ima(owner="trainer", frames=(("slime/x/update_weight.py", 3, "update_weights"),))], "weight sync"),
        ([event("timer", owner="trainer", name="ref_log_probs", edge="start"), ima(owner="trainer")], "log-prob"),
        ([event("timer", owner="trainer", name="actor_train", edge="start"), ima(owner="trainer")], "train step"),
        ([ima(owner="trainer")], "unknown"),
    ],
)
def test_the_phase_of_a_trainer_s_fault(events: list[LogEvent], phase: str) -> None:
    assert verdict("train.ima", seen(*events)).value["phase"] == phase


# -- engine.oom, train.oom

OOM: dict[str, Any] = {"tried_gb": 2.0, "free_gb": 0.5, "gpu": 1}


def test_an_engine_that_runs_out_of_memory() -> None:
    found = verdict("engine.oom", seen(event("oom", owner="engine", engine=4, **OOM)))
    assert (found.status, found.engine, found.value["gpu"]) == ("fail", 4, 1)
    assert any("--sglang-mem-fraction-static" in advice for advice in found.advice)
    assert evaluate(seen(event("oom", owner="engine", **OOM), ima())).root_causes == ("engine.oom",)


def test_an_out_of_memory_line_that_the_engine_survives_is_none() -> None:
    went_on = seen(event("oom", owner="engine", pid=3, **OOM), batch(pid=3))
    assert verdict("engine.oom", went_on).status == "pass"
    gone = seen(event("oom", owner="engine", pid=3, **OOM), batch(pid=4))
    assert verdict("engine.oom", gone).status == "fail"
    benign = seen(event("memory_saver", owner="engine", benign=True))
    assert verdict("engine.oom", benign).status == "pass"


@pytest.mark.parametrize(
    ("events", "rows", "status"),
    [
        ([batch(avail_gb=0.7), ima()], [], "warn"),
        ([batch(avail_gb=8.0), ima()], [], "pass"),
        ([ima()], [], "pass"),
        ([event("oom", owner="engine", time=40.0, pid=1), batch(time=41.0, pid=1), ima(time=60.0)], [], "warn"),
        ([event("oom", owner="engine", time=40.0, pid=1), batch(time=41.0, pid=1), ima(time=160.0)], [], "pass"),
        ([stage("capture", "begin", avail_gb=0.7), ima()], [], "pass"),
        ([batch(avail_gb=0.7), ima(owner="trainer")], [], "pass"),
        ([batch(avail_gb=0.7), ima()], [(0.8, "ima"), (0.5, "ima")], "pass"),
        ([batch(avail_gb=0.7), ima()], [(0.7, "ima"), (0.9, "ok")], "pass"),
        ([batch(avail_gb=0.7), ima()], [(0.7, "ima"), (0.5, "ok")], "warn"),
    ],
)
def test_an_illegal_access_may_be_memory_only_with_evidence_of_memory(
    events: list[LogEvent], rows: list[tuple[float, str]], status: str
) -> None:
    table = tuple(Row("bisect", {"mem_fraction": f, "outcome": o}, Where("runs.jsonl", 1)) for f, o in rows)
    assert verdict("engine.oom", seen(*events, rows=table)).status == status


CONFIG = Document("config", "config.json", {"model_type": "x", "vocab_size": 100_000})
LOGITS = (("slime/utils/ppo_utils.py", 3, "calculate_log_probs"),)


def test_the_logits_of_one_long_sample_are_worked_out_in_tokens() -> None:
    tried = 60_000 * 100_000 * 4 / 2**30
    flags = {"max_tokens_per_gpu": 8000, "use_dynamic_batch_size": True, "context_parallel_size": 2}
    lost = event("oom", owner="trainer", frames=LOGITS, tried_gb=tried)
    row = rollout(7)
    row = replace(row, values={"multi_turn/raw_response_length/response_length_max": 60_100.0})
    found = verdict("train.oom", seen(lost, documents=(CONFIG,), flags=flags, rows=()))
    assert found.value["tokens"] == 60_000
    assert found.value["longest"] is None
    told = obs(row, events=in_order(lost), documents=(CONFIG,), flags=flags)
    found = verdict("train.oom", told)
    assert (found.value["longest"], found.rollout) == (60_100, 7)
    assert "no hard cap" in found.cause
    assert not any("--max-tokens-per-gpu" in advice for advice in found.advice)
    sharded = verdict(
        "train.oom",
        obs(row, events=in_order(lost), documents=(CONFIG,), flags=flags | {"tensor_model_parallel_size": 2}),
    )
    assert sharded.value["tokens"] == 120_000


def test_memory_that_is_not_logits_gives_no_tokens_and_advises_the_budget() -> None:
    lost = event("oom", owner="trainer", frames=(("megatron/core/mlp.py", 3, "forward"),), tried_gb=3.0)
    flags = {"max_tokens_per_gpu": 20_000, "use_dynamic_batch_size": True, "rollout_max_response_len": 12_000}
    found = verdict("train.oom", seen(lost, documents=(CONFIG,), flags=flags))
    assert found.value["tokens"] is None
    assert "--max-tokens-per-gpu 12000" in found.advice


def test_a_trainer_that_goes_on_did_not_run_out_of_memory() -> None:
    line = replace(event("oom", owner="trainer", tried_gb=1.0), time=5.0)
    step = replace(train(3, loss=0.1), time=9.0)
    assert verdict("train.oom", obs(step, events=(line,))).status == "pass"
    earlier = replace(train(3, loss=0.1), time=2.0)
    assert verdict("train.oom", obs(earlier, events=(line,))).status == "fail"
    assert verdict("train.oom", Observations()).status == "skip"


# -- train.colocate-swap

COLOCATE: dict[str, Any] = {"colocate": True}


def steps(count: int, since: float = 0.0) -> list[Any]:
    rows = [replace(rollout(i, truncated_ratio=0.0), time=since + 10.0 * i) for i in range(count)]
    return rows + [replace(train(i, loss=0.1), time=since + 10.0 * i + 5) for i in range(count)]


def test_colocate_is_proved_by_the_second_step() -> None:
    assert verdict("train.colocate-swap", obs(*steps(2), flags=COLOCATE)).status == "pass"
    assert verdict("train.colocate-swap", obs(*steps(1), flags=COLOCATE)).status == "skip"
    assert verdict("train.colocate-swap", obs(*steps(3), flags={"lr": 1})).status == "skip"
    alone = verdict("train.colocate-swap", obs(*steps(3), flags=COLOCATE, mode="rollout-only"))
    assert "does not test" in alone.cause
    assert verdict("train.colocate-swap", Observations()).status == "skip"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([event("memory_saver", function="resume", owner="trainer", time=9.0)], "fail"),
        ([event("memory_saver", function="", benign=True, owner="trainer", time=9.0)], "skip"),
        (
            [
                event("timer", owner="trainer", name="wake_up", edge="start", time=8.0),
                event("oom", owner="trainer", time=9.0, **OOM),
            ],
            "fail",
        ),
        (
            [
                event("timer", owner="trainer", name="wake_up", edge="start", time=7.0),
                event("timer", owner="trainer", name="wake_up", edge="end", time=8.0),
                event("oom", owner="trainer", time=9.0, frames=LOGITS, **OOM),
            ],
            "fail",
        ),
        ([event("death", owner="engine", how="sigquit", time=9.0)], "fail"),
        ([event("death", owner="engine", how="sigquit", time=2.0)], "skip"),
    ],
)
def test_a_wake_up_that_fails_or_a_death_before_the_second_step(events: list[LogEvent], status: str) -> None:
    found = verdict("train.colocate-swap", obs(*steps(1), events=in_order(*events), flags=COLOCATE))
    assert found.status == status


HELD: dict[str, Any] = {
    "device": "cpu",
    "after_s": 3.0,
    "engines": "1",
    "holders": "1 (pid 77: 0.316 GB)",
    "processes": {"77": 0.316},
}


def test_memory_that_the_trainer_found_held_fails_with_phase_device_and_process() -> None:
    found = verdict("train.colocate-swap", obs(*steps(2), events=(event("memory_held", owner="trainer", **HELD),)))
    assert (found.status, found.engine, found.confidence) == ("fail", "1", "high")
    assert isinstance(found.value, dict)
    assert (found.value["phase"], found.value["device"]) == ("wake-up", "cpu")
    assert "(pid 77: 0.316 GB), 3 s after the release: it released too late" in found.cause


@pytest.mark.parametrize("seen", ["samples", "log"])
def test_token_0_after_a_resume_is_named_as_that_and_not_as_garble(seen: str) -> None:
    zeros = [sample("!" * 20, rollout_id=1, index=i, token_ids=[0] * 20, engine="1") for i in range(3)]
    zeros += [sample(rollout_id=1, index=9, token_ids=[5, 6, 7, 8] * 5, engine="0")]
    how = "answered token 0 alone"
    line = event("no_weights", owner="trainer", engine_id="1", how=how, samples=3, rollout=1)
    rows = [*steps(3), *(zeros if seen == "samples" else [])]
    found = verdict("train.colocate-swap", obs(*rows, flags=COLOCATE, events=(line,) if seen == "log" else ()))
    assert (found.status, found.engine, found.rollout) == ("fail", "1", 1)
    assert "token 0 alone in all 3 of its samples of rollout 1" in found.cause
    assert "no update followed" in found.cause
    healthy_ones = [sample(rollout_id=1, index=i, token_ids=[0, 5, 0, 7] * 5, engine="1") for i in range(3)]
    assert verdict("train.colocate-swap", obs(*steps(3), *healthy_ones, flags=COLOCATE)).status == "pass"


@pytest.mark.parametrize("seen", ["process", "address", "id"])
def test_an_engine_without_weights_is_one_root_cause_however_its_lines_name_it(seen: str) -> None:
    paths = ("/generate", "/release_memory_occupation", "/resume_memory_occupation", "/generate")
    line = event("no_weights", owner="trainer", engine_id="1", how="answered token 0 alone", samples=9, rollout=1)
    if seen == "address":
        calls = tuple(HttpCall(path, 200, url=f"http://10.0.0.1:30000{path}", order=i) for i, path in enumerate(paths))
        report = evaluate(obs(http=calls, events=(line,), flags={"colocate": True}))
    else:
        name: dict[str, Any] = {"engine": 1} if seen == "id" else {"pid": 4711}
        lines = [event("http", owner="engine", path=path, status=200, **name) for path in paths]
        report = evaluate(obs(events=in_order(*lines, line), flags={"colocate": True}))
    firing = {v.id for v in report.verdicts if v.status == "fail"}
    assert firing >= {"engine.resume-order", "train.colocate-swap"}
    assert report.root_causes == ("engine.resume-order",)


def test_two_steps_of_one_rollout_prove_nothing() -> None:
    named = [train(i, on=i, rollout=0, loss=0.1) for i in range(2)]
    assert verdict("train.colocate-swap", obs(rollout(0), rollout(1), *named, flags=COLOCATE)).status == "skip"
    third = train(2, on=0, rollout=1, loss=0.1)
    assert verdict("train.colocate-swap", obs(rollout(0), rollout(1), *named, third, flags=COLOCATE)).status == "pass"
    unnamed = [rollout(0), rollout(1), train(0, loss=0.1), train(1, loss=0.1)]
    flags = COLOCATE | {"num_steps_per_rollout": 2}
    assert verdict("train.colocate-swap", obs(*unnamed, flags=flags)).status == "skip"
    assert verdict("train.colocate-swap", obs(*unnamed, train(2, loss=0.1), flags=flags)).status == "pass"


def test_memory_per_process_names_who_still_holds_it() -> None:
    rows = tuple(
        Row("gpu_mem", {"t": 1, "gpu": 1, "owner": name, "gb": size}, Where("gpu_mem.jsonl", i))
        for i, (name, size) in enumerate([("sglang", 70.0), ("trainer", 3.0)], 1)
    )
    lost = event("memory_saver", function="resume", owner="trainer", gpu=1, time=9.0)
    found = verdict("train.colocate-swap", obs(*steps(1), events=in_order(lost), flags=COLOCATE, rows=rows))
    assert found.confidence == "high"
    assert "sglang 70 GB" in found.cause
    assert found.evidence[1].source == "gpu_mem.jsonl"


# -- engine.died, engine.health-timeout


def served(**more: Any) -> list[LogEvent]:
    return [stage("ready"), batch(pid=7, node="n1", **more)]


def unanswered(**more: Any) -> LogEvent:
    return event("retry", owner="rollout", status=503, url="http://h:1/generate", path="/generate", **more)


@pytest.mark.parametrize(
    ("events", "status", "reason"),
    [
        ([*served(), event("oom_killer", owner="host", by="kernel", victim=7), unanswered()], "fail", "host memory"),
        ([*served(), event("oom_killer", owner="host", by="kernel", victim=8)], "pass", "gone"),
        ([*served(), event("death", owner="engine", pid=7, how="sigquit")], "fail", "no line before it"),
        ([*served(), ima(pid=7), event("death", owner="engine", pid=7, how="sigquit")], "fail", "CUDA error"),
        (
            [
                *served(),
                event("traceback", owner="engine", pid=7, exception="KeyError", frames=frames("scheduler.py:run")),
                event("death", owner="engine", pid=7, how="subprocess", victim=7, code=-6),
            ],
            "fail",
            "raised KeyError",
        ),
        ([*served(), event("death", owner="engine", pid=7, how="killed")], "fail", "SGLang also ends its own"),
        ([*served(), event("health", owner="rollout", by="monitor", kills=True, time=500.0)], "fail", "health monitor"),
        (
            [*served(), event("death", owner="engine", pid=7, how="server"), event("recovered", count=1)],
            "warn",
            "started again",
        ),
        (
            [*served(), event("death", owner="trainer", pid=4, how="actor", name="MegatronTrainRayActor")],
            "pass",
            "gone",
        ),
        ([*served(), unanswered()], "fail", "no line says that one died"),
        ([unanswered()], "pass", "gone"),
    ],
)
def test_an_engine_that_worked_is_gone(events: list[LogEvent], status: str, reason: str) -> None:
    found = verdict("engine.died", seen(*events))
    assert (found.status, reason in found.cause) == (status, True), found


def test_an_engine_that_dies_after_another_was_started_again_is_gone() -> None:
    first = event("death", owner="engine", engine=2, pid=7, how="server")
    later = event("death", owner="engine", engine=3, pid=9, how="watchdog")
    events = [*served(), first, event("recovered", count=1), later]
    found = verdict("engine.died", seen(*events))
    assert (found.status, found.engine) == ("fail", 3)
    assert "watchdog" in found.cause
    assert found.cause.endswith("; engine 2 had died before and was started again.")
    both = verdict("engine.died", seen(*events, event("recovered", count=1)))
    assert (both.status, both.engine) == ("warn", 2), "the first one is the one to look at again"


def test_an_engine_that_comes_up_beside_a_dead_one_does_not_stand_for_it() -> None:
    died = event("death", owner="engine", engine=2, pid=7, how="server")
    assert verdict("engine.died", seen(*served(), died, stage("ready", engine=3))).status == "fail"
    assert verdict("engine.died", seen(*served(), died, stage("ready", engine=2))).status == "warn"


def test_the_seconds_to_the_first_request_without_an_answer_are_told() -> None:
    events = [*served(), event("death", owner="engine", pid=7, how="server", time=50.0), unanswered(time=62.0)]
    assert verdict("engine.died", seen(*events)).value["seconds_to_first_503"] == 12.0


def test_the_kernel_s_log_says_why_and_the_run_s_own_when() -> None:
    day = 1.7e9
    events = [
        event("oom_killer", owner="host", by="kernel", victim=7, time=81_234.5),
        *(batch(pid=7, actor="SGLangEngine", time=day + at) for at in (0.0, 1.0)),
        event("death", owner="engine", actor="SGLangEngine", pid=7, how="server", time=day + 50),
        unanswered(time=day + 62),
    ]
    found = verdict("engine.died", seen(*events))
    assert "host ran out of memory" in found.cause
    assert (found.engine, found.value["seconds_to_first_503"]) == ("SGLangEngine", 12.0)


def test_ray_s_line_about_an_engine_names_the_engine() -> None:
    lost = event("death", owner="ray", actor="raylet", how="worker", victim=7)
    found = verdict("engine.died", seen(*served(engine=2), lost))
    assert (found.status, found.engine) == ("fail", 2)


def failed(time: float = 60.0, **more: Any) -> LogEvent:
    data: dict[str, Any] = {"by": "monitor", "kills": True, "time": time}
    return event("health", owner="rollout", **data | more)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([batch("prefill", time=50.0), failed()], "warn"),
        ([batch("prefill", time=10.0), failed()], "pass"),
        ([batch("prefill", time=50.0, engine=1), failed(engine=2)], "pass"),
        ([batch("prefill", time=50.0, engine=2), failed(engine=2)], "warn"),
        ([event("http", path="/pause_generation", status=200, time=55.0), failed()], "info"),
        ([batch(time=50.0)], "pass"),
    ],
)
def test_a_failed_health_check_of_an_engine_that_works(events: list[LogEvent], status: str) -> None:
    assert verdict("engine.health-timeout", seen(*events)).status == status


def test_the_window_of_a_health_check_is_the_one_that_was_set() -> None:
    slow = [batch("prefill", time=52.0), failed()]
    assert verdict("engine.health-timeout", seen(*slow, flags={"rollout_health_check_timeout": 5})).status == "pass"
    told = seen(*slow, flags={"rollout_health_check_timeout": 10})
    assert verdict("engine.health-timeout", told).status == "warn"
    assert verdict("engine.died", told).status == "pass"
    assert verdict("engine.health-timeout", Observations()).status == "skip"


# -- known crashes

PLAN = KnownCrash("owner/name#1", "plan kernel", kernels=("ragged_plan",), fix="PR #2", toggle="graph off")
PAIR = KnownCrash("owner/name#3", "spec with cache", flags=("speculative_algorithm=eagle|nextn", "enable_cache"))
OLD = replace(PLAN, issue="owner/name#4", until="0.4.4")


def known(*crashes: KnownCrash, kernel: str = "", version: str = "", flags: dict[str, Any] | None = None) -> Verdict:
    documents = (Document("versions", "versions.json", {"sglang": version}),) if version else ()
    events: Sequence[LogEvent] = [ima(kernel=kernel)]
    return verdict("engine.ima", seen(*events, known_crashes=crashes, documents=documents, flags=flags or {}))


def test_a_crash_that_looks_like_a_public_report_says_so() -> None:
    found = known(PLAN, kernel="fused_ragged_plan_kernel")
    assert found.value["known"] == ["owner/name#1"]
    assert "looks like owner/name#1 (plan kernel), fixed by PR #2" in found.cause
    assert "compare with owner/name#1; there it vanished with graph off" in found.advice
    assert "known" not in known(PLAN, kernel="another_kernel").value
    assert known(OLD, kernel="ragged_plan", version="0.4.3").value["known"] == ["owner/name#4"]
    assert "known" not in known(OLD, kernel="ragged_plan", version="0.5.1").value
    both = {"sglang_speculative_algorithm": "NEXTN", "sglang_enable_cache": True}
    assert known(PAIR, flags=both).value["known"] == ["owner/name#3"]
    assert "known" not in known(PAIR, flags={"sglang_speculative_algorithm": "NEXTN"}).value


def test_an_equal_fingerprint_is_a_match_by_itself() -> None:
    print_ = fingerprint(ACCESS)
    exact = KnownCrash("owner/name#9", "the same", fingerprints=(print_,))
    assert known(PLAN, exact, kernel="").value["known"] == ["owner/name#9"]


@pytest.mark.parametrize(
    "other",
    [
        "RuntimeError: bad block 0x7fd3102c775e on rank 3 (pid 4242) at /opt/b/scheduler.py:77, line 90 of 12.5 GiB",
        "[2026-01-02 03:04:05] RuntimeError: bad block 0xde on rank 11 (pid 9) at /y/scheduler.py:3, line 2 of 7 GiB",
    ],
)
def test_a_fingerprint_is_stable_under_what_differs_from_run_to_run(other: str) -> None:
    base = "RuntimeError: bad block 0x1 on rank 0 (pid 1) at /a/scheduler.py:1, line 4 of 80.25 GiB"
    assert normalise(other).endswith(normalise(base))
    trace = ("/opt/a/srt/scheduler.py:run_batch", "/opt/a/srt/runner.py:912:replay")
    moved = ("/home/b/srt/scheduler.py:run_batch", "/home/b/srt/runner.py:7:replay")
    assert fingerprint(base, trace) == fingerprint(base, moved)
    assert fingerprint(base, trace) != fingerprint(base, trace, "some_kernel")
    assert fingerprint(base, trace) != fingerprint("KeyError: 1", trace)
    assert version_key("0.5.12.post1") > version_key("0.5.9")
