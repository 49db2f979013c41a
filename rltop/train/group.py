"""Actors that work as one, such as the trainer's ranks: called together, failing together.

Failure policy. Ranks wait for each other inside collectives, so the first failure ends the call: nobody waits for a
rank that waits for a dead one. The first failure to arrive is often not the cause, so the others get a moment to fail
too, and the best explanation is told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltop.errors import RltopError
from rltop.train.cluster import Actor, Cluster

CAUSE_WAIT_S = 3.0
"""When one fails, how long the others may take to show that they failed first."""
_LOOK_EVERY_S = 1.0

_Failure = tuple[Exception, Actor]


@dataclass(frozen=True, slots=True)
class Group:
    """Each actor is called with the same arguments, and the first one's answer counts."""

    actors: Sequence[Actor]
    cause_wait_s: float = CAUSE_WAIT_S

    def ready(self) -> None:
        """Wait until all processes run."""
        for actor in self.actors:
            actor.ready()

    def call(self, method: str, *args: Any) -> Any:
        """The first actor's answer, once all have answered. The arguments travel once.

        Raises RltopError as soon as one fails, for the best explanation: a death before a refusal before an exception,
        which is often only the broken connection to the dead.
        """
        if len(self.actors) == 1:
            return self.actors[0].call(method, *args)
        cluster = self.actors[0].cluster
        shared = [cluster.ray.put(arg) for arg in args]
        refs = [actor.begin(method, *shared) for actor in self.actors]
        waiting, failed = dict(zip(refs, self.actors, strict=True)), list[_Failure]()
        while waiting and not failed:
            failed += _settle(cluster, waiting, _LOOK_EVERY_S)
        if failed:
            deadline = time.monotonic() + self.cause_wait_s
            while waiting and time.monotonic() < deadline and all(_standing(cluster, one) for one in failed):
                failed += _settle(cluster, waiting, 0.2)
            error, actor = min(failed, key=lambda failure: _standing(cluster, failure))
            raise cluster.translated(error, actor.name, actor.pid) from error
        return cluster.ray.get(refs[0])


def _settle(cluster: Cluster, waiting: dict[Any, Actor], timeout_s: float) -> list[_Failure]:
    """Take what is done out of `waiting`; returns what of it failed."""
    cluster.signals.check()
    ready, _ = cluster.ray.wait(list(waiting), timeout=timeout_s)
    return _failures(cluster, {ref: waiting.pop(ref) for ref in ready})


def _failures(cluster: Cluster, done: Mapping[Any, Actor]) -> list[_Failure]:
    failures: list[_Failure] = []
    for ref, actor in done.items():
        try:
            cluster.ray.get(ref)
        except cluster.ray.exceptions.RayError as error:
            failures.append((error, actor))
    return failures


def _standing(cluster: Cluster, failure: _Failure) -> int:
    """0: the process is dead. 1: it refused, in words. 2: something broke in it."""
    error, _ = failure
    if not isinstance(error, cluster.ray.exceptions.RayTaskError):
        return 0
    return 1 if isinstance(getattr(error, "cause", None), RltopError) else 2
