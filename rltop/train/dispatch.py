"""Gets every request of a rollout answered by engines that come and go.

`Roster` is the shared place: one thread says which engines may be asked, another one asks them (`dispatch`).

Failure policy. A request that fails because its engine went away, is drained, refuses or holds other weights goes to
another engine, the same request with the same seed; the engine that failed rests (0.25 s doubling to 10 s) and is asked
again after all others. An engine that is said to be dead is not waited for: its requests move on at once. With nobody
to ask the rollout waits; it ends with an error only when nothing was asked of anybody for `patience_s` in all (time in
which engines are reserved for a bisection, which gives them back, does not count), or when every engine there is
refuses one and the same request as bad (a 4xx status). An answer counts once, also when a request
that was given up on is answered after all.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rltop.engines.client import EngineRefused, EngineUnreachable, WrongWeightVersion
from rltop.errors import RltopError
from rltop.train.ports import EngineFacts

R = TypeVar("R")
"""A request: one sample to be."""
S = TypeVar("S")
"""Its answer."""
Key = tuple[str, int]
"""Engine id and generation: a restarted engine is another one."""

FIRST_REST_S = 0.25
LAST_REST_S = 10.0
LOOK_EVERY_S = 0.2
"""A thread that waits for answers looks so often whether an engine has rested."""
WAIT_NOTE_S = 1.0
"""A rollout without anybody to ask says so after this long."""


class Unanswered(RltopError):
    """An engine answered, and some of the requests have no answer in it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call to an engine that did not bring all of its samples."""

    engine: str
    generation: int
    kind: str
    """`gone`, `refused`, `aborted`, `version` (it holds other weights) or `incomplete`."""
    why: str


@dataclass(frozen=True, slots=True)
class News:
    """What happened since the last time somebody asked."""

    failures: tuple[Failure, ...] = ()
    recovered: tuple[Key, ...] = ()
    """Engines that answered for the first time, or again after a failure."""
    waiting: bool = False
    """There are requests and nobody to ask, for more than a moment."""


class Roster:
    """Who may be asked, and what became of it. For two threads."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        """patience_s: see the module. clock: monotonic seconds."""
        self.patience_s, self.clock = patience_s, clock
        self.changed = threading.Condition()
        self.members: tuple[EngineFacts, ...] = ()
        """In order of their index."""
        self.dead: frozenset[Key] = frozenset()
        """Engines whose process is known to be gone."""
        self.told = ""
        """The states of all engines, for people."""
        self.reserved = False
        """Engines are on trial and will be back: the wait for one has no end of its own."""
        self.waiting = False
        self._failures: list[Failure] = []
        self._recovered: set[Key] = set()
        self._served: set[Key] = set()
        """Engines that answered at least once."""
        self._strikes: Counter[Key] = Counter()
        self._rest: dict[Key, float] = {}

    def set(
        self, members: Sequence[EngineFacts], dead: Iterable[Key] = (), told: str = "", *, reserved: bool = False
    ) -> News:
        """From now on these; returns what happened since the last call."""
        with self.changed:
            self.members, self.dead, self.told = tuple(members), frozenset(dead), told
            self.reserved = reserved
            news = News(tuple(self._failures), tuple(sorted(self._recovered)), self.waiting)
            self._failures.clear()
            self._recovered.clear()
            self.changed.notify_all()
            return news

    def struck(self, engine: EngineFacts, kind: str, why: str) -> None:
        """A call to it failed: it rests. The caller holds `changed`."""
        key = (engine.id, engine.generation)
        self._strikes[key] += 1
        pause = min(FIRST_REST_S * 2.0 ** min(self._strikes[key] - 1, 10), LAST_REST_S)
        self._rest[key] = self.clock() + pause
        self._recovered.discard(key)
        self._failures.append(Failure(engine.id, engine.generation, kind, why))

    def answered(self, engine: EngineFacts) -> None:
        """A call to it brought everything. The caller holds `changed`."""
        key = (engine.id, engine.generation)
        self._rest.pop(key, None)
        if self._strikes.pop(key, 0) or key not in self._served:
            self._served.add(key)
            self._recovered.add(key)

    def rests(self, engine: EngineFacts) -> bool:
        """Whether it failed a moment ago."""
        return self._rest.get((engine.id, engine.generation), 0.0) > self.clock()


Ask = Callable[[EngineFacts, Sequence[R]], Sequence[tuple[R, S]]]
"""Asks one engine for many samples. May return fewer, in any order (what is missing was aborted)."""


@dataclass(slots=True)
class Turn(Generic[R]):
    """Requests that go to an engine together."""

    requests: Sequence[R]
    engine: str = ""
    """Only this one may answer them; empty: any."""
    tried: set[Key] = field(default_factory=set)
    refused: dict[Key, EngineRefused] = field(default_factory=dict)
    """Who called them bad."""


@dataclass(slots=True, eq=False)
class _Call(Generic[R, S]):
    turn: Turn[R]
    engine: EngineFacts
    answers: Sequence[tuple[R, S]] | None = None
    error: BaseException | None = None
    done: bool = False

    @property
    def key(self) -> Key:
        return (self.engine.id, self.engine.generation)


@dataclass(slots=True)
class Outcome(Generic[S]):
    """All answers, and what they cost."""

    samples: list[S] = field(default_factory=list)
    retried: int = 0
    """Requests that had to be asked again."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed calls per engine id."""


