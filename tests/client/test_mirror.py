"""The mirror ends on the daemon's true state whatever happens on the way, and says what it could not see."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.client import Mirror, SequenceError
from rltop.client.mirror import series_from_answer
from rltop.protocol.codec import WireError, decode
from rltop.protocol.messages import Hello, SeriesAnswer
from tests.client.model import ModelDaemon, messages

KEYS = st.sampled_from(["run", "phase", "metric/a", "metric/b", "engine/0", "check/kl.on-policy"])
VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.text(max_size=5), st.floats(), st.dictionaries(st.text(max_size=3), st.none())
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, VALUES),
        st.tuples(st.just("remove"), KEYS, st.none()),
        st.tuples(st.just("event"), st.text(max_size=5), st.none()),
        st.tuples(st.sampled_from(["frame", "tick", "lose", "restart", "reconnect"]), st.none(), st.none()),
    ),
    max_size=60,
)


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN is NaN."""
    return repr(sorted(left.items())) == repr(sorted(right.items()))


def connect(mirror: Mirror, daemon: ModelDaemon) -> None:
    hello = Hello(proto=(1, 1), client="test", epoch=mirror.epoch, ver=mirror.ver, eseq=mirror.eseq)
    for message in messages(daemon.welcome(hello)):
        mirror.apply(message)


@given(STEPS)
def test_any_history_of_changes_losses_and_restarts_ends_on_the_true_state(steps: list[tuple[str, Any, Any]]) -> None:
    daemon, mirror = ModelDaemon(ring=5), Mirror()
    connect(mirror, daemon)
    seen: dict[str, Any] = {}
    lost_one = False
    for step, key, value in [*steps, ("frame", None, None)]:
        match step:
            case "set":
                daemon.set(key, value)
            case "remove":
                daemon.remove(key)
            case "event":
                daemon.event(key)
            case "tick":
                mirror.apply(decode(daemon.tick()))
            case "lose":
                daemon.delta()
                lost_one = True
            case "reconnect":
                connect(mirror, daemon)
                lost_one = False
            case "restart":
                old, daemon = daemon, ModelDaemon(ring=5)
                for name, (old_value, _) in old.table.items():
                    daemon.set(name, old_value)
                connect(mirror, daemon)
                lost_one = False
            case _ if lost_one:
                before = dict(mirror.state)
                with pytest.raises(SequenceError):
                    mirror.apply(decode(daemon.delta()))
                assert same(mirror.state, before), "a frame behind a hole was applied"
                connect(mirror, daemon)
                lost_one = False
            case _:
                mirror.apply(decode(daemon.delta()))
        for changed in mirror.take_dirty():
            if changed in mirror.state:
                seen[changed] = mirror.state[changed]
            else:
                seen.pop(changed, None)
        assert same(seen, mirror.state), "take_dirty missed a change"
    assert same(mirror.state, daemon.truth())
    assert (mirror.epoch, mirror.ver, mirror.eseq) == (daemon.epoch, daemon.ver, daemon.eseq)
    assert every_event_is_shown_or_in_a_gap(mirror)


def every_event_is_shown_or_in_a_gap(mirror: Mirror) -> bool:
    shown = [event["eseq"] for event in mirror.events]
    missing = [eseq for first, last in mirror.gaps for eseq in range(first, last + 1)]
    start = min([*shown, *missing], default=mirror.eseq + 1)
    return sorted([*shown, *missing]) == list(range(start, mirror.eseq + 1))


def test_events_that_fell_off_the_ring_are_a_gap() -> None:
    daemon, mirror = ModelDaemon(ring=3), Mirror()
    connect(mirror, daemon)
    for number in range(10):
        daemon.event(f"line {number}")
    mirror.apply(decode(daemon.delta()))
    assert [event["text"] for event in mirror.events] == ["line 7", "line 8", "line 9"]
    assert mirror.gaps == [(1, 7)]


def test_the_old_picture_stays_until_the_snapshot_of_another_epoch_replaces_it() -> None:
    old, new, mirror = ModelDaemon(), ModelDaemon(), Mirror()
    old.set("run", {"state": "running"})
    old.event("old")
    connect(mirror, old)
    new.set("phase", {"name": "train"})
    welcome, snap = messages(new.welcome(None))
    mirror.apply(welcome)
    assert mirror.state == {"run": {"state": "running"}}
    mirror.apply(snap)
    assert mirror.state == {"phase": {"name": "train"}}
    assert not mirror.events
    assert mirror.epoch == new.epoch


def test_a_resume_into_another_epoch_is_refused() -> None:
    """A daemon that says `resumed` while its epoch is not ours would mix two tables."""
    daemon, mirror = ModelDaemon(epoch="one"), Mirror()
    connect(mirror, daemon)
    daemon.epoch = "two"
    lying = Hello(proto=(1, 1), client="test", epoch="two", ver=0, eseq=0)
    welcome, delta = messages(daemon.welcome(lying))
    mirror.apply(welcome)
    with pytest.raises(SequenceError):
        mirror.apply(delta)


def test_series_columns_keep_nan_and_counts() -> None:
    blobs = [
        struct.pack("<2d", 10.0, 20.0),
        struct.pack("<2f", 1.0, math.nan),
        struct.pack("<2f", 2.0, math.nan),
        struct.pack("<2f", 1.5, math.nan),
        struct.pack("<2I", 0, 3),
    ]
    answer = SeriesAnswer({"train/grad_norm": {"n": 2, "step": 0, "min": 1, "max": 2, "last": 3, "nan": 4}})
    series = series_from_answer(answer, blobs)["train/grad_norm"]
    assert len(series) == 2
    assert list(series.step) == [10.0, 20.0]
    assert (series.lo[0], series.hi[0], series.last[0]) == (1.0, 2.0, 1.5)
    assert math.isnan(series.hi[1])
    assert list(series.nan) == [0, 3]


@pytest.mark.parametrize("change", [{"n": 3}, {"min": 9}, {"last": -9}])
def test_series_columns_that_do_not_fit_their_blobs_are_refused(change: dict[str, int]) -> None:
    cols = {"n": 1, "step": 0, "min": 1, "max": 1, "last": 1, "nan": 2} | change
    with pytest.raises(WireError):
        series_from_answer(SeriesAnswer({"x": cols}), [bytes(8), bytes(4), bytes(4)])
