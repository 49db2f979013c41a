"""One guinea pig of a bisection: trial after trial, each written down before anything follows from it.

A trial asks the planner for an arm, puts the engine on it, replays the traffic, and ends when the engine crashes or the
planner wants something else. Exposure is time under traffic: from ready to the crash, pauses and deaths of the daemon
left out. It counts as the arm that is in effect, not as the one that was asked for; a toggle whose flag has no effect
is never asked for again.

Failure policy: an engine that does not start, cannot load its weights, refuses every request, hangs or is taken away
makes the trial "lost", and a crash of another kind is noted: both are no evidence. An arm that is lost twice is left
out if the engine then starts with another one; three lost trials in a row and the engine takes no part any more.
`RltopError` means that there is nothing left to try: whoever runs the bisection ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rltop.bisect.planner import Next
from rltop.bisect.story import same_fault
from rltop.daemon.bisect_bench import Bench, first, sentence, within
from rltop.daemon.bisect_crashes import NO_TOGGLE, same_kind
from rltop.daemon.bisect_record import Outcome, TrialRow
from rltop.engines.client import AsyncEngineClient
from rltop.engines.ground import MEMORY_SAVER, RESUME_ORDER, arm, effective
from rltop.engines.launcher import LOG
from rltop.engines.requests import Config
from rltop.engines.slots import OnTrial
from rltop.engines.traffic import Cycle
from rltop.engines.trials import Sight
from rltop.errors import RltopError

MOST_LOST = 3
"""Trials in a row without evidence, after which an engine takes no part any more."""
MOST_AGAIN = 2
"""Of these with one arm: then another arm is tried, to tell an arm that cannot start from an engine that cannot."""
AGAIN_S = 1.0
"""A replay that ends by itself while its engine lives begins again after so long."""
DYING_S = 120.0
"""How long an engine whose requests broke off, or that writes its dumps, may take to be gone."""
SOON_S = 3.0
"""Requests that broke off without a death that follows are not the engine's end."""


