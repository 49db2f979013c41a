"""`rltop drill ima|hang|oom|nan|stale`: plant a fault in a small run of its own, and see whether rltop finds it.

Everything is a rehearsal on this machine: null engines (they compute nothing, need no GPU) for the faults of engines,
the demo's tiny trainer on the CPU for those of training. What was planted is said at the end, or at once with --tell.
The run is stopped at the end, whatever happens.

Failure policy: exit code 0 when everything on the scorecard was found, 1 when something was not, or not in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltop.bisect.story import minutes_text
from rltop.bisect.story_of import story_of
from rltop.checks.phrase import count
from rltop.cli.connect import LOCAL_S, running
from rltop.cli.demo import DemoOptions
from rltop.cli.demo import started as demo_run
from rltop.cli.extra import require_train
from rltop.cli.output import clean, note, print_json
from rltop.cli.signals import held, raised
from rltop.client import Client, local_client
from rltop.errors import RltopError
from rltop.protocol.messages import Rejected
from rltop.runs import RunInfo, mark_rehearsal

Name = Literal["ima", "hang", "oom", "nan", "stale"]
TOGGLES = ("cuda_graph", "speculative", "overlap_schedule", "radix_cache")
CULPRITS = (("radix_cache",), ("overlap_schedule",), ("cuda_graph", "speculative"), ("overlap_schedule", "radix_cache"))
"""What may be planted; which of them is drawn from the seed."""
KERNEL = "injected_oob_kernel"
SCALE = 60.0
"""Exposure minutes per minute of clock: a second of the rehearsal counts as a minute."""
LIMITS_S: Mapping[Name, float] = {"ima": 300.0, "hang": 120.0, "oom": 90.0, "nan": 240.0, "stale": 240.0}
ENGINES_UP_S = 60.0
STEP_S = "0.02"
TRAINED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "nan": ("nan-grad", ("train.nan",)),
    "stale": ("stale-tensor", ("weights.compare", "weights.frozen")),
}
"""Drill -> what is planted, and the checks of which one has to fail."""
_ENGINES = "two null engines start, and engine 0 gets requests until"
_TRAINER = "the demo's trainer starts with a fault planted, and has to be told which check finds it"
COURSE: Mapping[Name, str] = {
    "ima": f"{_ENGINES} it crashes; then a bisection finds the toggles that the crash takes (about half a minute)",
    "hang": f"{_ENGINES} it stands still; that has to be told from a slow engine (about half a minute)",
    "oom": f"{_ENGINES} it runs out of memory; that has to be told from other crashes (a few seconds)",
    "nan": _TRAINER,
    "stale": _TRAINER,
}
"""What is about to happen."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that rltop had to find."""

    what: str
    found: bool
    seconds: float
    """Since the engines served, or the run began."""
    text: str

    def told(self) -> str:
        """For people."""
        return clean(f"{'found    ' if self.found else 'NOT FOUND'} {self.seconds:6.1f} s  {self.what}: {self.text}")


