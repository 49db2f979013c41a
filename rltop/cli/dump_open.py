"""Which dumps a command of `rltop dump` shows, and the samples that were asked for, with progress on a terminal.

Nothing is read further than it has to be: without --sort the first page ends the reading.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rltop.cli.output import note, size
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.evidence.dump_file import DumpFile
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_rows import Filter
    from rltop.evidence.dump_sample import DumpSample
    from rltop.evidence.dump_trained import Trained

SHOW_AFTER_S = 0.5
MOST_HOLES = 12


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which samples, in which order."""

    chosen: str = ""
    """--filter."""
    search: str = ""
    sort: str = ""
    offset: int = 0
    limit: int = 10

    def __post_init__(self) -> None:
        from rltop.evidence.dump_rows import SORTS

        if self.sort.lstrip("-") not in ("", *SORTS):
            names = ", ".join(SORTS)
            raise RltopError(
                f"cannot sort by {self.sort!r}", where="--sort", why=f"there are {names}", do="--sort -gap"
            )


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample that is shown."""

    ref: DumpRef
    sample: DumpSample
    trained: DumpSample | None


def chosen_dumps(pattern: str, *, evaluation: bool, texts: bool = False) -> list[DumpRef]:
    """Dumps of a pattern: of the training, or with `evaluation` of the evaluation. What is left out is said on stderr.

    texts: only dumps that have prompts and responses. Raises RltopError where none is left.
    """
    from rltop.evidence.dump_find import find_dumps, holes

    found = find_dumps(pattern)
    for ref in found:
        if ref.problem:
            note(f"{ref.path}: {ref.problem}")
        elif ref.damage:
            note(f"{ref.path}: {ref.damage}")
    readable = [ref for ref in found if not ref.problem]
    if texts and readable and not (rollouts := [one for one in readable if not (one.kind or "").startswith("train")]):
        raise RltopError(
            "a train dump has no prompts and responses as text",
            where=str(readable[0].path),
            why="slime keeps them in the rollout dump of the same rollout",
            do="give the path of --save-debug-rollout-data",
        )
    readable = rollouts if texts and readable else readable
    refs = [ref for ref in readable if ref.is_eval is evaluation]
    if not refs and not evaluation and readable:
        return readable  # nothing but evaluations: no question which
    if not refs:
        raise RltopError(
            "no eval_ dump", where=pattern, why=f"{len(readable)} dumps of the training", do="leave out --eval"
        )
    if len(refs) < len(readable):
        note(f"left out of the {'training' if evaluation else 'evaluation (--eval)'}: {len(readable) - len(refs)}")
    if gaps := holes(refs):
        more = f" and {len(gaps) - MOST_HOLES} more" if len(gaps) > MOST_HOLES else ""
        note(f"no dump of rollout {', '.join(map(str, gaps[:MOST_HOLES]))}{more}")
    return refs


@dataclass(frozen=True, slots=True)
class Pick:
    """Which dumps and samples a command that works through them means: PATTERN, --eval, --filter, --limit."""

    pattern: str
    chosen: str = ""
    """A filter, as in `rltop dump show`."""
    limit: int | None = None
    evaluation: bool = False

    def refs(self) -> Sequence[DumpRef]:
        """The rollout dumps, by rollout id: see `chosen_dumps`."""
        return chosen_dumps(self.pattern, evaluation=self.evaluation, texts=True)

    def samples(self, refs: Sequence[DumpRef], broken: dict[Path, str]) -> Iterator[tuple[DumpRef, DumpSample]]:
        """One after the other, a dump open at a time; tensors of a sample can be read until the next one is taken.

        broken: gets every dump that is damaged, as far as that was seen, and what of it could not be read. What came
        before stands.
        """
        from rltop.evidence.dump_file import DumpFile

        takes, left = self._filter(), self.limit
        for ref in refs:
            at = 0
            try:
                with DumpFile.open(ref.path) as dump:
                    for one in dump:
                        if left == 0:
                            break
                        at = one.at + 1
                        if one.problem:
                            broken.setdefault(ref.path, f"{ref.path}, entry {one.at}: no sample: {one.problem}")
                        elif takes(one):
                            left = None if left is None else left - 1
                            yield ref, one
                    if dump.damage:
                        broken.setdefault(ref.path, f"{ref.path}: {dump.damage}")
            except RltopError as error:
                broken[ref.path] = f"{ref.path}, from sample {at} on: {error.why or error.what}"
            if left == 0:
                return

    def nothing(self) -> RltopError:
        """The error for no sample at all."""
        where = f"--filter {self.chosen}" if self.chosen else self.pattern
        return RltopError("no sample fits", where=where)

    def _filter(self) -> Callable[[DumpSample], bool]:
        if not self.chosen:
            return lambda one: True
        from rltop.evidence.dump_rows import Filter, line_of

        chosen = Filter(self.chosen)
        return lambda one: chosen.takes(line_of(one, None), one)


class Dump:
    """A dump that is open, with the train dumps beside it."""

    def __init__(self, ref: DumpRef, stack: ExitStack) -> None:
        from rltop.evidence.dump_file import DumpFile
        from rltop.evidence.dump_trained import Trained

        self.ref = ref
        self.file: DumpFile = stack.enter_context(DumpFile.open(ref.path))
        self._trained: Trained = Trained(stack, ref.train)

    def trained(self, sample: DumpSample) -> DumpSample | None:
        """The trainer's entry of a sample; looks through the train dumps as far as it has to."""
        found = self._trained.sample(sample.at, sample.index, sample.tokens)
        while found is None and self._trained.more():
            found = self._trained.sample(sample.at, sample.index, sample.tokens)
        return found

    def scanned(self, upto: int | None = None) -> None:
        """Finds the places of samples, with progress."""
        with Progress(self.ref) as progress:
            for share in self.file.scan(upto):
                progress.show(share)

    def samples(self) -> Iterator[DumpSample]:
        """All of them, with progress."""
        with Progress(self.ref) as progress:
            for sample in self.file:
                progress.show(self.file.share)
                yield sample


