"""What the checks say of engines that rltop started itself: the fleet's own words, not guesses from their logs."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import LogSource
from rltop.checks.observe import EngineCrash, EngineFact, EngineSync, Observations, SyncEvent
from rltop.checks.thresholds import DEFAULTS
from tests.checks.build import event, in_order, obs, verdict

KILLED = EngineCrash(
    1, 1, "silent/serve/exit-9", "The process was ended by SIGKILL; its log tells of no error.", 50.0, 41
)
REHEARSED = EngineCrash(
    4, 5, "ima/decode/3fa2c1", "Illegal memory access in decode. A rehearsal: the fault ima was injected.", 90.0, 60
)


def own(name: str, state: str, *crashes: EngineCrash, generation: int = 2, **more: Any) -> EngineFact:
    return EngineFact(id=name, kind="cpu", state=state, generation=generation, owned=True, crashes=crashes, **more)


def seen(*facts: EngineFact, **more: Any) -> Observations:
    return obs(engines=facts, logs=(LogSource("trainer.log"),), live=True, now=100.0, moved=100.0, **more)


# -- engine.died


def test_a_death_that_no_log_tells_of_is_told_with_engine_cause_and_fingerprint() -> None:
    found = verdict("engine.died", seen(own("0", "BACKOFF", KILLED, generation=1)))
    assert (found.status, found.engine) == ("fail", 0)
    assert found.value["fingerprint"] == "silent/serve/exit-9"
    assert "Engine 0 died at 00:00:50, in rollout 41 (generation 1)" in found.cause
    assert "rltop starts it again" in found.cause
    assert "--use-fault-tolerance" not in " ".join(found.advice)


@pytest.mark.parametrize(
    ("state", "generation", "survived", "since", "status"),
    [
        ("BACKOFF", 1, 0, 99.0, "fail"),
        ("QUARANTINED", 1, 0, 99.0, "fail"),
        ("LOADING", 2, 0, 99.0, "fail"),
        ("HEALTHY", 2, 0, 99.0, "warn"),
        ("HEALTHY", 2, DEFAULTS.died_clear_rollouts - 1, 99.0, "warn"),
        ("HEALTHY", 2, DEFAULTS.died_clear_rollouts, 99.0, "info"),
        ("HEALTHY", 2, 0, 100.0 - DEFAULTS.died_clear_s, "info"),
        ("STOPPED", 2, 0, 99.0, "info"),
        ("STALE", 2, 0, 99.0, "fail"),
        ("STALE", 2, 2, 99.0, "warn"),
        ("LAUNCHING", 3, 0, 99.0, "info"),
        ("HEALTHY", 3, 0, 99.0, "info"),
    ],
)
def test_a_crash_is_a_fault_until_the_engine_serves_and_a_warning_until_it_lasts(
    state: str, generation: int, survived: int, since: float, status: str
) -> None:
    fact = own("1", state, KILLED, generation=generation, survived=survived, since=since)
    assert verdict("engine.died", seen(fact)).status == status


def test_the_engine_that_is_down_comes_before_one_that_serves_again() -> None:
    again = own("0", "HEALTHY", KILLED)
    down = own("1", "BACKOFF", REHEARSED, generation=5)
    found = [v for v in evaluate(seen(again, down)).verdicts if v.id == "engine.died"]
    assert [(v.engine, v.status) for v in found] == [(1, "fail"), (0, "warn")]
    assert "crash number 4" in found[0].cause
    assert "A rehearsal: the fault ima was injected" in found[0].cause


def test_a_quarantined_engine_is_started_with_rltop_itself() -> None:
    advice = verdict("engine.died", seen(own("1", "QUARANTINED", REHEARSED, generation=5))).advice
    assert any(one.startswith("rltop engine start --engine 1") for one in advice)
    assert any(one.startswith("rltop engine set ") and "--engine 1" in one for one in advice)


def test_an_end_that_was_asked_for_is_no_death_whatever_its_log_says() -> None:
    line = event("death", "killed", owner="engine", how="killed", source="engines/0/1/stdout.log")
    alive = seen(own("0", "HEALTHY"), events=in_order(line))
    assert verdict("engine.died", alive).status == "pass"
    of_others = event("death", "killed", owner="engine", how="killed", source="engine_3.log")
    assert verdict("engine.died", seen(own("0", "HEALTHY"), events=in_order(line, of_others))).status == "fail"


def test_how_far_a_live_run_was_is_noted_and_not_counted_from_thinned_metrics() -> None:
    line = event("death", "killed", owner="engine", how="killed", source="engine_3.log")
    at = (line.where.source, line.where.line)
    found = verdict("engine.died", seen(events=in_order(line), rollouts_by={at: 262}))
    assert "the newest rollout by then was 262" in found.cause
    assert found.value["rollout"] == 262


# -- engine.ima


def _fault(engine: str, generation: int, time: float, line: int = 9, **more: Any) -> Any:
    source = f"engines/{engine}/{generation}/stdout.log"
    text = "CUDA error: an illegal memory access was encountered"
    return event(
        "ima", text, owner="engine", engine=int(engine), source=source, time=time, line=line, fault=text, **more
    )


def _start(engine: str, generation: int, time: float) -> Any:
    source = f"engines/{engine}/{generation}/stdout.log"
    return event("engine_stage", "server_args", owner="engine", stage="start", source=source, time=time, line=1)


def test_crashes_of_other_engines_and_generations_are_no_cascade_of_the_first() -> None:
    events = in_order(
        _start("0", 1, 1.0), _start("1", 1, 1.0), _start("0", 2, 100.0),
        _fault("0", 2, 120.0), _fault("1", 1, 300.0), _fault("1", 2, 330.0),
    )  # fmt: skip
    found = [
        v
        for v in evaluate(seen(own("0", "HEALTHY"), own("1", "BACKOFF"), events=events)).verdicts
        if v.id == "engine.ima"
    ]
    assert [v.engine for v in found] == [0, 1]
    first, second = found
    assert "later_reports" not in first.value
    assert first.value["since_start_s"] == 20.0
    assert first.value["generation"] == 2
    assert "20 s after the start" in first.cause
    assert second.value["again"] == 1
    assert second.value["since_start_s"] == 299.0


def test_a_rehearsal_is_called_one() -> None:
    source = "engines/1/1/stdout.log"
    told: dict[str, Any] = {"what": "strikes", "fault": "ima"}
    struck = event("injected", "strikes", owner="engine", source=source, time=10.0, line=3, **told)
    found = verdict("engine.ima", seen(own("1", "BACKOFF"), events=in_order(struck, _fault("1", 1, 10.5))))
    assert "A rehearsal: the fault ima was injected" in found.cause


def test_the_ladder_names_rltop_s_own_tools_for_its_own_engine() -> None:
    mine = verdict(
        "engine.ima", seen(own("0", "HEALTHY"), own("1", "BACKOFF"), events=in_order(_fault("1", 1, 10.0)))
    ).advice
    assert any("rltop engine set cuda_graph=off --engine 1" in one for one in mine)
    assert any("rltop engine ab " in one for one in mine)
    assert not any("--sglang-" in one for one in mine)
    theirs = verdict("engine.ima", seen(events=in_order(_fault("1", 1, 10.0)))).advice
    assert any("--sglang-disable-cuda-graph" in one for one in theirs)


# -- weights.update-failed


def _sync(version: str, time: float, transport: str = "disk", **answers: bool) -> SyncEvent:
    engines = tuple(
        EngineSync(name.removeprefix("e"), ok, version if ok else "1", "" if ok else "Failed to update weights.")
        for name, ok in answers.items()
    )
    return SyncEvent(
        version, rollout_id=int(version), ok=all(answers.values()), transport=transport, engines=engines, time=time
    )


def test_a_refusal_is_a_fact_once_the_engine_holds_the_newest_weights() -> None:
    refused = _sync("2", 10.0, e0=True, e1=False)
    stale = obs(refused, engines=(own("1", "STALE", weight_version="1"),), live=True)
    found = verdict("weights.update-failed", stale)
    assert (found.status, found.engine) == ("fail", 1)
    assert any("rltop engine restart --engine 1" in one for one in found.advice)
    for state in ("HEALTHY", "SUSPECT"):
        asked = obs(refused, engines=(own("1", state, weight_version="2"),), live=True)
        found = verdict("weights.update-failed", asked)
        assert (found.status, found.value["holds"], found.advice) == ("info", "2", ())
        assert "It holds version 2 since." in found.cause
    older = obs(refused, engines=(own("1", "HEALTHY", weight_version="1"),), live=True)
    assert verdict("weights.update-failed", older).status == "fail"


@pytest.mark.parametrize(
    ("later", "status"),
    [
        (_sync("3", 20.0, e0=True, e1=True), "info"),
        (_sync("2", 12.0, e1=True), "info"),
        (_sync("3", 20.0, "delta", e0=True, e1=True), "fail"),
        (_sync("3", 20.0, e0=True, e1=False), "fail"),
        (_sync("3", 20.0, e0=True), "fail"),
    ],
)
def test_a_later_push_of_everything_repairs_a_refused_one(later: SyncEvent, status: str) -> None:
    assert verdict("weights.update-failed", obs(_sync("2", 10.0, e0=True, e1=False), later)).status == status


def test_what_the_trainer_s_log_says_of_an_engine_is_that_engine_s_and_has_no_logger_in_it() -> None:
    text = "narrator.py:137 - Engine 1 did not take the weights of version '2': Failed to update weights"
    line = event("update_refused", text, owner="trainer", source="trainer.log", time=10.0, message=text)
    found = verdict("weights.update-failed", obs(events=in_order(line), live=True))
    assert (found.status, found.engine) == ("fail", 1)
    assert "narrator" not in found.cause
    again = obs(_sync("2", 12.0, e1=True), events=in_order(line), live=True)
    assert verdict("weights.update-failed", again).status == "info"


# -- engine.stale-kv


def _line(kind: str, engine: str, time: float, **more: Any) -> Any:
    source = f"engines/{engine}/1/stdout.log"
    return event(kind, owner="engine", engine=int(engine), source=source, time=time, line=int(time * 10), **more)


def _update(engine: str, time: float) -> Any:
    return _line("http", engine, time, path="/update_weights_from_disk", status=200)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        # A prefill of the other engine between an engine's flush and its update says nothing about its cache.
        ([_line("flushed", "0", 1.0), _line("prefill", "1", 1.1, cached_token=9), _update("0", 1.2),
          _line("prefill", "0", 5.0, cached_token=0), _line("prefill", "0", 6.0, cached_token=40)], "pass"),
        # A request that waited for the update is served before the update's access line is written.
        ([_line("flushed", "0", 1.0), _line("prefill", "0", 1.1, cached_token=0), _update("0", 1.2),
          _line("prefill", "0", 5.0, cached_token=40)], "pass"),
        # A flush of the rollout before is no flush of this update.
        ([_line("flushed", "0", 1.0), _line("prefill", "0", 2.0, cached_token=0), _update("0", 30.0),
          _line("prefill", "0", 31.0, cached_token=40)], "warn"),
        ([_line("flushed", "1", 29.9), _update("0", 30.0), _line("prefill", "0", 31.0, cached_token=40)], "warn"),
    ],
)  # fmt: skip
def test_only_the_cache_of_the_engine_itself_and_of_before_its_update_is_stale(events: list[Any], status: str) -> None:
    found = verdict("engine.stale-kv", obs(events=in_order(*events)))
    assert found.status == status


# -- cluster.stall


def test_an_engine_that_hangs_is_told_at_once_with_what_ends_it() -> None:
    fact = own("1", "SUSPECT", hung=True, since=60.0, cause="hung: no token for over 15 s with 4 running")
    found = verdict("cluster.stall", seen(own("0", "HEALTHY"), fact))
    assert (found.status, found.engine, found.value["side"]) == ("fail", 1, "engine")
    assert "no token for over 15 s" in found.cause
    assert "rltop engine restart --engine 1" in found.advice
    assert verdict("cluster.stall", seen(own("0", "SUSPECT"), own("1", "HEALTHY"))).status != "fail"


def test_memory_of_an_own_engine_is_changed_with_rltop_itself() -> None:
    out = event("oom", "CUDA out of memory", owner="engine", engine=1, source="engines/1/1/stdout.log", tried_gb=2.0)
    mine = verdict("engine.oom", seen(own("1", "BACKOFF"), events=in_order(out)))
    assert mine.status == "fail"
    assert any("mem_fraction_static=FRACTION --engine 1" in one for one in mine.advice)
    assert not any("--sglang-" in one for one in mine.advice)
    theirs = verdict("engine.oom", seen(events=in_order(out)))
    assert any("--sglang-mem-fraction-static" in one for one in theirs.advice)