def dispatch(
    turns: Sequence[Turn[R]], ask: Ask[R, S], roster: Roster, *, in_flight: int, retry: bool, where: str
) -> Outcome[S]:
    """Every request of `turns` answered exactly once.

    in_flight: calls per engine at a time. retry: False: the first failure ends it (nobody brings the engine back).
    where: what it is for, in an error. Raises RltopError.
    """
    work = _Dispatch(deque(turns), ask, roster, in_flight, retry, where)
    with roster.changed:
        try:
            return work.run()
        finally:
            roster.waiting = False


class _Dispatch(Generic[R, S]):
    """One rollout's calls. Every method runs in the caller's thread, which holds the roster's lock but while it waits;
    only `_call` runs in threads of its own."""

    def __init__(
        self, waiting: deque[Turn[R]], ask: Ask[R, S], roster: Roster, in_flight: int, retry: bool, where: str
    ) -> None:
        self._waiting, self._ask, self._roster = waiting, ask, roster
        self._in_flight, self._retry, self._where = in_flight, retry, where
        self._running: list[_Call[R, S]] = []
        self._outcome: Outcome[S] = Outcome()
        self._idle_s = 0.0
        self._reserved_s = 0.0
        """Of these seconds, those in which engines were on trial."""

    def run(self) -> Outcome[S]:
        roster = self._roster
        while self._waiting or self._running:
            self._start()
            began = roster.clock()
            roster.changed.wait(LOOK_EVERY_S)
            self._settle()
            if self._running or not self._waiting:
                roster.waiting = False
            else:
                self._idle(roster.clock() - began)
        return self._outcome

    def _start(self) -> None:
        """Give out what can be given out now."""
        for _ in range(len(self._waiting)):
            turn = self._waiting.popleft()
            engine = self._choose(turn)
            if engine is None:
                self._waiting.append(turn)
                continue
            call: _Call[R, S] = _Call(turn, engine)
            self._running.append(call)
            threading.Thread(target=self._call, args=(call,), name=f"ask-{engine.id}", daemon=True).start()

    def _choose(self, turn: Turn[R]) -> EngineFacts | None:
        """Of the engines with room the one that did not fail this turn and has least to do; equal ones by index."""
        load = Counter(call.key for call in self._running)
        best: tuple[tuple[bool, int, int], EngineFacts] | None = None
        for at, engine in enumerate(self._roster.members):
            key = (engine.id, engine.generation)
            if (turn.engine and turn.engine != engine.id) or load[key] >= self._in_flight or self._roster.rests(engine):
                continue
            rank = (key in turn.tried, load[key], at)
            if best is None or rank < best[0]:
                best = (rank, engine)
        return None if best is None else best[1]

    def _call(self, call: _Call[R, S]) -> None:
        try:
            answers = self._ask(call.engine, call.turn.requests)
        except BaseException as error:
            call.error = error
        else:
            call.answers = answers
        with self._roster.changed:
            call.done = True
            self._roster.changed.notify_all()

    def _settle(self) -> None:
        """Take the answers that came, and give up on the dead."""
        dead = self._roster.dead
        for call in [call for call in self._running if call.done or call.key in dead]:
            self._running.remove(call)
            if not call.done:
                self._failed(call, "gone", "its process is gone", call.turn.requests)
            elif call.error is not None:
                self._failed(call, _kind(call.error), _why(call.error), call.turn.requests)
            else:
                self._answered(call)

    def _answered(self, call: _Call[R, S]) -> None:
        answers = call.answers or ()
        self._outcome.samples += [sample for _, sample in answers]
        self._idle_s = 0.0
        self._reserved_s = 0.0
        have = {id(request) for request, _ in answers}
        missing = [request for request in call.turn.requests if id(request) not in have]
        if missing:
            self._failed(call, "aborted", f"{len(missing)} of {len(call.turn.requests)} requests were aborted", missing)
        else:
            self._roster.answered(call.engine)

    def _failed(self, call: _Call[R, S], kind: str, why: str, requests: Sequence[R]) -> None:
        """Ask again, or raise what cannot be helped by asking somebody else."""
        turn, error = call.turn, call.error
        if error is not None and (not self._retry or kind == ""):
            self._waiting.clear()  # the rollout is lost: nobody shall start another turn of it
            raise error
        self._roster.struck(call.engine, kind, why)
        self._outcome.retried += len(requests)
        self._outcome.failures[call.engine.id] += 1
        if isinstance(error, EngineRefused) and 400 <= error.status < 500 and error.status not in (408, 429):
            turn.refused[call.key] = error
            if all((engine.id, engine.generation) in turn.refused for engine in self._roster.members):
                self._waiting.clear()
                raise error
        self._waiting.appendleft(Turn(requests, turn.engine, turn.tried | {call.key}, turn.refused))

    def _idle(self, seconds: float) -> None:
        """There is work and nobody to do it."""
        self._idle_s += seconds
        roster = self._roster
        roster.waiting = self._idle_s >= WAIT_NOTE_S
        self._reserved_s += seconds if roster.reserved else 0.0
        if self._idle_s - self._reserved_s > roster.patience_s:
            states = roster.told or ", ".join(f"engine {one.id}: fails or refuses" for one in roster.members)
            raise RltopError(
                f"no engine took the requests for {roster.patience_s:g} s",
                where=self._where,
                why=states or "there is no engine",
                do="`rltop engine list` says why each is out; --rollout-engine-wait-s SECONDS waits longer",
                exit_code=1,
            )


def _kind(error: BaseException) -> str:
    """What failed, for errors that another engine may not have; else empty."""
    match error:
        case EngineUnreachable():
            return "gone"
        case EngineRefused():
            return "refused"
        case WrongWeightVersion():
            return "version"
        case Unanswered():
            return "incomplete"
        case _:
            return ""


def _why(error: BaseException) -> str:
    if isinstance(error, RltopError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return f"{type(error).__name__}: {error}"
