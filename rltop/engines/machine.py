"""The life of one engine slot as a pure state machine: no I/O, no clock of its own.

    STOPPED -> LAUNCHING -> LOADING -> CAPTURING -> WARMING -> STALE -> HEALTHY <-> SUSPECT
                                                                 -> DRAINING -> STOPPING -> RECLAIMING -> STOPPED
    HEALTHY | SUSPECT | STALE -> OFFLOADED -> STALE        any live state -> CRASHED -> BACKOFF -> LAUNCHING
                                                                             CRASHED -> QUARANTINED

**The transition that must not exist is DEAD -> HEALTHY.** A process that was just started, found again or resumed holds
the weights of its checkpoint, or none: it passes STALE and serves nothing until it holds the required version. The only
way into HEALTHY is `Synced` in STALE, and `Trust` in SUSPECT, whose process never went away.

`step(slot, event, now)` returns the new slot and the actions that its supervisor must carry out. An event that a state
does not allow raises `IllegalTransition`: it is a fault of the supervisor, never of an engine.

Failure policy: one bad probe is SUSPECT, never a kill. A hang only alarms, unless the policy says restart. A crash is
followed by a restart with backoff (`restart="auto"`), after everything of the dead process was reclaimed; three
crashes with one fingerprint within few rollouts, or within ten minutes, are QUARANTINED until a person acts. A deadline
that passes while nothing can be done safely (memory held by a stranger, weights that nobody sends) alarms once and
waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from rltop.engines.states import (
    ANSWERING,
    LIVE,
    SERVING,
    STARTING,
    Action,
    Adopted,
    Awaits,
    Crash,
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

Outcome: TypeAlias = tuple[Slot, tuple[Action, ...]]
_FORWARD = (State.LOADING, State.CAPTURING, State.WARMING)


def step(slot: Slot, event: Event, now: float) -> Outcome:
    """The slot after `event`, and what to do. Raises `IllegalTransition`."""
    state, policy = slot.state, slot.policy
    match event:
        case Tick(updating):
            return (slot, ()) if updating and state is State.DRAINING else _tick(slot, now)
        case Start(person, cause):
            return _start(slot, event, now, person, cause)
        case Spawned() if state is State.LAUNCHING:
            return _to(slot, State.LOADING, now, slot.cause, deadline=now + policy.start_s), ()
        case SpawnFailed(fingerprint, cause) if state is State.LAUNCHING:
            return _crash(slot, fingerprint, cause, now)
        case Adopted(generation) if state is State.STOPPED:
            # Whether it is ready, and with which weights, is learnt as after any start.
            taken = replace(slot, generation=generation, rollouts=0, failing=None)
            return _to(taken, State.LOADING, now, "found again", deadline=now + policy.start_s), ()
        case Reached(reached) if state in STARTING and reached in _FORWARD:
            if _FORWARD.index(reached) <= _FORWARD.index(state):
                return slot, ()
            return _to(slot, reached, now, slot.cause, deadline=slot.deadline), ()
        case Ready(cause) if state is State.WARMING:
            return _to(slot, State.STALE, now, cause, deadline=now + policy.stale_s), ()
        case Awaits(cause) if state is State.STALE:
            return replace(slot, cause=cause), ()
        case Synced(version) if state is State.STALE:
            return _to(slot, State.HEALTHY, now, f"holds weight version {version}"), ()
        case Outdated(cause) if state in SERVING:
            return _to(slot, State.STALE, now, cause, deadline=now + policy.stale_s), ()
        case Doubt() | Trust() | Hang() if state in SERVING:
            return _judge(slot, event, now)
        case Dying(fingerprint, cause) if state in ANSWERING:
            # Out of the rotation at once, but not ended: it may be writing the dump that names the kernel.
            failing = Crash(fingerprint, slot.rollouts, slot.generation, now)
            dying = replace(slot, failing=failing, fingerprint=fingerprint)
            dying = _to(dying, State.CRASHED, now, cause, clean=False, deadline=now + policy.dying_s)
            return replace(dying, dying=True), (Action.ALARM,)
        case Released() if state in ANSWERING:
            return _to(slot, State.OFFLOADED, now, "its memory is released to the trainer"), ()
        case Resumed() if state is State.OFFLOADED:
            return _to(slot, State.STALE, now, "resumed with empty memory", deadline=now + policy.stale_s), ()
        case RolloutDone():
            return _rollout(slot, now), ()
        case NodeLost(node) if state in LIVE:
            return _to(slot, State.LOST, now, f"node {node} does not answer", deadline=now + policy.lost_s), (
                Action.ALARM,
            )
        case NodeLost() if state is State.CRASHED and slot.dying:
            return replace(slot, dying=False, deadline=now + policy.reclaim_s), (Action.RECLAIM,)
        case NodeFound() if state is State.LOST:
            # It was out of sight: it proves itself as one that was found again.
            return _to(slot, State.LOADING, now, "its node is back", deadline=now + policy.start_s), ()
        case GiveUp(cause) if state is State.LOST:
            return _give_up(slot, cause, now)
        case _:
            return _ending(slot, event, now)


def toward(slot: Slot, goal: Goal, now: float, *, updating: bool) -> Event | None:
    """The event that brings the slot nearer to its goal now; None: nothing to do, or it has to wait.

    updating: a weight update is going on. Nothing is stopped or started in one: the trainer would hang in it.
    """
    state, outdated = slot.state, slot.generation < goal.generation
    # What a hung engine holds never ends: whoever waits for it is told sooner by the end of the connection.
    drain = goal.drain and not (state is State.SUSPECT and slot.escalated)
    if updating and not (state is State.DRAINING and goal.run and not outdated):
        return None
    if not goal.run:
        if state is State.LOST:
            return GiveUp(goal.cause)
        ended = state in (State.STOPPED, State.LAUNCHING, State.DRAINING, State.STOPPING, State.RECLAIMING)
        return None if ended else Stop(goal.cause, drain)
    match state:
        case State.STOPPED:
            return Start(person=outdated, cause=goal.cause, reserved=goal.reserved)
        case State.BACKOFF if outdated or (slot.deadline is not None and now >= slot.deadline):
            return Start(person=outdated, cause=goal.cause if outdated else "", reserved=goal.reserved)
        case State.CRASHED | State.QUARANTINED if outdated and slot.clean:
            return Start(person=True, cause=goal.cause, reserved=goal.reserved)
        case State.LOST if outdated:
            return GiveUp(goal.cause)
        case State.DRAINING if not outdated:
            return Undrain("its stop was called off")
        case _ if outdated and state in ANSWERING | STARTING:
            # An OFFLOADED one waits: its next generation would take the memory that the trainer has now.
            return Stop(goal.cause, drain)
        case _:
            return None


def _ending(slot: Slot, event: Event, now: float) -> Outcome:
    """The events of the way down."""
    state, policy = slot.state, slot.policy
    match event:
        case Stop(cause, drain) if state in ANSWERING and drain:
            return _to(slot, State.DRAINING, now, cause, deadline=now + policy.drain_s), (Action.DRAIN,)
        case Stop(cause, _) if state in ANSWERING | STARTING or state in (State.OFFLOADED, State.DRAINING):
            return _terminate(slot, cause, now)
        case Stop(cause, _) if state in (State.CRASHED, State.BACKOFF, State.QUARANTINED):
            forgiven = replace(slot, failing=None, crashes=())
            if slot.clean:
                return _to(forgiven, State.STOPPED, now, cause), ()
            return _to(forgiven, State.RECLAIMING, now, cause, deadline=now + policy.reclaim_s), (Action.RECLAIM,)
        case Undrain(cause) if state is State.DRAINING:
            # Weights may have moved on while it was out: it proves its version like everybody.
            return _to(slot, State.STALE, now, cause, deadline=now + policy.stale_s), ()
        case Drained(cause) if state is State.DRAINING:
            return _terminate(slot, cause or slot.cause, now)
        case Exited(fingerprint, cause) if state in (State.DRAINING, State.STOPPING):
            if state is State.DRAINING:
                slot = replace(slot, fingerprint=fingerprint)
                reclaiming = _to(slot, State.RECLAIMING, now, f"ended while it was drained: {cause}", clean=False)
                return replace(reclaiming, deadline=now + policy.reclaim_s), (Action.EVIDENCE, Action.RECLAIM)
            reclaiming = _to(slot, State.RECLAIMING, now, slot.cause, clean=False, deadline=now + policy.reclaim_s)
            return reclaiming, (Action.RECLAIM,)
        case Exited(fingerprint, cause) if state is State.CRASHED and slot.dying:
            # What is known at its end is known better.
            crashed, actions = _crash(slot, fingerprint, cause, now)
            return replace(crashed, since=slot.since), tuple(one for one in actions if one is not Action.ALARM)
        case Exited(fingerprint, cause) if state in LIVE or state is State.LOST:
            return _crash(slot, fingerprint, cause, now)
        case Held(cause) if state in (State.RECLAIMING, State.CRASHED) and not slot.dying:
            return replace(slot, cause=cause), ()
        case Reclaimed() if state is State.RECLAIMING:
            if slot.failing is not None:
                return _after_crash(replace(slot, clean=True), slot.failing, now)
            return _to(slot, State.STOPPED, now, slot.cause, clean=True), ()
        case Reclaimed() if state is State.CRASHED and not slot.clean and not slot.dying:
            assert slot.failing is not None, "CRASHED is entered with the crash"
            return _after_crash(replace(slot, clean=True), slot.failing, now)
        case _:
            raise IllegalTransition(slot, event)


def _start(slot: Slot, event: Start, now: float, person: bool, cause: str) -> Outcome:
    match slot.state:
        case State.STOPPED:
            pass
        case State.BACKOFF if person or (slot.deadline is not None and now >= slot.deadline):
            pass
        case State.QUARANTINED if person:
            pass
        case State.CRASHED if person and slot.clean:
            pass
        case _:
            raise IllegalTransition(slot, event)
    automatic = slot.state is State.BACKOFF and not person
    begun = replace(
        slot,
        generation=slot.generation + 1,
        reserved=event.reserved,
        rollouts=0,
        failing=None,
        restarts=slot.restarts + automatic,
        # A person who starts it knows of the crashes: the count begins anew.
        crashes=() if person else slot.crashes,
        fingerprint="" if person else slot.fingerprint,
    )
    # What its last process ended of is no news of this one.
    again = f"started again after: {slot.fingerprint}" if automatic and slot.fingerprint else ""
    return _to(begun, State.LAUNCHING, now, cause or again, deadline=now + slot.policy.launch_s), (Action.SPAWN,)


def _judge(slot: Slot, event: Doubt | Trust | Hang, now: float) -> Outcome:
    match event:
        case Trust():
            return (slot, ()) if slot.state is State.HEALTHY else (_to(slot, State.HEALTHY, now, "answers again"), ())
        case Doubt(cause):
            if slot.state is State.SUSPECT:
                return replace(slot, cause=cause), ()
            return _to(slot, State.SUSPECT, now, cause), ()
        case Hang(cause):
            if slot.policy.on_hang == "restart":
                failing = Crash("hang", slot.rollouts, slot.generation, now)
                ended, actions = _terminate(replace(slot, failing=failing, fingerprint="hang"), cause, now)
                return ended, (Action.EVIDENCE, *actions)
            if slot.state is State.SUSPECT and slot.escalated:
                return replace(slot, cause=cause), ()
            # Of one that was in doubt already it is the same trouble, known better: it lasts as long as before.
            doubted = slot if slot.state is State.SUSPECT else _to(slot, State.SUSPECT, now, cause)
            return replace(doubted, cause=cause, escalated=True, deadline=None), (Action.ALARM,)


def _rollout(slot: Slot, now: float) -> Slot:
    if slot.state not in LIVE:
        return slot
    counted = replace(slot, rollouts=slot.rollouts + 1)
    # The fingerprints stay until flapping is ruled out, by rollouts and by time.
    recent = any(_within(crash.at, now, slot.policy.flap_s) for crash in slot.crashes)
    settled = counted.rollouts > slot.policy.flap_rollouts and slot.state is State.HEALTHY and not recent
    return replace(counted, crashes=()) if settled else counted


def _tick(slot: Slot, now: float) -> Outcome:
    """What a passed deadline means in each state."""
    if slot.deadline is None or now < slot.deadline:
        return slot, ()
    policy, over = slot.policy, f"after {slot.deadline - slot.since:.0f} s"
    match slot.state:
        case State.LAUNCHING:
            crashed, actions = _crash(slot, "launch-timeout", f"no process {over}", now)
            return crashed, (Action.ABANDON_SPAWN, *actions)
        case State.LOADING | State.CAPTURING | State.WARMING:
            fingerprint = f"start-timeout:{slot.state}"
            failing = Crash(fingerprint, slot.rollouts, slot.generation, now)
            slot = replace(slot, failing=failing, fingerprint=fingerprint)
            ended, actions = _terminate(slot, f"not ready {policy.start_s:.0f} s after its start", now)
            return ended, (Action.ALARM, Action.EVIDENCE, *actions)
        case State.DRAINING if not slot.escalated:
            return replace(slot, escalated=True, deadline=now + policy.abort_s), (Action.ABORT,)
        case State.DRAINING:
            return _terminate(slot, slot.cause, now)
        case State.STOPPING if not slot.escalated:
            return replace(slot, escalated=True, deadline=now + policy.kill_s), (Action.KILL,)
        case State.STOPPING:
            # A process in an uninterruptible call ends when that returns; killing again costs nothing.
            late = replace(slot, cause=f"SIGKILL did not end it {over}", deadline=now + policy.kill_s)
            return late, (Action.ALARM, Action.KILL)
        case State.CRASHED if slot.dying:
            ended = replace(slot, dying=False, deadline=now + policy.reclaim_s)
            return ended, (Action.EVIDENCE, Action.RECLAIM)
        case State.LOST if policy.restart == "auto":
            return _give_up(slot, f"its node has not come back {over}", now)
        case State.BACKOFF:
            return slot, ()  # the supervisor starts it, when no weight update is going on
        case _ if not slot.escalated:
            return replace(slot, escalated=True, deadline=None), (Action.ALARM,)
        case _:
            return replace(slot, deadline=None), ()


def _terminate(slot: Slot, cause: str, now: float) -> Outcome:
    return _to(slot, State.STOPPING, now, cause, deadline=now + slot.policy.term_s), (Action.TERMINATE,)


def _give_up(slot: Slot, cause: str, now: float) -> Outcome:
    """A lost process is taken for dead. If its node comes back, the slot's lock there still speaks for it."""
    given_up = _to(slot, State.RECLAIMING, now, cause, clean=False, deadline=now + slot.policy.reclaim_s)
    return given_up, (Action.RECLAIM,)


