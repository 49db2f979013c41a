"""Requests over engines that come and go: none lost, none answered twice, nobody asked in vain for long."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rltop.engines.calls import Call
from rltop.engines.client import EngineRefused, EngineUnreachable, WrongWeightVersion
from rltop.errors import RltopError
from rltop.train.dispatch import WAIT_NOTE_S, Failure, News, Outcome, Roster, Turn, dispatch
from rltop.train.ports import EngineFacts
from tests.train.fakes import ENGINE

pytestmark = pytest.mark.timeout(60)
GENERATE = Call("POST", "/generate")
ZERO, ONE = (replace(ENGINE, id=name, url=f"http://{name}") for name in ("0", "1"))
Pair = tuple["Req", str]


class Req:
    """A request; two with the same name are two requests."""

    def __init__(self, name: int) -> None:
        self.name = name


class Engines:
    """What engines answer, by id; `fail` may raise or swallow requests first."""

    def __init__(self, fail: Callable[[EngineFacts, int], object] = lambda engine, call: None) -> None:
        self.fail = fail
        self.asked: list[tuple[str, list[int]]] = []
        self.lock = threading.Lock()

    def __call__(self, engine: EngineFacts, requests: Sequence[Req]) -> list[Pair]:
        with self.lock:
            self.asked.append((engine.id, [request.name for request in requests]))
            number = len(self.asked)
        kept = self.fail(engine, number)
        answered = requests if kept is None else requests[: int(str(kept))]
        return [(request, f"{engine.id}:{request.name}") for request in answered]


def turns(count: int, size: int = 2, engine: str = "") -> list[Turn[Req]]:
    return [Turn([Req(at * size + n) for n in range(size)], engine) for at in range(count)]


def roster(*members: EngineFacts, patience_s: float = 30.0) -> Roster:
    made = Roster(patience_s, time.monotonic)
    made.set(members)
    return made


def go(ask: Engines, these: Roster, work: list[Turn[Req]], *, in_flight: int = 2, retry: bool = True) -> Outcome[str]:
    return dispatch(work, ask, these, in_flight=in_flight, retry=retry, where="rollout 3")


def names(outcome: Outcome[str]) -> list[int]:
    return sorted(int(sample.split(":")[1]) for sample in outcome.samples)


def unreachable(engine: EngineFacts) -> EngineUnreachable:
    return EngineUnreachable(engine.url, GENERATE, "ReadError")


def test_two_engines_share_the_work() -> None:
    ask = Engines()
    these = roster(ZERO, ONE)
    outcome = go(ask, these, turns(10))
    assert names(outcome) == list(range(20))
    assert these.set((ZERO, ONE)) == News(recovered=(("0", 1), ("1", 1))), "the first answer of each is told of"
    assert names(go(ask, these, turns(10))) == list(range(20))
    assert these.set((ZERO, ONE)) == News()
    assert {name for name, _ in ask.asked} == {"0", "1"}
    assert (outcome.retried, outcome.failures) == (0, Counter())


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("gone", unreachable(ZERO)),
        ("refused", EngineRefused("u", GENERATE, 503, "paused")),
        ("version", WrongWeightVersion("u", "2", "1", "before the request")),
    ],
)
def test_what_one_engine_fails_the_other_answers(kind: str, error: RltopError) -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        if engine.id == "0":
            raise error

    ask, these = Engines(fail), roster(ZERO, ONE)
    outcome = go(ask, these, turns(4), in_flight=1)
    assert names(outcome) == list(range(8))
    assert {sample[0] for sample in outcome.samples} == {"1"}
    assert outcome.retried == 2 * outcome.failures["0"] > 0
    news = these.set((ZERO, ONE))
    assert {(failure.engine, failure.kind) for failure in news.failures} == {("0", kind)}
    assert these.set((ZERO, ONE)) == News(), "what was told is not told again"


def test_only_what_was_aborted_is_asked_again() -> None:
    def fail(engine: EngineFacts, number: int) -> object:
        return 3 if number == 1 else None

    ask = Engines(fail)
    outcome = go(ask, roster(ZERO), turns(1, size=5))
    assert names(outcome) == [0, 1, 2, 3, 4]
    assert ask.asked == [("0", [0, 1, 2, 3, 4]), ("0", [3, 4])]
    assert outcome.retried == 2


def test_an_engine_that_answers_again_is_told_of() -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        if number == 1:
            raise unreachable(engine)

    these = roster(ZERO)
    assert names(go(Engines(fail), these, turns(1))) == [0, 1]
    news = these.set((ZERO,))
    assert news.failures == (Failure("0", 1, "gone", "the engine does not answer: ReadError"),)
    assert news.recovered == (("0", 1),)


def test_the_requests_of_a_dead_engine_move_on_and_its_late_answer_counts_for_nothing() -> None:
    release, asked = threading.Event(), threading.Event()

    def fail(engine: EngineFacts, number: int) -> None:
        if engine.id == "0":
            asked.set()
            assert release.wait(30)

    these = roster(ZERO)
    outcomes: list[Outcome[str]] = []
    thread = threading.Thread(target=lambda: outcomes.append(go(Engines(fail), these, turns(1))))
    thread.start()
    assert asked.wait(30)
    these.set((ONE,), dead=[("0", 1)])
    thread.join(30)
    release.set()
    assert outcomes[0].samples == ["1:0", "1:1"]


def test_an_engine_that_joins_in_the_middle_is_used_and_one_that_leaves_is_not() -> None:
    these = roster(ZERO)

    def fail(engine: EngineFacts, number: int) -> None:
        if number == 2:
            these.set((ONE,))

    ask = Engines(fail)
    outcome = go(ask, these, turns(6), in_flight=1)
    assert names(outcome) == list(range(12))
    assert [name for name, _ in ask.asked] == ["0", "0", "1", "1", "1", "1"]


def test_a_fixed_map_waits_for_its_engine() -> None:
    these = roster(ONE)
    outcomes: list[Outcome[str]] = []
    ask = Engines()
    work = turns(1, engine="0") + turns(1, engine="1")
    thread = threading.Thread(target=lambda: outcomes.append(go(ask, these, work)))
    thread.start()
    deadline = time.monotonic() + 30
    while not these.set((ONE,)).waiting:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert [name for name, _ in ask.asked] == ["1"]
    these.set((ZERO, ONE))
    thread.join(30)
    assert sorted(outcomes[0].samples) == ["0:0", "0:1", "1:0", "1:1"]
    assert not these.set((ZERO, ONE)).waiting


def test_nobody_to_ask_ends_with_the_states_of_the_engines() -> None:
    these = Roster(0.5, time.monotonic)
    these.set((), told="engine 0: LOADING; engine 1: QUARANTINED (flapping)")
    with pytest.raises(RltopError) as caught:
        go(Engines(), these, turns(1))
    assert caught.value.where == "rollout 3"
    assert "engine 1: QUARANTINED (flapping)" in caught.value.why
    assert "--rollout-engine-wait-s" in caught.value.do
    assert caught.value.exit_code == 1


def test_engines_on_trial_are_waited_for_without_end() -> None:
    """Longer than anybody's patience: they come back when the bisection is over."""
    these = roster(patience_s=0.3)
    these.set((), told="engine 0: RESERVED", reserved=True)
    waited = threading.Timer(WAIT_NOTE_S + 1.0, lambda: these.set((ZERO,)))
    waited.start()
    assert len(go(Engines(), these, turns(1)).samples) == 2
    waited.join()


