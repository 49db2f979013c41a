"""The history of crashes in an engine's cell, and what the live checks make of it."""

from __future__ import annotations

from typing import Any

from rltop.checks.found import LogEvent
from rltop.checks.observe import Where
from rltop.daemon.engine_view import MOST_CRASHES, crashes
from rltop.daemon.live_checks import LiveChecks
from rltop.daemon.log_watch import Logs
from tests.checks.build import Recorder


def cell(state: str, generation: int, fingerprint: str = "", cause: str = "", **more: Any) -> dict[str, Any]:
    return {
        "id": "0", "owner": "rltop", "kind": "cpu", "state": state, "generation": generation,
        "fingerprint": fingerprint or None, "cause": cause, **more,
    }  # fmt: skip


def test_a_crash_is_told_once_with_what_is_known_best() -> None:
    before: dict[str, Any] = {}
    history = [
        cell("HEALTHY", 1),
        cell("CRASHED", 1, "ima/decode/aaaaaa", "it is dying: CUDA error"),
        cell("CRASHED", 1, "ima/decode/bbbbbb", "Illegal memory access."),
        cell("CRASHED", 1, "ima/decode/bbbbbb", "memory is still held by 41"),
        cell("BACKOFF", 1, "ima/decode/bbbbbb", "memory is still held by 41"),
        cell("LAUNCHING", 2, "ima/decode/bbbbbb"),
        cell("HEALTHY", 2, "ima/decode/bbbbbb"),
        cell("QUARANTINED", 2, "ima/decode/bbbbbb", "3 crashes"),
    ]
    for at, one in enumerate(history):
        before = one | {"crashes": crashes(before, one, float(at), 40 + at)}
    told = [(one["number"], one["generation"], one["t"], one["rollout"], one["cause"]) for one in before["crashes"]]
    assert told == [(1, 1, 1.0, 41, "Illegal memory access."), (2, 2, 7.0, 47, "3 crashes")]


def test_the_whole_log_tells_more_than_its_first_error_though_the_fingerprint_is_the_same() -> None:
    before: dict[str, Any] = {}
    for cause in (
        "it is dying: RuntimeError",
        "Illegal memory access, launched at m.py:3",
        "memory is still held by 41",
    ):
        one = cell("CRASHED", 1, "ima/decode/aaaaaa", cause)
        before = one | {"crashes": crashes(before, one, 1.0, None)}
    assert [one["cause"] for one in before["crashes"]] == ["Illegal memory access, launched at m.py:3"]


def test_the_history_is_short_and_counts_on() -> None:
    before: dict[str, Any] = {}
    for generation in range(1, 31):
        one = cell("BACKOFF", generation, "silent/serve/exit-9", "ended")
        before = one | {"crashes": crashes(before, one, 1.0, None)}
    assert [one["number"] for one in before["crashes"]] == list(range(31 - MOST_CRASHES, 31))


def test_an_engine_that_was_killed_fails_and_recovers_in_the_live_checks() -> None:
    checks = LiveChecks()

    def status(one: dict[str, Any]) -> str:
        checks.see_engines([one])
        return next(v.status for v in checks.report().verdicts if v.id == "engine.died")

    assert status(cell("HEALTHY", 1)) == "pass"
    down = cell("BACKOFF", 1, "silent/serve/exit-9", "SIGKILL")
    history = {"crashes": crashes({}, down, 5.0, 3)}
    assert status(down | history) == "fail"
    assert status(cell("HEALTHY", 2, "silent/serve/exit-9", survived=1) | history) == "warn"
    assert status(cell("HEALTHY", 2, "silent/serve/exit-9", survived=9) | history) == "info"


def test_an_engine_on_trial_fails_no_check() -> None:
    """Its crashes are what the trial is for; the one before is being looked into."""
    checks = LiveChecks()
    down = cell("BACKOFF", 1, "ima/decode/abc123", "IMA")
    history = {"crashes": crashes({}, down, 5.0, 3)}
    trial = cell("RESERVED", 2, "ima/decode/abc123", "IMA", reserved="bisection 1")
    assert crashes(history, trial | {"state": "CRASHED"}, 9.0, 4) == history["crashes"]
    checks.see_engines([trial | history])
    found = next(v for v in checks.report().verdicts if v.id == "engine.died")
    assert found.status == "warn"
    assert "on trial for a bisection" in found.cause


def test_cells_that_change_nothing_have_nothing_judged_anew() -> None:
    checks = LiveChecks()
    checks.see_engines([cell("HEALTHY", 1)])
    assert checks.pending() is not None
    checks.see_engines([cell("HEALTHY", 1, cause="other words", running=7)])
    assert checks.pending() is None
    checks.see_engines([{"owner": "rltop"}, cell("HEALTHY", 1)])
    assert checks.problems["engine"] == 1


def test_the_rollout_of_a_death_in_a_log_stays_as_the_run_goes_on() -> None:
    checks, record = LiveChecks(), Recorder()
    for rollout in range(3000):
        checks.feed(record.metrics("rollout", rollout, {"raw_reward": 0.5}))
        if rollout == 2500:
            line = LogEvent("death", "killed", Where("engine_3.log", 9), "engine", data={"how": "killed"})
            checks.see_logs(Logs(events=(line,)))
    found = next(v for v in checks.report().verdicts if v.id == "engine.died")
    assert found.value["rollout"] == 2500
