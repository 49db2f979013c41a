"""Operators' commands: taken once per id, written to the journal before they run, shown to every viewer as operations.

A command's answer is kept by its id (in the journal too), so that an operator whose connection broke can ask again and
never acts twice. Every operation runs as a task of its own: there is no global lock, only one per engine, and each can
be cancelled. What an earlier daemon left unfinished has failed, except for operations on engines: those go on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rltop.daemon.core import Core
from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, Command, Rejected

KEEP_ANSWERS = 1000
KEEP_OPERATIONS = 50
"""Finished operations that stay in the state table."""
MAX_NOTE = 2000
MAX_STAGES = 200
"""Stages of one operation that are shown; of more the first ones go."""
_NAMES = ("note", "mute", "unmute", "stop-run", "shutdown", "cancel")
_SHOWN = (
    *("op", "name", "target", "state", "stage", "percent", "who", "reason", "t", "text"),
    *("ended", "engines", "stages"),
)
_ENDED = frozenset({"done", "failed", "cancelled"})
_SHORT = frozenset({"note", "engine-synced"})
"""Of these only the end is news."""
_LEVEL = {"failed": "error", "cancelled": "warn"}

Stage = Callable[[str], None]
Work = Callable[[Stage], Awaitable[str]]
"""Does the operation; tells its stages; returns a closing sentence. Raises to fail."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command would do."""

    steps: list[str]
    work: Work
    engines: tuple[str, ...] = ()
    """Engines that no other operation may touch meanwhile."""
    args: Mapping[str, Any] | None = None
    """What the journal keeps in place of the command's own arguments."""


class EngineDesk(Protocol):
    """Commands on engines (`rltop.daemon.engine_commands`)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Commands that it takes."""
        ...

    async def look(self, command: Command) -> None:
        """Before `plan`: look again at what a refusal would stand on, if that is not told but asked for (a disk).
        Takes a few seconds at most, raises nothing."""
        ...

    def plan(self, command: Command, who: str) -> Plan | Rejected:
        """What the command would do. Nothing happens."""
        ...

    def resume(self, row: Mapping[str, Any]) -> Plan | None:
        """How an operation that an earlier daemon began goes on; None: it can not."""
        ...


@dataclass(frozen=True, slots=True)
class Actions:
    """What commands can do to the world; passed in by the daemon."""

    stop_trainer: Callable[[Stage], Awaitable[str]]
    shutdown: Callable[[Stage], Awaitable[str]]
    trainer_running: Callable[[], bool]
    committed: Callable[[], Awaitable[bool]]
    """Wait until the journal holds everything; False when it cannot."""
    mute: Callable[[str, str, str, float], None]
    """Check id, reason, who, since when."""
    unmute: Callable[[str], bool]
    engines: EngineDesk | None = None
    """None: this daemon takes no commands on engines."""
    bisections: EngineDesk | None = None

    def desk(self, name: str) -> EngineDesk | None:
        """Who takes commands of this name."""
        desks = (self.engines, self.bisections)
        return next((one for one in desks if one is not None and name in one.names), None)

    def desk_names(self) -> tuple[str, ...]:
        """The commands of all desks."""
        return tuple(name for one in (self.engines, self.bisections) if one is not None for name in one.names)


