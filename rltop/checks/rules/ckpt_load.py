"""`ckpt.loaded` and `ckpt.resume`: which checkpoint did the trainer load, and where does it go on?

slime falls back from `--load` to `--ref-load` without an error when `--load` has no tracker file and is no Hugging Face
directory: the optimizer is not loaded and the run starts at rollout 0. Relax takes `--hf-checkpoint`, and logs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rltop.checks.facts import NO_TRAINER
from rltop.checks.found import LogEvent, MegatronCheckpoint
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event, of_flags
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

LOADED = "ckpt.loaded"
RESUME = "ckpt.resume"
TRACKER = "latest_checkpointed_iteration.txt"
_FRAMEWORKS = ("", "slime", "relax", "miles")
"""Those that load with Megatron's loader, or with slime's own from Hugging Face."""
_ITERATION = re.compile(r"(?P<parent>.*?)/?iter_(?P<number>\d+)/?$")
_RANK_0 = re.compile(
    r"initializ(?:ed|ing) (?:torch distributed|tensor model parallel)|> setting random|building \S+ model"
)
"""What Megatron prints while it is set up, on its rank 0 alone, as it does the line about the load: where neither is
seen (a log without it, the output of other ranks), nothing is missing."""


def same_path(left: str, right: str) -> bool:
    """Two spellings of one directory, as far as the shorter one tells (evidence is a copy, arguments are absolute)."""
    a, b = (path.rstrip("/").removeprefix("./") for path in (left, right))
    if not a or not b:
        return False
    return a == b or a.endswith("/" + b.lstrip("/")) or b.endswith("/" + a.lstrip("/"))


# -- ckpt.loaded


def check_loaded(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: the load of the policy's weights."""
    if obs.mode == "rollout-only":
        return [Verdict(LOADED, "skip", cause=NO_TRAINER)]
    events = [event for event in obs.events if event.kind == "ckpt_loaded"]
    if missed := next((event for event in obs.events if event.kind == "ckpt_fallback"), None):
        return [_fell_back(obs, missed, events)]
    if events:
        return [_confirmed(obs, events)]
    if obs.args.framework not in _FRAMEWORKS:
        return [Verdict(LOADED, "skip", cause=f"{obs.args.framework} does not load with Megatron's loader")]
    started = {log.source for log in obs.logs if log.from_start and log.owner in ("", "trainer")}
    tells = {event.where.source for event in obs.events if event.kind == "startup" and _RANK_0.search(event.text)}
    if started and not started & tells:
        cause = "no start-up line of Megatron's rank 0 is in the log, and it is that rank which tells of the load"
        return [Verdict(LOADED, "skip", cause=cause)]
    started &= tells
    steps = [row for row in obs.metrics if row.axis == "train" and row.where and row.where.source in started]
    if not steps:
        return [Verdict(LOADED, "skip", cause=missing(obs, "the trainer's log from its start to the first step"))]
    first = steps[0]
    expected = obs.args.text("load") or obs.args.text("ref_load") or obs.args.text("hf_checkpoint")
    where = first.where
    return [
        Verdict(
            LOADED,
            "fail",
            value={"expected": expected or None, "loaded": None},
            threshold={"confirmed": True},
            evidence=((Evidence(where.source, where.line, where.text[:200]),) if where else ())
            + of_flags(obs.args, "load", "ref_load"),
            cause=f"The log goes from start-up to step {first.step} and no line confirms that "
            f"{expected or 'a checkpoint'} was loaded: the trainer may run on random weights.",
            advice=("--load: check the directory and its tracker file", "--ref-load", "--ckpt-step"),
            confidence="medium",
        )
    ]


