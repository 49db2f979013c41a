"""After the culprit: the kernel that made the illegal access, from the core dumps that there are, else from one run.

In this order, and no further than needed: the core dumps of the hunted crash and of the trials that crashed with the
culprit on (cuda-gdb where this machine has it, else the name in the log's `coredump:` lines); one run of the culprit's
arm with core dumps on, where none was written; one run with CUDA_LAUNCH_BLOCKING and graphs off, where the culprit
needs no graphs. The last is weaker: its timing is another. None of these runs is a trial: nothing is concluded from
them but the name.

Failure policy: what can not be found out is a note of the record; the bisection's result stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rltop.daemon.bisect_bench import Bench
from rltop.daemon.bisect_crashes import GPU_FAULTS
from rltop.daemon.bisect_record import KernelRun, Record
from rltop.daemon.bisect_trial import AGAIN_S, DYING_S
from rltop.engines.crash_facts import core_of, tail_of
from rltop.engines.gdb import Kernel, by_hand, of_blocking, of_log, read_core
from rltop.engines.ground import arm
from rltop.engines.planning import config_of, inherited_toggles
from rltop.engines.requests import Config
from rltop.engines.slots import OnTrial
from rltop.engines.toggle_table import CORE_DUMP_ENVIRONMENT
from rltop.engines.toggles import change
from rltop.engines.trials import Sight, model_of

GRAPHS = ("cuda_graph", "prefill_graph", "cuda_graph_padding")
MEANS = 3.0
"""A run for the kernel ends after so many mean times between crashes without one."""
LONGEST_MIN = 60.0
EVIDENCE_S, LOOK_S = 5.0, 0.05
"""After an end is seen: until its last lines are copied."""
STAND_IN = "a stand-in wrote it, no GPU was there"


@dataclass(frozen=True, slots=True)
class Death:
    """A crash whose evidence is looked at."""

    folder: Path
    """Of its generation."""
    what: str


async def locate(bench: Bench) -> None:
    """Put the kernel into the record, or a note. Raises RltopError when that cannot be written down."""
    record = bench.record
    record.kernel_stage = "the kernel is looked for in what the crashes left"
    found, notes = await _in_what_there_is(bench)
    if found is None and (engine := _free(bench)) is not None:
        found = await _once_more(bench, engine, notes)
    if found is None:
        record.notes += [f"the kernel is not known: {'; '.join(dict.fromkeys(notes)) or 'no crash names one'}"]
    else:
        source = f"{found.source}; {STAND_IN}" if record.crash.injected else found.source
        record.located = replace(found, source=source).cell()
        record.notes += [note for note in notes[:1] if note not in record.notes]  # the others say the same of others
        place = f", {found.place}" if found.place else ""
        weaker = " (weaker than a core dump)" if found.weaker else ""
        bench.say("info", f"the kernel is {found.name}{place}: {source}{weaker}")
    bench.save()


# ---------------------------------------------------------------------- what is there


async def _in_what_there_is(bench: Bench) -> tuple[Kernel | None, list[str]]:
    """The best that any crash so far tells: whole from a core dump before the name alone."""
    named: Kernel | None = None
    notes: list[str] = []
    for death in _deaths(bench):
        found, why = await _look(death)
        notes += [why] if why else []
        if found is not None and found.place:
            return found, []
        named = named or found
    return named, notes


def _deaths(bench: Bench) -> Iterator[Death]:
    """The hunted crash, then trials that crashed with the whole culprit on, the newest first."""
    record, engines = bench.record, bench.records.run_dir / "engines"
    culprit = set(record.verdict.culprit or ()) if record.verdict is not None else set()
    crash = record.crash
    yield Death(engines / crash.engine / str(crash.generation), "the hunted crash")
    for row in reversed(record.trials):
        if row.outcome == "crashed" and row.counts and culprit <= set(row.asked_on if row.on is None else row.on):
            yield Death(engines / row.engine / str(row.generation), f"trial {row.n}")


async def _look(death: Death) -> tuple[Kernel | None, str]:
    lines = await asyncio.to_thread(tail_of, death.folder)
    core = await asyncio.to_thread(core_of, lines, death.folder / "coredump")
    if core is not None:
        looked = await read_core(core)
        if looked.kernel is not None:
            return looked.kernel, ""
    named = of_log(lines)
    if core is None:
        why = "" if named is not None else f"{death.what} left no core dump here"
    else:
        why = f"its source line is not known: {looked.why}" if named is not None else looked.why or by_hand(core)
    return named, why


# ---------------------------------------------------------------------- one more run


def _free(bench: Bench) -> str | None:
    """A guinea pig that can run once more."""
    for engine in bench.record.engines:
        if engine not in bench.record.dropped and bench.trials.subject(engine).runs:
            return engine
    return None


async def _once_more(bench: Bench, engine: str, notes: list[str]) -> Kernel | None:
    record = bench.record
    culprit = set(record.verdict.culprit or ()) if record.verdict is not None else set()
    off = [name for name in record.ground.toggles if name not in culprit]
    made = arm(record.subject, record.ground, off)
    config = made.config if made.config is not None else record.ground.config
    if any(config.env.get(name) != value for name, value in CORE_DUMP_ENVIRONMENT.items()):
        dumping = Config(
            args=config.args,
            env={**config.env, **CORE_DUMP_ENVIRONMENT},
            unset=tuple(name for name in config.unset if name not in CORE_DUMP_ENVIRONMENT),
        )
        why = "no crash left a core dump that names the kernel: the culprit's arm runs once more, with core dumps"
        if (death := await _run(bench, engine, dumping, why)) is not None:
            found, why = await _look(death)
            notes += [why] if why else []
            if found is not None:
                return found
    if culprit & set(GRAPHS):
        notes.append("it needs CUDA graphs, and a launch in a graph can not be told by CUDA_LAUNCH_BLOCKING")
        return None
    blocking = _blocking(record, config, notes)
    if blocking is None:
        return None
    why = "the kernel has no name yet: the culprit's arm runs once more, with CUDA_LAUNCH_BLOCKING and graphs off"
    death = await _run(bench, engine, blocking, why)
    if death is None:
        notes.append("with CUDA_LAUNCH_BLOCKING it did not crash, which proves nothing")
        return None
    return of_blocking(await asyncio.to_thread(tail_of, death.folder), graphs=False)


def _blocking(record: Record, config: Config, notes: list[str]) -> Config | None:
    """Launches that block, without graphs; None: SGLang refuses that."""
    subject = record.subject
    inherited = inherited_toggles(config, subject.launcher)
    changes = {"launch_blocking": "on", "core_dump": "off", "cuda_graph": "off", "prefill_graph": "off"}
    env = inherited | dict(config.env)
    made = change(config.args, env, changes, version=subject.version, baseline=subject.info, model=model_of(subject))
    if not made.allowed:
        notes.append(f"it can not run with CUDA_LAUNCH_BLOCKING and without graphs: {made.refusals[0].why}")
        return None
    return config_of(made, config, inherited)


async def _run(bench: Bench, engine: str, config: Config, why: str) -> Death | None:
    """One run under the traffic until it crashes of a GPU fault; None: it did not. Raises RltopError."""
    trials, record = bench.trials, bench.record
    await bench.go_on.wait()
    limit = _limit_min(bench)
    run = KernelRun(
        engine=engine,
        generation=trials.next_generation(engine),
        why=why,
        limit_min=round(limit, 1),
        started=bench.wall(),
    )
    record.kernel_runs.append(run)
    record.kernel_stage = f"{why} (engine {engine}, at most {limit:.1f} min under traffic; no trial)"
    bench.say("info", record.kernel_stage, engine=engine)
    bench.save()
    try:
        base = trials.subject(engine).config
        trials.put_on(engine, OnTrial(name=bench.name, weights=record.weights, base=base), config, why)
        seen = await _seen(bench, run)
        if seen is not None:
            hit = seen.where == "crashed" and seen.kind in GPU_FAULTS
            run.outcome = "quiet" if seen.where == "ready" else "crashed" if hit else "lost"
            run.note = "" if seen.where == "ready" else seen.cause
    finally:
        run.outcome = "aborted" if run.outcome == "running" else run.outcome
        run.ended = bench.wall()
        text = f"the run for the kernel on engine {engine}: {run.outcome} after {run.minutes:.1f} min"
        bench.say("info", f"{text}: {run.note}" if run.note else text, engine=engine)
    bench.save()
    if run.outcome != "crashed":
        return None
    folder = Path(run.log).parent if run.log else bench.records.run_dir / "engines" / engine / str(run.generation)
    await _evidence(folder)
    return Death(folder, "the run for the kernel")


async def _seen(bench: Bench, run: KernelRun) -> Sight | None:
    """What became of it; None: it did not get ready in time."""
    trials, limit_s = bench.trials, bench.trials.patience_s(run.engine)
    try:
        async with asyncio.timeout(limit_s):
            seen = await trials.until(run.engine, run.generation, lambda now: None if now.where == "coming" else now)
    except TimeoutError:
        run.outcome, run.note = "lost", f"it was not ready after {limit_s:.0f} s ({trials.where(run.engine)})"
        return None
    run.log = seen.log
    return await _under_traffic(bench, run, seen) if seen.where == "ready" else seen


async def _under_traffic(bench: Bench, run: KernelRun, seen: Sight) -> Sight:
    trials, stop = bench.trials, asyncio.Event()
    client = trials.client(seen.url)
    ended = asyncio.ensure_future(
        trials.until(run.engine, run.generation, lambda now: None if now.where in ("ready", "coming") else now)
    )

    async def replay() -> None:
        seed = run.generation
        while not stop.is_set():
            await bench.traffic.replay(seed).run(client, stop=stop)
            seed += 1000
            if not stop.is_set():
                await asyncio.sleep(AGAIN_S)

    work, began = asyncio.ensure_future(replay()), bench.clock()
    try:
        while not ended.done() and run.minutes < run.limit_min:
            left = (run.limit_min - run.minutes) / bench.scale
            await asyncio.wait([ended], timeout=min(max(left, 0.05), bench.beat_s))
            run.minutes = (bench.clock() - began) * bench.scale
        if not ended.done() and trials.sight(run.engine, run.generation).where == "coming":
            await asyncio.wait([ended], timeout=DYING_S)  # its last words are being written
        return ended.result() if ended.done() else trials.sight(run.engine, run.generation)
    finally:
        stop.set()
        ended.cancel()
        await asyncio.gather(work, ended, return_exceptions=True)
        await client.close()


def _limit_min(bench: Bench) -> float:
    record, model = bench.record, bench.model
    mean = model.planner.believe(model.evidence()).mean_minutes()
    return min(MEANS * mean, LONGEST_MIN, max(1.0, record.budget_min - record.minutes))


async def _evidence(folder: Path) -> None:
    """crash.log is written a moment after the end is seen."""
    for _ in range(round(EVIDENCE_S / LOOK_S)):
        if (folder / "crash.json").exists():
            return
        await asyncio.sleep(LOOK_S)