def test_an_engine_that_only_fails_does_not_keep_a_rollout_waiting_for_ever() -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        raise unreachable(engine)

    ask, these = Engines(fail), roster(ZERO, patience_s=1.0)
    with pytest.raises(RltopError, match="no engine took the requests"):
        go(ask, these, turns(1))
    assert 2 <= len(ask.asked) <= 6, "it rests longer and longer"


def test_a_request_that_everybody_calls_bad_is_an_error_at_once() -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        raise EngineRefused(engine.url, GENERATE, 400, "max_new_tokens must be positive")

    ask = Engines(fail)
    with pytest.raises(EngineRefused, match="the engine refused"):
        go(ask, roster(ZERO, ONE), turns(1))
    assert sorted(name for name, _ in ask.asked) == ["0", "1"]


def test_one_engine_that_calls_a_request_bad_does_not_end_the_rollout() -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        if engine.id == "0":
            raise EngineRefused(engine.url, GENERATE, 400, "not with these flags")

    assert names(go(Engines(fail), roster(ZERO, ONE), turns(3))) == list(range(6))


@pytest.mark.parametrize("error", [unreachable(ZERO), KeyError("meta_info")])
def test_without_somebody_who_brings_engines_back_the_first_failure_is_the_end(error: Exception) -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        raise error

    with pytest.raises(type(error)):
        go(Engines(fail), roster(ZERO), turns(2), retry=False)


def test_an_error_that_is_no_engines_fault_is_not_retried() -> None:
    def fail(engine: EngineFacts, number: int) -> None:
        raise KeyError("meta_info")

    ask = Engines(fail)
    with pytest.raises(KeyError):
        go(ask, roster(ZERO), turns(1))
    assert len(ask.asked) == 1


@pytest.mark.parametrize("seed", range(5))
def test_whatever_fails_every_request_is_answered_exactly_once(seed: int) -> None:
    dice, lock = random.Random(seed), threading.Lock()
    these = roster(ZERO, ONE)

    def fail(engine: EngineFacts, number: int) -> object:
        with lock:
            what = dice.choice(["fine", "fine", "fine", "gone", "refused", "some", "move"])
            some = dice.randrange(3)
        match what:
            case "gone":
                raise unreachable(engine)
            case "refused":
                raise EngineRefused(engine.url, GENERATE, 503, "paused")
            case "some":
                return some
            case "move":
                later = replace(engine, generation=engine.generation + 1)
                other = ONE if engine.id == "0" else ZERO
                these.set((later, other), dead=[(engine.id, engine.generation)])
        return None

    assert names(go(Engines(fail), these, turns(12, size=3))) == list(range(36))
