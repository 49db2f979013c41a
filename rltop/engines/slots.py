"""What each engine slot should be, on disk: `<run_dir>/engines/<id>/slot.json`, written before anything is done.

A daemon that is killed between a stop and a start leaves a file that says what was wanted, and the next one goes on
from there. The file is replaced whole; a reader never sees half of one. It is not forced to the platter: whatever loses
it (a machine that goes down) ends the engines too.

Beside it stands a copy as of the last launch: from that, the numbers of the generations' folders and what `record.json`
in the newest one says of the process, a slot file that is damaged or lost is made again, so that its engine is adopted
like any other.

Failure policy: a file that cannot be written raises `RltopError`, and what was to be done is not begun; only a stop is
never withheld (`supervisor.Engine.aim`). A damaged file is named, set aside (`slot.damaged-1.json`) and made again. One
of a newer rltop is refused (`RltopError`), and then nothing at all is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from rltop.engines.launcher import RECORD, Launched, LaunchSpec
from rltop.engines.processes import locked
from rltop.engines.requests import ID, Config, EngineSlot, Required
from rltop.engines.states import Crash, FleetPolicy, Goal, Slot, State
from rltop.engines.toggle_table import CORE_DUMP, CORE_DUMP_ENVIRONMENT, CORE_DUMP_FILE, is_on
from rltop.errors import RltopError
from rltop.runs.masks import is_secret, mask_command

SCHEMA = 1
FILE = "slot.json"
COPY = "slot.launched.json"
"""Not in the generation's folder: that is passed on with bug reports, and the environment may hold keys."""


class Pause(msgspec.Struct, frozen=True):
    """A pause that a person asked for."""

    who: str
    since: float
    """On the wall clock."""


class OnTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The slot is out of the rotation: its engines are for trials (`rltop.engines.trials`)."""

    name: str
    """Of whoever tries: `bisection 3`."""
    weights: Required
    """That an engine on trial has to hold, whatever the run requires by now."""
    base: Config
    """What it goes back to."""


class SlotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a later daemon must know of one slot."""

    schema: int = SCHEMA
    declared: EngineSlot
    """As its owner asked for it; `args`, `env` and `unset` there are before any toggle."""
    launcher: str = "local"
    config: Config
    """Of the next launch."""
    running: Config
    """Of the newest generation. Equal to `config` unless a change is under way."""
    good: Config | None = None
    """Of the newest generation that answered: what a change that does not start goes back to."""
    good_generation: int | None = None
    before: Config | None = None
    """The good one before that, with other arguments: what `Revert` goes back to."""
    before_generation: int | None = None
    goal: Goal = Goal()
    state: State = State.STOPPED
    generation: int = 0
    cause: str = ""
    fingerprint: str = ""
    crashes: tuple[Crash, ...] = ()
    restarts: int = 0
    rollouts: int = 0
    process: Launched | None = None
    """Of `generation`; None: not started yet, or nothing is left of it."""
    unproven: tuple[int, ...] = ()
    """Generations that were given up with their node, never seen dead: they may still hold the slot's lock there."""
    paused: Pause | None = None
    """Of `generation`: somebody asked it to hold its requests."""
    emptied: bool = False
    """Its memory was released since it got weights: its label says nothing until they are pushed or loaded again."""
    version: str = ""
    """SGLang's, as the last engine here said it."""
    arm: Literal["", "A", "B"] = ""
    ab_base: Config | None = None
    """What `AbEnd` puts back (arm B)."""
    ab_changes: Mapping[str, str] = {}
    trial: OnTrial | None = None
    """Of the goal; None: its next engine serves like the others."""
    reserved: bool = False
    """The newest generation is for trials."""

    def spec(self, run: str, run_dir: Path, generation: int) -> LaunchSpec:
        """What the launcher is asked for, or was."""
        slot = self.declared
        folder = run_dir / "engines" / slot.id
        env = dict(self.running.env)
        if is_on(env.get(CORE_DUMP)):
            env.setdefault(CORE_DUMP_FILE, str(folder / str(generation) / "coredump" / "cuda_coredump_%h.%p.%t"))
        return LaunchSpec(
            run=run,
            engine_id=slot.id,
            generation=generation,
            kind=slot.kind,
            model_path=slot.model_path,
            directory=str(folder / str(generation)),
            lock=str(folder / "lock"),
            python=slot.python or sys.executable,
            host=slot.host,
            port=slot.port,
            args=self.running.args,
            env=env,
            unset=self.running.unset,
            place=slot.place,
        )

    def noted(self, slot: Slot) -> SlotRecord:
        """With what the state machine says now."""
        return msgspec.structs.replace(
            self,
            state=slot.state,
            generation=slot.generation,
            cause=slot.cause,
            fingerprint=slot.fingerprint,
            crashes=slot.crashes,
            restarts=slot.restarts,
            rollouts=slot.rollouts,
            reserved=slot.reserved,
        )

    def launched(self, generation: int) -> SlotRecord:
        """With the next generation about to be started."""
        return self.changed(running=self.config, process=None, generation=generation, emptied=False)

    def answered(self) -> SlotRecord:
        """With the newest generation known to be good."""
        if self.good is None or self.good == self.running:
            return self.changed(good=self.running, good_generation=self.generation)
        return self.changed(
            good=self.running,
            good_generation=self.generation,
            before=self.good,
            before_generation=self.good_generation,
        )

    def changed(self, **fields: Any) -> SlotRecord:
        """With some fields replaced."""
        return msgspec.structs.replace(self, **fields)


