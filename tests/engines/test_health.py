"""Health by five signals: what is a hang, what only looks like one, and what people see of each signal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.engines.health import NAMES, STAND_IN, EngineHealth, HealthLimits, Phase, Verdict
from rltop.engines.launcher import Look
from rltop.engines.log import EngineLog
from rltop.engines.scrape import EngineStats
from tests.engines.test_engine_log import DECODE, DECODING, IMA, PREFILL, QUIT, UP, trace

L = HealthLimits()
UNWELL = (
    "[2026-01-02 03:04:05] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.\n"
)
SCHEDULER = ((11, "sglang::schedul"), (12, "sglang::detoken"))
STATS = EngineStats(
    url="http://e",
    reachable=True,
    running=0,
    queued=0,
    active=0,
    paused=0,
    decode_tokens_total=0.0,
    prefill_tokens_total=0.0,
    requests_total=0.0,
)


def look(*, alive: bool = True, code: int | None = None, children: tuple[tuple[int, str], ...] = SCHEDULER) -> Look:
    return Look(alive=alive, exit_code=code, ended=None, port=1, log_size=0, children=children, lock_held=alive)


class Engine:
    """An engine as its supervisor sees it, one second after the other."""

    def __init__(self, limits: HealthLimits = L, *, speculative: str = "") -> None:
        self.health = EngineHealth(limits, speculative=speculative)
        self.log = EngineLog()
        self.now = 100.0
        self.stats = STATS
        self.look = look()
        self.phase = Phase.SERVING
        self.verdict = Verdict("healthy", "")
        self.write(UP)

    def write(self, text: str) -> None:
        self.health.read(self.log, self.log.feed(text.encode(), self.now), self.now)

    def seconds(self, count: float, *, decoded: float = 0.0, prefilled: float = 0.0, **seen: Any) -> Verdict:
        """Time passes with so many tokens a second."""
        self.stats = replace(self.stats, **seen)
        for _ in range(int(count)):
            self.now += 1
            self.stats = replace(
                self.stats,
                decode_tokens_total=(self.stats.decode_tokens_total or 0) + decoded,
                prefill_tokens_total=(self.stats.prefill_tokens_total or 0) + prefilled,
            )
            self.health.look(self.look, self.now)
            if self.phase is not Phase.RELEASED:
                self.health.scraped(self.stats, self.now)
            self.verdict = self.health.judge(self.phase, self.now)
        return self.verdict

    def ok(self, name: str) -> bool | None:
        found = self.health.signals(self.now, 5_000.0)[name]["ok"]
        assert found is None or isinstance(found, bool)
        return found

    def text(self, name: str) -> str:
        return str(self.health.signals(self.now, 5_000.0)[name]["text"])


def test_an_engine_that_works_or_idles_is_healthy_and_says_so_in_each_signal() -> None:
    engine = Engine()
    assert engine.seconds(300).state == "healthy"
    assert engine.text("progress") == "idle"
    assert engine.seconds(300, decoded=50, running=3, active=3).state == "healthy"
    assert [engine.ok(name) for name in NAMES] == [True, True, True, None, True]
    assert engine.text("progress") == "tokens flow"


def test_a_hang_is_found_though_every_route_answers() -> None:
    engine = Engine()
    engine.seconds(60, decoded=50, running=3, active=3)
    engine.health.generated(True, "200", engine.now)
    assert engine.seconds(L.stall_suspect_s - 1).state == "healthy"
    found = engine.seconds(2)
    assert (found.state, engine.ok("progress"), engine.ok("probe")) == ("suspect", False, True)
    assert "no token for over 20 s (3 running, 0 queued)" in found.why
    assert engine.seconds(L.stall_hung_s - L.stall_suspect_s - 3).state == "suspect"
    found = engine.seconds(3)
    assert found.state == "hung"
    assert "with 3 running, 0 queued, though its routes answer" in found.why


def test_a_scheduler_that_hangs_at_its_first_request_is_found_by_the_http_side() -> None:
    engine = Engine()
    engine.seconds(60)
    # The scheduler never counted the request: its gauges say that nothing runs.
    assert engine.seconds(L.stall_hung_s + 2, active=2).state == "hung"
    assert "2 waiting for an answer" in engine.verdict.why


def test_gauges_of_an_idle_scheduler_are_no_work() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    # The requests are answered, but the gauge keeps its value until SGLang writes it anew after 30 s.
    assert engine.seconds(31, running=3, active=0).state == "healthy"
    assert engine.seconds(200, running=0).state == "healthy"


def test_an_older_engine_without_a_count_of_the_http_side_is_judged_by_its_gauges() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=None)
    assert engine.seconds(L.stall_hung_s + 2).state == "hung"


def test_a_slow_prefill_is_suspect_and_never_hung() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    found = engine.seconds(1000, prefilled=400)
    assert found.state == "suspect"
    assert found.why.startswith("slow prefill: prompt tokens are computed, none was decoded for")
    assert engine.seconds(L.calm_s + 2, decoded=50).state == "healthy"


def test_a_first_token_that_does_not_come_may_be_a_long_prefill_for_a_time() -> None:
    engine = Engine()
    engine.seconds(30)
    found = engine.seconds(L.stall_suspect_s + 5, queued=1, active=1)
    assert found.why == "slow prefill or stuck: no first token for over 20 s (0 running, 1 queued)"
    assert engine.seconds(30, decoded=50, running=1, queued=0).state == "healthy"


def test_prefill_lines_of_the_log_count_where_there_are_no_counters() -> None:
    engine = Engine()
    engine.seconds(5, running=1, active=1, decode_tokens_total=None, prefill_tokens_total=None, requests_total=None)
    engine.stats = replace(engine.stats, decode_tokens_total=None, prefill_tokens_total=None)
    for _ in range(30):
        engine.write(PREFILL)
        engine.now += 9
        engine.health.scraped(engine.stats, engine.now)
        engine.verdict = engine.health.judge(Phase.SERVING, engine.now)
    assert engine.verdict.state == "suspect"
    assert "slow prefill" in engine.verdict.why


def test_a_chunk_that_is_known_to_be_large_may_take_its_time() -> None:
    engine = Engine()
    engine.seconds(10, decoded=5, running=1, active=1)
    engine.write(PREFILL.replace("#new-token: 27", "#new-token: 60000"))
    assert engine.seconds(L.stall_hung_s + 100).state == "suspect"
    assert engine.seconds(100).state == "hung"


def test_a_kernel_that_is_compiled_at_its_first_use_is_suspect_with_that_cause() -> None:
    engine = Engine(speculative="NGRAM")
    engine.seconds(10, decoded=50, running=1, active=1)
    found = engine.seconds(94)  # as measured; the compiler was not seen
    assert found.state == "suspect"
    assert "NGRAM compiles its sampler at the first request with a temperature" in found.why
    engine.look = look(children=(*SCHEDULER, (13, "ninja"), (14, "cicc")))
    found = engine.seconds(200)
    assert found.state == "suspect"
    assert "it compiles a kernel (ninja runs below it)" in found.why
    assert engine.seconds(L.compile_s).state == "hung"


def test_a_pause_for_a_weight_update_is_no_hang() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    engine.phase = Phase.PAUSED
    assert engine.seconds(L.stall_hung_s * 3).state == "healthy"
    assert (engine.ok("progress"), engine.text("progress")) == (None, "paused for a weight update")
    engine.phase = Phase.SERVING  # time counts anew
    assert engine.seconds(L.stall_suspect_s - 2).state == "healthy"
    assert engine.seconds(L.stall_hung_s).state == "hung"


def test_a_pause_that_the_engine_itself_reports_counts_too_until_it_is_too_long() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    assert engine.seconds(L.stall_hung_s * 2, paused=3).state == "healthy"
    found = engine.seconds(L.paused_s)
    assert found.state == "suspect"
    assert "it has been paused for" in found.why


def test_time_in_which_nobody_asked_is_no_hang() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    engine.seconds(3, reachable=False)
    engine.now += 500  # out of the rotation: it was not scraped
    assert engine.health.judge(Phase.SERVING, engine.now).state == "healthy"
    assert engine.seconds(L.calm_s + 1, decoded=50, reachable=True).state == "healthy"
    assert engine.seconds(L.stall_hung_s + 2).state == "hung"


def test_a_released_engine_is_not_asked_and_not_doubted() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    engine.phase = Phase.RELEASED
    assert engine.seconds(1000).state == "healthy"
    assert (engine.ok("probe"), engine.ok("progress"), engine.ok("process")) == (None, None, True)
    engine.look = look(alive=False, code=-9)
    assert engine.seconds(1).state == "dead"


def test_one_bad_probe_is_suspect_and_silence_is_a_hang() -> None:
    engine = Engine()
    engine.seconds(30)
    assert engine.seconds(1, reachable=False, problem="/metrics: ReadTimeout").state == "suspect"
    assert "no route answers (/metrics: ReadTimeout)" in engine.verdict.why
    assert engine.seconds(1, reachable=True).state == "suspect"  # not trusted at once
    assert engine.seconds(L.calm_s).state == "healthy"
    found = engine.seconds(L.probe_hung_s + 2, reachable=False)
    assert found.state == "hung"
    assert "though its process lives" in found.why


def test_a_refused_connection_means_nothing_before_the_engine_is_ready() -> None:
    engine = Engine()
    engine.phase = Phase.STARTING
    assert engine.seconds(1000, reachable=False, problem="ConnectError").state == "healthy"
    assert engine.text("progress").startswith("starting")


def test_a_dead_process_is_dead_at_the_next_glance() -> None:
    engine = Engine()
    engine.look = look(alive=False, code=-9)
    assert engine.seconds(1) == Verdict("dead", "its process ended, with signal 9")


def test_nothing_good_is_said_of_an_engine_that_ended() -> None:
    engine = Engine()
    engine.seconds(3)
    engine.look = look(alive=False, code=-9, children=())
    engine.health.look(engine.look, engine.now)
    shown = engine.health.signals(engine.now, 0.0)
    assert [shown[name]["ok"] for name in ("process", "probe", "progress")] == [False, None, None]
    assert shown["probe"]["text"] == "its process has ended"


def test_a_stop_that_was_asked_for_is_no_fault_of_the_log() -> None:
    engine = Engine()
    engine.write(
        "[2026-01-02 03:04:05] SIGTERM received. signum=None frame=None. Draining requests and shutting down...\n"
    )
    assert engine.health.signals(engine.now, 0.0)["log"]["ok"] is None


def test_a_refusal_stays_in_view_for_a_while() -> None:
    engine = Engine()
    engine.write(UNWELL)
    assert engine.health.signals(engine.now, 0.0)["log"]["ok"] is None
    engine.write(DECODE)
    assert "Health check failed" in engine.health.signals(engine.now, 0.0)["log"]["text"]
    engine.now += 60
    engine.write(DECODE)
    assert engine.health.signals(engine.now, 0.0)["log"]["text"] == "no fault"


def test_a_scheduler_child_that_is_gone_is_the_end_though_the_server_still_answers() -> None:
    engine = Engine()
    engine.seconds(5)
    engine.look = look(children=((12, "sglang::detoken"),))
    assert engine.seconds(1) == Verdict("dead", "its scheduler process is gone")


def test_children_without_names_that_tell_do_not_count_as_schedulers() -> None:
    engine = Engine()
    engine.look = look(children=())
    assert engine.seconds(30).state == "healthy"


def test_a_fatal_line_in_the_log_is_the_end_while_the_process_still_lives() -> None:
    engine = Engine()
    engine.seconds(5)
    engine.write(DECODE + trace(IMA, *DECODING) + QUIT)
    found = engine.seconds(1)
    assert found.state == "dead"
    assert "illegal memory access" in found.why
    assert engine.ok("log") is False


def test_a_rehearsal_is_called_one() -> None:
    engine = Engine()
    engine.write("[2026-01-02 03:04:05] INJECTED FAULT (rltop's CPU engine, a rehearsal): strikes: hang\n")
    found = engine.seconds(L.stall_hung_s + 2, running=1, active=1)
    assert found.state == "hung"
    assert found.why.endswith("(a rehearsal: the fault hang was injected)")


def test_failures_that_the_trainer_sees_are_doubts_until_it_succeeds_again() -> None:
    engine = Engine()
    engine.seconds(5)
    engine.health.trainer_saw(False, "POST /generate: ReadTimeout", engine.now)
    found = engine.seconds(1)
    assert found == Verdict("suspect", "the trainer's requests fail: POST /generate: ReadTimeout")
    assert engine.ok("trainer") is False
    assert engine.seconds(500).state == "suspect"
    engine.health.trainer_saw(True, "", engine.now)
    assert engine.seconds(L.calm_s + 1).state == "healthy"


def test_counters_that_fall_are_a_restart_and_no_progress() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    engine.seconds(1, decode_tokens_total=0.0)
    assert engine.health.restarts == 1
    assert engine.seconds(L.stall_hung_s + 2).state == "hung"


@pytest.mark.parametrize(
    ("phase", "seen", "reason"),
    [
        (Phase.RELEASED, {}, "the engine is released"),
        (Phase.PAUSED, {}, "the engine is paused"),
        (Phase.SERVING, {"paused": 2}, "requests are paused"),
        (Phase.SERVING, {"running": 1}, "the engine is busy"),
        (Phase.SERVING, {"active": 1}, "the engine is busy"),
        (Phase.SERVING, {"reachable": False}, "it is not known what the engine does"),
        (Phase.SERVING, {}, ""),
    ],
)
def test_a_generating_probe_is_asked_for_only_where_it_does_no_harm(
    phase: Phase, seen: dict[str, Any], reason: str
) -> None:
    engine = Engine()
    assert engine.health.may_generate(Phase.SERVING, engine.now) == "it is not known what the engine does"
    engine.seconds(1, **seen)
    found = engine.health.may_generate(phase, engine.now)
    assert found.startswith(reason)
    assert bool(found) is bool(reason)


def test_a_generating_probe_that_fails_is_a_doubt_and_is_not_repeated_at_once() -> None:
    engine = Engine()
    engine.seconds(1)
    engine.health.generated(False, "503", engine.now)
    assert engine.seconds(1).why == "/health_generate: 503"
    assert engine.health.may_generate(Phase.SERVING, engine.now) == "it was asked a moment ago"
    engine.seconds(L.generate_every_s)
    assert engine.health.may_generate(Phase.SERVING, engine.now) == ""
    engine.health.generated(True, "200", engine.now)
    assert engine.seconds(L.calm_s + 1).state == "healthy"


def test_a_signal_keeps_the_time_at_which_it_turned() -> None:
    engine = Engine()
    engine.seconds(30, decoded=50, running=3, active=3)
    engine.seconds(40)
    shown = engine.health.signals(engine.now, 5_000.0)["progress"]
    assert shown["ok"] is False
    assert shown["t"] == pytest.approx(5_000.0 - (40 - L.stall_suspect_s))


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="stall_hung_s = 5"):
        HealthLimits(stall_hung_s=5)
    with pytest.raises(ValueError, match="calm_s = 0"):
        HealthLimits(calm_s=0)
    assert STAND_IN.stall_hung_s < L.stall_hung_s


_SEEN = st.fixed_dictionaries(
    {
        "reachable": st.booleans(),
        "running": st.sampled_from([None, 0, 3]),
        "queued": st.sampled_from([None, 0, 2]),
        "active": st.sampled_from([None, 0, 3]),
        "paused": st.sampled_from([None, 0, 1]),
    }
)


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0.0, 5.0]), st.sampled_from([0.0, 9.0]), _SEEN, st.booleans()),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_an_engine_whose_tokens_flow_is_never_hung_whatever_else_is_odd(
    steps: list[tuple[int, float, float, dict[str, Any], bool]],
) -> None:
    engine = Engine()
    for seconds, decoded, prefilled, seen, trainer in steps:
        engine.health.trainer_saw(trainer, "refused", engine.now)
        before = engine.verdict
        found = engine.seconds(seconds, decoded=decoded, prefilled=prefilled, **seen)
        assert found.state != "dead"
        if (decoded or prefilled) and seen["reachable"]:
            assert found.state != "hung" or before.state == "hung"
        if found.state != "healthy":
            assert found.why
    engine.seconds(int(L.calm_s) + 2, decoded=5.0, reachable=True, running=1, active=1, paused=0)
    engine.health.trainer_saw(True, "", engine.now)
    assert engine.seconds(L.calm_s + 2, decoded=5.0).state == "healthy"