class Commands:
    """Takes commands and runs operations."""

    def __init__(self, core: Core, actions: Actions, *, epoch: str) -> None:
        self._core = core
        self._actions = actions
        self._epoch = epoch
        self._answers: OrderedDict[str, asyncio.Future[Accepted | Rejected]] = OrderedDict()
        self._rows: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unfinished: list[str] = []
        """Operations of an earlier daemon that wait for `resume`."""
        self._number = 0

    def restore(self, rows: list[dict[str, Any]]) -> None:
        """Take over operations of an earlier daemon (rows of the journal, oldest first): those it left unfinished have
        failed, or wait for `resume` if they are about engines; known command ids get their old answer."""
        loop = asyncio.get_running_loop()
        for row in rows:
            self._number = max(self._number, int(row["op"]) if str(row["op"]).isdigit() else 0)
            answer: asyncio.Future[Accepted | Rejected] = loop.create_future()
            answer.set_result(Accepted(row["op"], row["plan"] or []))
            self._remember(row["cmd_id"], answer)
            if row["state"] == "done" and row["name"] in ("mute", "unmute"):
                self._set_mute(row)
            if row["state"] not in _ENDED:
                shown = self._core.table.get(f"op/{row['op']}") or {}
                self._rows[row["op"]] = {
                    **row,
                    "stages": shown.get("stages") or [],
                    "engines": shown.get("engines") or [],
                }
                if self._actions.desk(row["name"]) is not None:
                    self._unfinished.append(row["op"])
                    self._advance(row["op"], "queued", stage="the daemon was restarted: looking at the engines first")
                else:
                    self._fail_left(row["op"])

    def resume(self) -> None:
        """The engines of the earlier daemon are known: its unfinished operations on them go on."""
        unfinished, self._unfinished = self._unfinished, []
        for op in unfinished:
            desk = self._actions.desk(self._rows[op]["name"])
            plan = None if desk is None else desk.resume(self._rows[op])
            if plan is None:
                self._fail_left(op)
            else:
                self._rows[op]["engines"] = list(plan.engines)
                self._tasks[op] = asyncio.get_running_loop().create_task(self._run(op, plan.work))

    def _fail_left(self, op: str) -> None:
        self._advance(op, "failed", text="the daemon ended before it was done", ended=self._core.now())

    async def take(self, command: Command, command_id: str, *, who: str, role: str) -> Accepted | Rejected:
        """Answer a command; the same id gets the same answer. The operation goes on after the answer."""
        known = self._answers.get(command_id)
        if known is not None:
            return await asyncio.shield(known)
        answer: asyncio.Future[Accepted | Rejected] = asyncio.get_running_loop().create_future()
        if command.dry_run:
            return await self._dry_run(command, who)
        self._remember(command_id, answer)
        try:
            found = await self._begin(command, command_id, who, role)
        except BaseException:
            self._answers.pop(command_id, None)
            answer.cancel()
            raise
        answer.set_result(found)
        return found

    async def finish(self) -> None:
        """Cancel what still runs (the daemon ends)."""
        tasks = [task for task in self._tasks.values() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------- taking

    async def _dry_run(self, command: Command, who: str) -> Accepted | Rejected:
        await self._look(command)
        plan = self._plan(command, who)
        if isinstance(plan, Rejected):
            return plan
        busy = self._busy(plan)
        return Accepted("", plan.steps if busy is None else [*plan.steps, f"! refused for now: {busy.why}"])

    async def _look(self, command: Command) -> None:
        if (desk := self._actions.desk(command.name)) is not None:
            await desk.look(command)

    async def _begin(self, command: Command, command_id: str, who: str, role: str) -> Accepted | Rejected:
        await self._look(command)
        plan = self._plan(command, who)
        if isinstance(plan, Rejected):
            return plan
        if (busy := self._busy(plan)) is not None:
            return busy
        self._number += 1
        op = str(self._number)
        self._rows[op] = {
            "op": op,
            "cmd_id": command_id,
            "t": self._core.now(),
            "name": command.name,
            "target": command.target,
            "args": command.args if plan.args is None else dict(plan.args),
            "who": who,
            "role": role,
            "reason": command.reason[:MAX_NOTE],
            "state": "queued",
            "stage": "",
            "percent": None,
            "text": "",
            "ended": None,
            "plan": plan.steps,
            "engines": list(plan.engines),
            "stages": [],
        }
        self._advance(op, "queued")
        # Who, when and why are on disk before anything happens. A journal that cannot be written is no reason to
        # withhold the brake from an operator: it is said in an event of its own.
        await self._actions.committed()
        self._tasks[op] = asyncio.get_running_loop().create_task(self._run(op, plan.work))
        return Accepted(op, plan.steps)

    def _plan(self, command: Command, who: str) -> Plan | Rejected:
        if command.if_epoch and command.if_epoch != self._epoch:
            return Rejected("stale-epoch", "the daemon was restarted since you looked", "look again, then repeat")
        if (stale := self._stale(command)) is not None:
            return stale
        if (desk := self._actions.desk(command.name)) is not None:
            return desk.plan(command, who)
        match command.name:
            case "note":
                return self._plan_note(command)
            case "mute" | "unmute":
                return self._plan_mute(command)
            case "stop-run":
                if not self._actions.trainer_running():
                    why = "this daemon started no trainer, or it has already ended"
                    return Rejected("bad-args", why, "stop it where it was started")
                return Plan(["TERM the trainer's process group", "KILL what is left"], self._actions.stop_trainer)
            case "shutdown":
                steps = ["stop the trainer"] if self._actions.trainer_running() else []
                return Plan([*steps, "stop the daemon"], self._actions.shutdown)
            case "cancel":
                task = self._tasks.get(command.target)
                if task is None:
                    running = ", ".join(self._tasks) or "none"
                    return Rejected("bad-args", f"operation {command.target!r} is not running (running: {running})")
                if self._rows[command.target]["name"] == "shutdown":
                    why = "a shutdown is not called off: the trainer and the engines are being stopped already"
                    return Rejected("bad-args", why, "start the run again when it is down")
                return Plan([f"cancel operation {command.target}"], lambda stage: self._cancel(command.target, task))
            case name:
                known = (
                    "note",
                    "mute",
                    "unmute",
                    "stop-run",
                    "shutdown",
                    "cancel",
                    *self._actions.desk_names(),
                )
                return Rejected("unknown-command", f"{name[:80]!r}", ", ".join(known))

    def _stale(self, command: Command) -> Rejected | None:
        """Compare-and-set: `if_gen` for one engine, `args.generations` for several."""
        seen: dict[Any, Any] = {} if command.if_gen is None else {command.target: command.if_gen}
        given = command.args.get("generations")
        if given is not None and not isinstance(given, dict):
            return Rejected("bad-args", "`generations` is a map: engine id -> generation")
        for name, generation in {**(given or {}), **seen}.items():
            engine = self._core.table.get(f"engine/{name}")
            if engine is None:
                return Rejected("bad-args", f"if_gen is for engines; there is no engine {str(name)[:80]!r}")
            if engine["generation"] != generation:
                why = f"engine {name} is at generation {engine['generation']}, not {generation}"
                by = self._last_on(str(name))
                return Rejected("stale-generation", why + by, "look again, then repeat")
        return None

    def _last_on(self, engine: str) -> str:
        """Who moved it last, for whoever comes second."""
        for row in sorted(self._rows.values(), key=lambda row: int(row["op"]), reverse=True):
            if engine in row.get("engines", ()):
                return f" (operation {row['op']}: {row['name']}, {row['state']}, by {row['who']})"
        return ""

    def _busy(self, plan: Plan) -> Rejected | None:
        for op, row in self._rows.items():
            held = [engine for engine in plan.engines if engine in row.get("engines", ())]
            if held and row["state"] not in _ENDED:
                what = f"engine {', '.join(held)}: operation {op} ({row['name']}, by {row['who']}) is not over yet"
                do = f"wait for it, or cancel operation {op}"
                if row["name"].startswith("bisect-"):
                    do = "a bisection holds it: rltop bisect status shows it, rltop bisect stop gives it back"
                return Rejected("busy", what, do)
        return None

    def _plan_note(self, command: Command) -> Plan | Rejected:
        text = command.args.get("text")
        if not isinstance(text, str) or not text.strip():
            return Rejected("bad-args", "a note needs `text`", '{"text": "…"}')

        async def say(stage: Stage) -> str:
            return text.strip()[:MAX_NOTE]

        return Plan(["put a line into the event log"], say)

    def _plan_mute(self, command: Command) -> Plan | Rejected:
        known = self._core.table.get(f"check/{command.target}")
        if known is None:
            return Rejected("bad-args", f"there is no check {command.target[:80]!r}", "the target is a check's id")
        if command.name == "mute" and not command.reason.strip():
            return Rejected("bad-args", "a mute needs a reason", "whoever comes next will want to know it")
        row = {"name": command.name, "target": command.target, "reason": command.reason[:MAX_NOTE]}

        async def do(_stage: Stage) -> str:
            op = next(op for op, task in self._tasks.items() if task is asyncio.current_task())
            self._set_mute({**self._rows[op], **row})
            return f"{command.target} is {'muted' if command.name == 'mute' else 'heard again'}"

        return Plan([f"{command.name} {command.target}"], do)

    def _set_mute(self, row: Mapping[str, Any]) -> None:
        if row["name"] == "mute":
            self._actions.mute(row["target"], row["reason"], row["who"], row["t"])
        else:
            self._actions.unmute(row["target"])

    async def _cancel(self, op: str, task: asyncio.Task[None]) -> str:
        task.cancel()
        await asyncio.wait([task])
        return f"operation {op} was told to stop"

    # ---------------------------------------------------------------- running

    async def _run(self, op: str, work: Work) -> None:
        self._advance(op, "running")
        try:
            text = await work(lambda stage: self._advance(op, "running", stage=stage[:MAX_NOTE]))
        except asyncio.CancelledError as error:
            # Else where it stood is the last of its stages.
            text = str(error) or self._rows[op]["text"] or "called off"
            self._advance(op, "cancelled", text=text, ended=self._core.now())
        except RltopError as error:
            self._advance(op, "failed", text=str(error), ended=self._core.now())
        except Exception as error:
            self._advance(op, "failed", text=f"{type(error).__name__}: {error}", ended=self._core.now())
        else:
            self._advance(op, "done", text=text, percent=100.0, ended=self._core.now())
        finally:
            self._tasks.pop(op, None)

    def _advance(self, op: str, state: str, **fields: Any) -> None:
        row = self._rows[op] = {**self._rows[op], **fields, "state": state}
        if fields.get("stage"):
            row["stages"] = [*row["stages"], {"t": self._core.now(), "text": row["stage"]}][-MAX_STAGES:]
        self._core.sink.operation(row)
        self._core.set(f"op/{op}", {key: row[key] for key in _SHOWN})
        if state in _ENDED or row["name"] not in _SHORT:
            detail = row["text"] or row["stage"] or row["reason"]
            words = f"{row['name']} {row['target']}".rstrip() + ("" if row["name"] == "note" else f" {state}")
            text = (f"{words}: {detail}" if detail else words) + f" [{row['who']}]"
            level = _LEVEL.get(state, "info")
            self._core.event("op", level, text, "operator", op=op, state=state, name=row["name"])
        if state in _ENDED:
            ended = [key for key, value in self._rows.items() if value["state"] in _ENDED]
            for old in ended[:-KEEP_OPERATIONS]:
                del self._rows[old]
                self._core.set(f"op/{old}", None)

    def _remember(self, command_id: str, answer: asyncio.Future[Accepted | Rejected]) -> None:
        self._answers[command_id] = answer
        while len(self._answers) > KEEP_ANSWERS:
            self._answers.popitem(last=False)
