"""What came of samples that were put to an engine again: the lines that `rltop dump send` prints, and its JSON."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.cli.output import number, table
from rltop.engines.resend import Examined, Sampled, Scored

MOST_SHOWN = 20
MOST_KINDS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answers are told with."""

    url: str
    sample: bool
    """New answers; else log-probs of the recorded ones."""
    tolerance: float


@dataclass(frozen=True, slots=True)
class Line:
    """One sample that was compared."""

    rollout_id: int | None
    at: int
    index: int | None
    versions: tuple[str, ...]
    result: Scored | Sampled
    differs: bool
    repeatable: bool
    """Of an answer: the same weights would give the same again."""


@dataclass(slots=True)
class Seen:
    """All that came of it."""

    sent: int = 0
    lines: list[Line] = field(default_factory=list)
    """The worst, at most MOST_SHOWN."""
    compared: int = 0
    differs: int = 0
    same: int = 0
    """Answers that are the recorded ones, token by token."""
    gaps: array[float] = field(default_factory=lambda: array("f"))
    by_version: dict[str, list[float]] = field(default_factory=dict)
    """Recorded version -> [samples, sum of their mean gaps, largest mean gap]."""
    skipped: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[tuple[int | None, int]]] = field(default_factory=dict)
    stopped: str = ""
    """Why it ended before the last sample."""
    broken: dict[Path, str] = field(default_factory=dict)
    """Dumps that end too early."""

    def add(self, line: Line) -> None:
        """One that was compared."""
        result = line.result
        self.compared += 1
        self.differs += line.differs
        self.gaps.extend(result.gaps)
        if isinstance(result, Sampled):
            self.same += result.same
        else:
            row = self.by_version.setdefault(", ".join(line.versions) or "-", [0.0, 0.0, 0.0])
            row[0] += 1
            row[1] += result.mean_gap
            row[2] = max(row[2], result.mean_gap) if not math.isnan(result.mean_gap) else math.nan
        self.lines.append(line)
        self.lines.sort(key=_badness)
        del self.lines[MOST_SHOWN:]

    def fail(self, why: str, rollout_id: int | None, at: int) -> None:
        """One that could not be compared."""
        self.failed.setdefault(why, []).append((rollout_id, at))


def _badness(line: Line) -> tuple[float, int, int]:
    """Worst first: the largest gap, or the earliest other token."""
    if isinstance(line.result, Sampled):
        at = line.result.diverges_at
        worst = math.inf if line.result.same else float(len(line.result.response_ids) if at is None else at)
    else:
        worst = -math.inf if math.isnan(line.result.mean_gap) else -line.result.mean_gap
    return worst, -1 if line.rollout_id is None else line.rollout_id, line.at


def _summary(gaps: array[float]) -> dict[str, float | int | None]:
    """Of all tokens: mean and largest |difference|, its 99th percentile, and the signed mean."""
    finite = sorted(abs(one) for one in gaps if math.isfinite(one))
    if not finite:
        return {"tokens": len(gaps), "mean": None, "p99": None, "max": None, "bias": None, "not_finite": len(gaps)}
    return {
        "tokens": len(gaps),
        "mean": math.fsum(finite) / len(finite),
        "p99": finite[min(len(finite) - 1, int(0.99 * len(finite)))],
        "max": finite[-1],
        "bias": math.fsum(one for one in gaps if math.isfinite(one)) / len(finite),
        "not_finite": len(gaps) - len(finite),
    }


