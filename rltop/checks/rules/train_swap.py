"""`train.colocate-swap`: colocate survives the second step.

Trainer and engines share GPUs and wake each other up. The first wake-up of each side is in step 2, so one clean step
proves nothing; split debugging runs do not test it at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.events import frames, goes_on, number, of_kind, side, who, whole, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event, of_flags, of_points
from rltop.checks.series import points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ID = "train.colocate-swap"
_RESUME = re.compile(r"resume|wake_up|onload|reload_process_groups|torch_memory_saver", re.I)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    if obs.mode != "full":
        cause = f"a {obs.mode} run starts one side only and does not test the swap"
        return [Verdict(ID, "skip", cause=cause)]
    swaps = [e for e in of_kind(obs, "timer") if word(e, "name") in ("wake_up", "sleep")]
    if obs.args.flags and not obs.args.on("colocate"):
        return [Verdict(ID, "skip", cause="the run is not colocated (no --colocate)")]
    if not obs.args.flags and not swaps and not of_kind(obs, "memory_saver", "release", "resume"):
        return [Verdict(ID, "skip", cause=missing(obs, "that the run is colocated (arguments, wake-up lines)"))]
    broken = _broken(obs)
    if broken:
        return [_fail(obs, broken)]
    rollouts, steps = _done(obs)
    if len(rollouts) >= 2 and len(steps) >= 2:
        evidence = of_points(points(obs, "train/loss")[1:2])
        cause = f"{len(rollouts)} rollouts and {len(steps)} steps are complete: both sides woke up and went on."
        value = {"rollouts": len(rollouts), "steps": len(steps)}
        return [Verdict(ID, "pass", value=value, threshold=2, evidence=evidence, cause=cause, confidence="medium")]
    if death := _between(obs, rollouts, steps):
        return [_fail(obs, [death])]
    return [Verdict(ID, "skip", cause=missing(obs, "a second rollout and a second step"))]


def _done(obs: Observations) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(segment, id) of the rollouts that were generated and of the steps that were finished."""
    rollouts = {(row.segment, row.step) for row in obs.metrics if row.axis == "rollout"}
    steps = {(row.segment, row.step) for row in obs.metrics if row.axis == "train"}
    return rollouts, steps


def _broken(obs: Observations) -> list[LogEvent]:
    """Out-of-memory lines, or failures of the memory saver, while one side wakes up."""
    found = []
    for event in of_kind(obs, "memory_saver", "oom"):
        if event.data.get("benign") or goes_on(obs, event):
            continue
        in_resume = word(event, "function") == "resume" or any(_RESUME.search(frame) for frame in frames(event))
        if in_resume or _waking(obs, event):
            found.append(event)
    return found


def _waking(obs: Observations, event: LogEvent) -> bool:
    """A wake-up of the same side is open: its timer has started and not ended, or a resume call is under way."""
    opened: dict[str, LogEvent] = {}
    for timer in of_kind(obs, "timer"):
        if timer.order > event.order:
            break
        if word(timer, "name") in ("wake_up", "onload"):
            if word(timer, "edge") == "start":
                opened[word(timer, "name")] = timer
            else:
                opened.pop(word(timer, "name"), None)
    own = side(obs, event)
    if any(side(obs, timer) in (own, "") or not own for timer in opened.values()):
        return True
    calls = [
        e
        for e in of_kind(obs, "resume", "http")
        if e.order > event.order and (e.kind == "resume" or word(e, "path").startswith("/resume_memory"))
    ]
    return any((whole(call, "status") or 0) >= 500 and call.order - event.order <= 3 for call in calls)


def _between(obs: Observations, rollouts: set[tuple[int, int]], steps: set[tuple[int, int]]) -> LogEvent | None:
    """A death after the first finished step and before the second, while the first rollout of the run is known."""
    starts = {number for _, number in steps}
    if len(steps) != 1 or min(starts) > 1 or len(rollouts) > 2:
        return None
    row = next(row for row in obs.metrics if row.axis == "train")
    for event in of_kind(obs, "oom", "memory_saver", "death", "ima"):
        if event.data.get("benign") or goes_on(obs, event):
            continue
        if row.time is not None and event.time is not None and event.time >= row.time:
            return event
    return None


def _holders(obs: Observations, event: LogEvent) -> tuple[str, list[Evidence]]:
    """Who holds memory on that GPU, from the memory rows nearest before the failure."""
    gpu = whole(event, "gpu")
    rows = [row for row in obs.rows if row.kind == "gpu_mem"]
    if gpu is not None:
        rows = [row for row in rows if row.fields.get("gpu") in (gpu, str(gpu), None)]
    best: dict[str, tuple[float, Evidence]] = {}
    for row in rows:
        name = str(row.fields.get("owner") or row.fields.get("name") or row.fields.get("pid") or "")
        size = row.fields.get("gb", row.fields.get("used_gb"))
        if name and isinstance(size, int | float):
            place = Evidence(row.where.source, row.where.line, row.where.text)
            best[name] = (float(size), place)
    told = event.data.get("processes")
    if not best and isinstance(told, dict):
        return ", ".join(f"process {pid} {gb:g} GiB" for pid, gb in told.items() if isinstance(gb, int | float)), []
    shown = ", ".join(f"{name} {size:g} GB" for name, (size, _) in best.items())
    return shown, [place for _, place in best.values()][:4]


def _fail(obs: Observations, broken: Sequence[LogEvent]) -> Verdict:
    event = broken[0]
    own = side(obs, event) or "one side"
    other = {"trainer": "the engines", "engine": "the trainer"}.get(own, "the other side")
    holders, places = _holders(obs, event)
    what = "its memory saver failed in resume" if word(event, "function") == "resume" else "it ran out of GPU memory"
    if event.kind in ("death", "ima"):
        what = "it died between the first and the second step"
    gpu = whole(event, "gpu")
    cause = f"At the wake-up of {who(event)}, {what}"
    cause += f" on GPU {gpu}" if gpu is not None else ""
    cause += f": {other} still hold memory there (released too late on some rank)"
    cause += f"; {holders}" if holders else ""
    sure: Confidence = "high" if holders else "medium"
    return Verdict(
        ID,
        "fail",
        rank=event.rank,
        value={"phase": "wake-up", "gpu": gpu, "tried_gb": number(event, "tried_gb"), "holders": holders or None},
        threshold="the other side has released",
        evidence=(*(of_event(one) for one in broken[:3]), *places, *of_flags(obs.args, "colocate")),
        cause=cause + ".",
        advice=(
            "wait until the release is complete on every TP rank before the other side wakes up",
            "a lower --sglang-mem-fraction-static",
        ),
        confidence=sure,
    )
