"""What a person asks for before a culprit is named, and which arms still owe it.

A crash with nothing but the culprit on, and quiet, for so many times as long as a crash takes where it comes, with
everything on but one member, for each member. What is between these arms is in the belief; this is what a bug that is
not in the belief at all (two at once, a broken engine) does not do.

These trials have to be made of whatever is the culprit in the end. So their minutes are lost only if it is another: the
choice of the next trial knows what each arm owes, to every culprit by what is believed of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from rltop.bisect.trials import Running, Trial

SURVIVES = (4.0, 2.9, 2.0)
"""Quiet with everything on but a member of a named single, pair or triple, in mean times to a crash, at the least."""
WITNESSED = 1.0
"""The same of a member that facts speak for, however loudly."""
DOUBTFUL = 0.01
"""Nothing is owed to a culprit that is believed less."""

Owed = Mapping[int, Sequence[tuple[float, float]]]
"""Arm -> (what is believed of a culprit, the exposure that its proof lacks in that arm), of several culprits."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Of one culprit."""

    bare: int
    """The arm with the fewest toggles on that has it: it has to crash."""
    rests: Mapping[int, float]
    """Everything on but one member, per member: each has to be quiet, for so many mean times to a crash."""
    witnessed: frozenset[int] = frozenset()
    """Those of members that a fact speaks for."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the trials have shown of that."""

    crashed: frozenset[int]
    """Arms."""
    quiet: Mapping[int, float]
    """Per arm: quiet exposure (minutes or starts) since its last crash, on engines whose quiet says something."""

    def lacks(self, asked: Asked, mean: float) -> dict[int, float]:
        """Arms that have not shown it yet -> the quiet that is lacking there; where it has to crash, `mean`.

        mean: exposure that a crash takes where it comes.
        """
        found = {} if asked.bare in self.crashed else {asked.bare: mean}
        for rest, times in asked.rests.items():
            if (left := times * mean - self.quiet.get(rest, 0.0)) > 0.0:
                found[rest] = left
        return found


def seen(trials: Iterable[Trial], running: Iterable[Running], engines: frozenset[str], *, starts: bool) -> Seen:
    """engines: `told_by`. starts: exposure is counted in starts; what runs is none yet."""
    quiet: dict[int, float] = {}
    crashed: set[int] = set()
    for trial in trials:
        if not trial.counts:
            continue
        if trial.crashed:
            crashed.add(trial.arm)
            quiet[trial.arm] = 0.0
        elif trial.engine in engines:
            quiet[trial.arm] = quiet.get(trial.arm, 0.0) + (1.0 if starts else trial.minutes)
    for one in () if starts else running:
        if one.engine in engines:
            quiet[one.arm] = quiet.get(one.arm, 0.0) + one.minutes
    return Seen(frozenset(crashed), quiet)


def quiet_for(members: int, witnessed: float) -> float:
    """Mean times to a crash that are asked for without one of so many members.

    Quiet for t mean times is e**t times likelier of a member than of what has no part in the culprit. A fact that is so
    many times likelier (`Space.witnessed`) has shown some of that already.
    """
    most = SURVIVES[min(members, len(SURVIVES)) - 1]
    return max(min(WITNESSED, most), most - log(witnessed))


def told_by(trials: Sequence[Trial], *others: str) -> frozenset[str]:
    """Engines of the trials, and `others`, whose quiet says something.

    An engine that crashed. Once two have, the crash is no single engine's own, and the quiet of every engine says
    something. Where a crash came on an engine that is not known, so does it.
    """
    crashed = {trial.engine for trial in trials if trial.crashed and trial.counts}
    if len(crashed) > 1 or "" in crashed:
        crashed |= {trial.engine for trial in trials}.union(others)
    return frozenset(crashed | {""})


def owed(asked: Iterable[tuple[float, Asked]], shown: Seen, mean: float, others: Sequence[Running]) -> Owed:
    """asked: (what is believed of a culprit, what it is asked for). others: each engine that is at it takes a half."""
    at_work: dict[int, int] = {}
    for one in others:
        at_work[one.arm] = at_work.get(one.arm, 0) + 1
    found: dict[int, list[tuple[float, float]]] = {}
    for chance, wants in asked:
        for arm, left in shown.lacks(wants, mean).items():
            found.setdefault(arm, []).append((chance, left / 2 ** at_work.get(arm, 0)))
    return found


def paid(parts: Sequence[tuple[float, float]], exposure: float) -> float:
    """How much of the proof that is owed so much exposure in an arm is expected to be."""
    return sum([chance * min(exposure, left) for chance, left in parts])
