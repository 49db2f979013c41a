"""The queue before a reporter: what it drops, what it survives."""

from __future__ import annotations

import os
import threading
from typing import Any, cast

from rltop.integrations.outbox import Outbox
from rltop.integrations.slime_attach import Attachment
from rltop.reporter import Reporter


class Held:
    """Stands for a reporter that takes its time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.busy = threading.Event()
        self.calls: list[Any] = []
        self.lost = 0

    def __call__(self, role: str, rank: int) -> Reporter:
        return cast(Reporter, self)

    def note(self, number: int) -> None:
        self.busy.set()
        assert self.go.wait(20)
        self.calls.append(number)

    def metrics(self, values: dict[str, float], *, step: int, axis: str) -> None:
        self.calls.append(step)

    def fail(self) -> None:
        raise OSError("no daemon")

    def count_dropped(self, count: int) -> None:
        self.lost += count

    def close(self) -> None:
        self.calls.append("closed")


def test_the_oldest_go_and_are_counted() -> None:
    held = Held()
    box = Outbox("trainer", 0, make=held, limit=3)
    box.put("note", 0)
    assert held.busy.wait(20)  # the thread holds number 0, the queue is empty
    for number in range(1, 8):
        box.put("note", number)
    assert box.dropped == 4
    held.go.set()
    box.close(20)
    assert held.calls == [0, 5, 6, 7, "closed"]
    assert held.lost == 4


def test_what_goes_wrong_is_counted_and_the_thread_goes_on() -> None:
    held = Held()
    held.go.set()
    box = Outbox("trainer", 0, make=held)
    box.put("fail")
    box.put("no such method")
    box.put("note", 1)
    box.close(20)
    assert held.calls == [1, "closed"]
    assert (box.errors, box.last_error) == (2, "AttributeError: 'Held' object has no attribute 'no such method'")


def test_after_the_end_nothing_is_kept() -> None:
    held = Held()
    held.go.set()
    box = Outbox("trainer", 0, make=held)
    box.close()
    box.put("note", 1)
    box.close()
    assert (held.calls, box.dropped) == ([], 1)


def test_a_child_begins_anew() -> None:
    held = Held()
    box = Outbox("trainer", 0, make=held)
    box.put("note", 1)
    assert held.busy.wait(20)
    box.put("note", 2)
    child = os.fork()
    if not child:
        held.go.set()
        held.calls.clear()
        box.put("note", 3)
        box.close(20)
        os._exit(0 if held.calls == [3, "closed"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.go.set()
    box.close(20)
    assert held.calls == [1, 2, "closed"]


def test_ranks_that_log_at_the_same_moment_share_one_queue() -> None:
    held = Held()
    held.go.set()
    attachment = Attachment(lambda role, rank: Outbox(role, rank, make=held, limit=100), {"RLTOP_INGEST": "x"})
    gate = threading.Barrier(64)

    def rank(number: int) -> None:
        gate.wait()
        for step in range(20):
            attachment.log({"rollout/x": number, "rollout/step": step}, "rollout/step")

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    attachment.settle()
    assert attachment.errors == 0, attachment.last_error
    assert held.calls.count("closed") == 1
    assert len(held.calls) - 1 + attachment.dropped == 64 * 20
    assert held.lost == attachment.dropped


def test_a_thousand_threads_at_once_wait_for_nobody() -> None:
    """1,024 ranks in one process: the reporter takes nothing, and every caller comes back."""
    held = Held()
    box = Outbox("trainer", 0, make=held, limit=100)
    box.put("note", -1)
    assert held.busy.wait(20)
    gate = threading.Barrier(1024)

    def rank(number: int) -> None:
        gate.wait()
        for _ in range(4):
            box.put("note", number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(1024)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert box.dropped == 4 * 1024 - 100
    held.go.set()
    box.close(20)
    assert len(held.calls) == 102
    assert held.lost == box.dropped
