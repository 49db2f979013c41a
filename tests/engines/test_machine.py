"""The engine state machine: each rule by name, then random lives whose invariants must hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rltop.engines.machine import backoff, step, toward
from rltop.engines.states import (
    DEAD,
    LIVE,
    SERVING,
    Action,
    Adopted,
    Doubt,
    Drained,
    Dying,
    Event,
    Exited,
    FleetPolicy,
    GiveUp,
    Goal,
    Hang,
    Held,
    IllegalTransition,
    NodeFound,
    NodeLost,
    Outdated,
    Reached,
    Ready,
    Reclaimed,
    Released,
    Resumed,
    RolloutDone,
    Slot,
    Spawned,
    SpawnFailed,
    Start,
    State,
    Stop,
    Synced,
    Tick,
    Trust,
    Undrain,
)

TO_STALE: tuple[Event, ...] = (
    Start(),
    Spawned(),
    Reached(State.CAPTURING),
    Reached(State.WARMING),
    Ready("it answers"),
)
TO_HEALTHY: tuple[Event, ...] = (*TO_STALE, Synced("3"))
EVERY_EVENT: tuple[Event, ...] = (
    *TO_HEALTHY,
    *(
        SpawnFailed("f", "c"),
        Adopted(1),
        Outdated("c"),
        Doubt("c"),
        Trust(),
        Hang("c"),
        Dying("f", "c"),
        Released(),
        Resumed(),
    ),
    *(Stop("c"), Undrain("c"), Drained(), Exited("f", "c"), Held("c"), Reclaimed(), RolloutDone()),
    *(NodeLost("n"), NodeFound(), GiveUp("c"), Tick(), Start(person=True)),
)


def lived(*events: Event, policy: FleetPolicy | None = None, now: float = 0.0) -> Slot:
    """A new slot after these events."""
    slot = Slot(policy=policy or FleetPolicy())
    for event in events:
        slot, _ = step(slot, event, now)
    return slot


def crashed(slot: Slot, fingerprint: str = "ima", rollouts: int = 0, now: float = 0.0) -> Slot:
    """Its next generation got HEALTHY, survived so many rollouts, and crashed; its remains are cleared away."""
    events = (*TO_HEALTHY, *[RolloutDone()] * rollouts, Exited(fingerprint, "killed itself"), Reclaimed())
    for event in events:
        event = Start(person=False) if isinstance(event, Start) else event
        at = slot.deadline if slot.state is State.BACKOFF and slot.deadline is not None else now
        slot, _ = step(slot, event, at)
    return slot


def in_state(state: State) -> Slot:
    """Some slot in this state."""
    ways: dict[State, tuple[Event, ...]] = {
        State.STOPPED: (),
        State.LAUNCHING: TO_STALE[:1],
        State.LOADING: TO_STALE[:2],
        State.CAPTURING: TO_STALE[:3],
        State.WARMING: TO_STALE[:4],
        State.STALE: TO_STALE,
        State.HEALTHY: TO_HEALTHY,
        State.SUSPECT: (*TO_HEALTHY, Doubt("slow")),
        State.DRAINING: (*TO_HEALTHY, Stop("asked")),
        State.STOPPING: (*TO_HEALTHY, Stop("asked"), Drained()),
        State.RECLAIMING: (*TO_HEALTHY, Stop("asked"), Drained(), Exited("", "")),
        State.OFFLOADED: (*TO_HEALTHY, Released()),
        State.CRASHED: (*TO_HEALTHY, Exited("ima", "died")),
        State.BACKOFF: (*TO_HEALTHY, Exited("ima", "died"), Reclaimed()),
        State.LOST: (*TO_HEALTHY, NodeLost("n1")),
    }
    if state is State.QUARANTINED:
        return crashed(crashed(crashed(Slot())))
    return lived(*ways[state])


# ---------------------------------------------------------------------- the way up


@pytest.mark.parametrize("state", [state for state in State if state not in (State.STALE, *SERVING)])
@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: type(event).__name__)
def test_only_a_stale_engine_becomes_healthy(state: State, event: Event) -> None:
    """DEAD -> HEALTHY does not exist, nor does any other way around STALE."""
    slot = in_state(state)
    try:
        after, _ = step(slot, event, slot.since)
    except IllegalTransition:
        return
    assert after.state not in SERVING


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: type(event).__name__)
def test_a_stale_engine_serves_only_once_it_holds_the_required_weights(event: Event) -> None:
    try:
        after, _ = step(in_state(State.STALE), event, 0.0)
    except IllegalTransition:
        return
    assert (after.state in SERVING) == isinstance(event, Synced)


def test_an_illegal_event_raises_and_names_both() -> None:
    with pytest.raises(IllegalTransition, match="Synced is not allowed in STOPPED"):
        step(Slot(), Synced("1"), 0.0)


def test_a_log_line_read_late_does_not_lead_back() -> None:
    slot = lived(*TO_STALE[:4])
    assert step(slot, Reached(State.CAPTURING), 1.0) == (slot, ())


def test_an_engine_found_again_is_never_taken_for_healthy() -> None:
    slot = lived(Adopted(7), Reached(State.WARMING), Ready())
    assert (slot.state, slot.generation) == (State.STALE, 7)


def test_an_engine_that_never_gets_ready_is_ended_as_a_crash() -> None:
    slot = lived(*TO_STALE[:2])
    slot, actions = step(slot, Tick(), slot.policy.start_s)
    assert (slot.state, slot.fingerprint) == (State.STOPPING, "start-timeout:LOADING")
    assert Action.TERMINATE in actions
    assert Action.EVIDENCE in actions
    for event in (Exited("", ""), Reclaimed()):
        slot, _ = step(slot, event, 1000.0)
    assert slot.state is State.BACKOFF


# ---------------------------------------------------------------------- serving


def test_one_bad_probe_only_makes_an_engine_suspect() -> None:
    slot, actions = step(in_state(State.HEALTHY), Doubt("no answer in 2 s"), 5.0)
    assert (slot.state, slot.cause, actions) == (State.SUSPECT, "no answer in 2 s", ())
    slot, actions = step(slot, Tick(), 1e6)
    assert (slot.state, actions) == (State.SUSPECT, ())
    assert step(slot, Trust(), 7.0)[0].state is State.HEALTHY


def test_doubt_that_becomes_a_hang_lasts_as_long_as_before() -> None:
    slot, _ = step(in_state(State.HEALTHY), Doubt("no token in 20 s"), 5.0)
    slot, actions = step(slot, Hang("no token in 120 s"), 105.0)
    assert (slot.since, slot.cause, slot.escalated, actions) == (5.0, "no token in 120 s", True, (Action.ALARM,))


def test_a_hang_alarms_once_and_kills_nothing() -> None:
    slot, actions = step(in_state(State.HEALTHY), Hang("no token in 60 s"), 1.0)
    assert (slot.state, actions) == (State.SUSPECT, (Action.ALARM,))
    assert step(slot, Hang("no token in 70 s"), 2.0)[1] == ()


def test_a_hung_engine_is_not_drained_when_a_person_restarts_it() -> None:
    slot, _ = step(in_state(State.HEALTHY), Hang("no token"), 1.0)
    goal = Goal(run=True, generation=2, cause="restart")
    assert toward(slot, goal, 2.0, updating=False) == Stop("restart", drain=False)
    assert toward(in_state(State.SUSPECT), goal, 2.0, updating=False) == Stop("restart", drain=True)


def test_a_hang_is_restarted_where_the_policy_says_so() -> None:
    slot = lived(*TO_HEALTHY, policy=FleetPolicy(on_hang="restart"))
    slot, actions = step(slot, Hang("no token"), 1.0)
    assert (slot.state, actions) == (State.STOPPING, (Action.EVIDENCE, Action.TERMINATE))
    slot, _ = step(slot, Exited("", ""), 1.0)
    slot, _ = step(slot, Reclaimed(), 1.0)
    assert (slot.state, slot.fingerprint, slot.crashes[-1].fingerprint) == (State.BACKOFF, "hang", "hang")


def test_an_engine_with_a_fatal_error_leaves_the_rotation_and_may_write_its_dump() -> None:
    slot, actions = step(in_state(State.HEALTHY), Dying("ima/decode/3fa2c1", "illegal memory access"), 1.0)
    assert (slot.state, slot.dying, actions) == (State.CRASHED, True, (Action.ALARM,))
    assert toward(slot, Goal(run=True, generation=1), 2.0, updating=False) is None, "it does not come back"
    with pytest.raises(IllegalTransition):
        step(slot, Reclaimed(), 2.0)
    ended, actions = step(slot, Exited("ima/decode/3fa2c1", "killed itself"), 7.0)
    assert (ended.state, ended.dying) == (State.CRASHED, False)
    assert actions == (Action.EVIDENCE, Action.RECLAIM)
    # One that does not end by itself is ended.
    late, actions = step(slot, Tick(), 1.0 + slot.policy.dying_s)
    assert (late.dying, actions) == (False, (Action.EVIDENCE, Action.RECLAIM))


def test_a_dying_engine_whose_node_goes_too_is_not_waited_for() -> None:
    slot, _ = step(in_state(State.HEALTHY), Dying("ima", "illegal memory access"), 1.0)
    slot, actions = step(slot, NodeLost("n1"), 2.0)
    assert (slot.state, slot.dying, actions) == (State.CRASHED, False, (Action.RECLAIM,))
    assert step(slot, Reclaimed(), 3.0)[0].state is State.BACKOFF


def test_an_offloaded_engine_comes_back_stale() -> None:
    """Released weights are not restored: it would answer token 0 for ever."""
    slot, _ = step(in_state(State.OFFLOADED), Resumed(), 1.0)
    assert slot.state is State.STALE


def test_weights_that_never_come_alarm_once() -> None:
    slot = in_state(State.STALE)
    slot, actions = step(slot, Tick(), 1e5)
    assert (slot.state, actions) == (State.STALE, (Action.ALARM,))
    assert step(slot, Tick(), 2e5)[1] == ()


# ---------------------------------------------------------------------- the way down


def test_a_drain_that_lasts_too_long_is_aborted_before_anything_is_killed() -> None:
    policy = FleetPolicy(drain_s=10, abort_s=3, term_s=20, kill_s=5)
    slot = lived(*TO_HEALTHY, Stop("toggle"), policy=policy)
    slot, actions = step(slot, Tick(), 10.0)
    assert (slot.state, actions) == (State.DRAINING, (Action.ABORT,))
    slot, actions = step(slot, Tick(), 13.0)
    assert (slot.state, actions) == (State.STOPPING, (Action.TERMINATE,))
    slot, actions = step(slot, Tick(), 33.0)
    assert actions == (Action.KILL,)
    slot, actions = step(slot, Tick(), 38.0)
    assert (slot.state, actions) == (State.STOPPING, (Action.ALARM, Action.KILL))


def test_a_stop_called_off_while_draining_proves_its_weights_again() -> None:
    slot, actions = step(in_state(State.DRAINING), Undrain("cancelled"), 1.0)
    assert (slot.state, actions) == (State.STALE, ())


def test_memory_held_by_a_stranger_keeps_the_next_launch_waiting() -> None:
    slot = in_state(State.RECLAIMING)
    slot, _ = step(slot, Held("pid 77 holds 800 MiB of GPU 0"), 1.0)
    assert toward(slot, Goal(run=True, generation=9), 5.0, updating=False) is None
    slot, actions = step(slot, Tick(), 1e4)
    assert actions == (Action.ALARM,)
    assert slot.cause == "pid 77 holds 800 MiB of GPU 0"
    assert step(slot, Reclaimed(), 1e4)[0].state is State.STOPPED


# ---------------------------------------------------------------------- crashes


def test_the_backoff_doubles_from_10_to_300_seconds() -> None:
    assert [backoff(n, FleetPolicy()) for n in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]


def test_a_crash_waits_for_what_is_left_and_then_for_its_backoff() -> None:
    slot, actions = step(in_state(State.HEALTHY), Exited("ima", "killed itself"), 100.0)
    assert slot.state is State.CRASHED
    assert {Action.EVIDENCE, Action.RECLAIM} <= set(actions)
    goal = Goal(run=True, generation=1)
    assert toward(slot, goal, 1e6, updating=False) is None
    slot, _ = step(slot, Reclaimed(), 100.0)
    assert (slot.state, slot.deadline) == (State.BACKOFF, 110.0)
    assert toward(slot, goal, 109.9, updating=False) is None
    assert toward(slot, goal, 110.0, updating=True) is None
    assert toward(slot, goal, 110.0, updating=False) == Start()
    begun, _ = step(slot, Start(), 110.0)
    assert (begun.state, begun.cause) == (State.LAUNCHING, "started again after: ima"), "not of what the last one ended"
    with pytest.raises(IllegalTransition):
        step(slot, Start(), 109.9)


def test_a_rollout_survived_begins_the_backoff_anew() -> None:
    slot = crashed(crashed(Slot(), "a"), "b")
    assert slot.deadline == pytest.approx(slot.since + 20)
    slot = crashed(slot, "c", rollouts=1)
    assert slot.deadline == pytest.approx(slot.since + 10)


def test_three_crashes_of_one_kind_within_few_rollouts_are_quarantined() -> None:
    slot = crashed(crashed(crashed(Slot(), rollouts=50), rollouts=2), rollouts=2)
    assert slot.state is State.QUARANTINED
    goal = Goal(run=True, generation=slot.generation)
    assert toward(slot, goal, 1e9, updating=False) is None, "only a person ends it"
    event = toward(slot, replace(goal, generation=slot.generation + 1), 1e9, updating=False)
    assert event == Start(person=True)
    assert step(slot, event, 1e9)[0].crashes == ()


def test_crashes_of_different_kinds_or_far_apart_are_no_flapping() -> None:
    assert crashed(crashed(crashed(Slot(), "a"), "a"), "b").state is State.BACKOFF
    assert crashed(crashed(crashed(Slot()), rollouts=4, now=400.0), rollouts=4, now=800.0).state is State.BACKOFF


def again(slot: Slot, at: float, fingerprint: str = "ima", rollouts: int = 20) -> Slot:
    """Its next generation is started when it is due and crashes at a moment, after so many short rollouts."""
    begun = slot.deadline if slot.state is State.BACKOFF and slot.deadline is not None else at
    assert begun <= at
    for event in (*TO_HEALTHY, *[RolloutDone()] * rollouts):
        slot, _ = step(slot, event, begun)
    slot, _ = step(slot, Exited(fingerprint, "killed itself"), at)
    return step(slot, Reclaimed(), at)[0]


def test_three_crashes_of_one_kind_within_ten_minutes_are_quarantined_however_short_the_rollouts() -> None:
    slot = again(again(Slot(), 100.0), 400.0)
    assert (slot.state, slot.deadline) == (State.BACKOFF, 420.0)
    slot = again(slot, 700.0)
    assert slot.state is State.QUARANTINED
    assert slot.cause.startswith("3 crashes with fingerprint 'ima' in 600 s; rltop engine start")
    between = again(again(again(Slot(), 100.0), 200.0, "oom"), 300.0)
    assert again(between, 400.0).state is State.QUARANTINED, "another crash between two of a loop does not excuse it"


def test_the_backoff_doubles_while_a_crash_comes_again_within_ten_minutes() -> None:
    slot, waits = Slot(), []
    for at in (0.0, 590.0, 1180.0, 1770.0, 2360.0, 2950.0):
        slot = again(slot, at)
        assert slot.state is State.BACKOFF, slot.cause
        assert slot.deadline is not None
        waits.append(slot.deadline - at)
    assert waits == [10, 20, 40, 80, 160, 300]
    slot = again(slot, 2950.0 + 601)
    assert slot.deadline == 2950.0 + 601 + 10, "later it is a row of its own"
    assert again(slot, 3600.0, "oom").deadline == 3610.0, "and so is another crash after a rollout"


def test_crashes_are_forgotten_once_rollouts_and_time_have_passed() -> None:
    slot = again(Slot(), 0.0)
    for event in TO_HEALTHY:
        slot, _ = step(slot, event, 10.0)
    for _ in range(20):
        slot, _ = step(slot, RolloutDone(), 600.0)
    assert len(slot.crashes) == 1
    slot, _ = step(slot, RolloutDone(), 601.0)
    assert slot.crashes == ()


def test_without_automatic_restarts_a_crash_stays_for_a_person() -> None:
    slot = crashed(Slot(policy=FleetPolicy(restart="never")))
    assert slot.state is State.CRASHED
    assert toward(slot, Goal(run=True, generation=1), 1e9, updating=False) is None
    assert toward(slot, Goal(run=True, generation=2), 1e9, updating=False) == Start(person=True)


@pytest.mark.parametrize(
    ("bad", "words"),
    [({"drain_s": -1}, "drain_s = -1"), ({"backoff_max_s": 1}, "backoff_max_s"), ({"flap_crashes": 1}, "flap_crashes")],
)
def test_a_policy_that_cannot_work_is_refused(bad: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FleetPolicy(**bad)  # type: ignore[arg-type]


def test_a_drain_waits_for_the_end_of_a_weight_update() -> None:
    slot = in_state(State.DRAINING)
    assert step(slot, Tick(updating=True), 1e4) == (slot, ())
    assert step(slot, Tick(), 1e4)[1] == (Action.ABORT,)


def test_nothing_is_stopped_or_started_in_a_weight_update() -> None:
    for state in State:
        for goal in (Goal(run=False), Goal(run=True, generation=99)):
            assert toward(in_state(state), goal, 1e9, updating=True) is None


# ---------------------------------------------------------------------- random lives


class World:
    """A process, its port and its children as the machine's actions and random faults make them.

    It is the supervisor's other half: what `Fleet` learns from launchers and HTTP, this draws.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.policy = FleetPolicy(
            restart=rng.choice(["auto", "auto", "never"]), on_hang=rng.choice(["alarm", "restart"])
        )
        self.slot = Slot(policy=self.policy)
        self.goal = Goal()
        self.alive = self.spawning = self.told = self.killed = False
        self.left_over = 0
        self.port = False
        self.stranger = self.updating = self.node_gone = False
        self.version = self.required = 0
        self.trail: list[str] = []
        self.seen: set[State] = set()

    def fire(self, event: Event) -> None:
        """One step, its invariants, and its actions."""
        before = self.slot
        self.slot, actions = step(before, event, self.now)
        self.trail.append(f"{self.now:.0f} {before.state} {event} -> {self.slot.state} {[*actions]}")
        self.trail = self.trail[-30:]
        self.seen.add(self.slot.state)
        if self.slot.state in SERVING and before.state not in SERVING:
            assert before.state is State.STALE
            assert self.version == self.required
        if self.slot.state in (State.STOPPED, State.BACKOFF, State.QUARANTINED) and before.state != self.slot.state:
            assert not self.alive, "a process of a slot that is called stopped"
            assert not self.left_over, "an orphan"
            assert not self.port, "a port leak"
        for action in actions:
            self.act(action)

    def act(self, action: Action) -> None:
        """What the launcher does with it."""
        match action:
            case Action.SPAWN:
                assert not self.alive, "two processes in one slot"
                assert not self.spawning
                assert not self.left_over
                assert not self.port
                assert not self.updating
                self.spawning = True
            case Action.ABANDON_SPAWN:
                if self.spawning and self.rng.random() < 0.5:  # it came into being all the same
                    self.left_over += 1
                self.spawning = False
            case Action.TERMINATE:
                assert not self.updating or self.slot.failing, "an engine was ended in a weight update"
                self.told = True
            case Action.KILL:
                self.killed = True
            case Action.RECLAIM:
                self.left_over = 0
                self.node_gone = False
                self.end()
            case _:
                pass

    def end(self) -> None:
        """The process is gone."""
        self.alive = self.port = self.told = self.killed = False

    def look(self) -> None:
        """What a supervisor sees at each turn, in its order."""
        state = self.slot.state
        if (state in LIVE or self.slot.dying) and not self.alive and not self.node_gone:
            self.left_over = self.rng.choice([0, 0, 1, 3])
            self.port = bool(self.left_over and self.rng.random() < 0.5)
            return self.fire(Exited(self.rng.choice(["ima", "ima", "oom"]), "it ended"))
        if state in (State.RECLAIMING, State.CRASHED) and not self.slot.clean and not self.slot.dying:
            self.port = self.port and bool(self.left_over)
            self.fire(Held("a stranger holds it") if self.stranger else Reclaimed())
        self.fire(Tick(self.updating))
        event = toward(self.slot, self.goal, self.now, updating=self.updating)
        if event is not None:
            self.fire(event)
        return None

    def advance(self, *, faults: bool) -> None:
        """The engine's own progress, and what may go wrong with it."""
        rng, state = self.rng, self.slot.state
        bad = faults and rng.random() < 0.15
        if self.alive and (bad or self.killed or (self.told and (not faults or rng.random() < 0.7))):
            self.end()
        elif state is State.LAUNCHING and self.spawning:
            self.spawning = False
            self.alive = self.port = not bad
            self.version = 0
            self.fire(SpawnFailed("port", "in use") if bad else Spawned())
        elif (state in LIVE or self.slot.dying) and faults and rng.random() < 0.03:
            self.node_gone = True
            self.fire(NodeLost("n1"))
        elif state is State.LOST and (not faults or rng.random() < 0.3):
            self.node_gone = False
            self.fire(NodeFound() if self.alive else Exited("node", "gone with its node"))
        elif self.alive:
            self.answer(faults=faults)

    def answer(self, *, faults: bool) -> None:
        """A living process in its state."""
        rng = self.rng
        match self.slot.state:
            case State.LOADING | State.CAPTURING:
                self.fire(Reached(rng.choice([State.CAPTURING, State.WARMING])))
            case State.WARMING:
                self.fire(Ready())
            case State.STALE if self.version == self.required and not self.updating:
                self.fire(Synced(str(self.version)))
            case State.STALE:
                self.version = self.required
            case State.HEALTHY | State.SUSPECT if faults and not self.updating:
                events: list[Event] = [
                    Doubt("slow"),
                    Hang("still"),
                    Trust(),
                    RolloutDone(),
                    Released(),
                    Outdated("old weights"),
                ]
                event = rng.choice(events)
                if isinstance(event, Released | Outdated):
                    self.version = -1
                self.fire(event)
            case State.OFFLOADED if not faults or rng.random() < 0.3:
                self.fire(Resumed())
            case State.DRAINING if (
                self.slot.failing is None and not self.updating and (not faults or rng.random() < 0.5)
            ):
                self.fire(Drained())
            case _:
                pass

    def operate(self) -> None:
        """A person, the trainer, or the next daemon."""
        rng = self.rng
        match rng.randrange(8):
            case 0 | 1:
                self.goal = Goal(run=True, generation=self.slot.generation + 1, drain=rng.random() < 0.7)
            case 2:
                self.goal = Goal(run=False, drain=rng.random() < 0.5)
            case 3 if self.slot.state is not State.LAUNCHING:  # called off: what runs may go on
                self.goal = Goal(run=self.goal.run, generation=min(self.goal.generation, self.slot.generation))
            case 4:
                self.required += 1
                self.version = self.required if self.alive and self.slot.serves() else self.version
            case 5:
                self.updating = not self.updating
            case 6:
                self.stranger = not self.stranger
            case _ if not self.spawning and self.slot.state is not State.LOST:
                self.next_daemon()

    def next_daemon(self) -> None:
        """This supervisor is killed; another finds the slot's file, and the process or what is left of it."""
        old = self.slot
        self.slot = Slot(policy=self.policy, generation=old.generation, crashes=old.crashes, since=self.now)
        self.told = False
        if self.alive:
            self.fire(Adopted(old.generation))
        elif self.left_over or self.port or old.state in LIVE | {State.CRASHED, State.RECLAIMING, State.LAUNCHING}:
            self.fire(Adopted(old.generation))
            self.fire(Exited("unseen", "it ended while no daemon was there"))