def lines(asked: Asked, facts: Examined, seen: Seen) -> list[str]:
    """For people."""
    total = _summary(seen.gaps)
    stand_in = f" ({facts.stand_in})" if facts.stand_in else ""
    found = [
        f"engine     {asked.url}{stand_in}",
        f"weights    version {facts.version}, {facts.model_path or 'model unknown'}",
        f"samples    {seen.compared} compared, {seen.differs} differ, {sum(map(len, seen.failed.values()))} failed, "
        f"{seen.skipped.total()} left out",
    ]
    if seen.stopped:
        found.append(f"STOPPED    {seen.stopped}")
    if asked.sample:
        found.append(f"answers    {seen.same} the same, token by token")
        what = "log-probs of the tokens before the first other one"
    else:
        what = "log-probs of the recorded tokens (teacher-forced)"
    if total["mean"] is not None:
        found += [
            f"{what}: |engine - dump| per token",
            f"  mean {number(total['mean'])}  p99 {number(total['p99'])}  max {number(total['max'])}  "
            f"engine - dump {number(total['bias'])}  tokens {total['tokens']}  NaN or Inf {total['not_finite']}",
        ]
        if not asked.sample:
            found.append(f"  a sample differs from a mean of {asked.tolerance:g} on")
    if seen.by_version:
        rows = [
            (version, int(row[0]), row[1] / row[0], row[2], "" if version == facts.version else "other weights")
            for version, row in sorted(seen.by_version.items())
        ]
        found += ["", *table(("recorded version", "samples", "mean gap", "largest", ""), rows)]
    found += _worst(asked, seen)
    for why, these in list(seen.failed.items())[:MOST_KINDS]:
        rollout, at = these[0]
        found.append(f"failed     {len(these)} samples: {why} (first: rollout {number(rollout)} at {at})")
    found += [f"BROKEN     {told}" for told in seen.broken.values()]
    return found + [f"left out   {count} samples: {why}" for why, count in seen.skipped.most_common(MOST_KINDS)]


def _worst(asked: Asked, seen: Seen) -> list[str]:
    if not seen.lines:
        return []
    if asked.sample:
        rows = [_sampled_row(line) for line in seen.lines if not line.result.same]  # type: ignore[union-attr]
        head = ("rollout", "at", "same tokens", "recorded", "now", "finish", "", "answer now")
        return ["", *table(head, rows)] if rows else []
    rows = [_scored_row(line) for line in seen.lines]
    return ["", *table(("rollout", "at", "tokens", "mean gap", "max gap", "token", "id", "dump", "engine", ""), rows)]


def _sampled_row(line: Line) -> tuple[Any, ...]:
    result: Any = line.result
    same = min(len(result.response_ids), result.recorded_length) if result.diverges_at is None else result.diverges_at
    told = "differs" if line.differs else "not repeatable" if not line.repeatable else ""
    lengths = (result.recorded_length, len(result.response_ids))
    return (line.rollout_id, line.at, same, *lengths, result.finish, told, result.text[-60:])


def _scored_row(line: Line) -> tuple[Any, ...]:
    result: Any = line.result
    token, dump, engine = result.worst
    gap = (result.mean_gap, result.max_gap, result.worst_at)
    return (line.rollout_id, line.at, len(result.gaps), *gap, token, dump, engine, "differs" if line.differs else "")


def as_object(asked: Asked, facts: Examined, seen: Seen) -> dict[str, Any]:
    """For programs (docs/cli.md)."""
    return {
        "url": asked.url,
        "mode": "sample" if asked.sample else "score",
        "engine": {
            "weight_version": facts.version,
            "model_path": facts.model_path,
            "stand_in": facts.stand_in or None,
            "vocab_size": facts.vocab_size,
        },
        "compared": seen.compared,
        "differ": seen.differs,
        "same_answers": seen.same if asked.sample else None,
        "tolerance": asked.tolerance,
        "gap": _summary(seen.gaps),
        "by_version": {
            version: {"samples": int(row[0]), "mean_gap": row[1] / row[0], "largest_mean_gap": row[2]}
            for version, row in sorted(seen.by_version.items())
        },
        "worst": [_line_object(line) for line in seen.lines],
        "failed": [
            {"why": why, "samples": len(these), "first": {"rollout_id": these[0][0], "at": these[0][1]}}
            for why, these in seen.failed.items()
        ],
        "left_out": dict(seen.skipped),
        "stopped": seen.stopped or None,
        "broken": list(seen.broken.values()),
    }


def _line_object(line: Line) -> dict[str, Any]:
    found = {
        "rollout_id": line.rollout_id,
        "at": line.at,
        "index": line.index,
        "weight_versions": list(line.versions),
        "differs": line.differs,
    }
    result = line.result
    if isinstance(result, Sampled):
        return found | {
            "first_other_token": result.diverges_at,
            "recorded_length": result.recorded_length,
            "length": len(result.response_ids),
            "finish_reason": result.finish,
            "repeatable": line.repeatable,
            "text": result.text,
        }
    token, dump, engine = result.worst
    return found | {
        "tokens": len(result.gaps),
        "mean_gap": result.mean_gap,
        "max_gap": result.max_gap,
        "worst_token": {"at": result.worst_at, "id": token, "dump": dump, "engine": engine},
    }
