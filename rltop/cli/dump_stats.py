"""`rltop dump stats`: the metrics that slime would log for each dump, computed from its samples, and its groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rltop.cli.dump_open import chosen_dumps, no_samples, opened
from rltop.cli.output import clean, note, number, print_json, size, table
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_stats import DumpStats

MOST_SHOWN = 60
"""Characters of a prompt in the table."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a dump does not say of its run, under slime's names."""

    reward_key: str | None = None
    log_reward_category: str | None = None
    rollout_time_s: float | None = None
    rollout_num_gpus: int | None = None


def stats(pattern: str, asked: Asked, *, groups: int, evaluation: bool, as_json: bool) -> int:
    """The command. groups: rows of the table of groups, those of the widest rewards first."""
    told = []
    broken: list[RltopError] = []
    refs = chosen_dumps(pattern, evaluation=evaluation)
    for ref in refs:
        try:
            found = _computed(ref, asked)
        except RltopError as error:  # the others can be read; metrics of a part of it are none
            broken.append(error)
            continue
        rows = [group.row() for group in found.groups()]
        if found.no_samples:
            at, why = found.no_samples[0]
            broken.append(no_samples(ref, len(found.no_samples), at, why))
        if as_json:
            told.append(_json(ref, found, rows))
        else:
            print("\n".join(_lines(ref, found, rows, groups)))
    if as_json:
        print_json({"dumps": told, "broken": [str(one) for one in broken]})
    if len(refs) == 1 and broken:
        raise broken[0]
    for one in broken:
        note(f"rltop: {one}")
    return 1 if broken else 0


def _computed(ref: DumpRef, asked: Asked) -> DumpStats:
    from rltop.evidence.dump_stats import DumpStats

    found = DumpStats(
        is_eval=ref.is_eval,
        reward_key=asked.reward_key,
        log_reward_category=asked.log_reward_category,
        rollout_time_s=asked.rollout_time_s,
        rollout_num_gpus=asked.rollout_num_gpus,
    )
    with opened(ref) as dump:
        for sample in dump.samples():
            found.add(sample, dump.trained(sample))
    return found


def _widest(std: float | None) -> float:
    """To sort by: NaN first, then from wide to narrow."""
    return 0.0 if std is None else -math.inf if math.isnan(std) else -std


def _json(ref: DumpRef, found: DumpStats, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "path": str(ref.path),
        "rollout_id": ref.rollout_id,
        "eval": ref.is_eval,
        "samples": found.count,
        "metrics": found.metrics(),
        "absent": found.absent(),
        "remarks": found.remarks(),
        "groups": rows,
    }


def _lines(ref: DumpRef, found: DumpStats, rows: list[dict[str, Any]], groups: int) -> list[str]:
    kind = "eval of rollout" if ref.is_eval else "rollout"
    lines = [f"{ref.path}  {kind} {number(ref.rollout_id)}  {found.count} samples  {size(ref.bytes)}"]
    lines += table(("metric", "value"), list(found.metrics().items()), indent="  ")
    lines += [f"  note: {clean(remark)}" for remark in found.remarks()]
    lines += [f"  not here: {name} ({why})" for name, why in found.absent().items()]
    if not groups or not rows:
        return [*lines, ""]
    # All right and all wrong teach nothing: what has spread comes first, as in the advantages of GRPO.
    best = sorted(rows, key=lambda row: _widest(row["reward_std"]))[:groups]
    head = ("group", "samples", "reward", "std", "min", "max", "tokens", "truncated", "prompt")
    cells = [
        (
            row["group"],
            row["samples"],
            row["reward_mean"],
            row["reward_std"],
            row["reward_min"],
            row["reward_max"],
            row["response_length_mean"],
            row["truncated"],
            clean(row["prompt"])[:MOST_SHOWN],
        )
        for row in best
    ]
    lines += ["", *table(head, cells, indent="  ")]
    if len(rows) > len(best):
        note(f"{len(best)} of {len(rows)} groups, those of the widest rewards: --groups {len(rows)} for all")
    return [*lines, ""]