def _crash(slot: Slot, fingerprint: str, cause: str, now: float) -> Outcome:
    failing = Crash(fingerprint, slot.rollouts, slot.generation, now)
    crashed = replace(slot, failing=failing, fingerprint=fingerprint)
    actions = (Action.EVIDENCE, Action.RECLAIM, Action.ALARM)
    return _to(crashed, State.CRASHED, now, cause, clean=False, deadline=now + slot.policy.reclaim_s), actions


def _after_crash(slot: Slot, crash: Crash, now: float) -> Outcome:
    """What follows once a crashed engine is cleared away: backoff, quarantine, or a person."""
    policy = slot.policy
    if slot.reserved:  # of a trial: whoever asked for it decides what comes next
        return _to(replace(slot, failing=None), State.CRASHED, now, slot.cause), ()
    crashes = (*slot.crashes, crash)[-max(16, policy.flap_crashes) :]
    slot = replace(slot, crashes=crashes, failing=None)
    if why := _flapping(crashes, policy):
        return _to(slot, State.QUARANTINED, now, f"{why}; rltop engine start tries it again"), (Action.ALARM,)
    if policy.restart == "never":
        return _to(slot, State.CRASHED, now, slot.cause), ()
    wait = backoff(_strikes(crashes, policy), policy)
    return _to(slot, State.BACKOFF, now, slot.cause, deadline=now + wait), ()