def _confirmed(obs: Observations, events: list[LogEvent]) -> Verdict:
    load, reference = obs.args.text("load"), obs.args.text("ref_load")
    sources = [path for path in (load, reference, obs.args.text("hf_checkpoint")) if path]
    by_load = [event for event in events if load and same_path(_directory(event), load)]
    event = by_load[0] if by_load else events[0]
    directory = _directory(event) or "a Hugging Face checkpoint"
    value = {"expected": load or reference or None, "loaded": directory, "iteration": event.data.get("iteration")}
    evidence = (of_event(event), *of_flags(obs.args, "load", "ref_load"))
    fresh = _first_rollout(obs) in (0, None)
    fallback = any(same_path(_directory(one), reference) for one in events) if reference else False
    if by_load or not sources or (not load and any(same_path(_directory(event), path) for path in sources)):
        cause = f"The log confirms the load of {directory}."
        return Verdict(LOADED, "pass", value=value, evidence=evidence, cause=cause, confidence="medium")
    if not _directory(event) or not load:  # a line without a path, or no --load to compare with
        cause = f"The log confirms the load of {directory}; the arguments name no --load."
        return Verdict(LOADED, "pass", value=value, evidence=evidence, cause=cause, confidence="medium")
    if fallback and fresh and not _holds_iterations(obs, load):
        cause = f"A fresh start: the log confirms the load of --ref-load {reference}."
        return Verdict(LOADED, "pass", value=value, evidence=evidence, cause=cause, confidence="medium")
    return Verdict(
        LOADED,
        "warn",
        value=value,
        threshold={"loaded": load},
        evidence=evidence,
        cause=f"The trainer loaded {directory}, and --load is {load}.",
        advice=(f"--load: check {load} and its {TRACKER}", "--ref-load", "--ckpt-step"),
        confidence="medium",
    )


def _fell_back(obs: Observations, event: LogEvent, loaded: list[LogEvent]) -> Verdict:
    """The framework says that it took another checkpoint than `--load`. Where that is the directory of the saves, the
    run is new and nothing is lost."""
    asked, instead = str(event.data.get("asked") or ""), str(event.data.get("instead") or "")
    saves = [text] if (text := obs.args.text("save")) else []
    saves += [str(one.data.get("directory") or "") for one in obs.events if one.kind == "ckpt_saved"]
    fresh = any(same_path(asked, path) for path in saves) if saves else (_first_rollout(obs) or 0) == 0
    took = next((_directory(one) for one in loaded if _directory(one)), "") or obs.args.text(instead)
    flag = "--" + instead.replace("_", "-")
    taken = f"{flag} {took}" if took else flag
    value = {"expected": asked or None, "loaded": took or None, "iteration": 0}
    evidence = (of_event(event), *(of_event(one) for one in loaded[:1]), *of_flags(obs.args, "load", "save"))
    if fresh:
        cause = f"A fresh start from {taken}: --load {asked} holds no checkpoint yet."
        return Verdict(LOADED, "pass", value=value, evidence=evidence, cause=cause, confidence="medium")
    return Verdict(
        LOADED,
        "warn",
        value=value,
        threshold={"loaded": asked},
        evidence=evidence,
        cause=f"--load {asked} holds no checkpoint, so the trainer took {taken} instead, at iteration 0 and without "
        "an optimizer, and went on.",
        advice=(f"--load: check {asked} (it has {TRACKER}, or config.json)", "--load with the directory of --save"),
        confidence="high" if saves else "medium",
    )


def _directory(event: LogEvent) -> str:
    return str(event.data.get("directory") or "")


def _first_rollout(obs: Observations) -> int | None:
    ids = [row.rollout_id if row.rollout_id is not None else row.step for row in obs.metrics if row.axis == "rollout"]
    ids += [sample.rollout_id for sample in obs.samples if sample.rollout_id is not None]
    return min(ids, default=None)


def _holds_iterations(obs: Observations, load: str) -> bool:
    return any(same_path(one.path, load) and one.iterations for one in obs.megatron)


# -- ckpt.resume


