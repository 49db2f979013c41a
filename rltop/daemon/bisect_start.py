"""From `bisect-start` to the record of a bisection that could begin: which crash, on which engines, over what.

Nothing happens here. Whatever speaks against it is a `Rejected` that says why and what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rltop.bisect.facts import CrashFacts, Tables, weigh, why_not
from rltop.bisect.story import minutes_text
from rltop.daemon.bisect_crashes import GPU_FAULTS, TRAINER_CHECK, Refused, earlier, fires, hunted, same_kind
from rltop.daemon.bisect_model import Model, outlook
from rltop.daemon.bisect_record import Crash, Record, Records
from rltop.daemon.bisect_weights import weights_of
from rltop.daemon.state import StateTable
from rltop.engines.crash_facts import Told, crash_facts, tail_of
from rltop.engines.ground import Ground, ground, toggles_now
from rltop.engines.launcher import CRASH_DUMP_FOLDER, STAND_INS
from rltop.engines.pins import shared
from rltop.engines.toggle_table import TOGGLES
from rltop.engines.traffic import SYNTHETIC, Traffic, captured, check_dump, in_flight, kept
from rltop.engines.trials import Subject, Trials
from rltop.engines.verify import read_server_info
from rltop.evidence.priors import load
from rltop.protocol.messages import Command
from rltop.settings import priors_path

ARGS = ("engine", "toggles", "engines", "mode", "budget_min", "sure", "traffic", "time_scale", "generations")
BUDGET_MIN = 24 * 60.0
MOST_TIME_SCALE = 3600.0
MOST_SURE = 0.99
RESTART_MIN = 2.0
"""Of SGLang, until one was measured."""
RESTART_S = 3.0
"""Of a stand-in."""
_SHARED = ("colocate", "offload", "offload_rollout", "offload_train")
"""Arguments of a trainer that lends and takes its engines' memory (slime's names)."""
MOST_BEFORE = 3
"""Earlier bisections that the plan tells of."""
LIKELY = 0.3
"""A toggle that has a part in the crash with this chance is worth turning off meanwhile where engines serve on."""
CYCLES = {
    "sleep": "between waves the engine sleeps and wakes: its memory is released, resumed, and its weights updated",
    "sync": "between waves the engine takes its weights again",
}


def plan(
    command: Command,
    who: str,
    *,
    trials: Trials,
    table: StateTable,
    run_dir: Path,
    keep: int,
    bisection_id: str,
    now: float,
) -> tuple[Record, list[str]]:
    """The record and, for people, the steps. Raises Refused, RltopError."""
    args = command.args
    if unknown := next((key for key in args if key not in ARGS), None):
        raise Refused(f"unknown argument {unknown[:80]!r}", f"bisect-start takes {', '.join(ARGS[:-1])}")
    mode = _mode(args)
    crash, story = hunted(str(args.get("engine") or command.target or ""), trials, table, run_dir)
    told = _facts(table, crash, story, run_dir)
    if why := why_not(told.facts):
        raise Refused(why)
    _refuse_shared_memory(table, crash)
    subject = _subject(trials, crash, story)
    engines = _guinea_pigs(_names(args, "engines"), mode, crash, subject, trials, keep)
    scale = _time_scale(args, [subject])
    cycle, cautions = _cycle(told.facts, subject)
    base = ground(subject, _names(args, "toggles"), cycle=cycle)
    tables = load(priors_path())
    factors, moved = weigh(told.facts, base.toggles, tables)
    weights, notes = weights_of(crash, run_dir, subject)
    notes = [*_before(crash, run_dir), *notes]
    source = traffic_words(args.get("traffic"), run_dir, crash)
    restart = RESTART_S / 60 * scale if subject.kind in STAND_INS else RESTART_MIN
    record = Record(
        id=bisection_id,
        mode=mode,
        engines=tuple(engines),
        subject=subject,
        ground=base,
        crash=crash,
        earlier=earlier(crash, story, trials, table, run_dir),
        weights=weights,
        factors=factors,
        facts=tuple(
            {"text": one.fact, "source": told.sources.get(one.sign, "crash.json"), "moves": dict(one.factors)}
            for one in moved
        ),
        traffic={"given": args.get("traffic"), "source": source, "requests": 0, "concurrency": 0},
        cycle=cycle,
        started=now,
        budget_min=_number(args, "budget_min", BUDGET_MIN),
        sure=_sure(args),
        time_scale=scale,
        restart_min=restart,
        reason=command.reason,
        who=who,
        notes=[*notes, *base.notes, *cautions],
    )
    return record, _steps(record, trials, tables)


def traffic_words(given: Any, run_dir: Path, crash: Crash) -> str:
    """What will be replayed, without reading it. Raises Refused, RltopError."""
    if given is not None and not isinstance(given, str):
        raise Refused("`traffic` is a dump's path, or `synthetic`")
    if given and given != SYNTHETIC:
        check_dump(Path(given))
        return f"dump {Path(given).name}"
    return SYNTHETIC if given else kept(run_dir, crash.engine, crash.generation)


def traffic_of(given: str | None, run_dir: Path, crash: Crash) -> Traffic:
    """What is replayed: as given, else what was captured, else synthetic. May take a while. Raises RltopError."""
    if given and given != SYNTHETIC:
        return Traffic.from_dump(Path(given))
    found = None if given else captured(run_dir, crash.engine, crash.generation)
    return found if found is not None else Traffic.synthetic()


# ---------------------------------------------------------------------- the crash's evidence


def _before(crash: Crash, run_dir: Path) -> list[str]:
    """What other bisections of this run came to that hunted the same: their trials are not counted again."""
    found = []
    for one in Records(run_dir).read_all()[0]:
        if one.verdict is not None and same_kind(crash.kind, one.crash.kind):
            result = f"{one.verdict.words} ({one.verdict.p:.0%})" if one.state == "found" else one.verdict.text
            verb = "found" if one.state == "found" else f"ended {one.state}:"
            text = f"bisection {one.id} of this run hunted {one.crash.fingerprint} and {verb} {result}"
            found.append(f"{text} (rltop bisect status --id {one.id}); this one begins anew")
    return found[-MOST_BEFORE:]


def _owner(table: StateTable, crash: Crash) -> str:
    """The check compares all ranks of everything: where it fires, the trainer's fault came first."""
    return "trainer" if crash.kind in GPU_FAULTS and fires(table, TRAINER_CHECK) else "engine"


