"""From a request to a plan: which engines, with which arguments, in which order, and what speaks against it.

Nothing is done here. A plan tells people everything that would change; a refusal says why and what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rltop.checks.phrase import named
from rltop.engines.cautions import nobody_serves, unlike
from rltop.engines.chores import model_config
from rltop.engines.flags import parse
from rltop.engines.launcher import STAND_INS
from rltop.engines.options import table
from rltop.engines.pins import PINNED
from rltop.engines.requests import (
    ID,
    VERSION,
    Ab,
    AbEnd,
    Config,
    EngineSlot,
    FleetPlan,
    Http,
    Refused,
    Request,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
    Synced,
)
from rltop.engines.rules import judge
from rltop.engines.slots import declared_config, differences, options
from rltop.engines.states import ANSWERING, LIVE, State
from rltop.engines.supervisor import Engine
from rltop.engines.toggle_table import CORE_DUMP_ENVIRONMENT, LAUNCH_BLOCKING
from rltop.engines.toggles import Change, change

MAX_WORD = 128 << 10
"""Linux: MAX_ARG_STRLEN, 32 pages; one argument or variable is shorter."""
MAX_WORDS = 1 << 20
"""Half of what Linux passes with the usual stack limit: the inherited environment needs room too."""
_OWN = {
    "--port": "give `port`",
    "--host": "give `host`",
    "--model-path": "give `model_path`",
    "--model": "give `model_path`",
    "--port-file": "leave it out",
}
"""Arguments that are fields of the slot; given twice, the later one would win and nobody would find the engine."""
_INHERITED = (LAUNCH_BLOCKING, *CORE_DUMP_ENVIRONMENT)
"""Toggles in the environment: an engine may have them from its daemon."""


def make_plan(request: Request, engines: Mapping[str, Engine], launchers: Mapping[str, Any]) -> FleetPlan | Refused:
    """The plan, or why not."""
    match request:
        case StartEngines():
            return _start_engines(request, engines, launchers)
        case Synced(target=target) | Http(target=target):
            return _one(request, target, engines)
        case AbEnd():
            targets = [one for one in engines.values() if one.record.arm == "B"]
            if not targets:
                return Refused(code="bad-args", why="no A/B comparison is running", do="rltop engine ab starts one")
            return _restarts(request, engines, targets)
        case _:
            chosen = _chosen(request.targets, engines)
            if isinstance(chosen, Refused):
                return chosen
    match request:
        case Start():
            return _start(request, chosen)
        case Stop():
            return _stop(request, chosen, engines)
        case _:
            return _restarts(request, engines, chosen)


def _chosen(targets: Sequence[str], engines: Mapping[str, Engine]) -> list[Engine] | Refused:
    """The engines that are meant; refused when one is unknown or held by another operation."""
    if not engines:
        return Refused(code="bad-args", why="this run has no engines of its own", do="start the trainer first")
    names = list(engines) if not targets or tuple(targets) == ("all",) else list(dict.fromkeys(targets))
    unknown = [name for name in names if name not in engines]
    if unknown:
        return Refused(code="bad-args", why=f"there is no engine {unknown[0]!r}", do=f"there are: {', '.join(engines)}")
    return _free([engines[name] for name in names])


def _free(chosen: list[Engine]) -> list[Engine] | Refused:
    for engine in chosen:
        if engine.busy:
            do = "wait until it is done, or cancel it"
            return Refused(code="busy", why=f"engine {engine.id} is held by another operation: {engine.busy}", do=do)
    return chosen


# ---------------------------------------------------------------------- start and stop


def _start_engines(
    request: StartEngines, engines: Mapping[str, Engine], launchers: Mapping[str, Any]
) -> FleetPlan | Refused:
    if request.launcher not in launchers and request.ray is None:
        known = ", ".join(launchers)
        return Refused(code="bad-args", why=f"there is no launcher {request.launcher!r}", do=f"there are: {known}")
    if not request.slots:
        return Refused(code="bad-args", why="no slots were given", do="give at least one engine")
    ids = [slot.id for slot in request.slots]
    if len(set(ids)) < len(ids):
        return Refused(code="bad-args", why=f"an id is given twice: {', '.join(ids)}")
    steps: list[str] = []
    diff: dict[str, list[str]] = {}
    for slot in request.slots:
        problem = problem_of(slot)
        if problem is not None:
            return problem
        known_engine = engines.get(slot.id)
        if known_engine is None:
            steps.append(f"engine {slot.id}: start ({slot.kind}, {request.launcher}, {slot.model_path})")
            continue
        if known_engine.busy:
            return Refused(code="busy", why=f"engine {slot.id} is held by another operation: {known_engine.busy}")
        if known_engine.record.declared == slot and known_engine.record.launcher == request.launcher:
            running = known_engine.slot.state in LIVE and known_engine.record.goal.run
            steps.append(f"engine {slot.id}: {'it runs already' if running else 'start'}")
        else:
            diff[slot.id] = differences(known_engine.record.config, declared_config(slot))
            steps += [f"engine {slot.id}: restart, it was declared otherwise", *_indented(diff[slot.id])]
    generations = {name: engines[name].slot.generation for name in ids if name in engines}
    return FleetPlan(request=request, steps=steps, diff=diff, targets=tuple(ids), generations=generations)


def problem_of(slot: EngineSlot) -> Refused | None:
    """Why this engine cannot be started at all; None: nothing that can be told without a process speaks against it."""
    if not ID.fullmatch(slot.id):
        return Refused(code="bad-args", why=f"{slot.id!r} cannot be an engine's id", do="letters, digits, . _ -")
    if not slot.model_path:
        return Refused(code="bad-args", why=f"engine {slot.id} has no model_path")
    if not 0 <= slot.port <= 65535:
        return Refused(code="bad-args", why=f"engine {slot.id}: there is no port {slot.port}", do="0 to 65535; 0: any")
    given = next((word for word in slot.args if word.split("=", 1)[0] in _OWN), "")
    if given:
        why = f"engine {slot.id}: {given} in its args is not its owner's to give"
        return Refused(code="bad-args", why=why, do=_OWN[given.split("=", 1)[0]])
    words = {"model_path": slot.model_path, "python": slot.python, "host": slot.host}
    if cannot := _unpassable(Config(args=slot.args, env={**slot.env, **words}, unset=slot.unset)):
        return Refused(code="bad-args", why=f"engine {slot.id}: {cannot}", do="correct it")
    if any(parse(slot.args, version=VERSION).values.get(name) for name in ("api_key", "admin_api_key")):
        why = f"engine {slot.id} has an API key: its routes would answer neither rltop nor the trainer (401)"
        do = "leave --api-key and --admin-api-key out; bind it to an address that only this cluster reaches"
        return Refused(code="refused-by-rules", why=why, do=do)
    judgement = judge(slot.args, slot.env, version=VERSION, model=model_config(slot.model_path))
    if slot.kind in STAND_INS and not judgement.accepted:
        why = f"engine {slot.id} would not start: {judgement.errors[0]}"
        return Refused(code="refused-by-rules", why=why, do="correct its arguments")
    return None


def _unpassable(config: Config) -> str:
    """Why the system would not take these arguments and this environment for a process; "": it would."""
    total = 0
    for place, text in (*(("an argument", word) for word in config.args), *config.env.items()):
        data = text.encode(errors="replace")
        total += len(data)
        if b"\0" in data:
            return f"{place}: a NUL character in {text[:40]!r}"
        if len(data) >= MAX_WORD:
            return f"{place}: {text[:40]!r}… has {len(data)} bytes; the system passes less than {MAX_WORD} at a time"
    bad = next((name for name in (*config.env, *config.unset) if not name or "=" in name or "\0" in name), None)
    if bad is not None:
        return f"{bad[:40]!r} cannot be the name of a variable"
    return f"{total} bytes of arguments and environment; at most {MAX_WORDS}" if total > MAX_WORDS else ""


def _start(request: Start, chosen: list[Engine]) -> FleetPlan | Refused:
    # One that is not adopted yet may turn out to run.
    waiting = [one for one in chosen if one.adopted and one.slot.state not in LIVE | {State.LAUNCHING}]
    if not waiting:
        return Refused(code="bad-args", why="every engine that was named runs", do="rltop engine restart restarts them")
    steps = [f"engine {one.id}: start generation {one.slot.generation + 1}" for one in waiting]
    return _plan(request, steps, waiting)


def _stop(request: Stop, chosen: list[Engine], engines: Mapping[str, Engine]) -> FleetPlan | Refused:
    running = [one for one in chosen if one.slot.state is not State.STOPPED or one.record.goal.run]
    if not running:
        return Refused(code="bad-args", why="every engine that was named is stopped")
    steps = [f"engine {one.id}: drain, TERM, reclaim; it stays stopped" for one in running]
    caution = nobody_serves(engines, [one.id for one in running], "afterwards, until one is started")
    return _plan(request, [*steps, *_given(caution)], running, _given(caution))


def _one(request: Synced | Http, target: str, engines: Mapping[str, Engine]) -> FleetPlan | Refused:
    engine = engines.get(target)
    if engine is None:
        return Refused(code="bad-args", why=f"there is no engine {target!r}", do=f"there are: {', '.join(engines)}")
    if isinstance(request, Synced):
        if request.generation != engine.slot.generation:
            why = f"engine {target} is at generation {engine.slot.generation}, not {request.generation}"
            return Refused(code="stale-generation", why=why, do="push to the engine that runs now")
        return _plan(
            request, [f"engine {target}: ask it whether it holds weight version {request.version!r}"], [engine]
        )
    if (trial := engine.record.trial) is not None:
        why = f"engine {target} is on trial for {trial.name}, and its traffic would not be what it was"
        return Refused(code="busy", why=why, do="rltop bisect pause, or rltop bisect stop gives it back")
    if engine.slot.state not in ANSWERING:
        why = f"engine {target} is {engine.slot.state}: it cannot be asked"
        return Refused(code="bad-args", why=why, do="wait until it is HEALTHY")
    return _plan(request, [f"engine {target}: {request.action}"], [engine])


def _plan(request: Request, steps: list[str], chosen: list[Engine], warnings: Sequence[str] = ()) -> FleetPlan:
    return FleetPlan(
        request=request,
        steps=steps,
        warnings=list(warnings),
        targets=tuple(one.id for one in chosen),
        generations={one.id: one.slot.generation for one in chosen},
    )


# ---------------------------------------------------------------------- restarts


def _restarts(
    request: SetToggles | Restart | Revert | Ab | AbEnd, engines: Mapping[str, Engine], chosen: list[Engine]
) -> FleetPlan | Refused:
    """A rolling or simultaneous restart with these engines' next arguments. One that is stopped stays so, unless it is
    named to be restarted."""
    warnings: list[str] = []
    if isinstance(request, Ab):
        chosen = [one for one in chosen if one.record.goal.run]
        arms = _arms(request, engines, chosen)
        if isinstance(arms, Refused):
            return arms
        warnings += _given(_differ(chosen, engines))
        chosen = arms
    steps: list[str] = []
    diff: dict[str, list[str]] = {}
    configs: dict[str, Config] = {}
    stays: list[str] = []
    for engine in chosen:
        found = _next_config(request, engine)
        if isinstance(found, Refused):
            return found
        config, notes = found
        lines = differences(engine.record.config, config)
        if not lines and isinstance(request, (SetToggles, Ab)):
            steps.append(f"engine {engine.id}: nothing changes, that is set already")
            continue
        configs[engine.id], diff[engine.id] = config, lines
        stopped = not engine.record.goal.run
        if stopped and not isinstance(request, Restart):
            stays.append(engine.id)
        steps += [_step(engine, starts=engine.id not in stays), *_indented(_once(lines, notes))]
        warnings += [note for note in notes if note not in warnings]
    if not configs:
        assert isinstance(request, (SetToggles, Ab)), "a restart changes its generation"
        asked = ", ".join(f"{name}={value}" for name, value in request.changes.items())
        do = "rltop engine restart restarts as it is"
        return Refused(code="bad-args", why=f"nothing would change: {asked} is set already", do=do)
    moving = [name for name in configs if name not in stays]
    order = _order(request, engines, moving)
    if isinstance(order, Refused):
        return order
    together = not isinstance(request, (Ab, AbEnd)) and request.mode == "at-once"
    if moving and (together or keep_serving(request.keep, engines) == 0) and not order.endswith(_ALONE):
        until = "until the first is back" if len(moving) > 1 else "until it is back"
        warnings += _given(nobody_serves(engines, moving, until))
    cautions = [text for text in warnings if text.startswith(_WARNING)]
    noted = {line.strip() for line in steps}
    return FleetPlan(
        request=request,
        steps=[*steps, *(text for text in cautions if text not in noted), order],
        diff=diff,
        targets=tuple(configs),
        generations={name: engines[name].slot.generation for name in configs},
        configs=configs,
        stays=tuple(stays),
        warnings=warnings,
    )


_WARNING = "warning: "
_PINNED = "pinned: "
_ALONE = "; no other engine serves meanwhile"


def _given(text: str) -> list[str]:
    return [text] if text else []


def _once(lines: Sequence[str], notes: Sequence[str]) -> list[str]:
    """What changes and what to know of it; an option that is only pinned says so where it is added, and once."""
    pinned = {f"+ {note.removeprefix(_PINNED)}": note for note in notes if note.startswith(_PINNED)}
    told = {pinned[line] for line in lines if line in pinned}
    shown = [f"{line}   (pinned: as it is now)" if line in pinned else line for line in lines]
    return [*shown, *(note for note in notes if note not in told)]


def _step(engine: Engine, *, starts: bool) -> str:
    number = engine.slot.generation
    if not starts:
        return f"engine {engine.id}: it is stopped and stays so; when it is started it gets"
    return f"engine {engine.id}: generation {number} -> {number + 1}" + (
        "" if engine.record.goal.run else " (it is stopped: it is started)"
    )


def _differ(chosen: Sequence[Engine], engines: Mapping[str, Engine]) -> str:
    words = unlike({one.id: one.record.config for one in chosen}, engines)
    return f"{_WARNING}the engines differ already, and that is compared too: {words}" if words else ""


def _arms(request: Ab, engines: Mapping[str, Engine], chosen: list[Engine]) -> list[Engine] | Refused:
    """Arm B: every second of the chosen engines."""
    if any(one.record.arm for one in engines.values()):
        why = "an A/B comparison is running already"
        return Refused(code="bad-args", why=why, do="rltop engine ab-end ends it")
    if len(chosen) < 2:
        why = "an A/B comparison needs at least two engines that run"
        return Refused(code="bad-args", why=why, do="name two or more")
    return chosen[1::2]


def _next_config(
    request: SetToggles | Restart | Revert | Ab | AbEnd, engine: Engine
) -> tuple[Config, list[str]] | Refused:
    """Its next arguments, and what people should know of them."""
    record = engine.record
    match request:
        case Restart():
            return record.config, []
        case AbEnd():
            return record.ab_base or record.config, []
        case Revert():
            if not record.goal.run and record.config != record.running:
                return record.running, [f"as in generation {record.generation}: the change was never started"]
            if record.before is None:
                why = f"engine {engine.id} has no earlier generation with other arguments"
                return Refused(code="bad-args", why=why)
            return record.before, [f"as in generation {record.before_generation}"]
        case _:
            return _toggled(request.changes, engine)


def _toggled(changes: Mapping[str, str], engine: Engine) -> tuple[Config, list[str]] | Refused:
    if not changes:
        return Refused(code="bad-args", why="no toggle was named", do="give at least one NAME=VALUE")
    old = engine.record.config
    inherited = inherited_toggles(old, engine.record.launcher)
    seen = inherited | dict(old.env)
    found, version = engine.watch.verified, engine.record.version or VERSION
    made = change(
        old.args,
        seen,
        changes,
        version=version,
        baseline=found.info if found else None,
        model=model_config(engine.record.declared.model_path),
    )
    if not made.allowed:
        first = made.refusals[0]
        why = f"engine {engine.id}: {f'{first.toggle}: ' if first.toggle else ''}{first.why}"
        return Refused(code="refused-by-rules", why=why, do=first.do)
    config = config_of(made, old, inherited)
    if cannot := _unpassable(config):
        return Refused(code="bad-args", why=f"engine {engine.id}: {cannot}", do="correct it; nothing was changed")
    if engine.record.launcher == "local" and (missing := _missing_draft(changes.get("speculative", ""))):
        why = f"engine {engine.id}: speculative: there is no draft model at {missing}"
        return Refused(code="bad-args", why=why, do="name the folder of its checkpoint, as the engine's host sees it")
    return config, [*_notes(made), *stays(engine.record.declared.args, made, version=version)]


def _missing_draft(value: str) -> str:
    """The path of a draft model on this machine that is not there; a name of the Hub is SGLang's to find."""
    _, _, path = value.partition(":")
    return path if os.path.isabs(path) and not os.path.exists(path) else ""