@dataclass(slots=True)
class Card:
    """The scorecard."""

    name: Name
    planted: str
    tell: Callable[[str], None]
    """Shows a line at once: each is shown once."""
    began: float = field(default_factory=time.monotonic)
    lines: list[Line] = field(default_factory=list)

    def add(self, what: str, found: bool, text: str) -> None:
        """A line, told at once."""
        line = Line(what, found, time.monotonic() - self.began, text)
        self.lines.append(line)
        self.tell(line.told())

    @property
    def ok(self) -> bool:
        """Everything was found."""
        return bool(self.lines) and all(line.found for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        """The answer of `--json`."""
        lines = [
            {"what": line.what, "found": line.found, "seconds": round(line.seconds, 2), "text": line.text}
            for line in self.lines
        ]
        return {"drill": self.name, "planted": self.planted, "found": self.ok, "lines": lines, "rehearsal": True}


def drill(name: Name, *, seed: int, tell: bool, as_json: bool) -> int:
    """Plant, follow, score, clean up. Raises RltopError: the train extra is missing, the run does not start."""
    require_train("drill")
    draw = random.Random(f"drill/{seed}")
    culprit = draw.choice(CULPRITS)
    card = Card(name, planted(name, culprit), note if as_json else _shown)
    note(f"drill {name}: a rehearsal on a run of its own with stand-ins; your runs are not touched")
    note(COURSE[name])
    if tell:
        note(f"planted: {card.planted}")
    with raised():
        if name in TRAINED:
            with demo_run(DemoOptions(seed=seed, num_rollout=4, inject=(f"{TRAINED[name][0]}@1",))) as run:
                asyncio.run(_played(run, card, _trained))
        else:
            with _engines(name, culprit) as run:
                asyncio.run(_played(run, card, lambda client, card: _engine_fault(client, card, culprit)))
    note(f"what was planted: {card.planted}")
    if as_json:
        print_json(card.to_json())
    else:
        print(f"drill {name}: {'everything was found' if card.ok else 'NOT everything was found'}")
    return 0 if card.ok else 1


def _shown(line: str) -> None:
    print(line, flush=True)


def planted(name: Name, culprit: tuple[str, ...]) -> str:
    """For people."""
    match name:
        case "ima":
            return f"illegal memory accesses in {KERNEL}, only while {' and '.join(culprit)} on"
        case "hang":
            return "engine 0 stands still after a while and goes on answering /health"
        case "oom":
            return "engine 0 runs out of GPU memory while it serves"
        case "nan":
            return "one element of the gradient is NaN in rollout 1"
        case "stale":
            return "one weight is pushed as it was in the version before, after rollout 1"


# ---------------------------------------------------------------------- runs


@contextlib.contextmanager
def _engines(name: Name, culprit: tuple[str, ...]) -> Iterator[RunInfo]:
    """A daemon with two null engines, gone again at the end of the block."""
    from rltop.daemon.spawn import start_daemon, stop_daemon
    from rltop.daemon.tether import Tether
    from rltop.engines.toggle_table import CORE_DUMP
    from rltop.train.cpu_engine.faults import VARIABLE
    from rltop.train.cpu_engine.process import CRASH_VARIABLE
    from rltop.train.null_engine import STEP_VARIABLE

    model = Path(tempfile.mkdtemp(prefix="rltop-drill-"))
    env = {CRASH_VARIABLE: "0.05", STEP_VARIABLE: STEP_S, CORE_DUMP: "1"}
    if name == "ima":
        env[VARIABLE] = f"ima:{'&'.join(culprit)}:hazard=0.05,kernel={KERNEL}"
    engines = {
        "kind": "null",
        "model_path": str(model),
        "args": ["--speculative-algorithm", "NGRAM"],
        "count": 2,
        "env": env,
        "keep_serving": 0,
        "drain_s": 1,
        "on_hang": "restart",  # by default it only alarms, so that somebody can look
    }
    run: RunInfo | None = None
    tether = Tether()  # a drill that is killed takes its run along
    try:
        with held():
            run = start_daemon(None, config={"engines": engines}, tether=tether)
        note(f"run {run.name}: rltop attach {run.name} shows it meanwhile, from another terminal")
        yield run
    finally:
        if run is not None:
            with held(lambda: note("still stopping; nothing is left behind in a moment …")):
                stop_daemon(run)
            note(f"run {run.name} is down; what it left is in {run.path}")
        shutil.rmtree(model, ignore_errors=True)


async def _played(run: RunInfo, card: Card, play: Callable[[Client, Card], Awaitable[None]]) -> None:
    """The drill, in its time. What is not there by then was not found."""
    mark_rehearsal(run)
    async with running(local_client(run, role="control", name="drill")) as client:
        await client.wait_live(LOCAL_S)
        card.began = time.monotonic()
        try:
            async with asyncio.timeout(LIMITS_S[card.name]):
                await play(client, card)
        except TimeoutError:
            card.add("in time", False, f"it took longer than {LIMITS_S[card.name]:g} s")


async def _until(client: Client, reached: Callable[[Mapping[str, Any]], Any]) -> Any:
    while not (found := reached(client.mirror.state)):
        if client.status == "lost" and time.monotonic() - client.since > LOCAL_S * 4:
            raise RltopError("the daemon of the drill went away", why=client.problem, exit_code=1)
        await client.wait_change()
    return found


# ---------------------------------------------------------------------- engines


async def _engine_fault(client: Client, card: Card, culprit: tuple[str, ...]) -> None:
    async with asyncio.timeout(ENGINES_UP_S):
        await _until(client, lambda state: all(_state(state, name) == "HEALTHY" for name in ("0", "1")))
    card.began = time.monotonic()
    stop = asyncio.Event()
    traffic = asyncio.ensure_future(_ask(client, stop))
    try:
        if card.name == "ima":
            await _crashed(client, card, ("ima",), "an illegal memory access")
            stop.set()
            await asyncio.gather(traffic, return_exceptions=True)
            await _bisected(client, card, culprit)
        else:
            await _injected(client, card.name)
            if card.name == "hang":
                await _hung(client, card)
            else:
                await _crashed(client, card, ("oom",), "out of memory")
        await _back(client, card)
    finally:
        stop.set()
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)


async def _injected(client: Client, fault: str) -> None:
    from rltop.engines.client import AsyncEngineClient

    url = str(client.mirror.state["engine/0"]["url"])
    async with AsyncEngineClient(url) as engine:
        await engine.inject(fault)


