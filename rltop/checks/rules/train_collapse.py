"""`train.collapse`: training itself went wrong.

A rule of the last stages: a fault of sync, engine or numbers gives the same picture, and is then the explanation. A
first rollout that is good and later garbage is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rltop.checks.facts import NO_TRAINER, fires
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_points
from rltop.checks.series import Point, finite, median, points, segments
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ID = "train.collapse"
STAGE = 2
REWARD = ("rollout/raw_reward", "rollout/rewards_mean", "rollout/reward")
KL = ("train/kl_loss", "train/ppo_kl")
ENTROPY = ("train/entropy_loss", "train/entropy", "rollout/entropy")
REPETITION = ("rollout/repetition_frac",)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the newest run with enough rollouts."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    rewards = next((found for name in REWARD if (found := finite(points(obs, name, "rollout")))), ())
    parts = [part for part in segments(rewards) if sum(p.span for p in part) >= t.collapse_rollouts]
    if not parts:
        cause = missing(obs, f"the reward (rollout/raw_reward) of {t.collapse_rollouts} rollouts")
        return [Verdict(ID, "skip", cause=cause)]
    part = parts[-1]
    best, now = _best(part, t), median(p.value for p in part[-t.collapse_recent :])
    value: dict[str, object] = {"best": jnum(best), "now": jnum(now)}
    limits = {"reward": t.collapse_drop, "kl_factor": t.collapse_kl_factor, "entropy": t.collapse_entropy}
    if not (best > 0 and now < t.collapse_drop * best):
        cause = f"The reward holds: its newest median is {num(now)}, the best stretch {num(best)}."
        last = part[-1]
        where = of_points((last,))
        return [Verdict(ID, "pass", rollout=last.rollout, value=value, threshold=limits, evidence=where, cause=cause)]
    if other := fires(obs, "weights.*", "engine.*", "train.nan"):
        cause = f"The reward fell from {num(best)} to {num(now)}, but {other[0].id} explains it."
        return [Verdict(ID, "pass", value=value, threshold=limits, cause=cause)]
    signs = _signs(obs, t, part[0].segment)
    if not signs:
        cause = (
            f"The reward fell from {num(best)} to {num(now)}, but neither KL, entropy, log-prob gap, repetition nor "
            "text says that training went wrong."
        )
        return [Verdict(ID, "pass", value=value, threshold=limits, cause=cause, confidence="low")]
    start = _fall(part, best, t)
    text = " and ".join(sign for sign, _ in signs)
    return [
        Verdict(
            ID,
            "fail",
            rollout=start.rollout,
            value=value | {"signs": [sign for sign, _ in signs]},
            threshold=limits,
            evidence=(*of_points((start, part[-1])), *(place for _, places in signs for place in places[:1])),
            cause=(
                f"Training went wrong: the reward fell from {num(best)} to {num(now)} from rollout {start.rollout} on, "
                f"and {text}; no sync, engine or number fault explains it."
            ),
            advice=(
                "check the reward function on samples of the rollouts around the fall",
                "a lower --lr, a larger --kl-loss-coef, a smaller --eps-clip",
                f"go back to the last checkpoint before rollout {start.rollout} (--ckpt-step)",
            ),
            confidence="medium",
        )
    ]


def _best(part: Sequence[Point], t: Thresholds) -> float:
    size = t.collapse_rollouts
    stretches = [part[i : i + size] for i in range(max(1, len(part) - size + 1))]
    return max(median(point.value for point in stretch) for stretch in stretches)


def _fall(part: Sequence[Point], best: float, t: Thresholds) -> Point:
    """First rollout after which the reward never comes back."""
    at = len(part) - 1
    while at > 0 and part[at - 1].value < t.collapse_drop * best:
        at -= 1
    return part[at]


def _series(obs: Observations, names: Sequence[str], segment: int) -> tuple[Point, ...]:
    for name in names:
        found = finite(points(obs, name, "rollout" if name.startswith("rollout/") else "train"))
        if same := tuple(point for point in found if point.segment == segment):
            return same
    return ()


def _signs(obs: Observations, t: Thresholds, segment: int) -> list[tuple[str, tuple[Evidence, ...]]]:
    """What says, besides the reward, that training went wrong."""
    found: list[tuple[str, tuple[Evidence, ...]]] = []
    for name in KL:
        kl = _series(obs, (name,), segment)
        if len(kl) >= t.collapse_rollouts:
            level = median(abs(p.value) for p in kl)
            now = median(abs(p.value) for p in kl[-t.collapse_recent :])
            if now > t.collapse_kl_factor * level and now > t.collapse_kl_floor:
                found.append((f"{name} rose from {num(level)} to {num(now)}", of_points((kl[-1],))))
                break
    entropy = _series(obs, ENTROPY, segment)
    if len(entropy) >= t.collapse_rollouts:
        begun = median(p.value for p in entropy[: t.collapse_recent])
        now = median(p.value for p in entropy[-t.collapse_recent :])
        if begun > 0 and now < t.collapse_entropy * begun:
            found.append((f"the entropy fell from {num(begun)} to {num(now)}", of_points((entropy[-1],))))
    repeated = _series(obs, REPETITION, segment)
    if repeated and (now := median(p.value for p in repeated[-t.collapse_recent :])) > t.collapse_repetition:
        found.append((f"{num(100 * now)} % of the responses repeat themselves", of_points((repeated[-1],))))
    for drift in fires(obs, "logprob.drift"):
        found.append(("the train/rollout log-prob gap grows", drift.evidence))
    for text in fires(obs, "rollout.text"):
        if text.rollout is None or text.rollout > 1:
            found.append(("the text went bad", text.evidence))
    return found
