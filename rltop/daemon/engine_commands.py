"""Commands on engines: from a message to a request to the fleet, and its answer to a plan or a refusal.

Two operators: each command may carry the generations that its sender saw (`if_gen`, `args.generations`), and an engine
with an unfinished operation takes no second one. Whoever comes second is told who was first.

Engines that others run take only what SGLang's HTTP API allows (`engine-http`).
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rltop.daemon.commands import Plan, Stage
from rltop.daemon.engines import Engines
from rltop.daemon.state import StateTable
from rltop.engines.requests import (
    Ab,
    AbEnd,
    EngineSlot,
    FleetPlan,
    Http,
    HttpAction,
    Mode,
    Refused,
    Request,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
    Synced,
    When,
)
from rltop.errors import RltopError
from rltop.protocol.messages import Command, Rejected

T = TypeVar("T")
NAMES = (
    "engines-start",
    "engine-synced",
    "engine-set",
    "engine-restart",
    "engine-stop",
    "engine-start",
    "engine-revert",
    "engine-ab",
    "engine-ab-end",
    "engine-http",
)
_ONE = ("engine-synced", "engine-http")
"""About one engine. They change no process, so they may come while an operation is going on, which may even wait for
`engine-synced`."""
_ACTIONS: tuple[HttpAction, ...] = ("flush", "pause", "continue", "profile")
MAX_SLOTS = 4_096
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "engines-start": ("slots", "launcher", "ray"),
    "engine-synced": ("version", "digest"),
    "engine-set": ("changes", "mode", "keep", "when"),
    "engine-restart": ("mode", "keep", "when"),
    "engine-stop": ("when",),
    "engine-start": (),
    "engine-revert": ("mode", "keep", "when"),
    "engine-ab": ("changes", "keep", "when"),
    "engine-ab-end": ("keep", "when"),
    "engine-http": ("action",),
}

AskOther = Callable[[str, str], Awaitable[str]]
"""URL and action of `engine-http` for an engine that others run -> a closing sentence. Raises RltopError."""


class Wrong(Exception):
    """The command can not be understood; `rejected` says why."""

    def __init__(self, why: str, do: str = "") -> None:
        super().__init__(why)
        self.rejected = Rejected("bad-args", why, do)


class EngineCommands:
    """Implements `rltop.daemon.commands.EngineDesk`."""

    def __init__(
        self,
        table: StateTable,
        engines: Engines,
        ask_other: AskOther,
        hold_other: Callable[[str, str], None] = lambda engine_id, who: None,
    ) -> None:
        """hold_other: told that an engine of others was paused, and by whom ("": it goes on)."""
        self._table = table
        self._engines = engines
        self._ask_other = ask_other
        self._hold_other = hold_other

    @property
    def names(self) -> tuple[str, ...]:
        """Commands that it takes."""
        return NAMES

    async def look(self, command: Command) -> None:
        """Which weight versions are on the disk of a slime run, as of now."""
        if self._engines.slime is not None and command.name not in _ONE:
            await self._engines.slime.look()

    def plan(self, command: Command, who: str) -> Plan | Rejected:
        """What the command would do. Nothing happens."""
        try:
            if command.name == "engine-http" and self._others(command.target):
                return self._http_of_others(command, who)
            request = self._request(command, who)
            slime = self._engines.slime
            found = (slime.refused(request) if slime is not None else None) or self._engines.fleet.plan(request)
        except Wrong as wrong:
            return wrong.rejected
        except RltopError as error:
            return Rejected("bad-args", _sentence(error), error.do)
        if isinstance(found, Refused):
            return Rejected(found.code, found.why, found.do)
        warnings = slime.warnings(request, found.targets) if slime is not None else []
        before = {**(command.args.get("generations") or {}), **found.generations}
        return Plan(
            steps=[*found.steps, *warnings],
            work=self._work(found),
            engines=() if command.name in _ONE else tuple(found.targets),
            args={**command.args, "generations": before},
        )

    def resume(self, row: Mapping[str, Any]) -> Plan | None:
        """How an operation of an earlier daemon goes on: engines that are past it already are only waited for."""
        if not self._engines.enabled or row["name"] == "engine-http":
            return None  # whether it came through can not be told; asking twice may not be harmless
        command = Command(row["name"], row["target"] or "", row["args"] or {}, reason=row["reason"] or "")
        before = {str(name): int(number) for name, number in (command.args.get("generations") or {}).items()}
        try:
            request = self._request(command, row["who"])
        except (Wrong, RltopError):
            return None
        fleet = self._engines.fleet
        locks = () if command.name in _ONE else tuple(before)

        async def work(stage: Stage) -> str:
            if isinstance(request, StartEngines):
                self._engines.ensure_launcher(request)
            return await fleet.resume(request, before, stage)

        return Plan(row["plan"] or [], work, locks)

    # ---------------------------------------------------------------- requests

    def _work(self, plan: FleetPlan) -> Callable[[Stage], Awaitable[str]]:
        async def work(stage: Stage) -> str:
            if isinstance(plan.request, StartEngines):
                self._engines.ensure_launcher(plan.request)
            return await self._engines.fleet.carry_out(plan, stage)

        return work

    def _request(self, command: Command, who: str) -> Request:
        args, name = command.args, command.name
        for key in args:
            if key not in (*_KNOWN[name], "generations"):
                raise Wrong(f"unknown argument {key[:80]!r}", f"{name} takes {', '.join(_KNOWN[name]) or 'none'}")
        if not self._engines.enabled:
            raise Wrong(*self._nobody(command))
        if name == "engines-start":
            return self._start(args, who)
        if name == "engine-ab-end":
            return AbEnd(keep=_keep(args), when=_when(args), reason=command.reason, who=who)
        targets = self._targets(command.target)
        if name in _ONE:
            return _about_one(command, targets, who)
        why = command.reason
        match name:
            case "engine-stop":
                return Stop(targets=targets, when=_when(args), reason=why, who=who)
            case "engine-start":
                return Start(targets=targets, reason=why, who=who)
            case "engine-ab":
                changes = _changes(args)
                return Ab(changes=changes, targets=targets, keep=_keep(args), when=_when(args), reason=why, who=who)
        mode, keep, when = _mode(args), _keep(args), _when(args)
        match name:
            case "engine-set":
                changes = _changes(args)
                return SetToggles(
                    targets=targets, changes=changes, mode=mode, keep=keep, when=when, reason=why, who=who
                )
            case "engine-restart":
                return Restart(targets=targets, mode=mode, keep=keep, when=when, reason=why, who=who)
            case _:
                return Revert(targets=targets, mode=mode, keep=keep, when=when, reason=why, who=who)

    def _start(self, args: Mapping[str, Any], who: str) -> Request:
        options = self._engines.options
        given = args.get("slots")
        if not isinstance(given, list) or not given or not all(isinstance(slot, dict) for slot in given):
            raise Wrong("engines-start needs `slots`, a list of maps")
        launcher = (options.launcher if options else "") or args.get("launcher", "local")
        if launcher not in ("local", "ray"):
            raise Wrong(f"unknown launcher {str(launcher)[:40]!r}", "local or ray")
        ray = args.get("ray")
        if launcher == "ray":
            ray = {**(ray if isinstance(ray, dict) else {})}
            if options is not None and options.ray_address:
                ray["address"] = options.ray_address
            if not isinstance(ray.get("address"), str) or not ray["address"]:
                do = 'ray {"address": "host:6379"}, or ray_address in [engines]'
                raise Wrong("the ray launcher needs the address of a cluster", do)
        return StartEngines(slots=slots_of(given), launcher=launcher, ray=ray if launcher == "ray" else None, who=who)

    def _targets(self, target: str) -> tuple[str, ...]:
        """Engine ids of a target. Raises Wrong: none, unknown, others'."""
        mine = self._engines.fleet.ids()
        if target == "all":
            if not mine:
                raise Wrong("the run has no engines that rltop started")
            return tuple(mine)
        wanted = tuple(dict.fromkeys(word.strip() for word in target.split(",") if word.strip()))
        if not wanted:
            raise Wrong("say which engines", 'target "0", "0,2" or "all"')
        for name in wanted:
            if name in mine:
                continue
            if f"engine/{name}" in self._table:
                raise Wrong(f"engine {name}: rltop did not start it, so it can not restart it", _OTHERS)
            raise Wrong(f"there is no engine {name[:80]!r}", f"there are {', '.join(mine) or 'none'}")
        return wanted

    def _nobody(self, command: Command) -> tuple[str, str]:
        """Why a run whose engines are others' takes no commands on them."""
        if command.name == "engines-start":
            return (
                "this run was started without a fleet: the daemon starts no engines for it",
                "add [engines] to its file",
            )
        if command.name == "engine-http" and (command.target == "all" or "," in command.target):
            known = [key.removeprefix("engine/") for key in self._table.keys("engine/")]
            return "engine-http is about one engine", f"one of {', '.join(known) or 'none'}"
        if command.target != "all" and f"engine/{command.target}" not in self._table:
            return f"there is no engine {command.target[:80]!r}", ""
        which = "these engines" if command.target == "all" else f"engine {command.target}"
        return f"{which}: rltop did not start it, so it can not restart it", _OTHERS

    # ---------------------------------------------------------------- engines of others

    def _others(self, target: str) -> bool:
        engine = self._table.get(f"engine/{target}")
        return engine is not None and not self._engines.owns(target)

    def _http_of_others(self, command: Command, who: str) -> Plan:
        action = _action(command.args)
        url = (self._table.get(f"engine/{command.target}") or {}).get("url")
        if not url:
            raise Wrong(f"engine {command.target} has told no URL")
        steps = [f"engine {command.target} (others run it): {action} over HTTP at {url}"]

        async def work(stage: Stage) -> str:
            text = await self._ask_other(url, action)
            if action in ("pause", "continue"):
                self._hold_other(command.target, who if action == "pause" else "")
            return text

        return Plan(steps, work)


