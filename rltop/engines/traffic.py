"""The traffic that a crash came under, and its replay against an engine on trial.

Where it comes from, best first: SGLang's own crash dump of the generation that died, the trainer's ring of requests
(`traffic_ring.py`; an engine that is killed writes no dump), a rollout dump of the run, made-up prompts.
`Traffic.source` says which.

`Traffic` is plain data; `Traffic.replay(seed)` makes a `Replay`, which loops the requests, in their order, until it is
told to stop or the engine dies. They go out in waves of odd and changing sizes, up to the concurrency of the original:
a batch that shrinks through odd sizes is what padded CUDA graphs meet. With a `Cycle` the engine also sleeps and wakes,
or takes its weights again, between waves, in the one order that SGLang survives.

Failure policy: a dead engine ends a replay, it never raises for one; requests that an engine refuses are counted. What
can not be read is passed over, with the reason in `notes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rltop.engines.client import AsyncEngineClient, EngineRefused, EngineUnreachable
from rltop.engines.launcher import CRASH_DUMP_FOLDER
from rltop.engines.traffic_ring import FOLDER, SEGMENTS, read_ring
from rltop.errors import RltopError
from rltop.evidence.crash_dumps import Flown, crash_dumps, most_at_once, read_crash_dump, singles
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_find import DumpRef, find_dumps
from rltop.evidence.pickle_values import Unreadable

SYNTHETIC = "synthetic"
MOST_TOKENS = 24
"""Of a synthetic response; the shortest has one."""
END_S = 2.0
"""For the requests that run when a replay is told to stop: they are aborted, and may answer."""
REFUSED_PAUSE_S = 0.2
"""After a refused request: an engine that refuses everything is not asked in a tight loop."""
VOCABULARY = 256
"""Synthetic prompts use the ids that every vocabulary has."""
MOST_REQUESTS = 4096
"""Of one traffic: the newest."""
MOST_REQUEST_TOKENS = 64 << 20
"""In all their prompts."""
QUICK_BYTES = 1 << 20
"""Of a crash dump that is read where somebody waits: 0.2 s."""
DUMP_CONCURRENCY = 64
"""Of a rollout dump, which does not say how many ran at once."""
CYCLE_WAVES = 4
"""Waves after a cycle, before the next one. The first cycle comes before the first wave: a trial may be short, and the
crash came just after such a moment."""
FLUSH_TRIES, FLUSH_PAUSE_S = 20, 0.25
"""An engine whose last request has not quite ended refuses the flush."""
CACHES = ("kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """What became of the requests of a replay."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    """Refused, or cut off."""
    tokens: int = 0
    cycles: int = 0
    """Sleeps and wakes, or weight updates, that were gone through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cycle:
    """What happens to the engine between waves, as it did before the crash."""

    kind: Literal["sleep", "sync"]
    """sleep: release all memory, resume the weights, update them, resume the rest. sync: update the weights."""
    version: str
    path: str
    """Of the weights on the engine's host."""
    lend: Callable[[], None] = lambda: None
    """Called before: nobody may probe the engine until `back`."""
    back: Callable[[], Awaitable[None]] | None = None
    """Called after, also after a failure; returns when the engine may be asked again."""