def inherited_toggles(config: Config, launcher: str) -> dict[str, str]:
    """Toggles that an engine with these arguments has from the environment of its daemon."""
    if launcher != "local":
        return {}
    here = ((name, os.environ.get(name)) for name in _INHERITED if name not in config.unset)
    return {name: value for name, value in here if value is not None}


def config_of(made: Change, old: Config, inherited: Mapping[str, str]) -> Config:
    """What is only inherited stays so, unless the change moves it."""
    env = {name: value for name, value in made.env.items() if name in old.env or inherited.get(name) != value}
    unset = [name for name in old.unset if name not in made.env]
    unset += [name for name in made.env_unset if name in inherited]
    return Config(args=made.argv, env=env, unset=tuple(dict.fromkeys(unset)))


def _notes(made: Change) -> list[str]:
    notes = [f"{_PINNED}{pin}" for pin in made.pins]
    notes += [f"moves too: {name}={alias.value}: {alias.why}" for name, alias in made.aliases.items()]
    return notes + [f"warning: {text}" for text in made.warnings]


def stays(declared: Sequence[str], made: Change, *, version: str) -> list[str]:
    """What an earlier change pinned or set beside its toggle, and this one does not take away again."""
    before, spec = parse(declared, version=version), table(version)
    flags = {
        spelling
        for name in PINNED
        if not before.is_given(name)
        for option in spec.named(name)
        for spelling in option.spellings
    }
    stay = [text for text in options(made.argv) if text.partition(" ")[0] in flags and text not in made.added]
    return [f"stays as an earlier change set it: {', '.join(stay)}"] if stay else []


