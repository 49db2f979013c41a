"""`rollout.reward-flat`: the rewards carry no signal although the text is sound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.facts import fires
from rltop.checks.observe import Observations, Sample
from rltop.checks.phrase import jnum, missing, num, of_points, of_samples
from rltop.checks.series import Point, finite, points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ID = "rollout.reward-flat"
REWARD = "rollout/raw_reward"
ZERO_STD = "rollout/zero_std/"


@dataclass(frozen=True, slots=True)
class Rollout:
    """The rewards of one rollout."""

    segment: int
    rollout: int
    mean: float
    flat: bool
    """Every group has one reward."""
    evidence: tuple[Evidence, ...]


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict, on the newest rollouts."""
    rollouts = _rollouts(obs)
    if not rollouts:
        what = "raw_reward is not logged in rollout-only mode; compute it from a dump"
        return [Verdict(ID, "skip", cause=what if obs.mode == "rollout-only" else missing(obs, REWARD))]
    if others := fires(obs, "rollout.text", "rollout.truncated"):
        cause = f"{others[0].id} fires: rewards of such responses say nothing about the reward function"
        return [Verdict(ID, "skip", cause=cause)]
    last = rollouts[-1]
    streak: list[Rollout] = []
    for one in reversed(rollouts):
        if not (one.flat and one.segment == last.segment and (one.mean == 0) == (last.mean == 0)):
            break
        streak.insert(0, one)
    value: dict[str, object] = {"mean": jnum(last.mean), "rollouts": len(streak)}
    threshold = {"rollouts": t.reward_flat_rollouts}
    if len(streak) < t.reward_flat_rollouts:
        cause = f"The rewards carry a signal: their mean is {num(last.mean)} in rollout {last.rollout}"
        cause += "." if not streak else "; too few rollouts were flat to say more."
        return [Verdict(ID, "pass", rollout=last.rollout, value=value, threshold=threshold, cause=cause)]
    evidence = (*streak[0].evidence, *last.evidence)
    span = f"From rollout {streak[0].rollout} to {last.rollout}"
    if last.mean != 0:
        cause = (
            f"{span} every group has one reward (mean {num(last.mean)}): the task is too easy, nothing can be learnt."
        )
        return [
            Verdict(
                ID, "info", rollout=streak[0].rollout, value=value, threshold=threshold, evidence=evidence, cause=cause
            )
        ]
    return [_zero(obs, streak, span, value, threshold, evidence)]


def _zero(
    obs: Observations,
    streak: list[Rollout],
    span: str,
    value: dict[str, object],
    threshold: dict[str, int],
    evidence: tuple[Evidence, ...],
) -> Verdict:
    ids = {one.rollout for one in streak}
    right = [s for s in obs.samples if s.label_shown and (s.rollout_id in ids or s.rollout_id is None) and not s.reward]
    cause = f"{span} every reward is 0 and no group has any spread: there is nothing to learn."
    if right:
        cause += (
            f" {len(right)} responses contain their label and still got 0: the grader does not accept their format."
        )
    return Verdict(
        ID,
        "fail" if right else "warn",
        rollout=streak[0].rollout,
        value=value | {"right_but_zero": len(right)},
        threshold=threshold,
        evidence=(*evidence, *of_samples(right)),
        cause=cause,
        advice=(
            "run the reward function on one printed sample",
            "--rm-type: check the answer format that it expects (\\boxed{}, <answer>)",
            "strip thinking tags before the grader sees the response",
        ),
    )


def _rollouts(obs: Observations) -> list[Rollout]:
    groups: dict[tuple[int, int], dict[int, set[float]]] = {}
    shown: dict[tuple[int, int], list[Sample]] = {}
    for sample in obs.samples:
        reward = sample.reward
        if reward is not None and math.isfinite(reward) and sample.rollout_id is not None and sample.group is not None:
            key = (sample.segment, sample.rollout_id)
            groups.setdefault(key, {}).setdefault(sample.group, set()).add(reward)
            shown.setdefault(key, []).append(sample)
    found: dict[tuple[int, int], Rollout] = {}
    for point in finite(points(obs, REWARD, "rollout")):
        key = (point.segment, point.step)
        flat = _flat_by_counts(obs, point)
        if flat is None:
            flat = (
                all(len(rewards) == 1 for rewards in groups[key].values()) if key in groups else _all_zero(obs, point)
            )
        found[key] = Rollout(point.segment, point.step, point.value, flat, of_points((point,)))
    for key, rewards in groups.items():
        if key not in found and any(len(one) >= 1 for one in rewards.values()):
            values = [sample.reward or 0.0 for sample in shown[key]]
            flat = all(len(one) == 1 for one in rewards.values()) and len(values) > len(rewards)
            found[key] = Rollout(*key, sum(values) / len(values), flat, of_samples(shown[key], most=1))
    return [found[key] for key in sorted(found)]


def _all_zero(obs: Observations, point: Point) -> bool:
    """A mean of 0, and every sample of the rollout got 0."""
    known = [s.reward for s in obs.samples if s.rollout_id in (point.rollout, None) and s.reward is not None]
    return point.value == 0 and len(known) > 1 and not any(known)


def _flat_by_counts(obs: Observations, point: Point) -> bool | None:
    """From slime's counts of groups without spread; None where they do not tell."""
    counts: dict[str, float] = {}
    for row in obs.metrics:
        if row.axis == "rollout" and row.segment == point.segment and row.step == point.step:
            counts |= {name: value for name, value in row.values.items() if name.startswith(ZERO_STD)}
    if not counts:
        return None
    prompts = obs.args.number("rollout_batch_size")
    if prompts:
        return sum(counts.values()) >= prompts
    others = [value for name, value in counts.items() if not name.rsplit("_", 1)[-1].startswith(("0", "-0"))]
    zeros = sum(counts.values()) - sum(others)
    return point.value == 0 and zeros > 0 and not any(others)
