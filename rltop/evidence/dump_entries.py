"""The entries of a saved dump as they lie in its pickle, and what kind of dump it is.

One layer for `rltop check`, which reduces every sample to measures, and for `rltop dump`, which shows some. Failure
policy: `Unreadable` with the reason; entries found before the broken place can be read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from rltop.evidence.dump_sample import DumpKind
from rltop.evidence.pickle_samples import Samples
from rltop.evidence.pickle_values import Map, Seq, Unreadable
from rltop.evidence.saved import Mapped

_LAYOUT = frozenset({"raw_reward", "micro_batch_indices", "num_microbatches", "global_batch_sizes"})
_COLUMN = {"partition": "rollout_position", "sample_indices": "sample_index"}
"""Column of slime's old train dumps -> field of its new ones."""
_STATE_KEYS = frozenset({"sample_offset", "epoch_id", "sample_group_index", "sample_index"})


class Entries:
    """Samples of a mapped file; their places are found as far as they are asked for."""

    def __init__(self, file: Mapped) -> None:
        self._file = file
        self._samples = Samples(file.data, file.at)
        self._told = file.at
        self._sum, self._summed = 0, 0 if file.archive is not None and file.archive.has_sum else -1
        """CRC-32 of the first so many bytes of the pickle; -1: nobody knows what it should be."""
        self._broken: Unreadable | None = None
        first = self._samples.element(0) if self.reach(1) else None
        self.kind: DumpKind = kind_of(self.head, first)
        self.columns = _columns(self.head) if self.kind == "train-v1" and not len(self._samples) else {}
        """v1 of slime's train dumps: one list per field."""

    @property
    def head(self) -> Any:
        """The value around the samples, as far as it was read."""
        return self._samples.head

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names that were refused in what was built so far."""
        return tuple(self._samples.foreign)

    @property
    def ended(self) -> bool:
        """All entries are known."""
        return self._samples.ended

    @property
    def share(self) -> float:
        """Part of the file that was gone over, 0 to 1."""
        return 1.0 if self.ended else self._samples.at / max(len(self._file.data), 1)

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0) if self.columns else len(self._samples)

    def steps(self) -> Iterator[None]:
        """Finds entries: one step is at most some megabytes, or one entry. Raises Unreadable, again and again."""
        if self._broken is not None:
            raise self._broken
        try:
            while True:
                # Before every step: the step reads what may be gone.
                self._file.touched(self._samples.at - self._told)
                self._told = self._samples.at
                ended = next(self._samples.scan(), None) is None
                self._add_up()
                if ended:
                    return
                yield
        except Unreadable as error:
            self._broken = error
            raise

    def _add_up(self) -> None:
        """The checksum of what was gone over; at the end it is compared."""
        end = len(self._file.data) if self.ended else self._samples.at
        if self._summed < 0 or end <= self._summed:
            return
        self._sum = zlib.crc32(self._file.data[self._summed : end], self._sum)
        self._summed = end
        if self.ended and self._file.archive is not None:
            self._summed = -1
            self._file.archive.summed(self._sum)

    def reach(self, count: int) -> bool:
        """Finds entries up to a number of them; False where there are fewer. Raises Unreadable."""
        if len(self._samples) < count and not self.ended:
            for _ in self.steps():
                if len(self._samples) >= count:
                    break
        return len(self._samples) >= count

    def element(self, at: int) -> Any:
        """The entry at a known position: a `Map`, or whatever else is there."""
        if self.columns:
            return Map({key: column.items[at] for key, column in self.columns.items() if at < len(column)})
        self._file.touched(self._samples.size(at))
        return self._samples.element(at)

    def group(self, at: int) -> str | None:
        """Name of the data set that an entry belongs to, where the dump has several lists."""
        return self._samples.group(at)

    def maps(self) -> Iterator[tuple[int, Map]]:
        """(position, entry) of all entries that are maps, in constant memory."""
        at = 0
        while at < len(self) or self.reach(at + 1):
            entry = self.element(at)
            if isinstance(entry, Map):
                yield at, entry
            at += 1


def kind_of(value: Any, first: Any = None) -> DumpKind:
    """What a saved value is, by its keys and by its first sample."""
    if not isinstance(value, Map):
        return "other"
    keys = {key for key in value.items if isinstance(key, str)}
    if "dp_shards" in keys or (value.get("version") == 2 or (value.get("format_version") == 2 and "samples" in keys)):
        return "train-v2"
    if "rollout_data" in keys or ("samples" in keys and "rank" in keys):
        return "train-v1"
    if "samples" in keys:
        return "train-v2" if isinstance(first, Map) and "sample_index" in first.items else "rollout"
    return "state" if len(keys & _STATE_KEYS) >= 2 else "other"


def _columns(value: Any) -> dict[str, Seq]:
    """The lists of `rollout_data` that have one value per sample of the rank; `raw_reward` is the whole batch's."""
    data = value.get("rollout_data") if isinstance(value, Map) else None
    lists = {str(k): v for k, v in data.items.items() if isinstance(v, Seq)} if isinstance(data, Map) else {}
    sized = next((lists[name] for name in ("tokens", "response_lengths", "partition") if name in lists), None)
    count = len(sized) if sized is not None else min(map(len, lists.values()), default=0)
    return {_COLUMN.get(k, k): v for k, v in lists.items() if len(v) == count and k not in _LAYOUT}