def declared_config(slot: EngineSlot) -> Config:
    """What its owner asked for; with core dumps, where nobody has said anything about them.

    They name the kernel of an illegal access, inside graphs too, and cost 3 MB (facts in `toggle_table`).
    """
    env, said = dict(slot.env), {*slot.env, *slot.unset, *os.environ}
    if slot.kind == "sglang" and not said & {CORE_DUMP, "SGLANG_CUDA_COREDUMP"}:
        env = {**CORE_DUMP_ENVIRONMENT, **env}
    return Config(args=slot.args, env=env, unset=slot.unset)


def new_record(declared: EngineSlot, launcher: str, generation: int = 0) -> SlotRecord:
    """A slot that nothing was started in yet, as far as anybody knows. generation: the newest that has a folder."""
    config = declared_config(declared)
    return SlotRecord(declared=declared, launcher=launcher, config=config, running=config, generation=generation)


def remembered(record: SlotRecord, policy: FleetPolicy, now: float) -> Slot:
    """The machine's slot as far as a file can tell it; whether a process lives is found out by looking.

    States that need no process are taken over, so that a quarantine survives the daemon; all others begin as STOPPED.
    The clock of the crashes is the machine's: what lies ahead of now was before it was booted anew.
    """
    crashes = tuple(one if one.at is None or one.at <= now else replace(one, at=None) for one in record.crashes)
    slot = Slot(
        policy=policy,
        since=now,
        generation=record.generation,
        fingerprint=record.fingerprint,
        crashes=crashes,
        restarts=record.restarts,
        rollouts=record.rollouts,
        reserved=record.reserved,
    )
    if record.state is State.CRASHED and record.process is None and (record.crashes or record.reserved):
        return replace(slot, state=State.CRASHED, cause=record.cause)
    if record.state is State.QUARANTINED or (record.state is State.BACKOFF and record.goal.run):
        deadline = now + policy.backoff_s if record.state is State.BACKOFF else None
        return replace(slot, state=record.state, cause=record.cause, deadline=deadline)
    return slot


class SlotStore:
    """The slot files of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "engines"

    def folder(self, engine_id: str) -> Path:
        """Everything of one engine."""
        return self._root / engine_id

    def write(self, record: SlotRecord) -> None:
        """Replace the slot's file. Raises `RltopError`."""
        folder = self.folder(record.declared.id)
        data = msgspec.json.format(msgspec.json.encode(record))
        try:
            _replace(folder / FILE, data)
        except OSError as error:
            raise RltopError(
                "cannot write down what the engine should be",
                where=str(folder / FILE),
                why=error.strerror or str(error),
                do="make room on the disk of the run directory; nothing was changed",
                exit_code=1,
            ) from error
        if record.state is State.LAUNCHING and record.declared.model_path:
            with contextlib.suppress(OSError):  # it is only a copy
                _replace(folder / COPY, data)

    def newest(self, engine_id: str) -> int:
        """The newest generation that left a folder or a copy; 0: none did."""
        return _newest(self.folder(engine_id), _copy(self.folder(engine_id)))

    def read_all(self) -> tuple[list[SlotRecord], list[str]]:
        """Every slot, and a sentence for each file that was damaged or lost.

        Raises `RltopError` for a file of a newer rltop, before anything is touched.
        """
        refuse_newer(self._root)
        records, problems = [], []
        for folder in sorted(path for path in self._root.glob("*") if path.is_dir()):
            lost = not (folder / FILE).exists()
            if lost and not locked(folder / "lock"):
                continue  # of a slot that nothing runs in only the numbers of its generations count
            if not ID.fullmatch(folder.name):
                problems.append(f"{folder / FILE}: {folder.name!r} cannot be an engine's id; it is left alone")
                continue
            why = "it is missing, and its engine runs"
            if not lost:
                try:
                    records.append(_read(folder / FILE, folder.name))
                    continue
                except ValueError as error:
                    why = f"cannot be read ({error}); set aside as {_set_aside(folder / FILE)}"
            made = _made_again(folder)
            if made is not None:
                records.append(made)
                why += f"; made again from generation {made.generation}"
                with contextlib.suppress(RltopError):  # the next write brings it
                    self.write(made)
            problems.append(f"{folder / FILE}: {why}")
        return records, problems


