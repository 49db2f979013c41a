"""Which trial next, and when to stop.

The next arm is the one that is expected to tell most per minute, restart included. What a trial tells is the mutual
information between the culprit and its outcome: nothing if every culprit would crash it, nothing if none would. On
several engines the arms that already run are taken into account: what they will tell anyway is not worth a second
engine, unless it is worth it (then the same arm runs twice).

It ends when one culprit has `sure` of the belief and the two facts that a person asks for: a crash with nothing but the
culprit on, and quiet, for long enough, with each of its members off. Where the arms can not give these (a toggle that
can not be turned off, a budget that is spent, an explanation outside the hypotheses), it says what is left and why.
Never a wrong name for the sake of a name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

from rltop.bisect.belief import Belief, believe
from rltop.bisect.hazard import Grid, load_grid, starts_grid
from rltop.bisect.outlook import Group, Outlook, Window
from rltop.bisect.proof import DOUBTFUL, Asked, Owed, Seen, owed, paid, quiet_for, seen, told_by
from rltop.bisect.space import OTHER, Space
from rltop.bisect.story import minutes_text
from rltop.bisect.trials import Running, Trial

__all__ = ["Budget", "Next", "Planner", "Running", "Trial", "Verdict"]

SURE = (0.95, 0.98)
"""A culprit is named that is believed so much: on one engine, and on several, where being surer takes few minutes."""
NONE_LEFT = (0.012, 0.008)
"""No culprit is named while "none of these" is believed more than this. (One engine, several.)"""
WINDOWS = (0.5, 1.5, 4.0)
"""Trial lengths that are weighed, in believed mean minutes to the crash."""
CLOSE = 0.02
"""Arms within so much of the best are equally good; chance (seeded) takes one, so that engines do not all copy."""
OWED_BITS = 0.4
"""A mean time to a crash of what has to be shown anyway, before the culprit is named, is worth so many bits.
(Simulated, on other bugs than are measured: 0 takes a sixth longer, 0.3 to 0.6 make no difference.)
"""
PATIENCE = 1.2
"""A trial goes on unless another is so many times better: a restart that tells little more is none."""
MOST_ARMS = 400


@dataclass(frozen=True, slots=True)
class Budget:
    """What a bisection may cost."""

    minutes: float = 24 * 60.0
    """Wall time."""
    restart_min: float = 2.0
    """Minutes from the decision to an engine that is ready in another arm."""
    longest_trial_min: float = 120.0
    """Look again after so long, at the latest."""
    shortest_trial_min: float = 0.5


@dataclass(frozen=True, slots=True)
class Next:
    """What an engine should do now."""

    arm: int
    minutes: float
    """Look again after so many minutes, if it did not crash."""
    bits: float
    """What it is expected to tell."""
    crash: float
    """Probability that it crashes within that time."""
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it ended, or stands."""

    state: Literal["open", "found", "none", "not-separable", "budget"]
    culprit: int | None
    probability: float
    text: str
    left: tuple[tuple[int, float], ...] = ()
    """What can not be told apart, likeliest first."""


@dataclass(frozen=True, slots=True, order=True)
class _Worth:
    """What one arm for one length is worth."""

    rate: float
    """Bits per minute, restart included."""
    arm: int
    length: float
    crash: float
    bits: float


@dataclass(frozen=True, slots=True)
class _Debt:
    """What the arms owe to a proof."""

    owed: Owed
    rate: float
    """Bits per minute (or start) of it."""

    def bits(self, arm: int, exposure: float) -> float:
        """What so much exposure in an arm is worth for that."""
        return self.rate * paid(self.owed.get(arm, ()), exposure)


