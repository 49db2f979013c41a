"""One bisection from its first trial to its engines' return: who works, where it stands, how it ends.

Each guinea pig has a worker (`bisect_trial.py`). What happened is in the record before anything else follows from it,
so that whoever goes on after a death of this process, of an engine or of a node knows what is known.

Failure policy: while its record cannot be written (a full disk) it goes on in memory, which is said and shown. Whatever
ends it (a verdict, an operator, an error, no engine left), the engines go back to their own flags, and what could not
be put back is said. Only a daemon that dies leaves that to the next one; engines
that are being stopped by others get their own arguments for their next start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from rltop.bisect.facts import Tables
from rltop.bisect.planner import Verdict
from rltop.bisect.space import OTHER
from rltop.checks.phrase import count
from rltop.daemon.bisect_bench import Bench, Tell, Traffic, sentence
from rltop.daemon.bisect_crashes import Since
from rltop.daemon.bisect_kernel import locate
from rltop.daemon.bisect_model import Model, Outlook, cell, outlook
from rltop.daemon.bisect_record import ENDED, Ending, Record, Records, State
from rltop.daemon.bisect_trial import Worker
from rltop.engines.trials import Trials
from rltop.errors import RltopError

BEAT_S = 1.0
"""Between two looks at where it stands, while nothing happens."""
SAVE_S = 5.0
"""Exposure that a daemon which is killed may lose."""
LOOK_S = 5.0
"""Between two looks at what is believed, while no trial begins or ends."""
CUT_OFF = (
    "the run went down before it was clear; what was tried is kept: once its engines run again (rltop up), "
    "rltop bisect resume goes on with it"
)
ANEW = "once they start again, rltop bisect start begins anew"
BACK_TRIES, BACK_PAUSE_S = 6, 5.0
"""How often it is tried to put an engine back, and the pause between: a disk may have room again."""


class Runner:
    """Implements one bisection. `run` is its life; everything else may be called at any time."""

    def __init__(
        self,
        record: Record,
        *,
        trials: Trials,
        records: Records,
        traffic: Traffic,
        tables: Tables,
        tell: Tell,
        changed: Callable[[], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
        since: Since | None = None,
        beat_s: float = BEAT_S,
        back_pause_s: float = BACK_PAUSE_S,
    ) -> None:
        """tell: writes an event. changed: what viewers see is another. since: crashes of the engines that serve on."""
        self.record = record
        self.model = Model(record, tables)
        self.seen = Outlook()
        """What is believed, as of the last look."""
        self.bench = Bench(
            record=record,
            model=self.model,
            trials=trials,
            records=records,
            traffic=traffic,
            tell=tell,
            clock=clock,
            wall=wall,
            beat_s=beat_s,
        )
        self._changed, self._back_pause_s, self._since = changed, back_pause_s, since
        for name in record.engines:
            if name not in trials.ids():
                record.dropped[name] = record.restored[name] = "it is not there any more"
        if record.state != "paused":
            self.bench.go_on.set()
        self._verdict: Verdict | None = None
        self._stopped = ""
        self._leaving = False
        self.bench.saved = self._ticked = self._looked_at = clock()
        self._looked: Any = None

    @property
    def over(self) -> bool:
        """It has its result, and its engines are back as far as can be."""
        return self.record.ended is not None

    @property
    def leaving(self) -> bool:
        """It is left to the next daemon."""
        return self._leaving

    def stage(self) -> str:
        """Where it stands, in a line that changes only when a trial ends or it enters another stage."""
        record = self.record
        if record.verdict is not None:
            return f"{record.state}: {record.kernel_stage or 'its engines go back to their own flags'}"
        ended = [row for row in record.trials if row.outcome != "running"]
        crashed = sum(row.outcome == "crashed" and row.counts for row in ended)
        told = f"{count(len(ended), 'trial')} ended, {crashed} of them crashed" if ended else "no trial has ended yet"
        return f"{record.state}: {told}"

    def cell(self) -> dict[str, Any]:
        """For viewers."""
        return {**cell(self.model, self.seen), "unwritten": self.bench.unwritten or None}

    # ---------------------------------------------------------------- from outside

    def pause(self, who: str) -> None:
        """Stop the traffic; the engines stay as they are."""
        self.record.state = "paused"
        self.bench.go_on.clear()
        self.bench.save()
        self.bench.say("info", f"paused by {who}: its engines stay reserved, and idle")
        self.bench.moved.set()

    def go_on(self, who: str) -> None:
        """After a pause."""
        self.record.state = "running"
        self.bench.save()
        self._ticked = self.bench.clock()
        self.bench.go_on.set()
        self.bench.say("info", f"goes on, asked by {who}")
        self.bench.moved.set()

    def stop(self, why: str) -> None:
        """End it; `run` then puts the engines back."""
        self._stopped = self._stopped or why
        self.bench.moved.set()

    def leave(self) -> None:
        """The daemon ends, the engines go on: the next one takes up what the record says."""
        self._leaving = True

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """From wherever the record stands to its end. Cancelled: its engines are stopped, or the daemon leaves."""
        record, trials = self.record, self.bench.trials
        there = [name for name in record.engines if name in trials.ids()]
        try:
            with trials.held(there, self.bench.name):
                try:
                    if record.state not in ENDED:
                        await self._search()
                    await self._locate()
                    await self._give_back()
                except asyncio.CancelledError:
                    if self._leaving:
                        self.bench.save()
                    else:
                        self.cut_off()
                    raise
        except RltopError as error:
            record.error = sentence(error)
            self._end("failed", Ending(state="failed", culprit=None, words="", p=0.0, text=record.error))
        record.ended, record.unserved = self.bench.wall(), ""
        await self._save_at_last()
        self._changed()

    async def _search(self) -> None:
        """Try until there is a verdict; it is in the record then."""
        record = self.record
        engines = [name for name in record.engines if name not in record.dropped]
        workers = {asyncio.ensure_future(Worker(name, self.bench).run()) for name in engines}
        try:
            while self._verdict is None and not self._stopped:
                self.bench.moved.clear()  # what moves from here on is looked at once more
                self._tick()
                await self._judge()
                self._changed()
                for worker in [one for one in workers if one.done()]:
                    workers.discard(worker)
                    worker.result()
                if not workers:
                    told = "; ".join(f"engine {name}: {why.rstrip('.')}" for name, why in record.dropped.items())
                    record.error = self._stopped = self._stopped or f"no engine is left to try on: {told}; {ANEW}"
                if self._verdict is None and not self._stopped:
                    await self._wait()
        except RltopError as error:
            record.error = self._stopped = sentence(error)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            if not self._leaving:
                self._finish_rows()
        self._conclude()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.bench.beat_s):
                await self.bench.moved.wait()

    def _tick(self) -> None:
        """Time passes."""
        now = self.bench.clock()
        if self.bench.go_on.is_set():
            self.record.minutes += (now - self._ticked) * self.bench.scale
        self._ticked = now
        self._see_the_others()
        if now - self.bench.saved > SAVE_S:
            self.bench.running()  # brings the exposures up to date
            self.bench.save()

    def _see_the_others(self) -> None:
        """Engines that serve on have the bug too: their crashes are evidence, and nobody may be left to serve."""
        record, bench = self.record, self.bench
        for one in self._since.new() if self._since is not None else ():
            record.outside.append(one)
            text = f"engine {one.engine} crashed of the hunted kind ({one.fingerprint}) while it served, after "
            text += f"{one.minutes * record.time_scale:.1f} min of requests: it counts as a crash with everything on"
            bench.say("warn", text, engine=one.engine)
            bench.save()
        before, record.unserved = record.unserved, bench.trials.unserved(record.engines)
        if record.unserved and not before:
            bench.say("warn" if record.mode == "in-fleet" else "info", record.unserved)
        elif before and not record.unserved:
            bench.say("info", "an engine serves the run again")

    async def _judge(self) -> None:
        """Ask the planner where it stands; what is shown follows more seldom, for it costs more."""
        trials, running = self.model.evidence(), self.bench.running()
        minutes, planner = self.record.minutes, self.model.planner
        found = await asyncio.to_thread(planner.verdict, trials, running, minutes=minutes)
        unsure = found.state in ("found", "none") and found.probability < self.record.sure
        if found.state != "open" and not unsure and self._verdict is None:
            self._verdict = found
        if self._verdict is None and len(trials) == len(self.model.evidence()):
            self.bench.judged.set()
        state = (len(trials), tuple(sorted((one.engine, one.arm) for one in running)), self._verdict is not None)
        if state != self._looked or self.bench.clock() - self._looked_at > LOOK_S:
            engines = [name for name in self.record.engines if name not in self.record.dropped]
            self._looked, self._looked_at = state, self.bench.clock()
            self.seen = await asyncio.to_thread(outlook, self.model, trials, running, engines)

    # ---------------------------------------------------------------- the end

    def _finish_rows(self) -> None:
        """What still runs ends with the bisection; its quiet minutes count."""
        for row in self.record.trials:
            if row.outcome == "running":
                row.outcome = "quiet" if self._verdict is not None and row.ready else "aborted"
                row.counts = row.counts and row.ready
                row.ended = self.bench.wall()
                row.note = row.note or "ended with the bisection"
                text = f"trial {row.n} on engine {row.engine}: {row.outcome} after {row.minutes:.1f} min: {row.note}"
                self.bench.say("info", text, trial=row.n, engine=row.engine, outcome=row.outcome)

    def _conclude(self) -> None:
        """Verdict, or whatever ended it, into the record."""
        record, found, model = self.record, self._verdict, self.model
        if found is None:
            belief = model.planner.believe(model.evidence())
            best, chance = belief.best()
            left, words = model.named(belief.ranking(0.02)), model.words(best)
            state: State = "failed" if record.error else "stopped"
            self._end(state, Ending(state=state, culprit=None, words=words, p=chance, text=self._stopped, left=left))
            return
        text = found.text
        counted = [row for row in record.trials if row.counts]
        tried = sum(row.minutes for row in counted) > 0
        if found.state == "budget" and tried and not any(row.outcome == "crashed" for row in counted):
            text += "; this traffic with these weights does not bring the crash back"
        ending = Ending(
            state=found.state,
            culprit=None if found.culprit in (None, OTHER) else model.names(found.culprit),
            words=model.words(found.culprit),
            p=found.probability,
            text=text,
            left=model.named(found.left),
        )
        self._end("failed" if found.state == "open" else found.state, ending)

    def _end(self, state: State, ending: Ending) -> None:
        self.record.state, self.record.verdict = state, ending
        level = "error" if state == "failed" else "info" if state in ("found", "none", "stopped") else "warn"
        self.bench.say(level, f"{state}: {ending.text}", verdict=state, p=ending.p)
        self.bench.save()
        self._changed()

    async def _save_at_last(self) -> None:
        """The result is wanted on disk: tried until it is there."""
        while not self.bench.save():
            self._changed()
            await asyncio.sleep(self._back_pause_s)

    async def _locate(self) -> None:
        """The kernel, where a culprit was found. `stop` cuts it short; whatever goes wrong, the engines go back."""
        record = self.record
        if record.state != "found" or record.located is not None or self._stopped:
            return
        work = asyncio.ensure_future(locate(self.bench))
        try:
            while not work.done() and not self._stopped:
                self.bench.moved.clear()
                self._changed()
                await asyncio.wait([work], timeout=self.bench.beat_s)
                self._see_the_others()
        except RltopError as error:
            self.bench.say("error", f"the search for the kernel ends: {sentence(error)}")
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            record.kernel_stage = ""
        if not work.cancelled() and (fault := work.exception()) is not None:
            told = sentence(fault) if isinstance(fault, RltopError) else f"a fault: {fault!r}"
            self.bench.say("error", f"the search for the kernel ends: {told}")
        self._changed()

    # ---------------------------------------------------------------- back to what they were

    async def _give_back(self) -> None:
        """Every engine on its own flags, all at once: none of them serves anyway."""
        record = self.record
        mine = [name for name, one in self.bench.trials.on_trial().items() if one.name == self.bench.name]
        for name in record.engines:
            if name not in mine:
                record.restored.setdefault(name, "original")
        await asyncio.gather(*(self._one_back(name) for name in mine))
        wrong = [f"engine {name}: {why.rstrip('.')}" for name, why in record.restored.items() if why != "original"]
        if wrong:
            self.bench.say("error", f"not every engine is back as it was: {'; '.join(wrong)}")
        else:
            self.bench.say("info", f"engine {', '.join(record.engines)}: back on the original flags")

    async def _one_back(self, name: str) -> None:
        why = ""
        for attempt in range(BACK_TRIES):
            if attempt:
                await asyncio.sleep(self._back_pause_s)
            try:
                why = await self.bench.trials.give_back(name, f"{self.bench.name} is over: its own flags")
            except RltopError as error:
                why = sentence(error)
                self.bench.say("error", f"engine {name} cannot be put back now: {why}", engine=name)
                continue
            break
        self.record.restored[name] = why or "original"
        self._changed()

    def cut_off(self) -> None:
        """Its engines were stopped: their next start has their own arguments, and somebody may let it go on then."""
        record = self.record
        if record.state not in ENDED:
            self._finish_rows()
            record.cut_off = not self._stopped
            self._stopped = self._stopped or CUT_OFF
            self._conclude()
        for name in record.engines:
            if name in record.restored:
                continue
            record.restored[name] = "original"
            try:
                self.bench.trials.put_back(name)
            except KeyError:
                record.restored[name] = "it is not there any more"
            except RltopError as error:
                record.restored[name] = sentence(error)
        record.ended, record.unserved, record.kernel_stage = self.bench.wall(), "", ""
        self.bench.save()
        self._changed()
