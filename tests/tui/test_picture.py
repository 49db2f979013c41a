"""From state keys to what is shown: order, names, honesty about what is unknown; nothing that a run sends breaks it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.catalogue import STEP1
from rltop.tui.app import local_clocks
from rltop.tui.fleet import engine_views, natural
from rltop.tui.picture import (
    CHARTS,
    FIRST_STEP,
    Link,
    check_counts,
    check_views,
    phase_view,
    run_view,
    threshold,
)
from rltop.tui.rows import plain_text, row_cells
from rltop.tui.theme import ASCII, UNICODE
from rltop.tui.view import Frame, View
from rltop.tui.widgets.chart import ChartsView
from rltop.tui.widgets.checks import ChecksView
from rltop.tui.widgets.events import EventsView
from rltop.tui.widgets.header import header_rows
from rltop.tui.widgets.rollouts import RolloutsView
from rltop.tui.widgets.run import RunFactsView
from rltop.tui.widgets.table import COLUMNS, EnginesView, fit_columns
from tests.tui.fake import NOW, FakeClient, stamp
from tests.tui.scenes import engine, failing, fleet, healthy, hostile, verdict

LIVE = Link(status="live", age_s=0.1)
VIEWS: tuple[type[View], ...] = (ChecksView, ChartsView, EnginesView, EventsView, RolloutsView, RunFactsView)


def frame(state: dict[str, Any], link: Link = LIVE, **more: Any) -> Frame:
    return Frame(state=state, link=link, server_now=NOW, clock=stamp, **more)


def header(state: dict[str, Any], width: int = 100, link: Link = LIVE, **more: Any) -> str:
    return plain_text(header_rows(frame(state, link, **more), width))


def test_root_causes_come_first_with_their_consequences_under_them_then_the_rest_by_status() -> None:
    client = FakeClient()
    failing(client)
    views = check_views(client.mirror.state)
    assert [(view.id, view.depth) for view in views[:4]] == [
        ("train.nan", 0),
        ("train.grad-high", 1),
        ("logprob.train-rollout", 0),
        ("rollout.text", 1),
    ]
    assert [view.status for view in views[4:]] == ["pass", "pass", "pass", "skip"]
    assert check_counts(views) == {"fail": 2, "warn": 2, "pass": 3, "skip": 1}


def test_the_first_step_checks_are_those_of_the_catalogue() -> None:
    assert FIRST_STEP == STEP1


def test_the_outcome_of_a_replay_comes_before_the_other_passes() -> None:
    ids = ("args.batch", "rollout.text", "train.replay", "train.nan")
    state = {f"check/{one}": verdict(one, "fail" if one == "train.nan" else "pass") for one in ids}
    assert [view.id for view in check_views(state)] == ["train.nan", "train.replay", "rollout.text", "args.batch"]


def test_a_train_only_run_says_why_there_is_no_engine() -> None:
    assert "no engines yet" in plain_text(EnginesView().body(frame({}), 80, 5, False))
    assert "train-only: no engine is started" in plain_text(
        EnginesView().body(frame({"run": {"mode": "train-only"}}), 80, 5, False)
    )


def test_checks_that_were_not_tested_are_one_line_that_opens() -> None:
    state = {f"check/host.c{i}": verdict(f"host.c{i}", "skip") for i in range(50)}
    state |= {"check/kl.on-policy": verdict("kl.on-policy", "skip"), "check/train.nan": verdict("train.nan", "pass")}
    view = ChecksView()
    now = frame(state)
    text = plain_text(view.body(now, 80, 20, focused=True))
    assert "kl.on-policy" in text
    assert "50 checks were not tested: enter lists them" in text
    assert "host.c1" not in text
    assert "50 skip" not in text
    assert "51 skip" in plain_text([view.summary(now)])
    view.act("end", now)
    view.act("open", now)
    assert "host.c1" in plain_text(view.body(now, 80, 20, focused=True))
    view.act("open", now)
    assert "host.c1" not in plain_text(view.body(now, 80, 20, focused=True))


def test_a_ring_of_consequences_is_shown_all_the_same() -> None:
    ring = {
        "check/a": verdict("a", "fail", consequence_of=["b"]),
        "check/b": verdict("b", "fail", consequence_of=["a"]),
    }
    assert sorted(view.id for view in check_views(ring)) == ["a", "b"]


def test_a_consequence_of_a_check_that_passes_again_stands_alone() -> None:
    state = {"check/a": verdict("a", "pass"), "check/b": verdict("b", "warn", consequence_of=["a"])}
    assert [(view.id, view.depth) for view in check_views(state)] == [("b", 0), ("a", 0)]


def test_a_skipped_check_shows_no_value_and_says_why() -> None:
    state = {"check/k": verdict("kl.on-policy", "skip", value=0.0, threshold=1e-8, cause="0 by construction")}
    (line, *_) = ChecksView().body(frame(state), 80, 1, focused=False)
    assert "skip kl.on-policy" in plain_text([line])
    assert "1e-8" not in plain_text([line])
    assert "0 by construction" in plain_text([line])


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (0.23, 0.05, "0.23 > 0.05"),
        (0.01, 0.05, "0.01 < 0.05"),
        (0, 0, "0 = 0"),
        ({"grad_norm": 0.4, "first": 0.5}, {"warn": 10, "fail": 1000}, "0.4 · warn 10"),
        ({"pattern": None, "bad": 3, "of": 4}, {"warn": 0.05}, "3 of 4 · warn 0.05"),
        ({"quantity": "loss", "value": "NaN"}, "finite", "loss"),
    ],
)
def test_value_and_limit_are_compared_only_when_both_are_one_number(value: Any, limit: Any, shown: str) -> None:
    state = {"check/x": verdict("x", "warn", value=value, threshold=limit)}
    (line, *_) = ChecksView().body(frame(state), 80, 1, focused=False)
    assert shown in plain_text([line])


def test_the_story_of_the_selected_check_names_cause_advice_evidence_and_what_it_follows_from() -> None:
    client = FakeClient()
    failing(client)
    view = ChecksView()
    now = frame(client.mirror.state)
    story = plain_text(view.body(now, 90, 22, focused=True))
    assert "grad_norm was NaN once" in story
    assert "--save-debug-rollout-data" in story
    assert "train/grad_norm@33" in story
    view.act("down", now)
    assert "from  train.nan" in plain_text(view.body(now, 90, 22, focused=True))


def test_a_story_that_does_not_fit_says_how_much_is_hidden() -> None:
    state = {"check/x": verdict("x", "fail", cause="c", advice=[f"do {i}" for i in range(30)])}
    text = plain_text(ChecksView().body(frame(state), 60, 14, focused=True))
    assert "more lines: enter" in text


def test_weights_that_are_not_the_newest_are_called_old() -> None:
    state = {
        "weights": {"version": "42"},
        "engine/0": engine("0"),
        "engine/1": engine("1", weight_version="41"),
        "engine/2": engine("2", weight_version=""),
    }
    assert [view.old for view in engine_views(state)] == [False, True, False]
    text = plain_text(EnginesView().body(frame(state), 120, 9, focused=False))
    assert "v41 of 42" in text


def test_the_cpu_engine_is_named_as_what_it_is() -> None:
    state = {"engine/0": engine("0", kind="cpu")}
    view = EnginesView()
    now = frame(state)
    assert "CPU engine" in plain_text(view.body(now, 80, 5, focused=False))
    view.act("open", now)
    assert "a stand-in, not SGLang" in plain_text(view.body(now, 80, 14, focused=False))


def test_unwell_engines_come_first_and_sorting_changes_that() -> None:
    client = FakeClient()
    fleet(client)
    view = EnginesView()
    now = frame(client.mirror.state)
    first = [row[1][0].split()[0] for row in view.body(now, 120, 8, focused=False)[1:6]]
    assert first == ["5", "23", "17", "40", "31"]
    view.act("sort", now)
    assert plain_text(view.body(now, 120, 3, focused=False)).splitlines()[1].split()[0] == "0"


def test_ids_with_numbers_are_sorted_as_people_count() -> None:
    assert sorted(["e10", "e9", "e1", "a"], key=natural) == ["a", "e1", "e9", "e10"]


@given(st.integers(10, 250))
def test_columns_fit_and_disappear_only_as_a_whole(width: int) -> None:
    fitted = fit_columns(width)
    assert 1 + sum(size for _, size in fitted) + 2 * (len(fitted) - 1) <= max(width, 1 + COLUMNS[0].width)
    assert all(size >= column.width for column, size in fitted)


def test_columns_that_do_not_fit_are_counted_in_the_title() -> None:
    client = FakeClient()
    fleet(client)
    view = EnginesView()
    now = frame(client.mirror.state)
    view.body(now, 78, 10, focused=False)
    assert "columns: enter" in plain_text([view.summary(now)])


def test_the_phase_clock_shows_elapsed_against_its_median_and_calls_slow_slow() -> None:
    state = {"phase": {"name": "rollout", "rollout_id": 3, "since": NOW - 40, "median_s": 4.0, "open": ["rollout"]}}
    phase = phase_view(state, NOW)
    assert phase is not None
    assert phase.times_median == pytest.approx(10.0)
    text = header(state)
    assert "rollout 40s, usually 4.0s" in text
    assert "10× its median" in text


def test_the_phase_clock_stops_when_the_run_ended() -> None:
    state = {"run": {"state": "done", "ended": NOW - 100}, "phase": {"name": "train", "since": NOW - 110}}
    phase = phase_view(state, NOW)
    assert phase is not None
    assert phase.elapsed_s == pytest.approx(10.0)


def test_the_header_names_stand_ins_and_injected_faults_at_every_width() -> None:
    client = FakeClient()
    failing(client)
    for width in (40, 60, 80, 120, 200):
        text = header(client.mirror.state, width)
        assert "2 injected: engine weights" in text
        assert "stand-in: CPU engine" in text
        assert all(row_cells(row) <= width for row in header_rows(frame(client.mirror.state), width))


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (Link(status="live", age_s=0.2), "● live"),
        (Link(status="live", age_s=0.2, quiet_s=40.0), "live, run quiet for 40s"),
        (Link(status="live", age_s=9.0), "lost, picture is 9.0s old"),
        (Link(status="lost", age_s=75.0, problem="gone"), "lost, picture is 1m15s old"),
        (Link(status="connecting", age_s=1.0, problem="no such host"), "connecting"),
        (Link(status="live", age_s=0.2, paused_s=12.0), "paused 12s"),
        (Link(status="live", age_s=0.2, viewers=3), "3 viewers"),
        (Link(status="live", age_s=0.2, lag_ms=1500), "daemon lags 1.5s"),
    ],
)
def test_the_connection_is_told_in_words(link: Link, words: str) -> None:
    assert words in header({"run": {"name": "r", "state": "running"}}, link=link)


def test_what_was_true_before_the_connection_went_is_told_as_past() -> None:
    text = header({"run": {"name": "r", "state": "running"}}, link=Link(status="lost", age_s=9.0, problem="reset"))
    assert "was running" in text
    assert "reset" in text


def test_a_threshold_is_drawn_only_when_it_is_one_positive_number() -> None:
    spec = next(spec for spec in CHARTS if spec.check == "train.grad-high")

    def of(limit: Any) -> float | None:
        return threshold(spec, {"check/train.grad-high": verdict("train.grad-high", "pass", threshold=limit)})

    assert of(10) == 10.0
    assert of({"warn": 10, "fail": 1000}) == 10.0
    assert of({"factor": "x"}) is None
    assert of("finite") is None
    assert of(0) is None


def test_gaps_are_shown_where_events_are_missing() -> None:
    events = [{"eseq": seq, "t": NOW, "kind": "log", "level": "info", "text": f"event {seq}"} for seq in (1, 2, 6)]
    text = plain_text(EventsView().body(frame({}, events=events, gaps=[(3, 5), (7, 9)]), 60, 9, focused=False))
    assert [line.split()[-1] for line in text.splitlines() if "event " in line] == ["1", "2", "6"]
    assert text.index("3 events missed (3 to 5)") < text.index("event 6") < text.index("3 events missed (7 to 9)")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """A good state table in which some values, at some depth, are anything."""
    client = FakeClient()
    draw(st.sampled_from([healthy, failing, hostile]))(client)
    state = dict(client.mirror.state)
    for key in draw(st.lists(st.sampled_from(sorted(state)), max_size=6)):
        value = state[key]
        if isinstance(value, dict) and value and draw(st.booleans()):
            state[key] = value | {draw(st.sampled_from(sorted(value))): draw(JSON)}
        else:
            state[key] = draw(JSON)
    return state


@settings(deadline=None, max_examples=40)
@given(states(), st.integers(20, 130), st.integers(3, 40), st.booleans(), st.data())
def test_nothing_that_a_run_sends_breaks_a_pane(
    state: dict[str, Any], width: int, height: int, ascii_only: bool, data: st.DataObject
) -> None:
    events = data.draw(
        st.lists(st.dictionaries(st.sampled_from(["text", "level", "t", "from", "kind"]), JSON), max_size=3)
    )
    now = frame(state, glyphs=ASCII if ascii_only else UNICODE, events=events)
    for row in header_rows(now, width):
        assert row_cells(row) <= width
    run_view(state)
    for make in VIEWS:
        view = make()
        for action in data.draw(
            st.lists(st.sampled_from(["down", "open", "sort", "level", "end", "zoom-in"]), max_size=3)
        ):
            view.act(action, now)
        rows = view.body(now, width, height, focused=True)
        assert len(rows) <= height or view.name == "charts"
        view.summary(now)
        view.badge(now)
        for char in plain_text(rows) + view.selection(now):
            assert char.isprintable() or char in "\n\t"


@pytest.mark.parametrize("when", [float("inf"), float("nan"), 1e300, -1e300, True, None, "soon"])
def test_a_time_on_no_calendar_is_dashes(when: object) -> None:
    assert Frame(state={}, link=Link("live", 0.0), clock=local_clocks().stamp).stamp(when) == "--:--:--"


@pytest.mark.parametrize("mode", ["rollout-only", "train-only"])
def test_a_run_of_one_side_says_so_from_80_columns_on(mode: str) -> None:
    run = {"name": "a-run-with-a-long-name-1", "framework": "rltop", "mode": mode, "state": "running"}
    link = Link(status="live", age_s=3.0, viewers=2)
    for width in (80, 120):
        rows = header_rows(frame({"run": run}, link), width)
        assert mode in plain_text(rows[:1])
        assert "● running" in plain_text(rows[:1])
        assert all(row_cells(row) <= width for row in rows)
    assert "rltop · full" in header({"run": run | {"mode": "full"}}, 120)
    assert "full" not in header({"run": run | {"mode": "full"}}, 60)


def test_a_fleet_of_sources_is_one_fact_for_each_role_and_those_that_lose_records() -> None:
    client = FakeClient()
    healthy(client)
    state = dict(client.mirror.state)
    one = {"role": "trainer", "records": 20, "lost": 0, "dropped": 0, "last": NOW - 3, "pid": 7, "host": "node1"}
    state |= {f"source/trainer/{rank}": one for rank in range(64)}
    state["source/trainer/900"] = {**one, "lost": 4}
    state["sources/trainer"] = {
        "role": "trainer",
        "count": 1024,
        "hosts": 128,
        "records": 20480,
        "lost": 4,
        "dropped": 0,
        "troubled": 1,
        "left": 0,
        "oldest": "trainer/999",
        "oldest_last": NOW - 60,
        "last": NOW,
    }
    view = RunFactsView()
    shown = "\n".join(plain_text([row]) for row in view.body(frame(state), 100, 200, False))
    assert "1024 on 128 hosts, 20480 records, 4 lost by 1 of them, the quietest trainer/999" in " ".join(shown.split())
    assert [line for line in shown.splitlines() if "trainer/900" in line]
    assert not [line for line in shown.splitlines() if "source trainer/5" in line]
    assert "4" in plain_text([view.badge(frame(state))])