@dataclass(frozen=True, slots=True)
class Planner:
    """A bisection over a space. Holds no state: everything follows from the trials.

    space: culprits that no arm can tell apart are made one here (`Space.merged`): ask `planner.space` for words.
    fixed: toggles that can not be turned off here (mask): every arm has them on.
    together: toggle -> toggles that go off with it (masks): without graphs there is no padding of graphs, say.
    barred: arms that SGLang refuses, or that could not be started. Not one in which a trial counted.
    exposure: "load", or "start" if the hunted crash comes before the first request: then every start is one exposure.
    grid: hazards that are believed possible; None: all of that exposure.
    engines: that take part.
    untried: toggles that stay as they are in every arm and are not in the space: nothing is said of them.
    """

    space: Space
    budget: Budget = field(default_factory=Budget)
    fixed: int = 0
    together: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0
    barred: frozenset[int] = frozenset()
    exposure: Literal["load", "start"] = "load"
    grid: Grid | None = None
    engines: int = 1
    untried: tuple[str, ...] = ()
    _asks: dict[int, Asked] = field(init=False, repr=False, compare=False)
    """Per culprit, once it was needed."""
    _arms: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _last: dict[tuple[Trial, ...], Belief] = field(init=False, repr=False, compare=False)
    """The newest belief: a verdict and the choices of all free engines are made from the same trials."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_arms", self._all_arms())
        object.__setattr__(self, "_last", {})
        object.__setattr__(self, "_asks", {})
        same = {culprit: self._closure(culprit) for culprit in self.space.culprits if culprit != OTHER}
        object.__setattr__(self, "space", self.space.merged(same))

    def arms(self) -> tuple[int, ...]:
        """Every set of toggles that a trial may have; of many toggles, those with few of them off or few on."""
        return self._arms

    def _all_arms(self) -> tuple[int, ...]:
        on, free = self.space.all_on, self._free()
        # Few off and few on first: where there are too many, the halves are left out.
        sizes = sorted(range(len(free) + 1), key=lambda size: (min(size, len(free) - size), size))
        found: dict[int, None] = {on: None}
        for size in sizes:
            for group in combinations(free, size):
                if len(found) >= MOST_ARMS:
                    return tuple(found)
                arm = self._effective(on & ~sum(group))
                if arm not in self.barred:
                    found[arm] = None
        return tuple(found)

    def _free(self) -> list[int]:
        return [1 << at for at in range(len(self.space.toggles)) if not self.fixed >> at & 1]

    def _effective(self, arm: int) -> int:
        """What is on if these are asked for."""
        before = -1
        while arm != before:
            before = arm
            for toggle, more in self.together.items():
                if not arm & toggle:
                    arm &= ~more
            arm |= self.fixed
        return arm

    def stands_for(self, culprit: int) -> int:
        """The culprit of `space` that a set of toggles is part of, however many they are."""
        return culprit if culprit == OTHER else self._closure(culprit)

    def _closure(self, culprit: int) -> int:
        """All that is on wherever this culprit is wholly on, but for what is always on."""
        whole = self.space.all_on
        if 1 << len(self._free()) <= MOST_ARMS:
            for arm in self._arms:
                if culprit & arm == culprit:
                    whole &= arm
        else:
            # Not all arms are listed: what refuses an arm or two of so many makes no two culprits alike.
            whole, before = culprit, -1
            while whole != before:
                before = whole
                whole |= sum(toggle for toggle, more in self.together.items() if more & whole and not whole & toggle)
        return whole & ~self.fixed

    def believe(self, trials: Iterable[Trial], running: Iterable[Running] = ()) -> Belief:
        """The posterior; what runs counts as quiet so far."""
        so_far = [Trial(one.arm, one.minutes, crashed=False) for one in running if one.minutes > 0]
        seen = (*trials, *so_far)
        if (found := self._last.get(seen)) is None:
            found = believe(self.space, seen, self.grid or (starts_grid() if self.exposure == "start" else load_grid()))
            self._last.clear()
            self._last[seen] = found
        return found

    def choose(self, trials: Sequence[Trial], running: Sequence[Running] = (), *, engine: str = "") -> Next:
        """What a free engine should do. A trial of its own that it may go on with is in `running` under its name."""
        belief = self.believe(trials, running)
        mean, shown = belief.mean_minutes(), self._seen(trials, running)
        if (last := self._last_word(belief, self._lacks(belief, shown, mean), trials, running, engine)) is not None:
            return last
        others = [one for one in running if one.engine != engine]
        mine = next((one for one in running if one.engine == engine), None)
        lengths = self._lengths(mean)
        outlook = Outlook(belief)
        windows = [outlook.window(length) for length in lengths]
        outlook.beside(others, windows[min(1, len(windows) - 1)])
        debt = _Debt(owed(self._asked(belief), shown, mean, others), OWED_BITS / mean)
        stay = self._stay(outlook, mine, lengths, debt) if mine is not None and self.exposure == "load" else None
        rows = self._best(outlook, windows, debt, but=None if stay is None else stay.arm)
        if stay is not None and (not rows or stay.rate * PATIENCE >= max(row.rate for row in rows)):
            rows = [stay]
        best = max(row.rate for row in rows)
        pick = random.Random(f"{self.seed}/{len(trials)}/{engine}/{len(running)}")
        then = pick.choice([row for row in rows if row.rate >= best * (1.0 - CLOSE)])
        why = self._why(belief, then, goes_on=then is stay)
        return Next(then.arm, self._minutes(then.length), then.bits, then.crash, why)

    def _lengths(self, mean: float) -> list[float]:
        """Lengths of a trial that are weighed, in the unit of exposure."""
        if self.exposure == "start":
            return [1.0]
        scale = max(mean, self.budget.shortest_trial_min)
        return sorted({self._bounded(scale * part) for part in WINDOWS})

    def _minutes(self, length: float) -> float:
        """How long that takes once the engine is ready."""
        return 0.0 if self.exposure == "start" else length

    def _best(self, outlook: Outlook, windows: Sequence[Window], debt: _Debt, *, but: int | None) -> list[_Worth]:
        """What the best arms are worth, and those about as good.

        What an arm tells beside the others is never more than what it tells alone: where that is too little already,
        the dearer question is not asked.
        """
        groups: dict[Group, list[int]] = {}
        for arm in self._arms:
            if arm != but:
                groups.setdefault(outlook.group(arm), []).append(arm)
        restart = self.budget.restart_min
        bounds = []
        for group, arms in groups.items():
            owing = [arm for arm in arms if arm in debt.owed]
            for when in windows:
                crash = outlook.crash(group, when)
                took = when.length * (1.0 - crash / 2)
                rate = 1.0 / (self._minutes(took) + restart)
                pays, needed = max([(debt.bits(arm, took), arm) for arm in owing], default=(0.0, None))
                most = rate * (outlook.alone(group, when, crash) + pays)
                bounds.append((most, rate, group, needed, pays, when, crash))
        bounds.sort(key=lambda row: -row[0])
        found: list[tuple[_Worth, Group, int | None]] = []
        best = 0.0
        for most, rate, group, needed, pays, when, crash in bounds:
            if found and most < best * (1.0 - CLOSE):
                break
            bits = outlook.bits(group, when, crash)
            worth = rate * (bits + pays)
            best = max(best, worth)
            found.append((_Worth(worth, groups[group][0], when.length, crash, bits), group, needed))
        return [
            replace(worth, arm=_most_telling(groups[group], group, outlook) if needed is None else needed)
            for worth, group, needed in found
            if worth.rate >= best * (1.0 - CLOSE)
        ]

    def _stay(self, outlook: Outlook, mine: Running, lengths: Sequence[float], debt: _Debt) -> _Worth:
        """What it is worth to go on with a trial."""
        group, found = outlook.group(mine.arm), []
        for length in lengths:
            when = outlook.window(length, age=mine.minutes)
            crash = outlook.crash(group, when)
            bits, took = outlook.bits(group, when, crash), length * (1.0 - crash / 2)
            found.append(_Worth((bits + debt.bits(mine.arm, took)) / took, mine.arm, length, crash, bits))
        return max(found)

    def _last_word(
        self, belief: Belief, lacks: dict[int, float], trials: Sequence[Trial], running: Sequence[Running], engine: str
    ) -> Next | None:
        """What a named culprit still lacks. It is believed anyway and so tells little, but a person wants it."""
        culprit, chance = belief.best()
        if chance < self._sure(culprit):
            return None
        if engine not in told_by(trials, engine):
            lacks = {arm: left for arm, left in lacks.items() if arm & culprit == culprit}
        if not lacks:
            return None
        # Engines share what is lacking, and one that does its part already goes on with it.
        at_work = {one.arm: one.engine == engine for one in sorted(running, key=lambda one: one.engine == engine)}
        arm = min(lacks, key=lambda arm: 0 if at_work.get(arm) else 1 if arm not in at_work else 2)
        length = self._lengths(belief.mean_minutes())[-1]
        must = "nothing but it is on, and it has to crash"
        if arm & culprit != culprit:
            if self.exposure == "load" and arm in self._ask(culprit).witnessed:
                length = self._bounded(lacks[arm])  # no longer than is asked for
            off = ", ".join(self.space.names(self.space.all_on & ~arm))
            must = f"without {off}, and it has to be quiet, {self._words(math.ceil(lacks[arm]))} more"
        outlook = Outlook(belief)
        crash = outlook.crash(outlook.group(arm), outlook.window(length))
        why = f"{self.space.words(culprit)} is {chance:.0%} sure: now {must}"
        return Next(arm, self._minutes(length), 0.0, crash, why)

    def _lacks(self, belief: Belief, shown: Seen, mean: float) -> dict[int, float]:
        """Arms that have not yet shown what a person asks for before the likeliest culprit is named."""
        culprit, _ = belief.best()
        return {} if culprit == OTHER else shown.lacks(self._ask(culprit), mean)

    def _seen(self, trials: Sequence[Trial], running: Sequence[Running]) -> Seen:
        engines = told_by(trials, *(one.engine for one in running))
        return seen(trials, running, engines, starts=self.exposure == "start")

    def _asked(self, belief: Belief) -> list[tuple[float, Asked]]:
        """(What is believed of a culprit, what it is asked for.)"""
        pairs = zip(belief.space.culprits, belief.probability, strict=True)
        return [(chance, self._ask(one)) for one, chance in pairs if chance >= DOUBTFUL and one != OTHER]

    def _ask(self, culprit: int) -> Asked:
        if (found := self._asks.get(culprit)) is None:
            core = self.space.core(culprit)
            witness: dict[int, float] = {}
            for member in map(self.space.mask, ([name] for name in self.space.names(core))):
                if (rest := self._effective(self.space.all_on & ~member)) not in self.barred:
                    witness[rest] = min(self.space.witnessed(culprit, member), witness.get(rest, math.inf))
            self._asks[culprit] = found = Asked(
                self._bare(culprit),
                {rest: quiet_for(core.bit_count(), factor) for rest, factor in witness.items()},
                frozenset(rest for rest, factor in witness.items() if factor > 1.0),
            )
        return found

    def _sure(self, culprit: int) -> float:
        """Of none of these, more engines are not asked for more: it crashed with everything off."""
        return SURE[self.engines > 1 and culprit != 0]

    def _bare_crashes(self, trials: Sequence[Trial]) -> int:
        """How often it crashed with as much off as can be."""
        bare = self._bare(0)
        return sum(trial.crashed and trial.counts and trial.arm == bare for trial in trials)

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running] = (), *, minutes: float = 0.0) -> Verdict:
        """Where it stands after `minutes` of wall time."""
        belief = self.believe(trials, running)
        culprit, chance = belief.best()
        left = tuple(belief.ranking(0.02))
        words = self.space.words(culprit)
        sure = chance >= self._sure(culprit) and (culprit == 0 or belief.of(0) <= NONE_LEFT[self.engines > 1])
        # Twice with everything off is no stray, and "something else" that crashes there too is not told apart from it.
        sure |= culprit == 0 and chance + belief.of(OTHER) >= SURE[0] and self._bare_crashes(trials) >= 2
        if culprit != OTHER and sure and not self._lacks(belief, self._seen(trials, running), belief.mean_minutes()):
            if culprit == 0:
                text = "it crashes with all of these toggles off"
                return Verdict("none", 0, chance, text if words == "none of these" else f"{text}: {words}")
            text = f"{words}: {self._grounds(culprit, trials, running)}"
            return Verdict("found", culprit, chance, text)
        if belief.of(OTHER) >= SURE[0]:
            text = (
                "no single toggle, pair or triple explains the outcomes: four together, more than one bug, or outcomes "
                "that contradict each other"
            )
            return Verdict("not-separable", None, belief.of(OTHER), text, left)
        if minutes >= self.budget.minutes:
            text = "the budget is spent; left: " + ", ".join(f"{self.space.words(c)} {p:.0%}" for c, p in left)
            if sum(trial.crashed and trial.counts for trial in trials) < 2:
                quiet = self._quiet(trials, running, 0)
                seen = f"it did not crash again in {self._words(quiet)}" if quiet > 0 else "no trial came under traffic"
                text = f"{seen}; {text}"
            return Verdict("budget", None, chance, text, left)
        return Verdict("open", culprit, chance, f"{words} {chance:.0%}", left)

    def _grounds(self, culprit: int, trials: Sequence[Trial], running: Sequence[Running]) -> str:
        """What a person may check by hand: where it crashed, and how long it was quiet without each member."""
        more = self._bare(culprit) & ~culprit & ~self.fixed
        crashed = f"crashes with nothing else on but {', '.join(self.space.names(more))}" if more else ""
        quiet = [
            f"{self._words(self._quiet(trials, running, self.space.mask([name])))} without {name}"
            for name in self.space.names(self.space.core(culprit))
        ]
        tail = f" ({', '.join(quiet)})" if quiet else ""
        beside = f"; not tried: {', '.join(self.untried)}" if self.untried else ""
        nothing = "crashes with nothing else of what was tried on" if self.untried else "crashes with nothing else on"
        return f"{crashed or nothing}, quiet with any of it off{tail}{beside}"

    def _quiet(self, trials: Sequence[Trial], running: Sequence[Running], off: int) -> float:
        """The quiet exposure (minutes or starts) of all arms without `off`; 0: of all arms."""
        ended = [trial for trial in trials if trial.counts and not trial.crashed and not trial.arm & off]
        if self.exposure == "start":
            return float(len(ended))
        return sum(trial.minutes for trial in ended) + sum(one.minutes for one in running if not one.arm & off)

    def _words(self, exposure: float) -> str:
        return f"{exposure:.0f} {'starts' if self.exposure == 'start' else 'min'}"

    def _bare(self, culprit: int) -> int:
        """The arm with the fewest toggles on that has the culprit."""
        if (bare := self._effective(culprit)) not in self.barred:
            return bare
        return min((arm for arm in self._arms if arm & culprit == culprit), key=lambda arm: (arm.bit_count(), arm))

    def _bounded(self, minutes: float) -> float:
        return min(max(minutes, self.budget.shortest_trial_min), self.budget.longest_trial_min)

    def _why(self, belief: Belief, then: _Worth, *, goes_on: bool) -> str:
        names, arm = self.space.names, then.arm
        off = self.space.all_on & ~arm
        if not off:
            what = "everything on"
        elif off.bit_count() <= arm.bit_count():
            what = f"without {', '.join(names(off))}"
        else:
            what = f"only {', '.join(names(arm))}" if arm else "everything off"
        inside = sum(
            chance
            for culprit, chance in zip(self.space.culprits, belief.probability, strict=True)
            if culprit != OTHER and culprit & arm == culprit
        )
        when = "at its start" if self.exposure == "start" else f"within {minutes_text(then.length)}"
        lead = ("go on" if what.startswith("without") else "go on with") if goes_on else "try"
        return (
            f"{lead} {what}: {inside:.0%} of the belief says that it can crash there, "
            f"{then.crash:.0%} that it does {when}"
        )


def _most_telling(arms: Sequence[int], group: Group, outlook: Outlook) -> int:
    """Of arms that tell the same about all that is believed, the one that tells most about what is not.

    A crash tells most with the least on, and quiet with the most on.
    """
    sign = 1 if outlook.expects_crash(group) else -1
    return min(arms, key=lambda arm: (sign * arm.bit_count(), arm))
