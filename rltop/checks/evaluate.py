"""Runs all rules over the observations and puts the verdicts in order: root causes first, consequences under them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import msgspec

from rltop.checks.catalogue import CATALOGUE, Entry, Explains
from rltop.checks.facts import NO_ENGINE, NO_TRAINER
from rltop.checks.observe import Axis, Observations
from rltop.checks.phrase import num
from rltop.checks.registry import RULES, Rule
from rltop.checks.rules.train_skipped import skipped_steps
from rltop.checks.series import finite, points
from rltop.checks.thresholds import DEFAULTS, Thresholds
from rltop.checks.verdict import FIRING, STATUSES, Report, Status, Verdict

_AXES: tuple[Axis, ...] = ("train", "rollout")
NO_RULE = "this build has no rule for it yet"
_WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "info", "pass", "skip")


def evaluate(obs: Observations, thresholds: Thresholds = DEFAULTS, *, rules: Sequence[Rule] = RULES) -> Report:
    """All verdicts on a run, in catalogue order. Pure: the same observations give the same report.

    A rule that raises is isolated: its check becomes `skip` with the error named (value `rule_error`); the others go
    on.
    """
    by_id = {rule.id: rule for rule in rules}
    found: dict[str, list[Verdict]] = {}
    for stage in range(max((rule.stage for rule in rules), default=0) + 1):
        seen = _seeing(obs, [verdict for verdicts in found.values() for verdict in verdicts]) if stage else obs
        for entry in CATALOGUE:
            rule = by_id.get(entry.id)
            if (rule.stage if rule else 0) == stage:
                found[entry.id] = _run(entry, rule, seen, thresholds)
    return assemble(verdict for entry in CATALOGUE for verdict in found[entry.id])


def _seeing(obs: Observations, verdicts: list[Verdict]) -> Observations:
    """The same facts, with what the rules before said; series that were worked out already stay so."""
    later = dataclasses.replace(obs, verdicts=tuple(verdicts))
    later.memo.update(obs.memo)
    return later


def assemble(verdicts: Iterable[Verdict]) -> Report:
    """Report from verdicts in catalogue order: consequences marked, root causes ordered, statuses counted."""
    folded = _fold(list(verdicts))
    summary: dict[str, int] = {status: sum(v.status == status for v in folded) for status in STATUSES}
    return Report(verdicts=tuple(folded), root_causes=_root_causes(folded), summary=summary)


def joined(report: Report, told: Iterable[Verdict]) -> Report:
    """The report, with the verdicts that a run's daemon gave while it could see more than what is left of the run.

    Of one check the worse holds (fail, warn, info, pass, skip); of two that are equally bad the report's own, which
    names file and line. A told verdict of a check that is not in the catalogue is left out.
    """
    by_id: dict[str, list[Verdict]] = {entry.id: [] for entry in CATALOGUE}
    for verdict in report.verdicts:
        by_id[verdict.id].append(verdict)
    for verdict in told:
        own = by_id.get(verdict.id)
        if own and _WORST_FIRST.index(verdict.status) < min(_WORST_FIRST.index(one.status) for one in own):
            by_id[verdict.id] = [verdict, *(one for one in own if one.status in FIRING)]
    every = (verdict for found in by_id.values() for verdict in found)
    return assemble(msgspec.structs.replace(verdict, consequence_of=()) for verdict in every)


def _run(entry: Entry, rule: Rule | None, obs: Observations, thresholds: Thresholds) -> list[Verdict]:
    if rule is None:
        return [Verdict(entry.id, "skip", cause=NO_RULE, refs=entry.refs)]
    try:
        found = list(rule.function(obs, thresholds))
    except Exception as error:  # one broken rule must not hide what the others see
        what = f"{type(error).__name__}: {error}"
        cause = f"the rule itself failed, which is a defect of rltop and says nothing about the run: {what}"
        return [
            Verdict(
                entry.id,
                "skip",
                value={"rule_error": type(error).__name__},
                cause=cause,
                confidence="low",
                refs=entry.refs,
            )
        ]
    if not found:
        return [Verdict(entry.id, "skip", cause="the rule found nothing to judge", refs=entry.refs)]
    found = [_unless_outdated(obs, rule, _unless_absent(obs, verdict)) for verdict in found]
    return [
        msgspec.structs.replace(
            verdict, refs=verdict.refs or entry.refs, evidence=tuple(dict.fromkeys(verdict.evidence))
        )
        for verdict in found
    ]


def _unless_absent(obs: Observations, verdict: Verdict) -> Verdict:
    """A side that was not started has passed nothing."""
    area = verdict.id.partition(".")[0]
    why = NO_ENGINE if obs.mode == "train-only" and area in ("engine", "weights") else ""
    why = NO_TRAINER if obs.mode == "rollout-only" and area in ("train", "kl", "logprob") else why
    if verdict.status != "pass" or verdict.evidence or not why:
        return verdict
    return Verdict(verdict.id, "skip", cause=why)


def _unless_outdated(obs: Observations, rule: Rule, verdict: Verdict) -> Verdict:
    """A pass on numbers of earlier steps is none while the newest value is no number. One skipped step alone says
    nothing: it left the run as it was."""
    if verdict.status != "pass":
        return verdict
    for name in rule.newest:
        for axis in _AXES:
            series = points(obs, name, axis)
            numbers = finite(series)
            if not numbers:
                continue
            if math.isfinite(series[-1].value):
                return verdict
            last = numbers[-1]
            first = series[series.index(last) + 1]
            if first is series[-1] and (first.segment, first.step) in {(p.segment, p.step) for p in skipped_steps(obs)}:
                return verdict
            where = f"rollout {first.step}" if axis == "rollout" else f"step {first.step}"
            cause = f"{name} is {num(first.value)} since {where}; the last number was {num(last.value)} at {last.step}"
            return Verdict(
                verdict.id, "skip", rollout=first.rollout, step=None if axis == "rollout" else first.step, cause=cause
            )
    return verdict


def _fold(verdicts: list[Verdict]) -> list[Verdict]:
    """Marks every firing verdict that another firing one explains."""
    firing = [v for v in verdicts if v.status in FIRING]
    explains = {entry.id: entry.explains for entry in CATALOGUE}
    folded = []
    for verdict in verdicts:
        causes: list[str] = []
        if verdict.status in FIRING:
            causes = [c.id for c in firing if any(_explains(c, e, verdict) for e in explains.get(c.id, ()))]
        folded.append(
            msgspec.structs.replace(verdict, consequence_of=tuple(dict.fromkeys(causes))) if causes else verdict
        )
    return folded


def _explains(cause: Verdict, rule: Explains, effect: Verdict) -> bool:
    if cause.id == effect.id or not _matches(rule.target, effect.id):
        return False
    if rule.only_fail and cause.status != "fail":
        return False
    if rule.first_step and effect.step not in (0, 1, None):
        return False
    if rule.pattern and (not isinstance(effect.value, dict) or effect.value.get("pattern") != rule.pattern):
        return False
    return _same_subject(cause, effect) and not _before(effect, cause)


def _matches(target: str, id: str) -> bool:  # noqa: A002
    return target == id or (target.endswith(".*") and id.startswith(target[:-1]))


def _same_subject(left: Verdict, right: Verdict) -> bool:
    """Neither names an engine or rank that the other contradicts."""
    # A log counts engines, a stream names them, a capture knows their addresses: only names of one sort contradict.
    one, other = str(left.engine), str(right.engine)
    engines = left.engine is None or right.engine is None or one == other or (":" in one) != (":" in other)
    ranks = left.rank is None or right.rank is None or left.rank == right.rank
    return engines and ranks


def _before(left: Verdict, right: Verdict) -> bool:
    """`left`'s first evidence is earlier than `right`'s, as far as both say."""
    if left.rollout is not None and right.rollout is not None and left.rollout != right.rollout:
        return left.rollout < right.rollout
    if left.step is not None and right.step is not None:
        return left.step < right.step
    return False


def _root_causes(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Ids of the firing verdicts that nothing explains: fails first, then catalogue order, then time."""
    order = {entry.id: i for i, entry in enumerate(CATALOGUE)}
    roots = [v for v in verdicts if v.status in FIRING and not v.consequence_of]
    roots.sort(key=lambda v: (FIRING.index(v.status), order.get(v.id, len(order)), _when(v)))
    return tuple(dict.fromkeys(v.id for v in roots))


def _when(verdict: Verdict) -> tuple[float, float]:
    last = float("inf")
    return (
        last if verdict.rollout is None else verdict.rollout,
        last if verdict.step is None else verdict.step,
    )