def _facts(table: StateTable, crash: Crash, story: Mapping[str, Any], run_dir: Path) -> Told:
    """What the crash's evidence says. In a Ray cluster some of it is on the engine's machine: then only the cell."""
    folder = run_dir / "engines" / crash.engine / str(crash.generation)
    cell = {"kernel": crash.kernel, "phase": crash.phase, "rank": crash.rank}
    value = (table.get("check/engine.ima") or {}).get("value")
    xids = value.get("xids") if isinstance(value, dict) else None
    return crash_facts(
        {**story, "crash": {**cell, **(story.get("crash") or {})}},
        tail_of(folder),
        folder / "coredump",
        owner=_owner(table, crash),
        in_flight=in_flight(folder / CRASH_DUMP_FOLDER),
        xids=[one for one in xids if isinstance(one, int)] if isinstance(xids, list) else (),
    )


def _cycle(facts: CrashFacts, subject: Subject) -> tuple[str, list[str]]:
    """What the replay must do between waves beside the load, and why it can not."""
    kind = "sleep" if facts.after_resume else "sync" if facts.after_sync else ""
    if not kind:
        return "", []
    said = str(subject.info.get("speculative_algorithm") or subject.toggles.get("speculative") or "")
    if said.upper() == "NGRAM":
        why = "an engine with NGRAM can not take weights from disk (it dies)"
        return "", [f"the crash came just after a {'resume' if kind == 'sleep' else 'sync'}, but {why}: load alone"]
    return kind, []


# ---------------------------------------------------------------------- the engines


def _subject(trials: Trials, crash: Crash, story: Mapping[str, Any]) -> Subject:
    """The crashed engine as it is; its /server_info from the crash where no later process shows it."""
    subject = trials.subject(crash.engine)
    info = story.get("server_info")
    if not subject.info and isinstance(info, dict) and info and story.get("args") is not None:
        seen = read_server_info(info, None, version=subject.version)
        subject = replace(subject, info=info, toggles=seen)
    return subject