def _about_one(command: Command, targets: tuple[str, ...], who: str) -> Request:
    args = command.args
    if len(targets) != 1:
        raise Wrong(f"{command.name} is about one engine", f"one of {', '.join(targets)}")
    if command.name == "engine-http":
        return Http(target=targets[0], action=_action(args), reason=command.reason, who=who)
    version, digest = args.get("version"), args.get("digest", "")
    if not isinstance(version, str) or not version or not isinstance(digest, str):
        raise Wrong("engine-synced needs `version`, and `digest` as text if at all")
    if command.if_gen is None:
        raise Wrong("engine-synced is about one generation of an engine", 'target "0", if_gen 3')
    return Synced(target=targets[0], generation=command.if_gen, version=version, digest=digest, who=who)


_OTHERS = "rltop engine http flush|pause|continue|profile is all that can be asked of it"


def slots_of(given: Sequence[Mapping[str, Any]]) -> tuple[EngineSlot, ...]:
    """Declared engines from plain maps. Raises Wrong with the first thing that is not right."""
    if len(given) > MAX_SLOTS:
        raise Wrong(f"{len(given)} engines are too many", f"at most {MAX_SLOTS}")
    found = []
    for at, slot in enumerate(given):
        try:
            made = msgspec.convert(dict(slot), EngineSlot, strict=True)
        except msgspec.ValidationError as error:
            raise Wrong(f"slot {at}: {error}") from None
        if not _is_id(made.id):
            raise Wrong(f"slot {at}: {made.id[:80]!r} is no id", "letters, digits, - and _; at most 64")
        found.append(made)
    if len({slot.id for slot in found}) != len(found):
        raise Wrong("two slots have one id")
    return tuple(found)


