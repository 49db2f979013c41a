"""`train.colocate-swap`: colocate survives the second step.

Trainer and engines share GPUs and wake each other up. The first wake-up of each side is in step 2, so one clean step
proves nothing; split debugging runs do not test it at all. Three ways to fail: memory that one side still held when
the other took its own (an out-of-memory error, or rltop's trainer that measured it before), a death between the two
steps, and an engine that was resumed but got no weights: real SGLang then answers nonsense without any error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.events import frames, goes_on, number, of_kind, side, who, whole, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations, Sample
from rltop.checks.phrase import missing, of_event, of_flags, of_points, of_samples
from rltop.checks.series import points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ID = "train.colocate-swap"
_SHARING = ("colocate", "offload", "offload_rollout", "offload_train")
_SEEN = ("memory_saver", "release", "resume", "memory_held", "no_weights")
_FEWEST = 2
"""Samples of an engine in a rollout that must all be token 0: one may be an accident."""
_RESUME = re.compile(r"resume|wake_up|onload|reload_process_groups|torch_memory_saver", re.I)


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    if obs.mode != "full":
        cause = f"a {obs.mode} run starts one side only and does not test the swap"
        return [Verdict(ID, "skip", cause=cause)]
    swaps = [e for e in of_kind(obs, "timer") if word(e, "name") in ("wake_up", "sleep")]
    if obs.args.flags and not any(obs.args.on(name) for name in _SHARING):
        return [Verdict(ID, "skip", cause="the run is not colocated (no --colocate)")]
    if not obs.args.flags and not swaps and not of_kind(obs, *_SEEN):
        return [Verdict(ID, "skip", cause=missing(obs, "that the run is colocated (arguments, wake-up lines)"))]
    if held := of_kind(obs, "memory_held"):
        return [_still_held(obs, held[0])]
    broken = _broken(obs)
    if broken:
        return [_fail(obs, broken)]
    if empty := _empty(obs, t):
        return [empty]
    rollouts, steps = _done(obs)
    if len(rollouts) >= 2 and _trained(obs, steps):
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


def _trained(obs: Observations, steps: set[tuple[int, int]]) -> bool:
    """Steps of two rollouts are finished. Where the steps do not name their rollout, arguments say how many it has."""
    rows = [row for row in obs.metrics if row.axis == "train"]
    named = {(row.segment, row.rollout_id) for row in rows if row.rollout_id is not None}
    if named:
        return len(named) >= 2
    per_rollout = obs.args.number("num_steps_per_rollout") or 1
    return len(steps) > per_rollout


def _still_held(obs: Observations, event: LogEvent) -> Verdict:
    """rltop's trainer measured it at its wake-up."""
    engines, device = word(event, "engines") or "?", word(event, "device") or "?"
    several = "," in engines
    cause = (
        f"At the wake-up of the trainer the memory of device {device} was still held by engine{'s' if several else ''} "
        f"{word(event, 'holders') or engines}, {number(event, 'after_s') or 0:g} s after the release: "
        f"{'they' if several else 'it'} released too late."
    )
    return Verdict(
        ID,
        "fail",
        engine=None if several else engines,
        value={"phase": "wake-up", "device": device, "engines": engines, "holders": word(event, "holders")},
        threshold="the other side has released",
        evidence=(of_event(event), *of_flags(obs.args, "colocate")),
        cause=cause,
        advice=(
            "wait until the release is complete on every rank before the other side wakes up",
            "the engine's log: was /release_memory_occupation asked and answered, and was it started with "
            "--enable-memory-saver?",
        ),
        confidence="high",
    )


def _empty(obs: Observations, t: Thresholds) -> Verdict | None:
    """An engine that answers as it does without weights: resumed, and not updated."""
    by_sample: dict[tuple[int, int], list[Sample]] = {}
    for sample in obs.samples:
        by_sample.setdefault((sample.segment, sample.rollout_id or 0), []).append(sample)
    for (_, rollout), samples in sorted(by_sample.items()):
        for engine in sorted({sample.engine for sample in samples}):
            own = [sample for sample in samples if sample.engine == engine]
            if len(own) >= _FEWEST and all(_zeros(sample, t) for sample in own):
                how = f"answered token 0 alone in all {len(own)} of its samples"
                return _no_update(obs, engine, rollout, how, of_samples(own[:2]))
    for event in of_kind(obs, "no_weights"):
        how = f"{word(event, 'how')} in all {whole(event, 'samples') or 0} of its samples"
        return _no_update(obs, word(event, "engine_id"), whole(event, "rollout"), how, (of_event(event),))
    return None


def _zeros(sample: Sample, t: Thresholds) -> bool:
    text = sample.text
    return text.top_id == 0 and text.top_id_share >= 1.0 and text.counted_ids >= t.text_repeat_least


def _no_update(obs: Observations, engine: str, rollout: int | None, how: str, evidence: Iterable[Evidence]) -> Verdict:
    who_is_it = f"Engine {engine}" if engine else "The engine"
    when = f" of rollout {rollout}" if rollout is not None else ""
    return Verdict(
        ID,
        "fail",
        rollout=rollout,
        engine=engine or None,
        value={"phase": "resume", "pattern": "no-weights", "engine": engine},
        threshold="an update between resume(weights) and the first request",
        evidence=(*evidence, *of_flags(obs.args, "colocate")),
        cause=f"{who_is_it} {how}{when}: its weights were released and resumed, and no update followed. Then all "
        "logits are equal: greedy requests get token 0, sampled ones any token. SGLang says no error, and its version "
        "label stays: this is no spoilt conversion.",
        advice=(
            "order: release, resume weights, update, resume kv_cache, generate",
            "/weights_checker compare after the resume shows it before any request",
        ),
        confidence="high",
    )


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