def backoff(strikes: int, policy: FleetPolicy) -> float:
    """Seconds before the restart after the n-th crash in a row: `backoff_s`, doubling to `backoff_max_s`."""
    wait = policy.backoff_s
    for _ in range(strikes - 1):
        if wait >= policy.backoff_max_s:
            break
        wait *= 2
    return min(wait, policy.backoff_max_s)


def _strikes(crashes: tuple[Crash, ...], policy: FleetPolicy) -> int:
    """Crashes in a row. A generation that survived a rollout begins a new row, unless it died as one did a moment ago:
    so does a loop whose rollouts are short."""
    strikes = 0
    for place in range(len(crashes) - 1, -1, -1):
        strikes += 1
        crash = crashes[place]
        alike = [one for one in crashes[:place] if one.fingerprint == crash.fingerprint]
        again = bool(alike) and crash.at is not None and _within(alike[-1].at, crash.at, policy.flap_s)
        if crash.rollouts and not again:
            break
    return strikes


def _flapping(crashes: tuple[Crash, ...], policy: FleetPolicy) -> str:
    """Why these crashes, newest last, are a loop that a person has to end; empty: they are none."""
    newest, count = crashes[-1], policy.flap_crashes
    recent = crashes[-count:]
    what = f"{count} crashes with fingerprint {newest.fingerprint!r}"
    alike = all(crash.fingerprint == newest.fingerprint for crash in recent)
    if len(recent) == count and alike and _between(recent) <= policy.flap_rollouts:
        return f"{what} in {_between(recent)} rollouts"
    same = [crash for crash in crashes if crash.fingerprint == newest.fingerprint][-count:]
    if len(same) < count or same[0].at is None or newest.at is None:
        return ""
    return f"{what} in {newest.at - same[0].at:.0f} s" if _within(same[0].at, newest.at, policy.flap_s) else ""


def _within(then: float | None, now: float, limit_s: float) -> bool:
    return then is not None and now - then <= limit_s


def _between(crashes: tuple[Crash, ...]) -> int:
    """Rollouts survived between the first and the last; what came before the first does not count."""
    return sum(crash.rollouts for crash in crashes[1:])


def _to(
    slot: Slot, state: State, now: float, cause: str, *, deadline: float | None = None, clean: bool | None = None
) -> Slot:
    return replace(
        slot,
        state=state,
        since=now,
        cause=cause,
        deadline=deadline,
        escalated=False,
        dying=False,
        clean=slot.clean if clean is None else clean,
    )