def _is_id(text: str) -> bool:
    plain = text.replace("-", "").replace("_", "")
    return 0 < len(text) <= 64 and plain.isascii() and plain.isalnum() and text != "all"


def _changes(args: Mapping[str, Any]) -> dict[str, str]:
    given = args.get("changes")
    if not isinstance(given, dict) or not given:
        raise Wrong("`changes` is a map: toggle -> value", '{"cuda_graph": "off"}')
    # Not at the top: the tables of arguments are read when the first toggle is changed.
    from rltop.engines.toggle_table import TOGGLES

    found = {}
    for name, value in given.items():
        if isinstance(value, bool):
            value = "on" if value else "off"
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise Wrong(f"`changes`: {str(name)[:80]!r} needs a word or a number")
        if name not in TOGGLES:
            close = difflib.get_close_matches(name, TOGGLES, n=1)
            words = f"; did you mean {close[0]!r}?" if close else ""
            raise Wrong(f"unknown toggle {name[:80]!r}{words}", f"there are {', '.join(TOGGLES)}")
        found[name] = str(value)
    return found


def _one_of(args: Mapping[str, Any], key: str, choices: tuple[T, ...]) -> T:
    value = args.get(key, choices[0])
    for choice in choices:
        if choice == value:
            return choice
    raise Wrong(f"{key} {str(value)[:40]!r} is not known", f"one of {', '.join(map(str, choices))}")


def _mode(args: Mapping[str, Any]) -> Mode:
    choices: tuple[Mode, ...] = ("rolling", "at-once")
    return _one_of(args, "mode", choices)


def _when(args: Mapping[str, Any]) -> When:
    choices: tuple[When, ...] = ("now", "safe-point")
    return _one_of(args, "when", choices)


def _action(args: Mapping[str, Any]) -> HttpAction:
    if "action" not in args:
        raise Wrong("engine-http needs `action`", f"one of {', '.join(_ACTIONS)}")
    return _one_of(args, "action", _ACTIONS)


def _keep(args: Mapping[str, Any]) -> int | None:
    value = args.get("keep")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise Wrong("`keep` is a number of engines, from 0 on")
    return value


def _sentence(error: RltopError) -> str:
    head = f"{error.where}: {error.what}" if error.where else error.what
    return f"{head}: {error.why}" if error.why else head
