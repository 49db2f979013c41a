"""The train dumps beside a rollout dump: for a sample of the rollout what the trainer computed for its tokens.

Joined by `rollout_position` (slime's train dumps), without it by `sample_index`, and those of Relax, which count the
samples of each rank from 0, by their tokens. Files of several DP shards are several parts of one rollout.

Failure policy: a train dump that cannot be read joins nothing; the rollout is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rltop.errors import RltopError
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_sample import DumpSample, DumpTensor

MOST_FILES = 64


class Trained:
    """Opens the train dumps when they are first asked for; `stack` closes them.

    slime sorts a train dump by the position, so in a single file both mostly stand at the same place: that is looked at
    first. Otherwise it is found out step by step where each sample stands (`more`): the train dumps of a rollout are as
    large as the rollout itself.
    """

    def __init__(self, stack: ExitStack, paths: Sequence[Path]) -> None:
        self._stack, self._paths = stack, paths[:MOST_FILES]
        self._files: list[DumpFile] | None = None
        self._steps: Iterator[None] | None = None
        self._places: dict[int, tuple[DumpFile, int]] = {}
        self._by_index: dict[int, tuple[DumpFile, int]] = {}
        self._by_tokens: dict[int, tuple[DumpFile, int]] = {}
        """By a hash: a sample that was drawn twice has the same log-probs twice."""
        self._same_places = len(paths) == 1
        self._indexed = not paths

    @property
    def complete(self) -> bool:
        """Where every sample stands is known, as far as can be told."""
        return self._indexed or self._same_places

    def more(self) -> bool:
        """Go on by one sample; False: it is complete."""
        if not self.complete:
            self._steps = self._steps or self._index()
            self._indexed = next(self._steps, self) is self
        return not self.complete

    def sample(self, at: int, index: int | None = None, tokens: Sequence[int] | None = None) -> DumpSample | None:
        """The trainer's entry for the sample at a place of the rollout dump; None: none, or none is known yet.

        index, tokens: of that sample, for train dumps that do not say the place.
        """
        if self._same_places and self._opened():
            with suppress(IndexError, RltopError, OSError):
                guess = self._opened()[0].sample(at)
                if whole_number(guess.extra.get("rollout_position")) == at:
                    return guess
        self._same_places = False
        found = self._places.get(at)
        if found is None and index is not None:
            found = self._by_index.get(index)
        if found is None and tokens and self._by_tokens:
            found = self._by_tokens.get(hash(tuple(tokens)))
            entry = found[0].sample(found[1]) if found is not None else None
            return entry if entry is not None and list(entry.tokens or ()) == list(tokens) else None
        return found[0].sample(found[1]) if found is not None else None

    def log_probs(self, sample: DumpSample) -> Sequence[float] | None:
        """The trainer's log-probs of the response tokens: of the train dump, else what the sample itself has."""
        trained = self.sample(sample.at, sample.index, sample.tokens)
        found = trained.log_probs if trained is not None else None
        return found if found is not None else sample.log_probs

    def _opened(self) -> list[DumpFile]:
        if self._files is None:
            self._files = []
            for path in self._paths:
                with suppress(RltopError, OSError):
                    self._files.append(self._stack.enter_context(DumpFile.open(path)))
        return self._files

    def _index(self) -> Iterator[None]:
        for file in self._opened():
            with suppress(RltopError, OSError):
                for sample in file:
                    position = whole_number(sample.extra.get("rollout_position"))
                    if position is not None:
                        self._places.setdefault(position, (file, sample.at))
                    elif "decoded_tokens" in sample.extra:  # Relax writes it, and its sample_index is the rank's
                        self._by_tokens.setdefault(hash(tuple(sample.tokens or ())), (file, sample.at))
                    elif sample.index is not None:
                        self._by_index.setdefault(sample.index, (file, sample.at))
                    yield


def whole_number(value: object) -> int | None:
    """An integer of a dump, plain or as a tensor of one element."""
    if isinstance(value, DumpTensor):
        values = value.values()
        value = values[0] if len(values) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None
