"""`train.replay`: training on the same dump again gives the same loss and grad_norm.

The trainer logs what the earlier run had at each step (`train/replay_loss`, `train/replay_grad_norm`) and how far each
may differ: 0 in the same layout, in another one what rounding allows. Without the tolerances the two runs are not
comparable, and the trainer's log says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rltop.checks.facts import NO_TRAINER
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, num, of_points
from rltop.checks.series import Point, points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

ID = "train.replay"
NAMES = ("loss", "grad_norm")
METRICS = tuple(f"train/{name}" for one in NAMES for name in (one, f"replay_{one}", f"replay_{one}_tolerance"))
_Key = tuple[int, int]


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: the first step that differs by more than it may, else the largest difference."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    there = {name: _by_step(obs, f"replay_{name}") for name in NAMES}
    if not there["loss"]:
        return [Verdict(ID, "skip", cause="no steps of an earlier run on the same dumps are at hand")]
    allowed = {name: _by_step(obs, f"replay_{name}_tolerance") for name in NAMES}
    pairs = [
        (mine, there[name][key], allowed[name].get(key))
        for name in NAMES
        for key, mine in _by_step(obs, name).items()
        if key in there[name]
    ]
    judged = [(mine, other, limit) for mine, other, limit in pairs if limit is not None]
    if not judged:
        cause = "the earlier run on these dumps is not comparable; the trainer's log says what differs"
        return [Verdict(ID, "info", cause=cause, evidence=of_points([pair[0] for pair in pairs[:1]]))]
    off = [(mine, other, limit) for mine, other, limit in judged if not _gap(mine, other) <= limit.value]
    if off:
        return [_deviates(min(off, key=lambda pair: pair[0].order))]
    mine, other, limit = max(judged, key=lambda pair: _gap(pair[0], pair[1]))
    steps = len({(one.segment, one.step) for one, _, _ in judged})
    gap = _gap(mine, other)
    cause = (
        f"Loss and grad_norm of {steps} steps are those of the earlier run on these dumps, bit for bit."
        if gap == 0
        else f"Loss and grad_norm of {steps} steps are those of the earlier run on these dumps within rounding; the "
        f"largest difference is {num(gap)} in {mine.name} (tolerance {num(limit.value)})."
    )
    last = max((one for one, _, _ in judged), key=lambda point: point.order)
    return [
        Verdict(
            ID,
            "pass",
            rollout=last.rollout,
            step=last.step,
            value={"steps": steps, "largest": jnum(gap), "of": mine.name},
            threshold=jnum(limit.value),
            evidence=of_points((last,)),
            cause=cause,
            confidence="high",
        )
    ]


def _deviates(pair: tuple[Point, Point, Point]) -> Verdict:
    mine, other, limit = pair
    exact = limit.value == 0
    why = (
        "same dump, weights, arguments, layout and machine should give the same bits"
        if exact
        else "other parallel sizes explain less"
    )
    return Verdict(
        ID,
        "fail",
        rollout=mine.rollout,
        step=mine.step,
        value={mine.name: jnum(mine.value), other.name: jnum(other.value)},
        threshold=jnum(limit.value),
        evidence=of_points((mine, other)),
        cause=f"{mine.name} is {_digits(mine.value)} at step {mine.step}, the earlier run on the same dumps had "
        f"{_digits(other.value)}: {why} (tolerance {num(limit.value)}).",
        advice=("--deterministic",)
        if exact
        else ("replay with the earlier sizes: if that is equal bit for bit, the parallel code is at fault",),
        confidence="high" if exact else "medium",
    )


def _by_step(obs: Observations, name: str) -> dict[_Key, Point]:
    return {(point.segment, point.step): point for point in points(obs, f"train/{name}")}


def _digits(value: float) -> str:
    """As many as an fp32 number has."""
    return f"{value:.9g}" if math.isfinite(value) else num(value)


def _gap(mine: Point, other: Point) -> float:
    """0 for equal values, NaN and Inf among them."""
    same = mine.value == other.value or (math.isnan(mine.value) and math.isnan(other.value))
    return 0.0 if same else abs(mine.value - other.value)
