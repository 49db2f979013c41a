"""The null engine's loop: batches without a model. See `rltop.train.cpu_engine.loop.Loop`.

One thread admits samples (a prefill batch), then gives every running one a token per `step_s` (a decode batch), which
is the number of its place; faults strike before each batch, as in the CPU engine. Everything that changes samples or
weights happens in this thread.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.injection import Injection, Phase, SchedulerDied
from rltop.train.cpu_engine.loop import ABORTED, Live, PauseMode
from rltop.train.cpu_engine.request import Endings, Sample, answer
from rltop.train.cpu_engine.stats import LOGGER, Stats, decode_line, prefill_line

if TYPE_CHECKING:
    from rltop.train.cpu_engine.profile import Profile

T = TypeVar("T")
_LOGPROB = -1.0
"""Of every token."""


class NullLoop:
    """`run` is the thread; every other public method may be called from any."""

    def __init__(
        self,
        live: Live,
        endings: Endings,
        stats: Stats,
        args: EngineArgs,
        *,
        injection: Injection,
        step_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.live, self.stats, self.injection = live, stats, injection
        self.fatal = ""
        self.on_death: Callable[[SchedulerDied], None] | None = None
        self.profile: Profile | None = None
        """Never: there is nothing to profile."""
        self.token_zero = False
        self._endings, self._args, self._step_s, self._wall = endings, args, step_s, wall
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Sample] = deque()
        self._running: list[Sample] = []
        self._exclusive: deque[Callable[[], None]] = deque()
        self._outbox: list[tuple[Sample, dict[str, Any]]] = []
        self._paused = self._stopping = False
        self._logged = time.perf_counter()

    # ------------------------------------------------------------------ from any thread

    @property
    def paused(self) -> bool:
        """Whether `pause` was called last."""
        return self._paused

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples."""
        self._inbox.put(lambda: self._waiting.extend(samples))

    def call(self, work: Callable[[], T], *, exclusive: bool = False) -> Future[T]:
        """Run `work` between two batches. `exclusive`: when no sample is running, or paused."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                self._count()
                future.set_result(result)

        self._inbox.put((lambda: self._exclusive.append(run)) if exclusive else run)
        return future

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """End samples whose id starts with `rid`, or all."""
        self._inbox.put(lambda: self._abort(lambda sample: everything or sample.rid.startswith(rid)))

    def abandon(self, samples: Sequence[Sample]) -> None:
        """End exactly these: their client has gone."""

        def forget() -> None:
            for sample in samples:
                sample.deliver = lambda _: None
            self._abort(lambda sample: sample in samples)

        self._inbox.put(forget)

    def crash(self, error: Exception) -> None:
        """End the loop with this error."""

        def fail() -> None:
            raise error

        self._inbox.put(fail)

    def stop(self) -> None:
        """Abort everything and leave the loop."""
        self.injection.release()
        self.abort(everything=True)
        self._inbox.put(self._stop)

    # ------------------------------------------------------------------ work for `call`

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping."""
        self._paused = True
        if mode == "abort":
            self._abort(lambda sample: True)
        elif mode == "retract":
            for sample in self._running:
                sample.retractions += 1
                self.stats.retractions += 1
            self._waiting.extend(self._running)
            self._running = []

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    def flush(self) -> bool:
        """False while samples are running or queued to run."""
        if self._running or (self._waiting and not self._paused):
            LOGGER.warning(
                "Cache not flushed because there are pending requests. #queue-req: %d, #running-req: %d",
                len(self._waiting),
                len(self._running),
            )
            return False
        LOGGER.info("Cache flushed successfully!")
        return True

    pool_gigabytes = 0.0

    def release(self, tags: Collection[str]) -> bool:
        """False while samples are running or queued to run."""
        if not self.flush():
            return False
        if "weights" in tags:
            self.live.release()
        return True

    def take_back(self, tags: Collection[str]) -> None:
        """The weights are lost: until the next update every token is 0."""
        if "weights" in tags and self.live.resume():
            self.token_zero = True

    def update(self, apply: Callable[[], None], version: str | None, *, flush: bool, source: str) -> tuple[bool, str]:
        """Change the weights, then the label. Raises `RltopError`."""
        began = time.perf_counter()
        apply()
        self.token_zero = False
        if version is not None:
            self.set_version(version)
        self.stats.weight_load_seconds[source] = time.perf_counter() - began
        if flush and not self.flush():
            return False, "Weights were updated, but requests are running, so the cache was not flushed."
        return True, "Succeeded to update model weights."

    def set_version(self, version: str) -> None:
        """Change the label."""
        recorded = 0
        for sample in (*self._waiting, *self._running):
            if sample.output:
                sample.versions.append((self.live.version, len(sample.output)))
                recorded += 1
        LOGGER.info(
            "Weight version changed. old_version=%r new_version=%r num_recorded=%d",
            self.live.version,
            version,
            recorded,
        )
        self.live.version = version

    def idle(self) -> bool:
        """Nothing running or waiting."""
        return not (self._running or self._waiting)

    def forget_prompts(self) -> None:
        """There is no prompt cache."""

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """The loop. Returns after `stop`, or after a failure (see `fatal`)."""
        try:
            while not self._stopping:
                self._obey()
                if self._exclusive and (self._paused or not (self._waiting or self._running)):
                    self._exclusive.popleft()()
                elif not self._paused and not self._exclusive:
                    self._admit()
                if self._running and not self._paused:
                    self._step()
                self._deliver()
        except Exception as error:
            self._die(error)
        self._deliver()

    def _obey(self) -> None:
        work = (self._waiting or self._running) and not self._paused
        idle = self._exclusive and (self._paused or not (self._waiting or self._running))
        if not work and not idle:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _die(self, error: Exception) -> None:
        died = error if isinstance(error, SchedulerDied) else SchedulerDied(traceback.format_exc())
        if died.before:
            print(died.before, flush=True)
        if died.traceback:
            LOGGER.error("Scheduler hit an exception: %s\n", died.traceback)
        if died.after:
            print(died.after, flush=True)
        self.fatal = died.traceback or died.death
        if self.on_death is None:
            self._abort(lambda sample: True)
        else:
            self.on_death(died)
            self._outbox.clear()

    def _stop(self) -> None:
        self._stopping = True

    def _before_batch(self, phase: Phase, samples: Sequence[Sample]) -> None:
        if self.injection.armed:
            self._count()
            padded = phase == "decode" and self._args.effects.decode.pads(len(samples))
            self.injection.before_batch(
                phase, lambda: any(sample.params.top_k != 1 for sample in samples), padded=padded
            )

    def _admit(self) -> None:
        room = self._args.max_running_requests - len(self._running)
        fresh = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not fresh:
            return
        self._running += fresh  # what a fault strikes is running
        self._before_batch("prefill", fresh)
        computed, stats = sum(sample.tokens for sample in fresh), self.stats
        graph = self._args.effects.prefill.covers(computed)
        stats.count_prefill(stats.prefill_passes + 1, graph=graph)
        stats.prefill_computed += computed
        now = self._wall()
        for sample in fresh:
            sample.started = sample.started or now
        LOGGER.info(
            prefill_line(
                sequences=len(fresh),
                computed=computed,
                cached=0,
                usage=stats.token_usage,
                running=len(self._running) - len(fresh),
                queued=len(self._waiting),
                graph=graph,
                throughput=0.0,
            )
        )

    def _step(self) -> None:
        """One token for every running sample."""
        samples = list(self._running)
        self._before_batch("decode", samples)
        time.sleep(self._step_s)
        now, stats, effects = self._wall(), self.stats, self._args.effects
        graph = effects.decode.covers(len(samples))
        stats.count_decode(len(samples), graph=graph)
        if effects.draft_tokens:  # nothing is ever accepted
            stats.verify_steps += len(samples)
            stats.verified_tokens += len(samples)
        for sample in samples:
            if sample.limit:
                token = 0 if self.token_zero else len(sample.output) % 256
                sample.output.append(token)
                sample.first_token = sample.first_token or now
                if sample.wishes.output:
                    sample.output_logprobs.append((_LOGPROB, token, None))
            finish = self._endings.check(sample) if sample.limit else {"type": "length", "length": 0}
            if finish is not None:
                self._running.remove(sample)
                self._finish(sample, finish)
            elif sample.streaming:
                self._outbox.append((sample, answer(sample, self._endings, self.live.version, now=now)))
        if stats.decode_passes % self._args.decode_log_interval == 0:
            self._log_decode(samples, graph=graph)

    def _log_decode(self, samples: Sequence[Sample], *, graph: bool) -> None:
        stats, now, draft = self.stats, time.perf_counter(), self._args.effects.draft_tokens
        interval = self._args.decode_log_interval
        stats.gen_throughput = len(samples) * interval / max(now - self._logged, 1e-9)
        self._logged = now
        if draft:
            stats.measure_acceptance(draft)
        LOGGER.info(
            decode_line(
                running=len(samples),
                tokens=sum(sample.tokens for sample in samples),
                usage=stats.token_usage,
                accepted=(stats.spec_accept_length, stats.spec_accept_rate) if draft else None,
                graph=graph,
                throughput=stats.gen_throughput,
                queued=len(self._waiting),
            )
        )

    def _abort(self, chosen: Callable[[Sample], bool]) -> None:
        ended = [sample for sample in (*self._running, *self._waiting) if chosen(sample)]
        self._running = [sample for sample in self._running if sample not in ended]
        self._waiting = deque(sample for sample in self._waiting if sample not in ended)
        for sample in ended:
            self.stats.aborted += 1
            self._finish(sample, dict(ABORTED))

    def _finish(self, sample: Sample, finish: dict[str, Any]) -> None:
        sample.finish = finish
        if not sample.quiet:
            self.stats.requests += 1
            self.stats.prompt_tokens += len(sample.prompt)
            self.stats.generation_tokens += len(sample.output)
        self._outbox.append((sample, answer(sample, self._endings, self.live.version, now=self._wall())))

    def _deliver(self) -> None:
        self._count()
        answers, self._outbox = self._outbox, []
        for sample, content in answers:
            sample.deliver(content)

    def _count(self) -> None:
        stats = self.stats
        stats.running, stats.queued = len(self._running), len(self._waiting)
        stats.used_tokens = sum(sample.tokens for sample in self._running)
        stats.paused = len(self._running) + len(self._waiting) if self._paused else 0
        stats.retracted = sum(1 for sample in self._waiting if sample.retractions)
