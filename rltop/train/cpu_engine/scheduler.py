"""The engine's loop: admits samples, steps the batch, and does what the control endpoints ask, in one thread.

Everything that touches weights or samples happens in this thread, between two steps; other threads only put commands in
its inbox. So a weight update can never land in the middle of a forward pass, and the loop needs no lock.

An update that arrives while samples are running waits until they are done and holds back new ones meanwhile (SGLang's
writer lock); while the engine is paused it is done at once. A failure inside the loop is fatal, as in SGLang: the
engine logs it and goes down rather than answer from a state that nobody has checked.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rltop.train.cpu_engine.effects import Drafter, Effects
from rltop.train.cpu_engine.injection import Injection, Phase, SchedulerDied
from rltop.train.cpu_engine.live_weights import LiveWeights
from rltop.train.cpu_engine.logprobs import note_prompt, note_token
from rltop.train.cpu_engine.loop import ABORTED, PauseMode
from rltop.train.cpu_engine.memory import Arena
from rltop.train.cpu_engine.model import Qwen3, Slab, slab_length
from rltop.train.cpu_engine.profile import Profile
from rltop.train.cpu_engine.prompts import Prompts
from rltop.train.cpu_engine.request import Endings, Sample, answer
from rltop.train.cpu_engine.sampling import all_zero, draw
from rltop.train.cpu_engine.stats import LOGGER, Stats, decode_line, prefill_line

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of the batch."""

    max_running_requests: int
    max_total_tokens: int
    """KV positions reserved at the same time, and again as many in the prompt cache."""
    decode_log_interval: int
    prompt_cache: bool
    effects: Effects = field(default_factory=Effects)


@dataclass(slots=True)
class Batch:
    """The running samples that share a slab, in the order of its rows."""

    slab: Slab
    samples: list[Sample] = field(default_factory=list)