class Replay(Protocol):
    """One run of captured traffic against one engine."""

    def counts(self) -> ReplayCounts:
        """So far."""
        ...

    async def run(self, client: AsyncEngineClient, *, stop: asyncio.Event) -> ReplayCounts:
        """Loop the traffic until `stop` or until the engine dies; never raises for a dead engine."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Requests and how many of them ran at once."""

    source: str
    """For people: `crash dump of engine 1, generation 3`, `synthetic`."""
    requests: tuple[Mapping[str, Any], ...]
    """Bodies of `/generate`, each of one prompt, in the order in which they came."""
    concurrency: int
    notes: tuple[str, ...] = ()
    """What was left out, or could not be read."""

    @classmethod
    def synthetic(cls, *, requests: int = 64, concurrency: int = 13, seed: int = 0) -> Traffic:
        """Fixed prompts of odd lengths: for an engine whose real traffic nobody kept."""
        draw = random.Random(f"traffic/{seed}")
        made: list[Mapping[str, Any]] = []
        for _ in range(requests):
            length, most = draw.randrange(1, 48) * 2 + 1, draw.randrange(1, MOST_TOKENS)
            prompt = [draw.randrange(1, VOCABULARY) for _ in range(length)]
            params = {"max_new_tokens": most, "temperature": draw.choice((0.0, 1.0)), "ignore_eos": True}
            made.append({"input_ids": prompt, "sampling_params": params})
        return cls(source=SYNTHETIC, requests=tuple(made), concurrency=concurrency)

    @classmethod
    def from_dump(cls, path: Path) -> Traffic:
        """Of a rollout dump in any format that rltop reads, or one of SGLang's crash dumps. Raises RltopError.

        A rollout dump has prompts and the lengths of the responses; each is asked for with exactly that length.
        """
        if path.suffix == ".pkl":
            with contextlib.suppress(Unreadable):
                return _of_flown(f"crash dump {path.name}", read_crash_dump(path).requests)
        made: list[Mapping[str, Any]] = []
        with DumpFile.open(path) as dump:
            for sample in dump:
                count = sample.response_length
                if sample.tokens is None or not count or not 0 < count < len(sample.tokens):
                    continue
                prompt = [int(token) for token in sample.tokens[: len(sample.tokens) - count]]
                params = {"max_new_tokens": count, "ignore_eos": True, **_sampling(sample.extra)}
                made.append({"input_ids": prompt, "sampling_params": params, "return_logprob": True})
                if len(made) >= MOST_REQUESTS:
                    break
        if not made:
            raise RltopError(
                "has no sample that could be asked for again",
                where=str(path),
                why="no sample has its tokens and the length of its response",
                do="give a rollout dump (--save-debug-rollout-data), or leave `traffic` out",
            )
        return cls(source=f"dump {path.name}", requests=tuple(made), concurrency=min(len(made), DUMP_CONCURRENCY))

    def replay(self, seed: int, cycle: Cycle | None = None) -> Replay:
        """A replay that begins at a place of its own. cycle: what happens between waves; None: nothing."""
        return _Waves(self, seed, cycle)


def captured(run_dir: Path, engine: str, generation: int) -> Traffic | None:
    """The traffic of a generation's last minutes, from the best source there is; None: nobody kept it."""
    notes: list[str] = []
    whose = f"engine {engine}, generation {generation}"
    for path in crash_dumps(run_dir / "engines" / engine / str(generation) / CRASH_DUMP_FOLDER):
        try:
            dump = read_crash_dump(path)
        except Unreadable as error:
            notes.append(f"crash dump {path.name} can not be read: {error}")
            continue
        if dump.left_out:
            notes.append(f"{dump.left_out} of its requests can not be asked for again (images, adapters)")
        if dump.requests:
            return _of_flown(f"crash dump of {whose}", dump.requests, notes)
    if kept := read_ring(run_dir / FOLDER, engine, generation):
        return _of_flown(f"the trainer's requests to {whose}", kept, notes)
    for ref in reversed([one for one in _dumps(run_dir) if not one.is_eval]):
        with contextlib.suppress(RltopError):
            found = Traffic.from_dump(ref.path)
            return replace(
                found, notes=(*notes, "nobody kept what this engine was asked: a rollout of the run instead")
            )
    return None


def kept(run_dir: Path, engine: str, generation: int) -> str:
    """What `captured` will look at first, in words; cheap, and it may turn out to be unreadable."""
    whose = f"engine {engine}, generation {generation}"
    if crash_dumps(run_dir / "engines" / engine / str(generation) / CRASH_DUMP_FOLDER):
        return f"crash dump of {whose}"
    if (run_dir / FOLDER / SEGMENTS[-1]).exists():
        return f"the trainer's requests to {whose}, where it kept some"
    return "a rollout of the run" if _dumps(run_dir) else SYNTHETIC


def check_dump(path: Path) -> None:
    """Raises RltopError: the file is no dump."""
    if path.suffix != ".pkl" or not path.is_file():
        with DumpFile.open(path):
            pass


def in_flight(folder: Path) -> int | None:
    """Requests that were open when SGLang wrote its crash dump; None: there is none that is quickly read."""
    for path in crash_dumps(folder):
        with contextlib.suppress(Unreadable, OSError):
            if path.stat().st_size <= QUICK_BYTES:
                return sum(one.ended is None for one in read_crash_dump(path).requests)
    return None


def _dumps(run_dir: Path) -> list[DumpRef]:
    try:
        return find_dumps(str(run_dir / "rollout_data"))
    except RltopError:
        return []


def _of_flown(source: str, flown: Sequence[Flown], notes: Sequence[str] = ()) -> Traffic:
    """The newest requests, prompt by prompt."""
    requests: list[Mapping[str, Any]] = []
    tokens = 0
    for one in reversed(flown):
        for body in reversed(list(singles(one.body))):
            ids, text = body.get("input_ids"), body.get("text")
            tokens += len(ids) if isinstance(ids, list) else len(str(text))
            requests.append({name: value for name, value in body.items() if name not in ("rid", "stream")})
        if len(requests) >= MOST_REQUESTS or tokens > MOST_REQUEST_TOKENS:
            break
    flying = sum(one.ended is None for one in flown)
    return Traffic(
        source=f"{source} ({flying} in flight when it crashed)" if flying else source,
        requests=tuple(reversed(requests)),
        concurrency=max(1, most_at_once(flown)),
        notes=tuple(notes),
    )


