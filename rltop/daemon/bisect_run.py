"""One bisection while it runs: engines take the arms that the planner chooses, under the captured traffic.

Each guinea pig has a worker: ask the planner, put the engine on that arm, replay, and see whether it crashes before the
planner's time is over. What happened is in the record before anything else follows from it, so that whoever goes on
after a death of this process, of an engine or of a node knows what is known. A trial that was under way goes on where
its engine still stands; minutes without traffic are no exposure.

Failure policy: an engine that does not start, hangs or is taken away makes a trial "lost" (no evidence); three in a row
and the engine takes no part any more. Whatever ends it (a verdict, an operator, an error, a full disk), the engines go
back to their own flags, and what could not be put back is said. Only a daemon that dies leaves that to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltop.bisect.planner import Next, Running, Verdict
from rltop.bisect.space import OTHER, Priors
from rltop.daemon.bisect_model import Model, Outlook, cell, outlook
from rltop.daemon.bisect_record import ENDED, Ending, Record, Records, State, TrialRow
from rltop.daemon.bisect_start import NO_TOGGLE, same_kind
from rltop.engines.ground import arm, effective
from rltop.engines.slots import OnTrial
from rltop.engines.traffic import Replay, ReplayCounts
from rltop.engines.trials import Sight, Trials
from rltop.errors import RltopError

BEAT_S = 1.0
"""Between two looks at where it stands, while nothing happens."""
SAVE_S = 5.0
"""Exposure that a daemon which is killed may lose."""
MOST_LOST = 3
"""Trials in a row without evidence, after which an engine takes no part any more."""
BACK_TRIES, BACK_PAUSE_S = 6, 5.0
"""How often it is tried to put an engine back, and the pause between: a disk may have room again."""
AGAIN_S = 1.0
"""A replay that ends by itself while its engine lives begins again after so long."""
LOOK_S = 5.0
"""Between two looks at what is believed, while no trial begins or ends."""

Tell = Callable[..., None]
"""Level, text, further fields of a journal event."""


class Traffic(Protocol):
    """What is replayed (`rltop.engines.traffic.Traffic`)."""

    def replay(self, seed: int) -> Replay: ...


@dataclass(slots=True)
class _Live:
    """A trial under traffic."""

    row: TrialRow
    base: float
    """Minutes before this stretch."""
    since: float


@dataclass(frozen=True, slots=True)
class _Decision:
    row: TrialRow
    then: Next


class Runner:
    """Implements one bisection. `run` is its life; everything else may be called at any time."""

    def __init__(
        self,
        record: Record,
        *,
        trials: Trials,
        records: Records,
        traffic: Traffic,
        priors: Priors,
        tell: Tell,
        changed: Callable[[], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
        beat_s: float = BEAT_S,
    ) -> None:
        """tell: writes an event. changed: what viewers see is another."""
        self.record = record
        self.seen = Outlook()
        """What is believed, as of the last look."""
        self._trials, self._records, self._traffic = trials, records, traffic
        self._tell, self._changed, self._clock, self._wall, self._beat_s = tell, changed, clock, wall, beat_s
        self._scale = record.time_scale / 60
        self.model = Model(record, priors)
        for name in record.engines:
            if name not in trials.ids():
                record.dropped[name] = record.restored[name] = "it is not there any more"
        self._live: dict[str, _Live] = {}
        self._lost: dict[str, int] = {}
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()
        self._go_on = asyncio.Event()
        if record.state != "paused":
            self._go_on.set()
        self._verdict: Verdict | None = None
        self._stopped = ""
        self._leaving = False
        self._saved = self._ticked = self._looked_at = clock()
        self._looked: Any = None

    @property
    def name(self) -> str:
        """What it is called where it stands in another's way."""
        return f"bisection {self.record.id}"

    @property
    def over(self) -> bool:
        """It has its result, and its engines are back as far as can be."""
        return self.record.ended is not None

    @property
    def leaving(self) -> bool:
        """It is left to the next daemon."""
        return self._leaving

    def stage(self) -> str:
        """Where it stands, in a line."""
        record = self.record
        rows = record.trials
        ended = [row for row in rows if row.outcome != "running"]
        crashed = sum(row.outcome == "crashed" for row in ended)
        best = self.seen.posterior[0] if self.seen.posterior else None
        likely = f"; {best['words']} {best['p']:.0%}" if best is not None else ""
        state = record.state if record.verdict is None else f"{record.state}, engines go back"
        return f"{state}: {len(ended)} trials, {crashed} crashed, {record.minutes:.0f} min{likely}"

    def cell(self) -> dict[str, Any]:
        """For viewers."""
        return cell(self.model, self.seen)

    # ---------------------------------------------------------------- from outside

    def pause(self, who: str) -> None:
        """Stop the traffic; the engines stay as they are. Raises RltopError when that cannot be written down."""
        self.record.state = "paused"
        self._go_on.clear()
        self._save()
        self._say("info", f"paused by {who}: its engines stay reserved, and idle")
        self._poke()

    def go_on(self, who: str) -> None:
        """After a pause. Raises RltopError when that cannot be written down."""
        self.record.state = "running"
        self._save()
        self._ticked = self._clock()
        self._go_on.set()
        self._say("info", f"goes on, asked by {who}")
        self._poke()

    def stop(self, why: str) -> None:
        """End it; `run` then puts the engines back."""
        self._stopped = self._stopped or why
        self._poke()

    def leave(self) -> None:
        """The daemon ends, the engines go on: the next one takes up what the record says."""
        self._leaving = True

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """From wherever the record stands to its end. Cancelled: its engines are stopped, or the daemon leaves."""
        record = self.record
        try:
            with self._trials.held([name for name in record.engines if name in self._trials.ids()], self.name):
                try:
                    if record.state not in ENDED:
                        await self._search()
                    await self._give_back()
                except asyncio.CancelledError:
                    if self._leaving:
                        with contextlib.suppress(RltopError):
                            self._save()
                    else:
                        self._cut_off()
                    raise
        except RltopError as error:
            self._end("failed", Ending(state="failed", culprit=None, words="", p=0.0, text=_sentence(error)))
            record.error = _sentence(error)
        record.ended = self._wall()
        await self._save_at_last()
        self._changed()

    async def _search(self) -> None:
        """Try until there is a verdict; it is in the record then."""
        record = self.record
        engines = [name for name in record.engines if name not in record.dropped]
        workers = {asyncio.ensure_future(self._work(name)) for name in engines}
        try:
            while self._verdict is None and not self._stopped:
                self._tick()
                await self._judge()
                self._changed()
                for worker in [one for one in workers if one.done()]:
                    workers.discard(worker)
                    worker.result()
                if not workers:
                    self._stopped = self._stopped or "no engine is left to try on"
                    record.error = self._stopped
                if self._verdict is None and not self._stopped:
                    await self._wait()
        except RltopError as error:
            record.error = self._stopped = _sentence(error)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            if not self._leaving:
                self._finish_rows()
        self._conclude()

    async def _wait(self) -> None:
        self._moved.clear()
        try:
            async with asyncio.timeout(self._beat_s):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _finish_rows(self) -> None:
        """What still runs ends with the bisection; its quiet minutes count."""
        outcome = "aborted" if self._verdict is None else "quiet"
        for row in self.record.trials:
            if row.outcome == "running":
                self._count(row)
                row.outcome = outcome if row.ready else "aborted"  # type: ignore[assignment]  # one of two literals
                row.counts = row.counts and row.ready
                row.ended = self._wall()
                row.note = row.note or "ended with the bisection"
        self._live.clear()

    def _conclude(self) -> None:
        """Verdict, or whatever ended it, into the record."""
        record, found = self.record, self._verdict
        if found is None:
            state: State = "failed" if record.error else "stopped"
            belief = self.model.planner.believe(self.model.evidence())
            best, chance = belief.best()
            left = self.model.named(belief.ranking(0.02))
            words = self.model.words(best)
            self._end(state, Ending(state=state, culprit=None, words=words, p=chance, text=self._stopped, left=left))
            return
        text = found.text
        if found.state == "budget" and not any(row.outcome == "crashed" and row.counts for row in record.trials):
            text += "; this traffic with these weights does not bring the crash back"
        culprit = None if found.culprit in (None, OTHER) else self.model.names(found.culprit)
        ending = Ending(
            state=found.state,
            culprit=culprit,
            words=self.model.words(found.culprit) if found.culprit is not None else "",
            p=found.probability,
            text=text,
            left=self.model.named(found.left),
        )
        known: State = "failed" if found.state == "open" else found.state
        self._end(known, ending)

    def _end(self, state: State, ending: Ending) -> None:
        self.record.state, self.record.verdict = state, ending
        level = "info" if state in ("found", "none", "stopped") else "warn"
        self._say(level if state != "failed" else "error", f"{state}: {ending.text}", verdict=state, p=ending.p)
        try:
            self._save()
        except RltopError as error:
            self._say("error", f"its end cannot be written down now: {_sentence(error)}")
        self._changed()

    # ---------------------------------------------------------------- back to what they were

    async def _give_back(self) -> None:
        """Every engine on its own flags, all at once: none of them serves anyway."""
        mine = [name for name, one in self._trials.on_trial().items() if one.name == self.name]
        for name in self.record.engines:
            if name not in mine:
                self.record.restored.setdefault(name, "original")
        await asyncio.gather(*(self._one_back(name) for name in mine))
        wrong = {name: why for name, why in self.record.restored.items() if why != "original"}
        if wrong:
            told = "; ".join(f"engine {name}: {why}" for name, why in wrong.items())
            self._say("error", f"not every engine is back as it was: {told}")
        else:
            self._say("info", f"engine {', '.join(self.record.engines)}: back on the original flags")

    async def _one_back(self, name: str) -> None:
        why = ""
        for attempt in range(BACK_TRIES):
            if attempt:
                await asyncio.sleep(BACK_PAUSE_S)
            try:
                why = await self._trials.give_back(name, f"{self.name} is over: its own flags")
            except RltopError as error:
                why = _sentence(error)
                continue
            break
        self.record.restored[name] = why or "original"
        self._changed()

    def _cut_off(self) -> None:
        """The engines are being stopped by others: their next start has their own arguments."""
        if self.record.state not in ENDED:
            self._stopped = self._stopped or "the run's engines were stopped"
            self._conclude()
        for name in self.record.engines:
            try:
                self._trials.put_back(name)
            except RltopError as error:
                self.record.restored[name] = _sentence(error)
            else:
                self.record.restored[name] = "original"
        self.record.ended = self._wall()
        try:
            self._save()
        except RltopError as error:
            self._say("error", f"its end cannot be written down: {_sentence(error)}")
        self._changed()

    async def _save_at_last(self) -> None:
        """The result is wanted on disk: tried until it is there."""
        while True:
            try:
                return self._save()
            except RltopError as error:
                self._say("error", f"its result cannot be written down now: {_sentence(error)}")
                self._changed()
            await asyncio.sleep(BACK_PAUSE_S)

    # ---------------------------------------------------------------- one engine

    async def _work(self, engine: str) -> None:
        """Trial after trial on one engine, until cancelled or until it takes no part any more."""
        then = self._left_over(engine)
        while engine not in self.record.dropped:
            await self._go_on.wait()
            if then is None:
                then = await self._choose(engine)
            then = await self._trial(engine, then)

    def _left_over(self, engine: str) -> _Decision | None:
        """The trial that an earlier daemon was at."""
        row = next((one for one in self.record.trials if one.engine == engine and one.outcome == "running"), None)
        if row is None:
            return None
        arm_on = self.model.space.mask(row.asked_on)
        return _Decision(row, Next(arm_on, row.planned, row.bits, row.crash, row.why))

    async def _choose(self, engine: str) -> _Decision:
        """The planner's next arm for a free engine, written down. Arms that cannot be are barred."""
        async with self._turn:
            while True:
                trials, running = self.model.evidence(), self._running()
                planner = self.model.planner
                then = await asyncio.to_thread(planner.choose, trials, running, engine=engine)
                on = self.model.space.names(then.arm)
                made = arm(self.record.subject, self.record.ground, self._off(on))
                if made.config is not None:
                    break
                self._bar(on, f"SGLang refuses it: {made.why_not}")
            row = TrialRow(
                n=len(self.record.trials) + 1,
                engine=engine,
                generation=self._trials.next_generation(engine),
                asked_on=on,
                planned=then.minutes,
                started=self._wall(),
                why=then.why,
                crash=then.crash,
                bits=then.bits,
            )
            self.record.trials.append(row)
            self._save()
        self._say("info", f"trial {row.n} on engine {engine}: {then.why}", trial=row.n, engine=engine)
        return _Decision(row, then)

    def _off(self, on: Sequence[str]) -> list[str]:
        return [name for name in self.record.ground.toggles if name not in on]

    def _bar(self, on: tuple[str, ...], why: str) -> None:
        """This arm is not chosen any more. Raises RltopError when it is barred already: the planner has no other."""
        if on in self.record.barred:
            raise RltopError("the planner has no arm that could be tried", why=why, exit_code=1)
        self.record.barred.append(on)
        self._say("warn", f"the arm with {', '.join(on) or 'nothing'} on cannot be: {why}")
        self.model.refresh()

    async def _trial(self, engine: str, decision: _Decision) -> _Decision | None:
        """One trial to its end; the decision for the next one, if the planner made it already."""
        row, began = decision.row, self._clock()
        fresh = not row.ready and self._trials.next_generation(engine) == row.generation
        if fresh:
            made = arm(self.record.subject, self.record.ground, self._off(row.asked_on))
            assert made.config is not None, "refused arms are barred"
            base = self._trials.subject(engine).config
            trial = OnTrial(name=self.name, weights=self.record.weights, base=base)
            self._trials.put_on(engine, trial, made.config, f"{self.name}, trial {row.n}: {row.why}")
            self._poke()
        seen = await self._arrival(engine, row.generation)
        if seen is None:
            self._is_lost(row, "it did not get ready in time")
            return None
        match seen.where:
            case "ready":
                if fresh:
                    self._measure_restart(began)
                return await self._under_traffic(engine, decision, seen)
            case "crashed":
                self._has_crashed(row, seen, at_start=not row.ready)
            case "hung":
                self._is_lost(row, f"it hung before the traffic began: {seen.cause}")
            case _:
                self._is_lost(row, seen.cause or "it is not there", gone=seen.where == "lost")
        return None

    async def _arrival(self, engine: str, generation: int) -> Sight | None:
        try:
            async with asyncio.timeout(self._trials.patience_s(engine)):
                return await self._trials.until(
                    engine, generation, lambda seen: seen if seen.where != "coming" else None
                )
        except TimeoutError:
            return None

    async def _under_traffic(self, engine: str, decision: _Decision, seen: Sight) -> _Decision | None:
        """Replay until it crashes or the planner wants something else of the engine."""
        row = decision.row
        self._see_effective(row, seen)
        row.ready, row.log = True, seen.log
        self._save()
        self._poke()
        ended = asyncio.ensure_future(
            self._trials.until(
                engine, row.generation, lambda seen: seen if seen.where not in ("ready", "coming") else None
            )
        )
        client = self._trials.client(seen.url)
        try:
            while True:
                await self._unpaused(ended)
                self._live[engine] = _Live(row, row.minutes, self._clock())
                stop = asyncio.Event()
                replay = asyncio.ensure_future(self._replay(client, row, stop))
                try:
                    await self._until_due(row, ended)
                finally:
                    stop.set()
                    await asyncio.gather(replay, return_exceptions=True)
                if ended.done():
                    self._ended_by_itself(row, ended.result())
                    return None
                self._count(row)
                if not self._go_on.is_set():
                    self._live.pop(engine, None)
                    continue
                then = await self._what_now(engine, row)
                if then is None:
                    continue
                self._is_over(row, "quiet", "")
                return None
        finally:
            self._count(row)
            self._live.pop(engine, None)
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            await client.close()

    async def _unpaused(self, ended: asyncio.Future[Sight]) -> None:
        waits = asyncio.ensure_future(self._go_on.wait())
        try:
            waited: list[asyncio.Future[Any]] = [waits, ended]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()

    async def _until_due(self, row: TrialRow, ended: asyncio.Future[Sight]) -> None:
        """Until the trial's time is over, its engine ends, or it is paused."""
        while not ended.done() and self._go_on.is_set():
            self._count(row)
            left = (row.planned - row.minutes) / self._scale
            if left <= 0:
                return
            await asyncio.wait([ended], timeout=min(left, self._beat_s))

    async def _replay(self, client: Any, row: TrialRow, stop: asyncio.Event) -> None:
        seed = row.n
        while not stop.is_set():
            counts: ReplayCounts = await self._traffic.replay(seed).run(client, stop=stop)
            row.requests += counts.done
            row.tokens += counts.tokens
            seed += 1000
            if not stop.is_set():  # its engine died, or refuses everything: whoever watches it says which
                waits = asyncio.ensure_future(stop.wait())
                await asyncio.wait([waits], timeout=AGAIN_S)
                waits.cancel()

    async def _what_now(self, engine: str, row: TrialRow) -> Next | None:
        """The planner's word on a trial whose time is over; None: it goes on."""
        async with self._turn:
            trials, running = self.model.evidence(), self._running()
            then = await asyncio.to_thread(self.model.planner.choose, trials, running, engine=engine)
            same = then.arm == self.model.arm_of(row) and not self.record.crash.at_start
            if same and self._verdict is None:
                row.planned = row.minutes + max(then.minutes, 0.05)
                row.why = then.why
                return None
        return then

    # ---------------------------------------------------------------- how a trial ended

    def _see_effective(self, row: TrialRow, seen: Sight) -> None:
        """It counts as what is in effect, not as what was asked for."""
        row.on = effective(self.record.ground, row.asked_on, seen.toggles)
        if set(row.on) != set(row.asked_on):
            more = [name for name in row.on if name not in row.asked_on]
            less = [name for name in row.asked_on if name not in row.on]
            words = [f"{', '.join(more)} stayed on"] if more else []
            words += [f"{', '.join(less)} went off too"] if less else []
            row.note = "; ".join(words)
        if seen.toggles.get("launch_blocking") == "on":
            row.counts = False
            row.note = "it runs with CUDA_LAUNCH_BLOCKING, which hides races: not counted"

    def _ended_by_itself(self, row: TrialRow, seen: Sight) -> None:
        live = self._live.pop(row.engine, None)
        if live is not None:
            row.minutes = live.base + max(0.0, min(self._clock(), seen.since) - live.since) * self._scale
        match seen.where:
            case "crashed":
                self._has_crashed(row, seen, at_start=False)
            case "hung":
                self._is_lost(row, f"it hung after {row.minutes:.1f} min: {seen.cause}")
            case _:
                self._is_lost(row, seen.cause or "somebody else ended it", gone=seen.where == "lost")

    def _has_crashed(self, row: TrialRow, seen: Sight, *, at_start: bool) -> None:
        hunted = self.record.crash
        row.fingerprint, row.kernel, row.log = seen.fingerprint, seen.kernel, seen.log
        if same_kind(hunted.kind, seen.kind):
            if at_start:
                row.note = _with(row.note, "before its first request")
            if seen.fingerprint != hunted.fingerprint:
                row.note = _with(row.note, f"as {seen.fingerprint}, hunted is {hunted.fingerprint}")
            self._lost[row.engine] = 0
            return self._is_over(row, "crashed", seen.cause)
        if at_start and seen.kind in NO_TOGGLE:
            return self._is_lost(row, f"it did not start: {seen.cause}", fingerprint=seen.fingerprint)
        row.counts = False
        row.note = _with(row.note, f"another crash than the hunted one ({seen.fingerprint}): not counted")
        self._strike(row.engine, "it keeps crashing of something else")
        return self._is_over(row, "crashed", seen.cause)

    def _is_lost(self, row: TrialRow, why: str, *, gone: bool = False, fingerprint: str = "") -> None:
        row.counts, row.fingerprint = False, fingerprint
        row.note = _with(row.note, why)
        self._strike(row.engine, why, at_once=gone and "node" in why)
        self._is_over(row, "lost", why)

    def _strike(self, engine: str, why: str, *, at_once: bool = False) -> None:
        self._lost[engine] = self._lost.get(engine, 0) + 1
        if at_once or self._lost[engine] >= MOST_LOST:
            self.record.dropped[engine] = why
            self._say("warn", f"engine {engine} takes no part any more: {why}", engine=engine)

    def _is_over(self, row: TrialRow, outcome: str, cause: str) -> None:
        if outcome == "quiet":
            self._lost[row.engine] = 0
        row.outcome, row.ended = outcome, self._wall()  # type: ignore[assignment]  # one of the outcomes
        if not row.ready and row.on is None:
            made = arm(self.record.subject, self.record.ground, self._off(row.asked_on))
            row.on = tuple(name for name in row.asked_on if name in made.on)
        self._live.pop(row.engine, None)
        text = f"trial {row.n} on engine {row.engine}: {outcome} after {row.minutes:.1f} min"
        details = "; ".join(part for part in (row.note, cause if cause not in row.note else "") if part)
        level = "info" if outcome in ("quiet", "crashed") else "warn"
        self._say(level, f"{text}{': ' + details if details else ''}", trial=row.n, engine=row.engine, outcome=outcome)
        self._save()
        self._poke()

    # ---------------------------------------------------------------- what is known

    def _running(self) -> list[Running]:
        """Trials under way, by now."""
        for live in self._live.values():
            self._count(live.row)
        return self.model.running()

    def _count(self, row: TrialRow) -> None:
        live = self._live.get(row.engine)
        if live is not None and live.row is row:
            row.minutes = live.base + (self._clock() - live.since) * self._scale

    async def _judge(self) -> None:
        """Ask the planner where it stands; what is shown follows more seldom, for it costs more."""
        trials, running = self.model.evidence(), self._running()
        minutes = self.record.minutes
        found = await asyncio.to_thread(self.model.planner.verdict, trials, running, minutes=minutes)
        if found.state != "open" and self._verdict is None:
            self._verdict = found
        state = (len(trials), tuple(sorted((one.engine, one.arm) for one in running)), self._verdict is not None)
        if state != self._looked or self._clock() - self._looked_at > LOOK_S:
            engines = [name for name in self.record.engines if name not in self.record.dropped]
            self._looked, self._looked_at = state, self._clock()
            self.seen = await asyncio.to_thread(outlook, self.model, trials, running, engines)

    def _measure_restart(self, began: float) -> None:
        took = (self._clock() - began) * self._scale
        count = sum(row.ready for row in self.record.trials)
        weight = 1 / (count + 2)
        self.record.restart_min += (took - self.record.restart_min) * max(weight, 0.1)
        self.model.refresh()

    def _tick(self) -> None:
        now = self._clock()
        if self._go_on.is_set():
            self.record.minutes += (now - self._ticked) * self._scale
        self._ticked = now
        if now - self._saved > SAVE_S:
            for live in self._live.values():
                self._count(live.row)
            self._save()

    def _save(self) -> None:
        """Raises RltopError."""
        self._records.write(self.record)
        self._saved = self._clock()

    def _poke(self) -> None:
        self._moved.set()

    def _say(self, level: str, text: str, **more: Any) -> None:
        self._tell(level, f"{self.name}: {text}", bisection=self.record.id, **more)


def _with(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def _sentence(error: RltopError) -> str:
    head = f"{error.where}: {error.what}" if error.where else error.what
    return f"{head}: {error.why}" if error.why else head
