"""Several actors called together: the first failure ends the call, and the best explanation is told."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rltop.errors import RltopError
from rltop.train.cluster import Actor, Cluster
from rltop.train.group import Group
from rltop.train.lifetime import Signals

pytestmark = pytest.mark.train


class RayError(Exception):
    pass


class RayTaskError(RayError):
    """The method raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"ray::method\n{cause}")
        self.cause = cause


class ActorDiedError(RayError):
    pass


class Never:
    """An answer that does not come: a rank that waits for the others."""


class FakeRay:
    """Refs are what `get` returns or raises; `puts` counts what travelled."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Any) -> Any:
        self.puts.append(value)
        return value

    def wait(self, refs: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if not isinstance(ref.value, Never)][:1]
        if not ready:
            time.sleep(min(timeout, 0.01))
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any) -> Any:
        if isinstance(ref, list):
            return [self.get(one) for one in ref]
        if isinstance(ref.value, BaseException):
            raise ref.value
        return ref.value


def group(*answers: Any) -> tuple[Group, FakeRay]:
    ray = FakeRay()
    cluster = Cluster(ray, None, Signals(), None)
    actors = []
    for at, answer in enumerate(answers):
        method = SimpleNamespace(remote=lambda *_args, answer=answer: Ref(answer))
        actors.append(Actor(cluster, SimpleNamespace(work=method), f"trainer rank {at}"))
    return Group(actors, cause_wait_s=0.05), ray


class Ref:
    """Hashable by identity, as Ray's."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_the_first_answer_counts_and_the_arguments_travel_once() -> None:
    ranks, ray = group("zero", "one", "two")
    assert ranks.call("work", [1, 2]) == "zero"
    assert ray.puts == [[1, 2]]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        # The connection breaks on the ranks that live; the dead one is the news.
        ((RayTaskError(RuntimeError("Connection closed by peer")), ActorDiedError("gone"), Never()), "rank 1 died"),
        (
            (RayTaskError(RuntimeError("closed")), RayTaskError(RltopError("no room on the disk"))),
            "no room on the disk",
        ),
        ((Never(), RayTaskError(RuntimeError("a bug"))), "trainer rank 1 failed"),
        ((RayTaskError(RltopError("bad sample")),) * 2, "bad sample"),
    ],
)
def test_one_failure_ends_the_call_and_the_cause_is_told(answers: tuple[Any, ...], told: str) -> None:
    ranks, _ = group(*answers)
    with pytest.raises(RltopError, match=told):
        ranks.call("work")