class Worker:
    """One engine."""

    def __init__(self, engine: str, bench: Bench) -> None:
        self._engine, self._bench = engine, bench

    async def run(self) -> None:
        """Trial after trial, until cancelled or until the engine takes no part any more. Raises RltopError."""
        bench = self._bench
        rows = (one for one in bench.record.trials if one.engine == self._engine and one.outcome == "running")
        row = next(rows, None)  # that an earlier daemon was at
        while self._engine not in bench.record.dropped:
            await bench.go_on.wait()
            if not bench.trials.subject(self._engine).runs:
                bench.record.dropped[self._engine] = "somebody stopped it"
                break
            await self._trial(await self._choose() if row is None else row)
            row = None
            bench.judged.clear()
            bench.moved.set()
            await bench.judged.wait()

    # ---------------------------------------------------------------- choosing

    async def _choose(self) -> TrialRow:
        """The planner's next arm for a free engine, written down. Arms that cannot be are barred."""
        bench, record = self._bench, self._bench.record
        async with bench.turn:
            while True:
                then = await self._ask()
                on = bench.model.space.names(then.arm)
                made = arm(record.subject, record.ground, self._off(on))
                if made.config is not None:
                    break
                self._bar(on, f"SGLang refuses it: {made.why_not}")
            row = TrialRow(
                n=len(record.trials) + 1,
                engine=self._engine,
                generation=bench.trials.next_generation(self._engine),
                asked_on=on,
                planned=then.minutes,
                started=bench.wall(),
                why=then.why,
                crash=then.crash,
                bits=then.bits,
            )
            if record.subject.launcher == "local":
                row.log = str(bench.records.run_dir / "engines" / row.engine / str(row.generation) / LOG)
            record.trials.append(row)
            bench.save()
        bench.say("info", f"trial {row.n} on engine {self._engine}: {then.why}", trial=row.n, engine=self._engine)
        return row

    async def _ask(self) -> Next:
        bench = self._bench
        planner, trials, running = bench.model.planner, bench.model.evidence(), bench.running()
        return await asyncio.to_thread(planner.choose, trials, running, engine=self._engine)

    def _off(self, on: Sequence[str]) -> list[str]:
        return [name for name in self._bench.record.ground.toggles if name not in on]

    def _bar(self, on: tuple[str, ...], why: str) -> None:
        """This arm is not chosen any more. Raises RltopError when it is barred already: the planner has no other."""
        record = self._bench.record
        if on in record.barred:
            raise RltopError("the planner has no arm that could be tried", why=why, exit_code=1)
        record.barred.append(on)
        self._bench.say("warn", f"the arm with {', '.join(on) or 'nothing'} on cannot be: {why}")
        self._bench.model.refresh()

    # ---------------------------------------------------------------- one trial

    async def _trial(self, row: TrialRow) -> None:
        bench, engine, began = self._bench, self._engine, self._bench.clock()
        fresh = not row.ready and bench.trials.next_generation(engine) == row.generation
        if fresh:
            made = arm(bench.record.subject, bench.record.ground, self._off(row.asked_on))
            assert made.config is not None, "refused arms are barred"
            base = bench.trials.subject(engine).config
            trial = OnTrial(name=bench.name, weights=bench.record.weights, base=base)
            await self._put_on(row, trial, made.config)
            bench.moved.set()
        seen = await self._arrival(row)
        if seen is None:
            limit = bench.trials.patience_s(engine)
            self._is_lost(row, f"it was not ready after {limit:.0f} s ({bench.trials.where(engine)})")
        elif seen.where == "ready":
            if fresh:
                self._measure_restart(began)
            await self._under_traffic(row, seen)
        else:
            self._ended(row, seen, at_start=not row.ready)

    async def _put_on(self, row: TrialRow, trial: OnTrial, config: Config) -> None:
        """Begin its generation, as soon as that can be written down."""
        bench, said = self._bench, False
        while True:
            try:
                bench.trials.put_on(self._engine, trial, config, f"{bench.name}, trial {row.n}: {row.why}")
                return
            except RltopError as error:
                if not said:
                    text = f"trial {row.n} waits until it can be written down: {sentence(error)}"
                    bench.say("error", text, trial=row.n, engine=self._engine)
                said = True
            await asyncio.sleep(AGAIN_S)

    async def _arrival(self, row: TrialRow) -> Sight | None:
        """Until it is there, or is not to come; None: it takes too long."""
        trials = self._bench.trials

        def there(seen: Sight) -> Sight | None:
            row.log = seen.log or row.log
            return _unless(seen, "coming")

        try:
            async with asyncio.timeout(trials.patience_s(self._engine)):
                return await trials.until(self._engine, row.generation, there)
        except TimeoutError:
            return None

    async def _under_traffic(self, row: TrialRow, seen: Sight) -> None:
        """Replay until it crashes or the planner wants something else of the engine."""
        bench, engine = self._bench, self._engine
        self._see_effective(row, seen)
        if not row.ready:
            text = f"trial {row.n} on engine {engine}: ready, its traffic begins"
            bench.say("info", text, trial=row.n, engine=engine)
        row.ready, row.log = True, seen.log
        bench.save()
        bench.moved.set()
        ended = asyncio.ensure_future(
            bench.trials.until(engine, row.generation, lambda seen: _unless(seen, "ready", "coming"))
        )
        client = bench.trials.client(seen.url)
        try:
            while True:
                await first(bench.go_on.wait(), ended)
                await self._stretch(row, client, ended)
                if ended.done():
                    break
                bench.rest(row)
                if row.failed >= MOST_LOST and not row.requests:
                    return self._is_lost(row, f"it refused every request ({row.failed})")
                if bench.go_on.is_set() and not await self._goes_on(row):
                    return self._is_over(row, "quiet", "")
            self._ended(row, ended.result(), at_start=False)
        finally:
            bench.rest(row)
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            await client.close()

    async def _stretch(self, row: TrialRow, client: AsyncEngineClient, ended: asyncio.Future[Sight]) -> None:
        """Traffic until the trial's time is over, it is paused, or the engine has ended."""
        bench, stop = self._bench, asyncio.Event()
        broke = asyncio.Event()
        replay = asyncio.ensure_future(self._replay(row, client, stop, broke))
        try:
            while not ended.done() and not replay.done() and bench.go_on.is_set():
                bench.count(row)
                self._see_unused(row)
                left = (row.planned - row.minutes) / bench.scale
                if left <= 0 and not bench.trials.sight(self._engine, row.generation).doubted:
                    break  # one that may hang is not called quiet before that is known
                waited: list[asyncio.Future[Any]] = [ended, replay]
                await asyncio.wait(
                    waited, timeout=min(max(left, 0.1), bench.beat_s), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            stop.set()
            await asyncio.gather(replay, return_exceptions=True)
        if replay.exception() is not None and not ended.done():
            bench.say("error", f"trial {row.n}: fault in its traffic: {replay.exception()!r}", engine=self._engine)
        # What broke off, or is writing its last words, is not quiet.
        if broke.is_set():
            await asyncio.wait([ended], timeout=SOON_S)
        if not ended.done() and bench.trials.sight(self._engine, row.generation).where != "ready":
            await asyncio.wait([ended], timeout=DYING_S)

    async def _replay(
        self, row: TrialRow, client: AsyncEngineClient, stop: asyncio.Event, broke: asyncio.Event
    ) -> None:
        """Over and over. broke: the newest replay ended by itself: its engine died, or refuses everything."""
        turn, bench = 0, self._bench
        while not stop.is_set():
            replay = bench.traffic.replay(row.n + 1000 * turn, self._cycle(row))
            bench.begin(row, replay)
            await replay.run(client, stop=stop)
            turn += 1
            if not stop.is_set():
                bench.rest(row)
            if not stop.is_set():
                broke.set()
                await within(stop.wait(), AGAIN_S)
                if not stop.is_set():
                    broke.clear()

    def _cycle(self, row: TrialRow) -> Cycle | None:
        """What this arm does between waves."""
        record, trials, engine = self._bench.record, self._bench.trials, self._engine
        off = self._off(row.asked_on)
        if not record.cycle or not record.weights.path or RESUME_ORDER in off:
            return None
        if record.cycle == "sleep" and MEMORY_SAVER in off:
            return None  # nothing can be released
        return Cycle(
            kind="sleep" if record.cycle == "sleep" else "sync",
            version=record.weights.version,
            path=record.weights.path,
            lend=lambda: trials.lend(engine),
            back=lambda: trials.back(engine, row.generation, record.weights.version),
        )

    async def _goes_on(self, row: TrialRow) -> bool:
        """The planner's word on a trial whose time is over."""
        bench = self._bench
        if bench.record.crash.at_start:
            return False  # every start is an exposure of its own
        async with bench.turn:
            then = await self._ask()
        if then.arm != bench.model.arm_of(row):
            return False
        row.planned = row.minutes + max(then.minutes, 0.05)
        row.why = then.why
        return True

    def _measure_restart(self, began: float) -> None:
        bench, record = self._bench, self._bench.record
        took = (bench.clock() - began) * bench.scale
        count = sum(row.ready for row in record.trials)
        record.restart_min += (took - record.restart_min) * max(1 / (count + 2), 0.1)
        bench.model.refresh()

    # ---------------------------------------------------------------- how it ended

    def _see_effective(self, row: TrialRow, seen: Sight) -> None:
        """It counts as what is in effect; the planner learns what cannot be had."""
        record = self._bench.record
        row.on = effective(record.ground, row.asked_on, seen.toggles)
        more = [name for name in row.on if name not in row.asked_on]
        less = [name for name in row.asked_on if name not in row.on]
        words = [f"{', '.join(more)} stayed on"] if more else []
        words += [f"{', '.join(less)} went off too"] if less else []
        row.note = "; ".join(words)
        if seen.toggles.get("launch_blocking") == "on":
            row.counts = False
            row.note = "it runs with CUDA_LAUNCH_BLOCKING, which hides races: not counted"
        for name in more:
            record.stuck[name] = f"its flag has no effect (trial {row.n})"
            self._bench.say("warn", f"{name} stays on whatever its flag says: it is not turned off any more")
        off = self._off(row.asked_on)
        if less and len(off) == 1:
            known = record.goes_with.get(off[0], ())
            record.goes_with[off[0]] = tuple(dict.fromkeys((*known, *less)))
        elif less and row.asked_on not in record.barred:
            record.barred.append(row.asked_on)
        if more or less:
            self._bench.model.refresh()

    def _see_unused(self, row: TrialRow) -> None:
        """What the log of the steps says against a toggle that the engine calls on. The planner is asked anew then."""
        record, seen = self._bench.record, self._bench.trials.sight(self._engine, row.generation)
        if seen.where != "ready" or row.on is None:
            return
        unused = [name for name in row.on if name not in effective(record.ground, row.asked_on, seen.toggles)]
        if unused:
            self._see_effective(row, seen)
            row.planned = row.minutes
            text = f"trial {row.n}: no decode step replays a CUDA graph: it counts as without {', '.join(unused)}"
            self._bench.say("warn", text, trial=row.n, engine=self._engine)

    def _ended(self, row: TrialRow, seen: Sight, *, at_start: bool) -> None:
        """By itself, or by somebody else."""
        bench = self._bench
        bench.count(row)
        if (live := bench.live.pop(row.engine, None)) is not None:
            row.minutes = live.base + max(0.0, min(bench.clock(), seen.since) - live.since) * bench.scale
        match seen.where:
            case "crashed":
                self._has_crashed(row, seen, at_start=at_start)
            case "hung":
                when = "before the traffic began" if at_start else f"after {row.minutes:.1f} min"
                self._is_lost(row, f"it hung {when}: {seen.cause}")
            case _:
                self._is_lost(row, seen.cause or "somebody else ended it", at_once=seen.node_lost)

    def _has_crashed(self, row: TrialRow, seen: Sight, *, at_start: bool) -> None:
        hunted = self._bench.record.crash
        row.fingerprint, row.kernel, row.log = seen.fingerprint, seen.kernel, seen.log
        if same_kind(hunted.kind, seen.kind):
            if at_start:
                row.note = _with(row.note, "before its first request")
            if not same_fault(seen.fingerprint, hunted.fingerprint):
                unnamed = ": its log names no kernel" if hunted.kernel and not seen.kernel else ""
                row.note = _with(row.note, f"as {seen.fingerprint}, hunted is {hunted.fingerprint}{unnamed}")
            self._evidence(row.engine)
            if seen.kernel and row.counts and not (hunted.kernel or self._bench.record.kernel):
                told = self._bench.model.learn_kernel(seen.kernel, seen.log or f"trial {row.n}")
                self._bench.say("info", f"trial {row.n}: its core dump names the kernel: {told}", trial=row.n)
            return self._is_over(row, "crashed", seen.cause)
        if seen.kind in NO_TOGGLE:
            when = "it was ended before its traffic began" if seen.started else "it did not start"
            when = when if at_start else f"it was ended after {row.minutes:.1f} min"
            return self._is_lost(row, f"{when}: {seen.cause}")
        row.counts = False
        row.note = _with(row.note, f"another crash than the hunted one ({seen.fingerprint}): not counted")
        self._strike("it keeps crashing of something else")
        return self._is_over(row, "crashed", seen.cause)

    def _is_lost(self, row: TrialRow, why: str, *, at_once: bool = False) -> None:
        row.counts = False
        row.note = _with(row.note, why)
        row.outcome = "lost"
        self._strike(why, at_once=at_once)
        self._set_aside(row, why)
        self._is_over(row, "lost", why)

    def _strike(self, why: str, *, at_once: bool = False) -> None:
        bench, engine = self._bench, self._engine
        bench.lost[engine] = bench.lost.get(engine, 0) + 1
        if at_once or bench.lost[engine] >= MOST_LOST:
            bench.record.dropped[engine] = why
            bench.say("warn", f"engine {engine} takes no part any more: {why}", engine=engine)
            if engine in bench.aside:  # no arm starts there: that says nothing of the one which was set aside
                bench.record.barred.remove(bench.aside.pop(engine)[0])
                bench.model.refresh()

    def _set_aside(self, row: TrialRow, why: str) -> None:
        """Try another arm after this one was lost again and again, as long as there is another one. A hang is nobody's
        arm: the machine may be busy."""
        bench, record = self._bench, self._bench.record
        mine = [one for one in record.trials if one.engine == row.engine and one.ended is not None]
        lost = [one for one in [*mine, row][-MOST_AGAIN:] if one.outcome == "lost"]
        again = [one.asked_on for one in lost if not one.ready or (one.failed and not one.requests)]
        others = 2 ** len(set(record.ground.toggles) - set(bench.model.fixed())) - len(record.barred) - 1
        if again != [row.asked_on] * MOST_AGAIN or row.engine in record.dropped or others < 1:
            return
        if row.engine not in bench.aside and row.asked_on not in record.barred:
            record.barred.append(row.asked_on)
            bench.aside[row.engine] = (row.asked_on, why)
            bench.model.refresh()

    def _evidence(self, engine: str) -> None:
        """A trial of this engine told something: an arm that it could not start is at fault itself."""
        bench = self._bench
        bench.lost[engine] = 0
        if (found := bench.aside.pop(engine, None)) is not None:
            on, why = found
            told = (
                f"the arm with {', '.join(on) or 'nothing'} on was lost twice, another one runs: it is left out: {why}"
            )
            bench.record.notes.append(told)
            bench.say("warn", told, engine=engine)

    def _is_over(self, row: TrialRow, outcome: Outcome, cause: str) -> None:
        bench = self._bench
        if outcome == "quiet":
            self._evidence(row.engine)
        row.outcome, row.ended = outcome, bench.wall()
        if row.on is None:  # it never answered: as far as its arguments tell
            made = arm(bench.record.subject, bench.record.ground, self._off(row.asked_on))
            row.on = tuple(name for name in row.asked_on if name in made.on)
        text = f"trial {row.n} on engine {row.engine}: {outcome} after {row.minutes:.1f} min"
        details = "; ".join(part for part in (row.note, cause if cause not in row.note else "") if part)
        level = "info" if outcome in ("quiet", "crashed") else "warn"
        whole = f"{text}{': ' + details if details else ''}"
        bench.say(level, whole, trial=row.n, engine=row.engine, outcome=outcome)
        bench.save()
        bench.moved.set()


def _unless(seen: Sight, *where: str) -> Sight | None:
    return None if seen.where in where else seen


def _with(note: str, more: str) -> str:
    return f"{note.rstrip('.')}; {more}" if note else more