def _guinea_pigs(
    named: Sequence[str],
    mode: Literal["in-fleet", "exclusive"],
    crash: Crash,
    subject: Subject,
    trials: Trials,
    keep: int,
) -> list[str]:
    everyone = {name: trials.subject(name) for name in trials.ids()}
    for name in named:
        if name not in everyone:
            raise Refused(f"there is no engine {name[:80]!r} of rltop's", f"there are {', '.join(everyone)}")
        if why := unfit(everyone[name], subject):
            raise Refused(f"engine {name}: {why}")
    fit = [name for name, one in everyone.items() if not unfit(one, subject)]
    if crash.engine in fit:  # it goes first: whatever is wrong with its own hardware is there
        fit = [crash.engine, *(name for name in fit if name != crash.engine)]
    if named:
        if mode == "exclusive" and (left := [name for name in fit if name not in named]):
            why = f"exclusive is all engines, and engine {', '.join(left)} would serve on"
            raise Refused(why, f"--exclusive alone, or --on {','.join(named)} alone")
        return list(named)
    if not fit:
        told = "; ".join(f"engine {name}: {unfit(one, subject)}" for name, one in everyone.items())
        raise Refused(f"there is no engine to try on: {told}", "start one, or end what holds them")
    if mode == "exclusive":
        return fit
    return fit[: max(1, min(len(fit) // 2, len(everyone) - keep))]


def _refuse_shared_memory(table: StateTable, crash: Crash) -> None:
    """An engine on trial keeps its memory: a trainer that wakes up on the same GPUs would find none. Of a run of
    engines alone (--debug-rollout-only) nobody wakes up."""
    run = table.get("run") or {}
    args = run.get("args") or {}
    shared = [name for name in _SHARED if args.get(name)]
    if run.get("state") == "running" and shared and not args.get("debug_rollout_only"):
        story = f"engines/{crash.engine}/{crash.generation}/crash.json"
        raise Refused(
            f"the trainer and its engines take turns on the GPUs' memory (--{shared[0].replace('_', '-')}): an engine "
            "on trial keeps its memory, and the trainer would wake up into it",
            "end the run (rltop down), start its engines alone under its name (rltop up FILE --name RUN, FILE with "
            f"[engines] only: model_path and args of {story}), and begin there: the crash is known, and sleeps and "
            'wakes are replayed (docs/engines.md, "On trial")',
        )


def unfit(one: Subject, like: Subject) -> str:
    """Why an engine like `like` cannot be tried on; "": it can."""
    if not one.runs:
        return "it is stopped"
    if one.busy:
        return f"it is held by another operation: {one.busy}"
    if one.state == "OFFLOADED":
        return "its memory is with the trainer"
    if one.state == "LOST":
        return "its node does not answer"
    if (one.kind, one.model_path) != (like.kind, like.model_path):
        return f"it is another kind of engine ({one.kind}, {one.model_path}) than engine {like.id}"
    return ""


# ---------------------------------------------------------------------- arguments


def _mode(args: Mapping[str, Any]) -> Literal["in-fleet", "exclusive"]:
    match args.get("mode", "in-fleet"):
        case "in-fleet":
            return "in-fleet"
        case "exclusive":
            return "exclusive"
        case other:
            raise Refused(f"mode {str(other)[:40]!r} is not known", "in-fleet or exclusive")


def _names(args: Mapping[str, Any], key: str) -> list[str]:
    value = args.get(key) or []
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise Refused(f"`{key}` is a list of names")
    return list(dict.fromkeys(value))


def _number(args: Mapping[str, Any], key: str, default: float) -> float:
    value = args.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise Refused(f"`{key}` is a number above 0", f"240, say, or leave {key} out")
    return float(value)


def _sure(args: Mapping[str, Any]) -> float:
    found = _number(args, "sure", 0.0) if "sure" in args else 0.0
    if found > MOST_SURE:
        raise Refused(f"`sure` is at most {MOST_SURE:g}: nothing is surer than that")
    return found


def _time_scale(args: Mapping[str, Any], subjects: Sequence[Subject]) -> float:
    scale = _number(args, "time_scale", 1.0)
    if scale != 1.0 and not all(one.kind in STAND_INS for one in subjects):
        raise Refused("`time_scale` is for rehearsals with stand-ins: this engine is SGLang", "leave it out")
    if scale > MOST_TIME_SCALE:
        raise Refused(f"`time_scale` is at most {MOST_TIME_SCALE:g}")
    return scale


def _steps(record: Record, trials: Trials, tables: Tables) -> list[str]:
    """For people, in order."""
    base, crash = record.ground, record.crash
    total = len(trials.ids())
    steps = [
        f"hunt {crash.fingerprint} of engine {crash.engine}, generation {crash.generation}"
        + (f": a rehearsal, the fault {crash.injected} was injected" if crash.injected else ""),
        _reserved(record, total),
    ]
    steps += [one for one in [trials.nobody_serves(record.engines)] if one]
    if others := [name for name in trials.ids() if name not in record.engines and trials.subject(name).runs]:
        steps.append(
            f"engine {', '.join(others)}: not touched, the run goes on with {'it' if len(others) == 1 else 'them'}"
        )
    steps += _others_crash_too(record, trials, tables, others)
    steps.append(f"toggles: {', '.join(_toggle(name, base) for name in base.toggles)}")
    for why in dict.fromkeys(base.left_out.values()):
        alike = ", ".join(name for name, its in base.left_out.items() if its == why)
        steps.append(f"  not tried: {alike} ({why})")
    steps += [f"  never off: {name} ({why})" for name, why in base.fixed.items()]
    steps += [f"  {name} off takes {', '.join(others)} with it" for name, others in base.together.items()]
    if pins := shared(base.pins, base.toggles):
        steps.append(f"  the same in every arm, because a toggle would move them: {', '.join(pins)}")
    steps.append(f"weights {record.weights.version!r}, traffic {record.traffic['source']}")
    steps += [f"  {CYCLES[record.cycle]}"] if record.cycle else []
    steps += [f"fact: {one['text']}" for one in record.facts]
    steps += [f"warning: {note}" for note in record.notes]
    if record.time_scale != 1.0:
        steps.append(f"time_scale {record.time_scale:g}: a rehearsal, a second counts as {record.time_scale:g}")
    model = Model(record, tables)
    left = outlook(model, model.evidence(), [], record.engines).left_min
    expected = f"expected: {left[0]:.0f} to {left[1]:.0f} minutes (a rough estimate); " if left is not None else ""
    steps.append(f"{expected}at most {record.budget_min:g} minutes")
    least = left[0] if left is not None else record.restart_min
    if record.budget_min < max(least, record.restart_min):
        steps.append(
            f"warning: {record.budget_min:g} minutes are hardly enough for a verdict (a restart alone takes "
            f"{minutes_text(record.restart_min)}): it will most likely end with what is left"
        )
    return steps


def _reserved(record: Record, total: int) -> str:
    """Which engines, of how many."""
    count, names = len(record.engines), ", ".join(record.engines)
    which = f"the only engine ({names})" if total == 1 else f"{count} of {total} engines ({names})"
    then = "then back on its own flags" if count == 1 else "then back on their own flags"
    return f"reserve {which}, {record.mode}: out of the rotation until the bisection ends, {then}"


def _toggle(name: str, base: Ground) -> str:
    """`speculative=NGRAM`; where off is another value than `off`, that too: `attention_backend=fa3 (off: triton)`."""
    off = base.off.get(name, "off")
    return f"{name}={base.on[name]}" + (f" (off: {off})" if off != "off" else "")


def _others_crash_too(record: Record, trials: Trials, tables: Tables, others: Sequence[str]) -> list[str]:
    """Engines that serve on with what is hunted: they may have the bug too, and nobody would be left to serve."""
    wanted = [name for name in record.ground.toggles if name in TOGGLES]
    alike: dict[tuple[str, ...], list[str]] = {}
    for engine in others:
        now = toggles_now(trials.subject(engine))
        if on := tuple(name for name in wanted if now.get(name) == record.ground.on[name]):
            alike.setdefault(on, []).append(engine)
    found, model = list[str](), Model(record, tables)
    likely = model.planner.believe(model.evidence()).involved() if alike else {}
    for on, engines in alike.items():
        names, one = ", ".join(engines), len(engines) == 1
        what = "the same toggles" if len(on) == len(wanted) else ", ".join(on)
        found.append(
            f"warning: engine {names} {'has' if one else 'have'} {what} on and may crash too; after three such crashes "
            f"{'it' if one else 'each'} is quarantined, and nobody serves. Each is counted as evidence"
        )
        free = sorted((name for name in on if name not in record.ground.fixed), key=lambda name: -likely.get(name, 0.0))
        off = [name for at, name in enumerate(free) if not at or likely.get(name, 0.0) >= LIKELY]
        changes = " ".join(f"{name}={record.ground.off[name]}" for name in off)
        found.append(
            f"  to keep {'it' if one else 'them'} serving: turn off meanwhile what is likeliest to take part "
            f"(rltop engine set {changes} --engine {','.join(engines)}), or try on more engines and be done sooner "
            f"(--on {','.join([*record.engines, *engines])}, or --exclusive: then nobody serves)"
        )
    return found
