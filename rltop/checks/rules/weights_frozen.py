"""`weights.frozen`: updates succeed, and the engine's weights stay as they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.found import Row
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, num, of_place, of_points, of_samples
from rltop.checks.rules.logprob_gap import METRIC as GAP
from rltop.checks.series import Point, finite, points, rank_correlation
from rltop.checks.syncs import updates
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Status, Verdict

ID = "weights.frozen"
NORM = "train/grad_norm"
RATE = "train/lr-pg_0"
_ANSWERS = (
    "output_sha1",
    "output_sha256",
    "output_hash",
    "sha1",
    "sha256",
    "hash",
    "digest",
    "output",
    "answer",
    "text",
)


@dataclass(frozen=True, slots=True)
class Streak:
    """One prompt's greedy answer, the same over several syncs."""

    first: int
    last: int
    answer: str
    syncs: int
    rows: tuple[Row, ...]


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the greedy answers, one on the versions; `skip` without either."""
    found: list[Verdict] = []
    rows = [row for row in obs.rows if row.kind == "greedy_probe" and _answer(row) and _step(row) is not None]
    if rows:
        found.append(_greedy(obs, t, rows))
    if verdict := _versions(obs, t):
        found.append(verdict)
    what = "a greedy probe over several syncs, or weight versions of several rollouts"
    return found or [Verdict(ID, "skip", cause=missing(obs, what))]


def _answer(row: Row) -> str:
    return next((str(row.fields[key]) for key in _ANSWERS if row.fields.get(key) is not None), "")


def _step(row: Row) -> int | None:
    value = row.fields.get("step", row.fields.get("rollout_id"))
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _greedy(obs: Observations, t: Thresholds, rows: list[Row]) -> Verdict:
    streak = max((_longest(obs, group) for group in _by_prompt(rows)), key=lambda one: one.syncs)
    if streak.syncs < t.frozen_syncs:
        cause = (
            f"The greedy answer was the same over {streak.syncs} syncs at most; {t.frozen_syncs} would be suspicious."
        )
        return Verdict(ID, "pass", value={"syncs": streak.syncs}, threshold={"syncs": t.frozen_syncs}, cause=cause)
    idle = _idle(obs, streak)
    if idle:
        return Verdict(
            ID, "pass", value={"syncs": streak.syncs}, cause=f"The greedy answer stayed the same, but {idle}."
        )
    gap = [point for point in finite(points(obs, GAP)) if streak.first <= point.step <= streak.last]
    drifts = _drifts(gap, t)
    status: Status = "fail" if drifts else "warn"
    confidence: Confidence = "high" if drifts else "medium"
    cause = (
        f"{streak.syncs} updates succeeded from step {streak.first} to {streak.last}, and one greedy answer "
        f"never changed ({streak.answer[:40]!r})"
    )
    if drifts:
        cause += f", while the gap between trainer and engine grew from {num(gap[0].value)} to {num(gap[-1].value)}"
    cause += ": the engine still computes with its old weights. "
    cause += _mechanism(obs)
    return Verdict(
        ID,
        status,
        step=streak.first,
        value={"syncs": streak.syncs, "answer": streak.answer[:80], "from": streak.first, "to": streak.last},
        threshold={"syncs": t.frozen_syncs},
        evidence=(
            *(of_place(row.where) for row in (streak.rows[0], streak.rows[-1])),
            *of_points((gap[0], gap[-1]) if drifts else ()),
        ),
        cause=cause,
        advice=(
            "an engine build with the INT4-RL restore step" if _packed(obs) else "another engine version",
            "restart the engines with a full load and compare the greedy answer",
        ),
        confidence=confidence,
    )


def _mechanism(obs: Observations) -> str:
    if _packed(obs):
        return "With packed INT4 weights the update lands in tensors that repacking has replaced."
    return "The update lands in tensors that the forward pass does not use, or the engine answers from a copy."


def _packed(obs: Observations) -> bool:
    text = " ".join(str((one.config or {}).get("quantization_config", "")) for one in obs.checkpoints)
    return "compressed-tensors" in text or "pack-quantized" in text


def _by_prompt(rows: list[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row.fields.get("prompt", "")), str(row.fields.get("engine", ""))), []).append(row)
    return [sorted(group, key=lambda row: (_step(row) or 0, row.order)) for group in groups.values()]


def _longest(obs: Observations, group: list[Row]) -> Streak:
    best = Streak(0, 0, "", 0, ())
    at = 0
    while at < len(group):
        end = at
        while end + 1 < len(group) and _answer(group[end + 1]) == _answer(group[at]):
            end += 1
        first, last = _step(group[at]) or 0, _step(group[end]) or 0
        syncs = _syncs_between(obs, first, last)
        if syncs > best.syncs:
            best = Streak(first, last, _answer(group[at]), syncs, tuple(group[at : end + 1]))
        at = end + 1
    return best


def _syncs_between(obs: Observations, first: int, last: int) -> int:
    """Successful updates in [first, last): by step, by the rollout that follows, else by order over the whole run."""
    good = [update for update in updates(obs) if update.ok]
    by_step = {update.step for update in good if update.step is not None and first <= update.step < last}
    by_rollout = {update.rollout for update in good if update.rollout is not None and first < update.rollout <= last}
    if by_step or by_rollout:
        return max(len(by_step), len(by_rollout))
    if any(update.step is None and update.rollout is None for update in good):
        return min(last - first, len(good))
    if not good and not updates(obs):  # a finished step is followed by a sync
        steps = {row.step for row in obs.metrics if row.axis == "train" and first <= row.step < last}
        return len(steps)
    return 0


def _idle(obs: Observations, streak: Streak) -> str:
    """Why the weights need not change, or empty."""
    for name, what in ((NORM, "grad_norm"), (RATE, "the learning rate")):
        series = [point for point in points(obs, name) if streak.first <= point.step <= streak.last]
        if series and all(point.value == 0 for point in series):
            return f"{what} was 0 throughout: there was nothing to learn"
        if name == NORM and series and not finite(series):
            return "every step was skipped for a bad gradient"
    return ""


def _drifts(gap: list[Point], t: Thresholds) -> bool:
    if len(gap) < 3:
        return False
    values = [point.value for point in gap]
    rises = values[-1] >= t.frozen_drift_factor * values[0] and values[-1] - values[0] >= t.frozen_drift_rise
    return rises and rank_correlation(values) >= t.frozen_drift_correlation


def _versions(obs: Observations, t: Thresholds) -> Verdict | None:
    """The same weight version over several rollouts with syncs between them. With one side only there are none."""
    if obs.mode in ("rollout-only", "train-only"):
        return None
    by_rollout: dict[tuple[int, int], set[str]] = {}
    for sample in obs.samples:
        if sample.rollout_id is not None and sample.weight_version:
            by_rollout.setdefault((sample.segment, sample.rollout_id), set()).add(sample.weight_version)
    keys = sorted(by_rollout)[-t.recovered_rollouts :]
    for start in range(len(keys)):
        run = [keys[start]]
        for key in keys[start + 1 :]:
            if key[0] != run[0][0] or by_rollout[key] != by_rollout[run[0]]:
                break
            run.append(key)
        version = next(iter(by_rollout[run[0]]))
        if len(run) <= t.frozen_syncs or len(by_rollout[run[0]]) != 1:
            continue
        syncs = _syncs_between(obs, run[0][1], run[-1][1])
        told = any(update.version for update in updates(obs))
        if syncs < t.frozen_syncs or (version in ("default", "0") and not told):
            continue
        shown = [s for s in obs.samples if (s.segment, s.rollout_id) in (run[0], run[-1])]
        return Verdict(
            ID,
            "fail",
            rollout=run[0][1],
            value={"version": version, "from": run[0][1], "to": run[-1][1], "syncs": syncs},
            threshold={"syncs": t.frozen_syncs},
            evidence=_ends(of_samples(shown[:1]), of_samples(shown[-1:])),
            cause=f"Rollouts {run[0][1]} to {run[-1][1]} were all sampled with weights version {version}, although "
            f"{syncs} syncs succeeded between them: the pushed weights never came into use.",
            advice=(
                "restart the engines with a full load",
                "compare /model_info of every engine with the trainer's version",
            ),
            confidence="medium",
        )
    if len({frozenset(versions) for versions in by_rollout.values()}) < 2:
        return None
    cause = "The weight version changes from rollout to rollout."
    return Verdict(ID, "pass", cause=cause, confidence="medium")


def _ends(*parts: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    return tuple(one for part in parts for one in part)
