"""What viewers are shown waits for the journal, but never for one that fails or hangs."""

from __future__ import annotations

from pathlib import Path

from rltop.daemon.events import EventRing
from rltop.daemon.journal import Journal
from rltop.daemon.publish import STUCK_TICKS, Publisher
from tests.daemon.fakes import FakeCore
from tests.daemon.util import wait_for


def test_a_gated_ring_shows_what_was_released_and_names_what_fell_off_meanwhile() -> None:
    ring = EventRing(4)
    ring.gated = True
    for _ in range(3):
        ring.add(0.0, "log", "info", "x")
    assert (ring.shown, ring.newest(10), ring.after(0, 10)) == (0, [], ([], None))
    assert ring.release(2)
    assert not ring.release(2)
    assert [event["eseq"] for event in ring.newest(10)] == [1, 2]
    assert [event["eseq"] for event in ring.newest(1)] == [2]
    assert [event["eseq"] for event in ring.after(1, 10)[0]] == [2]
    for _ in range(6):  # 9 in all, the ring holds 6..9
        ring.add(0.0, "log", "info", "x")
    ring.release(4)
    assert ring.after(2, 10) == ([], (3, 4)), "what fell off before it was shown is a gap, no more and no less"
    ring.release(7)
    events, gap = ring.after(4, 10)
    assert ([event["eseq"] for event in events], gap) == ([6, 7], (5, 5))
    ring.open()
    assert [event["eseq"] for event in ring.after(7, 1)[0]] == [8]
    assert ring.shown == 9
    ring.add(0.0, "log", "info", "x")
    assert ring.shown == 10


def test_an_event_is_shown_when_it_is_written() -> None:
    core = FakeCore()
    publisher = Publisher(core)
    publisher.begin()
    core.event("log", "info", "news")
    assert core.ring.newest(1) == []
    publisher.written(1)
    assert [event["text"] for event in core.ring.newest(1)] == ["news"]


def test_a_journal_that_fails_withholds_nothing_and_the_waiting_begins_again_when_it_works() -> None:
    core = FakeCore()
    publisher = Publisher(core)
    publisher.begin()
    core.event("log", "info", "a")
    publisher.problem("error", "no space left")
    publisher.working(False)
    core.event("log", "info", "b")
    assert [event["text"] for event in core.ring.newest(9)] == ["a", "no space left", "b"]
    assert core.table.get("daemon")["journal"] == "no space left"
    publisher.written(1)
    assert not core.ring.gated, "written once is not yet working"
    publisher.working(True)
    core.event("log", "info", "c")
    assert core.ring.shown == 3
    assert core.table.get("daemon")["journal"] == "ok"


def test_a_journal_that_hangs_is_not_waited_for() -> None:
    core = FakeCore()
    publisher = Publisher(core)
    publisher.begin()
    publisher.tick()
    core.event("log", "info", "a")
    for _ in range(STUCK_TICKS):
        publisher.tick()
    assert core.ring.shown == 0, "ticks may fall between an event and its commit"
    publisher.tick()
    assert core.ring.shown == 2
    assert "hangs" in core.table.get("daemon")["journal"]
    core.event("log", "info", "b")
    publisher.written(2)
    assert core.table.get("daemon")["journal"] != "ok", "it is still behind"
    publisher.written(3)
    assert core.table.get("daemon")["journal"] == "ok"
    assert core.ring.gated
    publisher.written(core.ring.head)
    for _ in range(3):
        publisher.tick()
    assert core.ring.gated, "with nothing to wait for nobody waits in vain"


def test_the_journal_says_what_it_holds_in_few_commits(tmp_path: Path) -> None:
    written: list[int] = []
    journal = Journal(tmp_path / "journal.sqlite", on_written=written.append)
    journal.start()
    core = FakeCore()
    for _ in range(1000):
        journal.event(core.event("log", "info", "x"))
    wait_for(lambda: written and written[-1] == 1000)
    assert journal.close()
    assert written == sorted(written)
    assert len(written) < 100, "commits come in groups"