def refuse_newer(root: Path) -> None:
    """Raise `RltopError` when a slot file below this folder of engines was written by a newer rltop."""
    for file in sorted(root.glob(f"*/{FILE}")):
        try:
            schema = msgspec.json.decode(file.read_bytes(), type=_Schema).schema
        except (OSError, msgspec.DecodeError):
            continue  # damaged, not newer
        if schema > SCHEMA:
            raise RltopError(
                "this engine's slot was written by a newer rltop",
                where=str(file),
                why=f"its schema version is {schema}, this build reads up to {SCHEMA}",
                do="pip install --upgrade rltop, or start the run under another name",
            )


class _Schema(msgspec.Struct):
    schema: int = 1


def _read(file: Path, engine_id: str) -> SlotRecord:
    """Raises ValueError (msgspec's errors are such): it cannot be used."""
    try:
        record = msgspec.json.decode(file.read_bytes(), type=SlotRecord)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if record.declared.id != engine_id:
        raise ValueError(f"it is about engine {record.declared.id[:80]!r}, in the folder of engine {engine_id!r}")
    if record.generation < 0:
        raise ValueError(f"generation {record.generation}")
    return record


def _made_again(folder: Path) -> SlotRecord | None:
    """A slot's record from what its generations left; None: nothing was ever started there.

    A process that has ended by what its keeper wrote is not started again: nobody knows any more whether it should be.
    """
    copy, held, cause = _copy(folder), locked(folder / "lock"), "its slot file was damaged"
    newest = _newest(folder, copy)
    if not newest:
        return None
    # Without a copy its process can still be adopted, and ended.
    made = copy or SlotRecord(declared=EngineSlot(id=folder.name), config=Config(), running=Config())
    try:
        told = json.loads((folder / str(newest) / RECORD).read_bytes())
        ended = "code" in told or "error" in told
    except (OSError, ValueError, TypeError):
        ended = made.launcher == "local" and not held
    goal = Goal(run=not ended and (copy is not None or held), generation=newest, cause=cause)
    state = State.LAUNCHING if goal.run or held else State.STOPPED
    return made.changed(schema=SCHEMA, generation=newest, goal=goal, state=state, cause=cause, process=None)


def _copy(folder: Path) -> SlotRecord | None:
    with contextlib.suppress(ValueError):
        return _read(folder / COPY, folder.name)
    return None


def _newest(folder: Path, copy: SlotRecord | None) -> int:
    """In a Ray cluster the folders are on the engines' machines."""
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    return max([*numbers, copy.generation if copy is not None else 0])


def _set_aside(file: Path) -> str:
    """Rename it to the first free name; that name."""
    number = 1
    while (aside := file.with_name(f"slot.damaged-{number}.json")).exists():
        number += 1
    with contextlib.suppress(OSError):
        file.rename(aside)
    return aside.name


def _replace(file: Path, data: bytes) -> None:
    """The whole file. Raises OSError."""
    staging = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The environment of an engine may hold keys.
        with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as written:
            written.write(data)
        os.replace(staging, file)
    except OSError:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise


def differences(old: Config, new: Config) -> list[str]:
    """What changes between two generations, one line each: `- --flag value`, `+ NAME=value`. Secrets are masked."""
    lines = _option_lines(old.args, new.args)
    for name in sorted({*old.env, *new.env}):
        was, becomes = old.env.get(name), new.env.get(name)
        if was == becomes:
            continue
        lines += [f"- {name}={_shown(name, was)}"] if was is not None else []
        lines += [f"+ {name}={_shown(name, becomes)}"] if becomes is not None else []
    lines += [f"- {name} (not inherited any more)" for name in new.unset if name not in old.unset]
    lines += [f"+ {name} (inherited again)" for name in old.unset if name not in new.unset]
    return lines


def _shown(name: str, value: str) -> str:
    return "***" if is_secret(name, value) else value


def _option_lines(old: tuple[str, ...], new: tuple[str, ...]) -> list[str]:
    was, becomes = options(old), options(new)
    gone = [option for option in was if was.count(option) > becomes.count(option)]
    came = [option for option in becomes if becomes.count(option) > was.count(option)]
    lines = [("-", option) for option in dict.fromkeys(gone)] + [("+", option) for option in dict.fromkeys(came)]
    return [f"{sign} {' '.join(mask_command(option.split(' '), None))}" for sign, option in lines]


def options(argv: tuple[str, ...]) -> list[str]:
    """Each option with its values as one string."""
    found: list[str] = []
    for token in argv:
        if token.startswith("--") or not found:
            found.append(token)
        else:
            found[-1] += f" {token}"
    return found