@contextmanager
def opened(ref: DumpRef) -> Iterator[Dump]:
    """A dump, closed at the end."""
    with ExitStack() as stack:
        yield Dump(ref, stack)


def picked(refs: Sequence[DumpRef], wanted: Wanted) -> Iterator[Shown]:
    """The samples that are shown, one after the other; tensors can be read until the next one is taken."""
    from rltop.evidence.dump_rows import FIELDS, Filter

    choose = Filter(wanted.chosen) if wanted.chosen else None
    for word in choose.odd if choose is not None else ():
        note(f"{word!r} is looked for as a word; fields are {FIELDS}")
    if wanted.sort:
        yield from _sorted(refs, wanted, choose)
        return
    passed, left = 0, wanted.limit
    broken: RltopError | None = None
    strange: list[Shown] = []
    for ref in refs:
        if left <= 0:
            break
        try:
            with opened(ref) as dump:
                if choose is None and not wanted.search:
                    found, gone = _at(dump, max(wanted.offset - passed, 0), left)
                    passed += gone
                else:
                    found = _fitting(dump, wanted.search, choose)
                for sample, trained in found:
                    if choose is not None or wanted.search:
                        passed += 1
                        if passed <= wanted.offset:
                            continue
                    yield Shown(ref, sample, trained)
                    if sample.problem:
                        strange.append(Shown(ref, sample, trained))
                    left -= 1
                    if left <= 0:
                        break
                if (damage := dump.file.damaged()) is not None:  # also where the page ends before it
                    raise damage
        except RltopError as error:  # what was before the damage is shown, then the other dumps
            if broken is not None:
                note(str(broken))
            broken = error
    if broken is not None:
        raise broken
    if strange:
        first = strange[0]
        raise no_samples(first.ref, len(strange), first.sample.at, first.sample.problem)


def no_samples(ref: DumpRef, count: int, at: int, why: str) -> RltopError:
    """The error for entries of a list of samples that are none, behind all that could be told."""
    return RltopError(
        f"not samples: {count} of these entries",
        where=f"{ref.path}, entry {at}",
        why=why,
        do="what wrote this file? slime's dumps have a map per sample",
    )


def _at(dump: Dump, start: int, count: int) -> tuple[Iterator[tuple[DumpSample, DumpSample | None]], int]:
    """(samples from `start` on, samples of the dump as far as they are known). A damage is raised behind them."""
    broken: RltopError | None = None
    try:
        dump.scanned(start + count)
    except RltopError as error:
        broken = error

    def found() -> Iterator[tuple[DumpSample, DumpSample | None]]:
        for at in range(start, min(start + count, dump.file.indexed())):
            sample = dump.file.sample(at)
            yield sample, dump.trained(sample)
        if broken is not None:
            raise broken

    return found(), dump.file.indexed()


def _fitting(dump: Dump, search: str, choose: Filter | None) -> Iterator[tuple[DumpSample, DumpSample | None]]:
    from rltop.evidence.dump_rows import contains, line_of

    for sample in dump.samples():
        if search and not contains(sample, search):
            continue
        trained = dump.trained(sample)
        own = sample.log_probs if trained is None else trained.log_probs
        if choose is None or choose.takes(line_of(sample, own), sample):
            yield sample, trained


def _sorted(refs: Sequence[DumpRef], wanted: Wanted, choose: Filter | None) -> Iterator[Shown]:
    """Reads every dump; only the best `offset + limit` places are kept. Damage is raised when they were shown."""
    from rltop.evidence.dump_rows import line_of, sort_key

    broken: list[RltopError] = []

    def keys() -> Iterator[tuple[float, int, int]]:
        for number, ref in enumerate(refs):
            try:
                with opened(ref) as dump:
                    for sample, trained in _fitting(dump, wanted.search, choose):
                        own = sample.log_probs if trained is None else trained.log_probs
                        yield sort_key(line_of(sample, own), wanted.sort), number, sample.at
            except RltopError as error:
                broken.append(error)

    best = heapq.nsmallest(wanted.offset + wanted.limit, keys())[wanted.offset :]
    with ExitStack() as stack:
        open_dumps: dict[int, Dump] = {}
        for _, number, at in best:
            dump = open_dumps.get(number)
            if dump is None:
                dump = open_dumps[number] = Dump(refs[number], stack)
            sample = dump.file.sample(at)
            yield Shown(refs[number], sample, dump.trained(sample))
    for error in broken[1:]:
        note(str(error))
    if broken:
        raise broken[0]


class Progress:
    """How far a dump was read, on a terminal's stderr, after half a second."""

    def __init__(self, ref: DumpRef, clock: Callable[[], float] = time.monotonic) -> None:
        self._ref, self._clock = ref, clock
        self._begin = self._told = clock()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._width:
            self._write("\r" + " " * self._width + "\r")

    def show(self, share: float) -> None:
        """share: of the file, 0 to 1."""
        now = self._clock()
        if now - self._begin < SHOW_AFTER_S or now - self._told < 0.1 or not sys.stderr.isatty():
            return
        self._told = now
        left = (now - self._begin) * (1 - share) / share if share > 0 else math.inf
        text = f"{self._ref.path.name}: {share:.0%} of {size(self._ref.bytes)}"
        text += f", {left:.0f} s left" if left < 1e6 else ""
        self._write("\r" + text.ljust(self._width))
        self._width = max(self._width, len(text))

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:  # narration: nobody can be told
            return