def _order(
    request: SetToggles | Restart | Revert | Ab | AbEnd, engines: Mapping[str, Engine], targets: list[str]
) -> str | Refused:
    """How the restarts follow each other, in words."""
    if not targets:
        return "no engine is started or stopped"
    when = " at the next safe point" if request.when == "safe-point" else ""
    mode = "rolling" if isinstance(request, (Ab, AbEnd)) else request.mode
    engines_named = named("engine", targets)
    if mode == "at-once":
        return f"restart {engines_named} at once{when}"
    total = sum(one.record.goal.run for one in engines.values())
    keep = request.keep
    if keep is not None and (keep < 0 or keep >= max(total, 1)):
        why = f"keep {keep} of {total} engines serving, and restart {engines_named}: that cannot be"
        return Refused(code="bad-args", why=why, do=f"give keep between 0 and {max(total - 1, 0)}")
    others = [one.id for one in engines.values() if one.record.goal.run and one.id not in targets]
    kept = keep_serving(keep, engines)
    turns = _turns(len(targets), total - kept)
    if kept == 0 and not others and len(targets) == 1:
        return f"restart {engines_named}{turns}{when}{_ALONE}"
    if not any(engines[name].record.goal.run for name in targets):
        return f"start {engines_named}{when}; the others are not touched"
    return f"restart {engines_named}{turns}{when}; at least {kept} of {total} go on serving"


def _turns(count: int, room: int) -> str:
    """How many restart at a time (`rolling.roll`): the first alone, then as many as leave enough serving."""
    if count < 2:
        return ""
    together = min(room, count - 1)
    return " one after the other" if together < 2 else f", the first alone, then up to {together} at a time"


def keep_serving(keep: int | None, engines: Mapping[str, Engine]) -> int:
    """How many must go on serving: as asked, or as the policy says where there are enough engines."""
    total = sum(one.record.goal.run for one in engines.values())
    policy = next((one.house.policy.keep_serving for one in engines.values()), 0)
    return max(0, min(policy if keep is None else keep, total - 1))


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