def check_resume(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per directory that is in the evidence, and one for a start at the wrong rollout."""
    if obs.mode == "rollout-only":
        return [Verdict(RESUME, "skip", cause=NO_TRAINER)]
    found: list[Verdict] = []
    load, reference = obs.args.text("load"), obs.args.text("ref_load")
    inside = _ITERATION.match(load)
    for one in obs.megatron:
        role = "--load" if same_path(one.path, load) or (not one.path and load and not reference) else ""
        if inside and inside["parent"] and same_path(one.path, inside["parent"]):
            found.append(_is_iteration(obs, load, one))
            continue
        if not role and same_path(one.path, reference):
            role = "--ref-load"
        found.append(_judge(obs, one, role))
    if load and not any(same_path(one.path, load) for one in obs.megatron):
        hf = next((one for one in obs.checkpoints if one.config and same_path(one.path, load)), None)
        if hf is not None:
            cause = (
                f"--load {load} is a Hugging Face directory: its weights are loaded, and the optimizer starts fresh."
            )
            found.append(
                Verdict(RESUME, "pass", value={"load": load}, evidence=of_flags(obs.args, "load"), cause=cause)
            )
    found += _wrong_start(obs, load)
    return found or [Verdict(RESUME, "skip", cause=missing(obs, "the listing of the --load directory"))]


def _is_iteration(obs: Observations, load: str, one: MegatronCheckpoint) -> Verdict:
    return _fail(
        obs,
        f"--load {load} is the directory of one iteration, which has no {TRACKER}: slime falls back to --ref-load "
        "without an error, without optimizer, from rollout 0.",
        (f"--load {one.path or 'its parent directory'}", f"--ckpt-step {one.iterations[0].number or 0}"),
        one,
    )


def _judge(obs: Observations, one: MegatronCheckpoint, role: str) -> Verdict:
    name = one.path or "the checkpoint"
    if one.is_iteration and role == "--load":
        return _is_iteration(obs, obs.args.text("load"), one)
    numbers = {it.number: it for it in one.iterations if it.number is not None}
    complete = sorted(number for number, it in numbers.items() if it.has_metadata)
    newest = complete[-1] if complete else None
    if one.tracker is None:
        return _no_tracker(obs, one, role, name, newest, bool(numbers))
    wanted = _wanted(one.tracker)
    step = obs.args.number("ckpt_step" if role == "--load" else "ref_ckpt_step") if role else None
    if (
        wanted == ""
        or (wanted != "release" and int(wanted) not in numbers)
        or (wanted == "release" and not _released(one))
    ):
        what = f"names iteration {wanted}, whose directory is not there" if wanted else "holds no iteration number"
        return _fail(
            obs,
            f"The tracker {TRACKER} of {name} {what} (it says {one.tracker[:40]!r}; newest complete iteration: "
            f"{newest}).",
            (*([f"echo {newest} > {name}/{TRACKER}"] if newest is not None else []), f"restore {name} from its copy"),
            one,
        )
    if step is not None and int(step) not in numbers:
        flag = "--ckpt-step" if role == "--load" else "--ref-ckpt-step"
        cause = f"{flag} {int(step)} names an iteration that {name} does not have (it has {sorted(numbers)[-5:]})."
        return _fail(obs, cause, (f"{flag} {newest}",) if newest is not None else (flag,), one)
    later = [n for n in numbers if wanted != "release" and n > int(wanted)]
    open_ones = [it.name for it in one.iterations if not it.has_metadata]
    status: Status = "info" if later or open_ones else "pass"
    cause = f"{name} resumes at iteration {wanted} by its tracker"
    cause += f"; newer than that: {', '.join(f'iter_{n:07d}' for n in sorted(later))}" if later else ""
    cause += f"; without .metadata, so unfinished or interrupted: {', '.join(open_ones[:5])}" if open_ones else ""
    return Verdict(RESUME, status, value=_value(one, newest), evidence=_evidence(obs, one), cause=cause + ".")


def _no_tracker(
    obs: Observations, one: MegatronCheckpoint, role: str, name: str, newest: int | None, any_iteration: bool
) -> Verdict:
    value = _value(one, newest)
    if role == "--load" and any_iteration:
        start = _first_rollout(obs)
        begun = f", and the run started at rollout {start}" if start is not None else ""
        loaded = next((_directory(e) for e in obs.events if e.kind == "ckpt_loaded"), "")
        took = f" It loaded {loaded}{begun}." if loaded else ""
        return _fail(
            obs,
            f"--load {name} holds iterations (newest complete: {newest}) but no {TRACKER}: slime falls back to "
            f"--ref-load without an error, without optimizer, from rollout 0.{took} Naming the directory of an "
            "iteration as --load does not help: it has no tracker either.",
            (
                f"echo {newest} > {name}/{TRACKER}  (once the save of iteration {newest} is verified)",
                "--load with the same directory as --save",
            ),
            one,
        )
    what = f"{name} has no {TRACKER}: given as --load, slime would fall back to --ref-load without an error"
    if role == "--load":
        what = f"--load {name} is empty: a fresh start from --ref-load"
    return Verdict(RESUME, "info", value=value, evidence=_evidence(obs, one), cause=what + ".")


def _wrong_start(obs: Observations, load: str) -> list[Verdict]:
    """After the load of iteration k the next rollout in the same log must be k + 1."""
    found = []
    reference = obs.args.text("ref_load")
    for event in obs.events:
        iteration = event.data.get("iteration")
        if event.kind != "ckpt_loaded" or not isinstance(iteration, int) or iteration < 1:
            continue
        directory = _directory(event)
        if not load or not same_path(directory, load) or same_path(directory, reference):
            continue
        after = [
            (row.where.line or 0, row.rollout_id if row.rollout_id is not None else row.step)
            for row in obs.metrics
            if row.axis == "rollout" and row.where and row.where.source == event.where.source
            if (row.where.line or 0) > (event.where.line or 0)
        ]
        if not after or min(after)[1] == iteration + 1:
            continue
        first = min(after)[1]
        found.append(
            Verdict(
                RESUME,
                "fail",
                rollout=first,
                value={"loaded": iteration, "first_rollout": first},
                threshold=iteration + 1,
                evidence=(of_event(event), Evidence(event.where.source, min(after)[0], f"rollout {first}")),
                cause=f"The trainer loaded iteration {iteration} of {directory}, and the next rollout is {first} "
                f"instead of {iteration + 1}.",
                advice=("--start-rollout-id: leave it out", "--load with the same directory as --save"),
            )
        )
    return found[:4]


def _wanted(tracker: str) -> str:
    """`release`, a number as text, or empty for neither."""
    text = tracker.strip()
    return text if text == "release" or (text.isdigit() and len(text) <= 9) else ""


def _released(one: MegatronCheckpoint) -> bool:
    return any(it.name == "release" for it in one.iterations)


def _value(one: MegatronCheckpoint, newest: int | None) -> dict[str, object]:
    return {"directory": one.path, "tracker": one.tracker, "newest_complete": newest}


def _evidence(obs: Observations, one: MegatronCheckpoint) -> tuple[Evidence, ...]:
    listed = ", ".join(it.name + ("" if it.has_metadata else " (no .metadata)") for it in one.iterations[-6:])
    text = f"tracker: {one.tracker if one.tracker is not None else 'none'}; {listed or 'no iteration'}"
    loaded = tuple(of_event(event) for event in obs.events if event.kind == "ckpt_loaded")[:2]
    return (Evidence(one.path or ".", None, text), *of_flags(obs.args, "load", "ref_load"), *loaded)


def _fail(obs: Observations, cause: str, advice: tuple[str, ...], one: MegatronCheckpoint) -> Verdict:
    complete = sorted(it.number for it in one.iterations if it.has_metadata and it.number is not None)
    newest = complete[-1] if complete else None
    return Verdict(
        RESUME,
        "fail",
        value=_value(one, newest),
        threshold={"tracker": TRACKER},
        evidence=_evidence(obs, one),
        cause=cause,
        advice=advice,
    )