class Scheduler:
    """See the module docstring. `run` is the thread; every other public method may be called from any thread."""

    def __init__(
        self,
        model: Qwen3,
        live: LiveWeights,
        endings: Endings,
        limits: Limits,
        stats: Stats,
        *,
        injection: Injection | None = None,
        pool: Arena | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.live = live
        self.stats = stats
        self.fatal: str = ""
        """Set when the loop died: the traceback."""
        self.injection = injection or Injection()
        self.on_death: Callable[[SchedulerDied], None] | None = None
        """Told of what ended the loop; then nothing is answered any more, for the process ends, as SGLang's does."""
        self.profile: Profile | None = None
        """Runs over the batches until it stops by itself. Only this thread's."""
        self.token_zero = False
        """Every token is 0, also a sampled one: an injected fault."""
        self.pool = pool
        """The KV pool, where it can be released; without one every slab has memory of its own."""
        self._model, self._endings, self._limits = model, endings, limits
        self._clock, self._wall = clock, wall
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Sample] = deque()
        self._held: list[Sample] = []
        self._starting: list[Sample] = []
        self._outbox: list[tuple[Sample, dict[str, Any]]] = []
        self._batches: dict[int, Batch] = {}
        self._exclusive: deque[Callable[[], None]] = deque()
        self._prompts = Prompts(model, capacity=limits.max_total_tokens if limits.prompt_cache else 0)
        self._paused = False
        self._stopping = False
        self._last_prefill = self._last_decode = clock()
        self._tokens_since_log = 0

    # ------------------------------------------------------------------ from any thread

    @property
    def paused(self) -> bool:
        """Whether `pause` was called last."""
        return self._paused

    @property
    def pool_gigabytes(self) -> float:
        """GiB of the KV pool, where it can be released."""
        return 0.0 if self.pool is None else self.pool.gigabytes

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples; each one's `deliver` is called when it ends."""
        self._inbox.put(lambda: self._enqueue(samples))

    def call(self, work: Callable[[], T], *, exclusive: bool = False) -> Future[T]:
        """Run `work` in the loop's thread between two steps. `exclusive`: when no sample is running, or paused."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                self._count()  # what the caller looks at next is up to date
                future.set_result(result)

        self._inbox.put((lambda: self._exclusive.append(run)) if exclusive else run)
        return future

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """End samples whose id starts with `rid`, or all. They are answered with what they have."""
        self._inbox.put(lambda: self._abort(lambda sample: everything or sample.rid.startswith(rid)))

    def abandon(self, samples: Sequence[Sample]) -> None:
        """End exactly these samples: their client has gone."""

        def forget() -> None:
            for sample in samples:
                sample.deliver = lambda _: None
            self._abort(lambda sample: sample in samples)

        self._inbox.put(forget)

    def crash(self, error: Exception) -> None:
        """End the loop with this error, before its next batch."""

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
        """Stop stepping. `abort` ends what is running, `retract` sends it back to the queue, `in_place` keeps it."""
        self._paused = True
        if mode == "abort":
            held, self._held = self._held, []  # they have not started: they wait, as in SGLang
            self._abort(lambda sample: True)
            self._held = held
        elif mode == "retract":
            for sample in self._leave_batches():
                sample.retractions += 1
                self.stats.retractions += 1
                self._waiting.append(sample)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._release_held()

    def flush(self) -> bool:
        """Empty the prompt cache. False, and nothing done, while samples are running or queued to run."""
        if self._running() or (self._waiting and not self._paused):
            LOGGER.warning(
                "Cache not flushed because there are pending requests. #queue-req: %d, #running-req: %d",
                len(self._waiting),
                self._running(),
            )
            return False
        self._prompts.forget()
        LOGGER.info("Cache flushed successfully!")
        return True

    def update(self, apply: Callable[[], None], version: str | None, *, flush: bool, source: str) -> tuple[bool, str]:
        """Change weights with `apply`, then the version label if one is given (without, the old label stays).

        Returns SGLang's (success, message). With samples running (possible only while paused in place) and `flush`
        the weights change but the call reports failure, because they would go on from KV of the old weights;
        retracted ones compute theirs anew and are fine.
        """
        began = self._clock()
        apply()
        self.token_zero = False
        if version is not None:
            self.set_version(version)
        self.stats.weight_load_seconds[source] = self._clock() - began
        if flush and not self.flush():
            return False, "Weights were updated, but requests are running, so the cache was not flushed."
        return True, "Succeeded to update model weights."

    def release(self, tags: Collection[str]) -> bool:
        """Give memory back to the system; False, and nothing done, while samples run or wait. Without a memory saver
        nothing is given back, as in SGLang."""
        if not self.flush():
            return False
        if "kv_cache" in tags and self.pool is not None and not self.pool.released:
            self._batches.clear()
            self.pool.empty()
            self.pool.release()
        if "weights" in tags:
            self.live.release()
        return True

    def take_back(self, tags: Collection[str]) -> None:
        """Take released memory again. The weights in it are zeros until the next update, and no error says so: greedy
        requests get token 0, sampled ones any token with equal chances, as of real SGLang."""
        if "kv_cache" in tags and self.pool is not None:
            self.pool.resume()
        if "weights" in tags:
            self.live.resume()

    def set_version(self, version: str) -> None:
        """Change the label; samples that already have tokens remember which label those tokens had."""
        recorded = 0
        for sample in (*self._waiting, *(item for batch in self._batches.values() for item in batch.samples)):
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
        """Nothing running, waiting or held."""
        return not self._in_flight() and not self._held

    def forget_prompts(self) -> None:
        """Drop the prompt cache whatever is running: samples have copies of what they need."""
        self._prompts.forget()

    # ------------------------------------------------------------------ the loop

    @torch.inference_mode()
    def run(self) -> None:
        """The loop. Returns after `stop`, or after a failure (see `fatal`)."""
        try:
            while not self._stopping:
                self._obey()
                if self._exclusive and (self._paused or not self._in_flight()):
                    self._exclusive.popleft()()
                    if not self._exclusive and not self._paused:
                        self._release_held()
                elif not self._paused:
                    self._admit()
                    for batch in [batch for batch in self._batches.values() if batch.samples]:
                        self._step(batch)
                self._deliver()
        except Exception as error:
            self._die(error)
        self._deliver()

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

    def _before_batch(self, phase: Phase, samples: Sequence[Sample]) -> None:
        """Where a profile counts and an injected fault strikes."""
        if self.profile is not None and self.profile.batch():
            self.profile = None
        if self.injection.armed:
            self._count()  # what a watcher sees while the loop stands still
            # SGLang decodes all that run in one batch, and not one per length of slab.
            padded = phase == "decode" and self._limits.effects.decode.pads(self._running())
            self.injection.before_batch(
                phase, lambda: any(sample.params.top_k != 1 for sample in samples), padded=padded
            )

    def _obey(self) -> None:
        """Do what is in the inbox; wait for something if there is nothing else to do."""
        ready = self._exclusive and (self._paused or not self._in_flight())
        busy = ready or (self._in_flight() and not self._paused)
        if not busy:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _enqueue(self, samples: Sequence[Sample]) -> None:
        if self._paused or self._exclusive:
            self._held.extend(samples)
        else:
            self._waiting.extend(samples)

    def _release_held(self) -> None:
        if not self._exclusive:
            self._waiting.extend(self._held)
            self._held.clear()

    def _stop(self) -> None:
        self._stopping = True

    def _in_flight(self) -> bool:
        return bool(self._waiting) or any(batch.samples for batch in self._batches.values())

    def _running(self) -> int:
        return sum(len(batch.samples) for batch in self._batches.values())

    def _deliver(self) -> None:
        """Send the answers of this round, after the counts that a client may look at next."""
        self._count()
        answers, self._outbox = self._outbox, []
        for sample, content in answers:
            sample.deliver(content)

    def _count(self) -> None:
        stats, samples = self.stats, [item for batch in self._batches.values() for item in batch.samples]
        stats.running, stats.queued = len(samples), len(self._waiting) + len(self._starting)
        stats.used_tokens = sum(sample.tokens for sample in samples)
        stats.paused = len(samples) + len(self._held) if self._paused else 0
        stats.retracted = sum(1 for sample in self._waiting if sample.retractions)

    # ------------------------------------------------------------------ prefill

    def _admit(self) -> None:
        """Take waiting samples into the batch while there is room; their first token comes from the prompt's logits."""
        reserved = sum(batch.slab.length * len(batch.samples) for batch in self._batches.values())
        running = self._running()
        admitted: list[Sample] = []
        while self._waiting and running + len(admitted) < self._limits.max_running_requests:
            length = slab_length(len(self._waiting[0].prompt) + self._waiting[0].limit)
            # A sample larger than the whole pool still runs, alone: refusing it belongs to the request's checks.
            if reserved and reserved + length > self._limits.max_total_tokens:
                break
            reserved += length
            admitted.append(self._waiting.popleft())
        if admitted:
            self._starting = admitted  # for `_abort`, should the prefill fail
            self._start(admitted, running)
            self._starting = []

    def _start(self, samples: list[Sample], running: int) -> None:
        now = self._wall()
        self._before_batch("prefill", samples)
        cached, prefills = self._prompts.run(self.live.packed, samples)
        computed = sum(sample.tokens for sample in samples) - cached
        elapsed, self._last_prefill = self._clock() - self._last_prefill, self._clock()
        self._record_prefill(samples, computed, cached, running, elapsed)
        fresh: list[tuple[Sample, Tensor]] = []
        for sample, prefill in zip(samples, prefills, strict=True):
            sample.started = sample.started or now
            note_prompt(sample, prefill.logits, self._endings.text)
            if sample.limit == 0:
                self._finish(sample, {"type": "length", "length": 0})
                continue
            length = slab_length(len(sample.prompt) + sample.limit)
            batch = self._batches.setdefault(length, Batch(Slab(self._model.config, length, self.pool)))
            sample.slab, sample.row = batch.slab, batch.slab.add(prefill)
            batch.samples.append(sample)
            fresh.append((sample, prefill.logits[-1]))
        if fresh:
            self._accept([sample for sample, _ in fresh], torch.stack([row for _, row in fresh]))

    def _record_prefill(self, samples: list[Sample], computed: int, cached: int, running: int, elapsed: float) -> None:
        stats, graph = self.stats, self._limits.effects.prefill.covers(computed)
        stats.count_prefill(self._prompts.passes, graph=graph)
        stats.prefill_computed += computed
        stats.cached_tokens += cached
        stats.cache_hit_rate = cached / max(1, computed + cached)
        stats.queued = len(self._waiting)
        LOGGER.info(
            prefill_line(
                sequences=len(samples),
                computed=computed,
                cached=cached,
                usage=stats.token_usage,
                running=running,
                queued=stats.queued,
                graph=graph,
                throughput=computed / max(elapsed, 1e-9),
            )
        )

    # ------------------------------------------------------------------ decode

    def _step(self, batch: Batch) -> None:
        """One token for every sample of the batch."""
        self._before_batch("decode", batch.samples)
        samples, rows = list(batch.samples), self._model.padded_rows(len(batch.samples))
        ids, positions = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        ids[: len(samples)] = torch.tensor([sample.output[-1] for sample in samples])
        positions[: len(samples)] = torch.tensor([sample.tokens - 1 for sample in samples])
        logits = self._model.decode(self.live.packed, batch.slab, ids, positions)
        self.stats.count_decode(len(samples), graph=self._limits.effects.decode.covers(len(samples)))
        self._tokens_since_log += len(samples)
        self._accept(samples, logits)
        if self.stats.decode_passes % self._limits.decode_log_interval == 0:
            self._log_decode(samples)

    def _log_decode(self, samples: list[Sample]) -> None:
        now, stats = self._clock(), self.stats
        stats.gen_throughput = self._tokens_since_log / max(now - self._last_decode, 1e-9)
        self._last_decode, self._tokens_since_log = now, 0
        draft_tokens = self._limits.effects.draft_tokens
        if draft_tokens:
            stats.measure_acceptance(draft_tokens)
        LOGGER.info(
            decode_line(
                running=len(samples),
                tokens=sum(sample.tokens for sample in samples),
                usage=stats.token_usage,
                accepted=(stats.spec_accept_length, stats.spec_accept_rate) if draft_tokens else None,
                graph=self._limits.effects.decode.covers(len(samples)),
                throughput=stats.gen_throughput,
                queued=len(self._waiting),
            )
        )

    def _accept(self, samples: list[Sample], logits: Tensor) -> None:
        """Draw a token for each sample, note it, and let go of those that are over."""
        drawn = draw(logits, [(sample.params, sample.stream, len(sample.output)) for sample in samples])
        if self.token_zero:
            drawn = all_zero(drawn)
        now = self._wall()
        for row, sample in enumerate(samples):
            sample.output.append(drawn.tokens[row])
            if self._limits.effects.draft_tokens:
                self._measure_draft(sample)
            sample.first_token = sample.first_token or now
            note_token(sample, drawn, row, self._endings.text)
            finish = self._endings.check(sample)
            if finish is not None:
                self._leave(sample)
                self._finish(sample, finish)
            elif sample.streaming:
                self._outbox.append((sample, answer(sample, self._endings, self.live.version, now=now)))

    def _measure_draft(self, sample: Sample) -> None:
        """Count the newest token towards the acceptance length."""
        if sample.drafter is None:
            earlier = sample.prompt + sample.output[:-1]
            sample.drafter = Drafter(earlier, sample.output[-1], self._limits.effects.draft_tokens)
        elif given := sample.drafter.saw(sample.output[-1]):
            self.stats.verify_steps += 1
            self.stats.verified_tokens += given

    # ------------------------------------------------------------------ endings

    def _leave(self, sample: Sample) -> None:
        """Take a running sample out of its batch; the slab's last row moves into its place."""
        assert sample.slab is not None, "only a running sample can leave"
        batch = self._batches[sample.slab.length]
        moved = batch.slab.remove(sample.row)
        batch.samples[sample.row] = batch.samples[moved]
        batch.samples[sample.row].row = sample.row
        batch.samples.pop()
        sample.slab, sample.row = None, -1

    def _leave_batches(self) -> list[Sample]:
        samples = [sample for batch in self._batches.values() for sample in batch.samples]
        for sample in samples:
            self._leave(sample)
        return samples

    def _abort(self, chosen: Callable[[Sample], bool]) -> None:
        running = [sample for batch in self._batches.values() for sample in batch.samples if chosen(sample)]
        for sample in running:
            self._leave(sample)
        queued = [sample for sample in (*self._waiting, *self._held, *self._starting) if chosen(sample)]
        queued = [sample for sample in queued if sample.finish is None and sample not in running]
        self._waiting = deque(sample for sample in self._waiting if not chosen(sample))
        self._held = [sample for sample in self._held if not chosen(sample)]
        for sample in (*running, *queued):
            self.stats.aborted += 1
            self._finish(sample, dict(ABORTED))

    def _finish(self, sample: Sample, finish: dict[str, object]) -> None:
        sample.finish = finish
        if not sample.quiet:
            self.stats.requests += 1
            self.stats.prompt_tokens += len(sample.prompt)
            self.stats.generation_tokens += len(sample.output)
        self._outbox.append((sample, answer(sample, self._endings, self.live.version, now=self._wall())))
