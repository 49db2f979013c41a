"""`train.collective`: a collective hangs because one rank is behind.

NCCL's watchdog prints, per process group, the last work that was enqueued and completed. The rank with the lowest
completed number is the one that the others wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rltop.checks.events import DEDUP, hidden, of_kind, side, who, whole, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Verdict

ID = "train.collective"


@dataclass(slots=True)
class _Rank:
    """What one rank's watchdog said last about one group."""

    event: LogEvent
    enqueued: int | None = None
    completed: int | None = None
    op: str = ""
    seq: int | None = None
    events: list[LogEvent] = field(default_factory=list)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per process group with a timeout; the one that hung first comes first."""
    if not obs.logs and not obs.events:
        return [Verdict(ID, "skip", cause=missing(obs, "a log with the lines of NCCL's watchdog"))]
    reports = [event for event in of_kind(obs, "collective") if side(obs, event) != "engine"]
    if not reports:
        return [Verdict(ID, "pass", cause="No watchdog reports a collective that timed out.")]
    groups: dict[str, dict[int, _Rank]] = {}
    unnamed: list[LogEvent] = []
    for event in reports:
        rank = event.rank if event.rank is not None else whole(event, "rank_in_group")
        if rank is None:
            unnamed.append(event)
            continue
        one = groups.setdefault(_group(reports, event, rank), {}).setdefault(rank, _Rank(event))
        one.events.append(event)
        one.enqueued = _or(whole(event, "enqueued"), one.enqueued)
        one.completed = _or(whole(event, "completed"), one.completed)
        one.seq = _or(whole(event, "seq"), one.seq)
        one.op = word(event, "op") or one.op
    if not groups:
        return [_verdict(obs, "", {-1: _Rank(unnamed[0], events=unnamed)})]
    return [_verdict(obs, name, ranks) for name, ranks in list(groups.items())[:4]]


def _or(new: int | None, old: int | None) -> int | None:
    return old if new is None else new


def _group(reports: list[LogEvent], event: LogEvent, rank: int) -> str:
    """Name of the process group; a line without one belongs to the group that the same rank names elsewhere."""
    if name := word(event, "group"):
        return name
    own = {word(e, "group") for e in reports if e.rank == rank or whole(e, "rank_in_group") == rank} - {""}
    return own.pop() if len(own) == 1 else ""


def _verdict(obs: Observations, name: str, ranks: dict[int, _Rank]) -> Verdict:
    done = {rank: one.completed for rank, one in ranks.items() if one.completed is not None}
    if not done:  # the number of the work that timed out says as much: everything before it is complete
        done = {rank: one.seq - 1 for rank, one in ranks.items() if one.seq is not None}
    culprit = min(done, key=lambda rank: (done[rank], rank), default=None)
    lowest = done[culprit] if culprit is not None else None
    others = {rank: number for rank, number in done.items() if rank != culprit}
    behind = culprit is not None and bool(others) and all(number > done[culprit] for number in others.values())
    first = min((one for one in ranks.values()), key=lambda one: one.event.order)
    told = ranks[culprit] if behind and culprit is not None else first
    op = told.op or next((one.op for one in ranks.values() if one.op), "a collective")
    group = f" of process group {name}" if name else ""
    numbers = {
        str(rank): {"enqueued": one.enqueued, "completed": done.get(rank)} for rank, one in sorted(ranks.items())
    }
    if behind and culprit is not None:
        cause = (
            f"Rank {culprit} is behind in {op}{group}: it completed work {lowest}, the others {min(others.values())} "
            "or more and wait for it."
        )
    elif others:
        cause = (
            f"{op}{group} timed out on {len(ranks)} ranks that all completed work {lowest}: the rank that they wait "
            "for wrote no line (unknown)."
        )
    else:
        cause = f"{op}{group} timed out on {who(first.event)}; no other rank wrote a line, so who is behind is unknown."
    every = [event for one in ranks.values() for event in one.events]
    if hidden(every):
        cause += " Ray hid the lines of other ranks."
    evidence = [told.event, *(one.event for one in ranks.values() if one is not told)]
    sure: Confidence = "high" if behind and len(done) >= 2 else "low"
    stack = f"py-spy dump --pid <pid of rank {culprit}>" if behind else "py-spy dump on all ranks"
    return Verdict(
        ID,
        "fail",
        rank=culprit if behind else None,
        value={"group": name or None, "op": op, "ranks": numbers},
        threshold="all ranks complete the same work",
        evidence=tuple(of_event(event) for event in evidence[:4]),
        cause=cause,
        advice=(stack, DEDUP, "TORCH_NCCL_TRACE_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 (flight recorder)"),
        confidence=sure,
    )
