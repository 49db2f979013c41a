"""Bisections of a run: the commands `bisect-start|pause|resume|stop`, the one that runs, and what the next daemon does.

One bisection runs at a time. It is an operation (`bisect-start`) that holds its guinea pigs until they are back on
their own flags, and a record on disk (`bisect_record.py`) that the next daemon goes on from, whatever became of the
operation. Nothing of the engines' code is imported before the first of them is asked for.

Failure policy: a record that cannot be read is said, and the engines that were on trial for it are given back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rltop.checks.phrase import named
from rltop.daemon.commands import Plan, Stage
from rltop.daemon.core import Core
from rltop.daemon.engines import Engines
from rltop.errors import RltopError
from rltop.protocol.messages import Command, Rejected

if TYPE_CHECKING:
    from rltop.daemon.bisect_record import Record
    from rltop.daemon.bisect_run import Runner
    from rltop.daemon.bisect_traffic import Later

NAMES = ("bisect-start", "bisect-pause", "bisect-resume", "bisect-stop")
CELL = "bisect"


class Bisections:
    """Implements `rltop.daemon.commands.EngineDesk`."""

    def __init__(
        self,
        core: Core,
        engines: Engines,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._core = core
        self._engines = engines
        self._clock, self._wall = clock, wall
        self._runner: Runner | None = None
        self._task: asyncio.Task[None] | None = None
        self._aside: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Commands that it takes."""
        return NAMES

    @property
    def runner(self) -> Runner | None:
        """The one that runs, or ran last under this daemon."""
        return self._runner

    # ---------------------------------------------------------------- commands

    async def look(self, command: Command) -> None:
        """Everything that a refusal stands on is told as it happens."""

    def plan(self, command: Command, who: str) -> Plan | Rejected:
        """What the command would do. Nothing happens."""
        if not self._engines.enabled:
            why = "the engines of this run are not rltop's: it can not restart them with a toggle off"
            return Rejected("bad-args", why, "start them by rltop ([engines] in its file)")
        if command.name == "bisect-start":
            return self._plan_start(command, who)
        runner = self._runner
        if runner is None or runner.over:
            if command.name == "bisect-resume":
                return self._plan_again(command)
            return Rejected("not-running", "no bisection is running", "rltop bisect start begins one")
        if command.target not in ("", "all", runner.record.id):
            why = f"bisection {command.target[:40]!r} is not the one that runs ({runner.record.id})"
            return Rejected("bad-args", why)
        return self._plan_other(command, who, runner)

    def _plan_start(self, command: Command, who: str) -> Plan | Rejected:
        from rltop.daemon import bisect_start
        from rltop.daemon.bisect_crashes import Refused
        from rltop.daemon.bisect_record import Records

        if self._runner is not None and not self._runner.over:
            record = self._runner.record
            why = f"bisection {record.id} is {record.state} ({record.crash.fingerprint}, by {record.who})"
            return Rejected("busy", why, "rltop bisect status shows it, rltop bisect stop ends it")
        fleet, run_dir = self._engines.fleet, self._engines.run_dir
        if fleet.ab() is not None:
            return Rejected("busy", "an A/B comparison is running on these engines", "rltop engine ab-end ends it")
        if (in_use := self._in_use()) is not None:
            return in_use
        options = self._engines.options
        try:
            record, steps = bisect_start.plan(
                command,
                who,
                trials=fleet.trials,
                table=self._core.table,
                run_dir=run_dir,
                keep=int((options.keep if options else {}).get("keep_serving", 1)),
                bisection_id=Records(run_dir).next_id(),
                now=self._wall(),
            )
        except Refused as refused:
            return Rejected("bad-args", refused.why, refused.do)
        except RltopError as error:
            return Rejected("bad-args", _sentence(error), error.do)

        async def work(stage: Stage) -> str:
            self._begin(record)
            return await self._follow(record.id, stage)

        return Plan(steps, work, record.engines, {**command.args, "id": record.id})

    def _plan_again(self, command: Command) -> Plan | Rejected:
        """One that was cut off when its run went down goes on."""
        if (in_use := self._in_use()) is not None:
            return in_use
        from rltop.daemon import bisect_again
        from rltop.daemon.bisect_crashes import Refused
        from rltop.daemon.bisect_record import Records

        try:
            record, steps = bisect_again.plan(
                command.target, Records(self._engines.run_dir).read_all()[0], self._engines.fleet.trials
            )
        except Refused as refused:
            return Rejected("not-running", refused.why, refused.do)

        async def work(stage: Stage) -> str:
            bisect_again.reopen(record)
            self._begin(record)
            return await self._follow(record.id, stage)

        return Plan(steps, work, record.engines, {**command.args, "id": record.id})

    def _in_use(self) -> Rejected | None:
        """Why the engines cannot be put on trial as long as a slime run is there."""
        if (slime := self._engines.slime) is None or not slime.attached():
            return None
        why = "slime trains against these engines: its next weight update would meet one on trial"
        return Rejected("bad-args", why, "end slime's run first; its engines and their crash stay")

    def _plan_other(self, command: Command, who: str, runner: Runner) -> Plan | Rejected:
        name, paused = f"bisection {runner.record.id}", runner.record.state == "paused"
        match command.name:
            case "bisect-pause":
                if paused:
                    return Rejected("not-running", f"{name} is paused already", "rltop bisect resume lets it go on")

                async def pause(stage: Stage) -> str:
                    runner.pause(who)
                    self._publish()
                    return f"{name}: no traffic any more; its engines stay reserved"

                return Plan([f"pause {name}: its engines stay reserved, and idle"], pause)
            case "bisect-resume":
                if not paused:
                    return Rejected("not-running", f"{name} is not paused", "rltop bisect status shows where it stands")

                async def go_on(stage: Stage) -> str:
                    runner.go_on(who)
                    self._publish()
                    return f"{name} goes on"

                return Plan([f"{name} goes on"], go_on)
            case _:
                reason = f": {command.reason}" if command.reason else ""

                async def stop(stage: Stage) -> str:
                    runner.stop(f"stopped by {who}{reason}")
                    return await self._follow(runner.record.id, stage)

                names = runner.record.engines
                own = "its" if len(names) == 1 else "their"
                return Plan([f"end {name}", f"{named('engine', names)}: back on {own} own flags"], stop)

    def resume(self, row: Mapping[str, Any]) -> Plan | None:
        """How an operation of an earlier daemon goes on: the bisection itself does so by its record."""
        runner, found = self._runner, (row["args"] or {}).get("id")
        begun = row["name"] == "bisect-start" or (row["name"] == "bisect-resume" and found is not None)
        if begun and (runner is None or runner.record.id != found or runner.over):
            return self._ended_before(str(found), row)
        if row["name"] == "bisect-stop" and runner is not None and not runner.over:
            runner.stop(f"stopped by {row['who']}")
            found = runner.record.id
        elif not begun or runner is None or runner.record.id != found:
            return None

        async def work(stage: Stage) -> str:
            return await self._follow(str(found), stage)

        return Plan(row["plan"] or [], work, runner.record.engines if begun else ())

    def _ended_before(self, bisection_id: str, row: Mapping[str, Any]) -> Plan | None:
        """The bisection was over when its daemon died, and its operation was not told."""
        from rltop.daemon.bisect_record import Records

        records, _ = Records(self._engines.run_dir).read_all()
        record = next((one for one in records if one.id == bisection_id and one.ended is not None), None)
        if record is None:
            return None

        async def work(stage: Stage) -> str:
            return _result(record)

        return Plan(row["plan"] or [], work)

    # ---------------------------------------------------------------- life

    def begin(self) -> None:
        """Go on where an earlier daemon was killed, and give back what is on trial for nobody."""
        if not self._engines.enabled or not (self._engines.run_dir / "bisect").is_dir():
            return
        from rltop.daemon.bisect_record import ENDED, Records

        found, problems = Records(self._engines.run_dir).read_all()
        for problem in problems:
            self._core.event("bisect", "error", problem, "bisect")
        left = [record for record in found if record.ended is None]
        for record in left[:-1]:  # never more than one; if there are, the newest counts
            record.state = record.state if record.state in ENDED else "stopped"
        fleet = self._engines.fleet
        if left and not any(
            name in fleet.trials.ids() and fleet.trials.subject(name).runs for name in left[-1].engines
        ):
            # Its engines were ended while no daemon was there.
            self._runner, _ = self._made(left[-1])
            self._runner.cut_off()
        elif left:
            self._start(left[-1])
        elif found and found[-1].cut_off:
            text = f"bisection {found[-1].id} was cut off when the run went down: rltop bisect resume goes on with it"
            self._core.event("bisect", "info", text, "bisect")
        held = set(left[-1].engines) if left else set()
        for name, trial in fleet.trials.on_trial().items():
            if name not in held:
                task = asyncio.get_running_loop().create_task(self._orphan(name, trial.name))
                self._aside.add(task)
                task.add_done_callback(self._aside.discard)

    async def close(self) -> None:
        """The daemon ends and the engines go on: the next one takes up what is in the record."""
        if self._runner is not None:
            self._runner.leave()
        tasks = [*self._aside, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _orphan(self, engine: str, name: str) -> None:
        trials = self._engines.fleet.trials
        try:
            why = await trials.give_back(engine, f"{name} is not known any more: its own flags")
        except RltopError as error:
            why = _sentence(error)
        text = f"engine {engine} was on trial for {name}, which nobody knows: "
        text += f"it could not be put back: {why}" if why else "it is back on its own flags"
        self._core.event("bisect", "error" if why else "warn", text, "bisect")

    def _begin(self, record: Record) -> None:
        """Raises RltopError: another one runs by now, or it cannot be written down."""
        from rltop.daemon.bisect_record import Records

        if self._runner is not None and not self._runner.over:
            raise RltopError("another bisection began meanwhile", exit_code=1)
        Records(self._engines.run_dir).write(record)
        self._start(record)

    def _start(self, record: Record) -> None:
        self._runner, traffic = self._made(record)
        self._publish()
        life = self._life(self._runner, traffic)
        self._task = asyncio.get_running_loop().create_task(life, name=f"bisection {record.id}")

    def _made(self, record: Record) -> tuple[Runner, Later]:
        from rltop.daemon.bisect_crashes import Since
        from rltop.daemon.bisect_record import Records
        from rltop.daemon.bisect_run import Runner
        from rltop.daemon.bisect_traffic import Later
        from rltop.evidence.priors import load
        from rltop.settings import priors_path

        run_dir, trials = self._engines.run_dir, self._engines.fleet.trials
        traffic = Later(record, run_dir)
        try:
            tables = load(priors_path())
        except RltopError as error:
            tables = load()
            record.notes.append(f"{_sentence(error)}: the shipped priors instead")
        runner = Runner(
            record,
            trials=trials,
            records=Records(run_dir),
            traffic=traffic,
            tables=tables,
            tell=self._tell,
            changed=self._publish,
            clock=self._clock,
            wall=self._wall,
            since=Since(record, trials, self._core.table, run_dir),
        )
        return runner, traffic

    async def _life(self, runner: Runner, traffic: Later) -> None:
        """Its weights are kept and its traffic is read in a thread (a crash dump takes seconds), then it runs."""
        from rltop.daemon.bisect_weights import keep, let_go

        record, run_dir = runner.record, self._engines.run_dir
        await asyncio.to_thread(keep, record, run_dir)
        await traffic.load()
        self._publish()
        await runner.run()
        await asyncio.to_thread(let_go, record, run_dir)

    async def _follow(self, bisection_id: str, stage: Stage) -> str:
        """Until it is over; its result in a sentence. Raises RltopError where it failed. Cancelled: it is ended."""
        runner, task = self._runner, self._task
        assert runner is not None, "it was begun"
        assert task is not None, "with its task"
        shown = ""
        try:
            while not task.done():
                if (text := runner.stage()) != shown:
                    shown = text
                    stage(text)
                await asyncio.wait([task], timeout=1.0)
        except asyncio.CancelledError:
            if not runner.leaving:
                runner.stop("its operation was cancelled")
                await asyncio.wait([task])
            raise
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        return _result(runner.record)

    # ---------------------------------------------------------------- showing

    def _tell(self, level: str, text: str, **more: Any) -> None:
        self._core.event("bisect", level, text, "bisect", **more)

    def _publish(self) -> None:
        if self._runner is not None:
            self._core.set(CELL, self._runner.cell())


def _result(record: Record) -> str:
    """In a sentence. Raises RltopError where it failed, or an engine is not as it was."""
    words = record.verdict.text if record.verdict is not None else record.state
    wrong = [f"engine {name}: {why.rstrip('.')}" for name, why in record.restored.items() if why != "original"]
    told = f"bisection {record.id}: {record.state}: {words}" + (f"; {'; '.join(wrong)}" if wrong else "")
    if record.state == "failed" or wrong:
        raise RltopError(told, exit_code=1)
    return told


def _sentence(error: RltopError) -> str:
    head = f"{error.where}: {error.what}" if error.where else error.what
    return f"{head}: {error.why}" if error.why else head