async def _ask(client: Client, stop: asyncio.Event) -> None:
    """Keep engine 0 at work, whichever process it is."""
    from rltop.engines.client import AsyncEngineClient
    from rltop.engines.traffic import Traffic

    traffic, seed = Traffic.synthetic(), 0
    while not stop.is_set():
        seed += 1
        cell = client.mirror.state.get("engine/0") or {}
        if cell.get("state") == "HEALTHY" and cell.get("url"):
            async with AsyncEngineClient(str(cell["url"])) as engine:
                await traffic.replay(seed).run(engine, stop=stop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await stop.wait()


async def _crashed(client: Client, card: Card, kinds: tuple[str, ...], words: str) -> None:
    """Until engine 0's end is known by its class."""

    def seen(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        crashes = (state.get("engine/0") or {}).get("crashes") or ()
        return crashes[-1] if crashes else None

    one = await _until(client, seen)
    kind = str(one.get("fingerprint") or "").partition("/")[0]
    card.add(f"{words} of engine 0", kind in kinds, f"{one.get('fingerprint')}: {one.get('cause')}")


async def _hung(client: Client, card: Card) -> None:
    """Until it is told from a slow engine; its routes go on answering."""

    def seen(state: Mapping[str, Any]) -> str:
        cell = state.get("engine/0") or {}
        why = str(cell.get("cause") or "")
        return why if cell.get("generation") != 1 or "hung" in why else ""

    why = await _until(client, seen)
    card.add("a hang of engine 0", "hung" in why or "hang" in why, why)
    await _until(client, lambda state: (state.get("engine/0") or {}).get("generation") != 1)


async def _bisected(client: Client, card: Card, culprit: tuple[str, ...]) -> None:
    """From the crash to the culprit and its kernel, with the engines back."""
    await _until(client, lambda state: all(_state(state, name) == "HEALTHY" for name in ("0", "1")))
    args = {"engine": "0", "toggles": list(TOGGLES), "time_scale": SCALE, "mode": "in-fleet"}
    answer = await client.command("bisect-start", args=args, reason="drill")
    if isinstance(answer, Rejected):
        return card.add("the culprit", False, f"the bisection was refused: {answer.why}")
    seen: set[int] = set()

    def over(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        _narrate(state, seen)
        return _over(state.get(f"op/{answer.op}"))

    ended = await _until(client, over)
    cell = client.mirror.state.get("bisect") or {}
    verdict = cell.get("verdict") or {}
    named = tuple(verdict.get("culprit") or ())
    right = cell.get("state") == "found" and set(named) == set(culprit)
    told = str(verdict.get("text") or ended.get("text"))
    told = told if right else f"{cell.get('state')}: {told}"
    told += f" ({count(len(cell.get('trials') or ()), 'trial')})"
    card.add("the culprit", right, told)
    kernel = cell.get("kernel") or {}
    card.add("the kernel", kernel.get("name") == KERNEL, f"{kernel.get('name')} ({kernel.get('source')})")
    restored = cell.get("restored") or {}
    fine = bool(restored) and all(value == "original" for value in restored.values())
    card.add("engines on their own flags", fine, ", ".join(f"{name}: {how}" for name, how in restored.items()))


def _narrate(state: Mapping[str, Any], seen: set[int]) -> None:
    """A line for every trial that ended since."""
    story = story_of(state.get("bisect"))
    for trial in story.trials if story is not None else ():
        if not trial.runs and trial.n not in seen:
            seen.add(trial.n)
            told = f"{trial.outcome} after {minutes_text(trial.minutes)}"
            note(clean(f"  trial {trial.n} on engine {trial.engine}, {trial.words()}: {told}"))


async def _back(client: Client, card: Card) -> None:
    await _until(client, lambda state: _state(state, "0") == "HEALTHY")
    card.add("engine 0 serves again", True, "HEALTHY")


def _state(state: Mapping[str, Any], engine: str) -> str:
    return str((state.get(f"engine/{engine}") or {}).get("state") or "")


def _over(op: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return op if op is not None and op.get("state") in ("done", "failed", "cancelled") else None


# ---------------------------------------------------------------------- the trainer


async def _trained(client: Client, card: Card) -> None:
    """Until one of the checks fails, or the run is over without it."""
    fault, checks = TRAINED[card.name]

    def failed(state: Mapping[str, Any]) -> str:
        found = (name for name in checks if (state.get(f"check/{name}") or {}).get("status") == "fail")
        ended = (state.get("run") or {}).get("state") in ("done", "failed", "interrupted", "lost")
        return next(found, "over" if ended else "")

    name = await _until(client, failed)
    cause = str((client.mirror.state.get(f"check/{name}") or {}).get("cause") or "the run ended, and no check failed")
    card.add(f"a check fails ({', '.join(checks)})", name != "over", f"{name}: {cause}")
    told = [str(one) for one in (client.mirror.state.get("run") or {}).get("injected_faults") or ()]
    named = any(one.partition("@")[0] == fault for one in told)
    card.add("the run says that it is a rehearsal", named, f"injected faults: {', '.join(told) or 'none'}")