def _sampling(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a dump's samples carry (rltop's and Relax's do)."""
    found = extra.get("sampling_params")
    if not isinstance(found, Mapping):
        return {}
    return {name: found[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in found}


class _Waves:
    """Waves of odd sizes, each of them some requests at once."""

    def __init__(self, traffic: Traffic, seed: int, cycle: Cycle | None) -> None:
        self._traffic, self._cycle = traffic, cycle
        self._draw = random.Random(f"replay/{seed}")
        self._at = self._draw.randrange(len(traffic.requests)) if traffic.requests else 0
        self._counts = _Counting()

    def counts(self) -> ReplayCounts:
        return self._counts.told()

    def _next(self) -> Mapping[str, Any]:
        body = self._traffic.requests[self._at]
        self._at = (self._at + 1) % len(self._traffic.requests)
        return body

    async def run(self, client: AsyncEngineClient, *, stop: asyncio.Event) -> ReplayCounts:
        counts = self._counts = _Counting()
        ended = asyncio.ensure_future(stop.wait())
        work: set[asyncio.Future[None]] = set()
        waves = 0
        try:
            while not stop.is_set() and not counts.dead and self._traffic.requests:
                waves += 1
                if self._cycle is not None and waves % (CYCLE_WAVES + 1) == 1:
                    work = await _until(work, ended, counts, down_to=0)
                    if not work and not stop.is_set() and not counts.dead:
                        await counts.cycle(client, self._cycle)
                    continue
                size = self._draw.randrange(1, max(2, self._traffic.concurrency + 1), 2)
                while len(work) < size and not counts.dead:
                    work.add(asyncio.ensure_future(counts.ask(client, self._next())))
                # The next wave begins while the last requests of this one still run: batches shrink and grow.
                work = await _until(work, ended, counts, down_to=size // 3)
        finally:
            ended.cancel()
            # Its requests end by its answer: one that is cut off while it connects leaves a socket behind.
            if work and not counts.dead:
                with contextlib.suppress(EngineUnreachable, EngineRefused, TimeoutError):
                    async with asyncio.timeout(END_S):
                        await client.abort()
            if work:
                await asyncio.wait(work, timeout=END_S)
            for task in work:
                task.cancel()
            await asyncio.gather(ended, *work, return_exceptions=True)
        return counts.told()


async def _until(
    work: set[asyncio.Future[None]], ended: asyncio.Future[Any], counts: _Counting, *, down_to: int
) -> set[asyncio.Future[None]]:
    """Wait until no more requests than these run, or the replay is over."""
    while len(work) > down_to and not ended.done() and not counts.dead:
        waited: set[asyncio.Future[Any]] = {*work, ended}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        work = {task for task in work if not task.done()}
    return work


class _Counting:
    def __init__(self) -> None:
        self.sent = self.done = self.failed = self.tokens = self.cycles = 0
        self.dead = False

    def told(self) -> ReplayCounts:
        return ReplayCounts(self.sent, self.done, self.failed, self.tokens, self.cycles)

    async def cycle(self, client: AsyncEngineClient, cycle: Cycle) -> None:
        """Nothing runs. In the order of SGLang's own users: any other loses the weights, or kills the engine."""
        cycle.lend()
        try:
            for left in range(FLUSH_TRIES, 0, -1):
                try:
                    await client.flush_cache()
                    break
                except EngineRefused:
                    if left == 1:
                        raise
                await asyncio.sleep(FLUSH_PAUSE_S)
            if cycle.kind == "sleep":
                await client.release_memory()
                await client.resume_memory(("weights",))
            await client.update_weights_from_disk(cycle.path, cycle.version)
            if cycle.kind == "sleep":
                await client.resume_memory(CACHES)
            self.cycles += 1
        except EngineUnreachable:
            self.dead = True
        except EngineRefused:
            self.failed += 1
        finally:
            if cycle.back is not None:
                await cycle.back()

    async def ask(self, client: AsyncEngineClient, body: Mapping[str, Any]) -> None:
        self.sent += 1
        try:
            answers: Sequence[Any] = await client.generate(body)
        except EngineUnreachable:
            self.failed += 1
            self.dead = True
        except EngineRefused:
            self.failed += 1
            await asyncio.sleep(REFUSED_PAUSE_S)
        else:
            self.done += 1
            told = (one.get("meta_info") or {} for one in answers if isinstance(one, dict))
            self.tokens += sum(int(one.get("completion_tokens") or 0) for one in told)