def live_a_life(world: World) -> None:
    """A random life, then calm: the goal must be reached."""
    rng = world.rng
    for _ in range(rng.randrange(5, 60)):
        world.now += rng.choice([0.25, 1, 5, 30, 400])
        if rng.random() < 0.25:
            world.operate()
        world.advance(faults=True)
        world.look()
    world.stranger = world.updating = False
    for _ in range(80):
        world.now += 30
        world.advance(faults=False)
        world.look()


def check_lives(seeds: range) -> None:
    seen: set[State] = set()
    for seed in seeds:
        world = World(random.Random(seed))
        try:
            live_a_life(world)
            seen |= world.seen
            state = world.slot.state
            if world.goal.run:
                assert state in (State.HEALTHY, State.SUSPECT, State.CRASHED, State.QUARANTINED), state
                newest = world.slot.generation >= world.goal.generation
                assert newest, "the operation never ended"
            else:
                assert state is State.STOPPED, state
                assert not world.alive
            assert (state in DEAD) == (not world.alive)
            assert not world.slot.dying
        except (AssertionError, IllegalTransition) as error:
            trail = "\n".join(world.trail)
            pytest.fail(f"seed {seed}: {type(error).__name__} {error}\n{trail}")
    assert seen == set(State), "the lives must be wild enough to come everywhere"


def test_random_lives_keep_the_invariants() -> None:
    check_lives(range(600))


@pytest.mark.soak
def test_ten_thousand_random_lives_keep_the_invariants() -> None:
    check_lives(range(10_000))
