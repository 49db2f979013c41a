"""Samples and weight syncs of any number of rollouts in bounded memory.

Of the samples stay: the first rollouts (the step-1 checks), the newest (recovery), and those a rule may need as
evidence, the first of them and the newest. Of the syncs: the first, the newest, and those around a rollout that is
evidence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rltop.checks.observe import Sample, SyncEvent

RolloutKey = tuple[int, int]
"""(segment, rollout id)."""


@dataclass(frozen=True, slots=True)
class KeepSizes:
    """How many rollouts, or syncs, of each sort are kept."""

    first: int = 4
    newest: int = 32
    notable: int = 4
    """Of the first, and as many of the newest."""
    samples_per_rollout: int = 64
    syncs: int = 64


@dataclass(slots=True)
class KeptSamples:
    """Samples by rollout. The measures of a text are some 600 bytes, whatever its length."""

    sizes: KeepSizes = KeepSizes()
    left_out: int = 0
    """Samples beyond `samples_per_rollout` of one rollout."""
    _first: dict[RolloutKey, list[Sample]] = field(default_factory=dict)
    _notable: dict[RolloutKey, list[Sample]] = field(default_factory=dict)
    _late_notable: dict[RolloutKey, list[Sample]] = field(default_factory=dict)
    _newest: dict[RolloutKey, list[Sample]] = field(default_factory=dict)
    _marked: set[RolloutKey] = field(default_factory=set)

    def add(self, key: RolloutKey, samples: Iterable[Sample], *, notable: bool) -> None:
        """Takes samples of a rollout; several calls for one rollout add up."""
        kept = next((store[key] for store in self._stores() if key in store), None)
        if kept is None:
            kept = []
            (self._first if len(self._first) < self.sizes.first else self._newest)[key] = kept
        for sample in samples:
            if len(kept) < self.sizes.samples_per_rollout:
                kept.append(sample)
            else:
                self.left_out += 1
        if notable and key in self._newest:
            self._marked.add(key)
        if len(self._newest) > self.sizes.newest:
            self._retire(next(iter(self._newest)))

    def all(self) -> tuple[Sample, ...]:
        """Every kept sample."""
        return tuple(sample for store in self._stores() for samples in store.values() for sample in samples)

    def _stores(self) -> tuple[dict[RolloutKey, list[Sample]], ...]:
        return self._first, self._notable, self._late_notable, self._newest

    def _retire(self, key: RolloutKey) -> None:
        samples = self._newest.pop(key)
        if key not in self._marked:
            return
        self._marked.discard(key)
        if len(self._notable) < self.sizes.notable:
            self._notable[key] = samples
            return
        self._late_notable[key] = samples
        if len(self._late_notable) > self.sizes.notable:
            del self._late_notable[next(iter(self._late_notable))]


@dataclass(slots=True)
class KeptSyncs:
    """Weight syncs, oldest first."""

    sizes: KeepSizes = KeepSizes()
    _first: list[SyncEvent] = field(default_factory=list)
    _pinned: list[SyncEvent] = field(default_factory=list)
    _newest: deque[SyncEvent] = field(default_factory=deque)

    def add(self, sync: SyncEvent, evidence: set[RolloutKey]) -> None:
        """Takes a sync. One that leaves the window stays if its rollout, or the one before, is in `evidence`."""
        if len(self._first) < self.sizes.first:
            self._first.append(sync)
            return
        self._newest.append(sync)
        if len(self._newest) <= self.sizes.syncs:
            return
        old = self._newest.popleft()
        near = old.rollout_id is not None and any(
            (old.segment, rollout) in evidence for rollout in (old.rollout_id, old.rollout_id - 1)
        )
        if near and len(self._pinned) < self.sizes.syncs:
            self._pinned.append(old)

    def all(self) -> Sequence[SyncEvent]:
        """Every kept sync."""
        return (*self._first, *self._pinned, *self._newest)
