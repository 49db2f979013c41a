"""Reads a log of any size in one pass and constant memory: lines in, events, metric rows, phases and samples out.

Most lines of a log say nothing that a rule wants. Whether one does is looked up by its shape, which is the line without
its digits: lines of one shape are alike, so most of them cost one dictionary look-up. Model text (`First rollout
sample`, `Finish rollout`) becomes a sample and is never searched for anything else.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rltop.checks.found import LogEvent, LogSource, Owner, Problem
from rltop.checks.observe import Args, MetricRow, PhaseEvent, Where
from rltop.evidence import logtext
from rltop.evidence.bounded import FirstAndNewest
from rltop.evidence.lines import RECOGNISERS, Line, Recogniser
from rltop.evidence.metric_names import Names, shipped
from rltop.evidence.pieces import GZIP, Splitter, chunks, how_packed, is_binary, unpacked
from rltop.evidence.prefix import Prefix, is_hybrid, owner_of_actor, owner_of_file, read_prefix
from rltop.evidence.sink import Reader, Sink, Source
from rltop.evidence.traceback import Block, event_of, opens

DIGITS = b"0123456789"
MOST_SHAPES = 50_000
"""Shapes that are remembered; then it starts anew."""
SHAPE = 4096
"""Bytes of a line that make its shape; a longer one is looked at every time."""
LOOK_BACK = 5000
"""Lines that are gone back for the prefix of a line that has none."""
MOST_BLOCKS = 256
SILENCE = 500
"""Lines of other processes after which a traceback is taken to be over."""
RING = 16
"""Batch and access lines of one process that are kept as first, as newest, and before and after any other event."""
MOST_STREAMS = 1024
EVENTS = (4000, 4000)
"""First and newest events of one kind in one log."""
LIVE_EVENTS = (0, 400)
"""The same of batch, access and timer lines of a log that is followed. None of the first: between them and the newest
the end of a phase would be missing."""
_PARENTHESIS = frozenset(b"(\x1b")
_PREFIXED = frozenset(b"([\x1b0123456789 DIWEFCMTS")
"""First bytes of lines that may have a prefix."""
_ACTOR = re.compile(rb"^(?:\x1b\[\d*m)?\([^()\n]{0,120}?\bpid=[^)\n]{0,120}\)(?:\x1b\[\d*m)?")
"""The prefix of a line without digits: the name of an actor (`…RayActor`) is nothing that its line says."""
_MINUTE = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\d\d:\d\d")
ROWS = (20_000, 20_000)
_ENGINE_KINDS = frozenset({"engine_stage", "prefill", "decode"})
"""What only an engine writes: a log with such lines and no actors is an engine's."""
TEXT = 65_536

_TAPS: tuple[tuple[str, bytes], ...] = (
    ("sample", b"First rollout sample"),
    ("sample", b"Finish rollout"),
    ("dict", b" : {"),
    ("dict", b"step: - "),
    ("dict", b" iteration "),
    ("dict", b"{'"),
    ("timer", b"Timer "),
    ("timer", b"ollout step "),
    ("timer", b"ollout backfill step "),
    ("timer", b"completed for rollout_id"),
    ("args", b" arguments -"),
    ("args", b"Namespace("),
    ("args", b"ServerArgs("),
    ("args", b".py --"),
    ("args", b".py \\"),
    ("abort", b"Unexpected result"),
    ("error", b"Traceback (most"),
    ("error", b'File "'),
    ("error", b"Error"),
    ("error", b"xception"),
    ("error", b"Interrupt"),
    ("error", b"Failure"),
    ("error", b"Failed"),
    ("error", b"Died"),
    ("error", b"Timeout"),
    ("error", b"SystemExit"),
    ("actor", b":actor_name:"),
    ("model", b"[prompt] "),
    ("model", b"[response] "),
)
"""What makes a line interesting besides the recognisers: (what for, literal in the line without digits)."""


@dataclass(frozen=True, slots=True)
class Hits:
    """What a shape is worth looking at for."""

    recognisers: tuple[Recogniser, ...] = ()
    taps: frozenset[str] = frozenset()
    bulk: bool = False
    """Only bulk recognisers."""
    kind: str = ""
    """Of the first recogniser."""


NOTHING = Hits()

Fact = LogEvent | MetricRow | logtext.Printed | Args
"""What a listener is told; a printed sample when its rollout is known."""
Listener = Callable[[Fact, str, int | None], None]
"""Called with a fact, and the actor and pid of its line."""


@dataclass(frozen=True, slots=True)
class Table:
    """Recognisers with their needles as they are searched for."""

    entries: tuple[tuple[bytes, Recogniser], ...]
    unless: tuple[tuple[bytes, Recogniser], ...] = ()

    @staticmethod
    def of(recognisers: Iterable[Recogniser]) -> Table:
        """The table of some recognisers. Raises ValueError for a needle without a letter left."""
        entries, unless = [], []
        for recogniser in recognisers:
            unless += [(literal.encode().translate(None, DIGITS), recogniser) for literal in recogniser.unless]
            for needle in recogniser.needles:
                literal = needle.encode().translate(None, DIGITS)
                if not literal.strip():
                    raise ValueError(f"recogniser {recogniser.kind}: the needle {needle!r} has no letters")
                entries.append((literal, recogniser))
        return Table(tuple(entries), tuple(unless))

    def hits(self, shape: bytes) -> Hits:
        """What a line of this shape may be."""
        found = tuple(dict.fromkeys(recogniser for literal, recogniser in self.entries if literal in shape))
        if found and self.unless:
            out = {id(recogniser) for literal, recogniser in self.unless if literal in shape}
            found = tuple(recogniser for recogniser in found if id(recogniser) not in out)
        taps = frozenset(name for name, literal in _TAPS if literal in shape)
        if not found and not taps:
            return NOTHING
        bulk = bool(found) and not taps and all(recogniser.bulk for recogniser in found)
        return Hits(found, taps, bulk, found[0].kind if found else "")


TABLE = Table.of(RECOGNISERS)
_BULK_KINDS = frozenset(recogniser.kind for recogniser in RECOGNISERS if recogniser.bulk)


@dataclass(slots=True)
class _Context:
    """The newest prefix above a line, and what came with it."""

    number: int = 0
    owner: Owner = ""
    certain: bool = False
    actor: str = ""
    pid: int | None = None
    node: str = ""
    rank: int | None = None
    tags: Mapping[str, int] = field(default_factory=dict)
    level: str = ""
    time: float | None = None


@dataclass(slots=True)
class _Bulk:
    """Batch or access lines of one process."""

    keep: int = RING
    """So many more are kept, because they are the first or because something happened."""
    minute: bytes = b"?"
    """Date and minute of the newest line."""
    unread: int = 0
    """Lines that were only put into the ring."""
    ring: deque[tuple[int, bytes, Hits, _Context]] = field(default_factory=lambda: deque(maxlen=RING))


@dataclass(slots=True)
class Taken:
    """What one log has given so far; bounded."""

    events: dict[str, FirstAndNewest[LogEvent]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    rows: FirstAndNewest[MetricRow] = field(default_factory=lambda: FirstAndNewest(*ROWS))
    phases: FirstAndNewest[PhaseEvent] = field(default_factory=lambda: FirstAndNewest(8000, 8000))
    samples: logtext.SampleLines = field(default_factory=logtext.SampleLines)
    args: list[Args] = field(default_factory=list)
    aborts: list[LogEvent] = field(default_factory=list)
    defects: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Recognisers that raised: kind -> (line, error)."""


class LogScan:
    """One pass over one log. `feed` any number of times, then `finish`; `so_far` is for a log that still grows.

    live: the newest lines count at once, those of which there are many too; fewer of these are kept then.
    told: is called with each event as it is found (the lines of a traceback when it is over).
    keep: first and newest events of one kind that are kept.
    names: what metrics of other frameworks are here; default the table that comes with rltop.
    facts: is called with everything that is found, in the order of the lines.
    """

    def __init__(
        self,
        name: str,
        table: Table = TABLE,
        *,
        live: bool = False,
        told: Callable[[LogEvent], None] | None = None,
        keep: tuple[int, int] = EVENTS,
        names: Names | None = None,
        facts: Listener | None = None,
    ) -> None:
        self._name = name
        self._live = live
        self._told = told
        self._facts = facts
        self._most = keep
        self._table = table
        self._shapes: dict[bytes, Hits] = {}
        self._owner, self._rank, self._engine = owner_of_file(name)
        self._context = _Context(owner=self._owner, rank=self._rank)
        self._near: float | None = None
        """The newest time with a date: stamps without one are close to it."""
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._bulk: dict[tuple[str, bytes], _Bulk] = {}
        self._minutes: dict[str, FirstAndNewest[tuple[int, bytes, Hits, _Context]]] = {}
        self._tables = logtext.ArgsTables(name)
        self._masked = 0
        """Lines of model text over several lines that were skipped so far."""
        self._masked_by: tuple[object, ...] = ()
        self._first_time: float | None = None
        self._last_time: float | None = None
        self.hurry = False
        """Of a log that grows, there is more to read than can be: lines of which there are many are read as those of
        a log that has ended, some of them."""
        self._rollouts = logtext.RolloutContext(names=(names or shipped()).of())
        self._lines = 0
        self.taken = Taken()

    def feed(self, start: int, pieces: Sequence[bytes]) -> None:
        """Lines `start`, `start` + 1, ...: the whole of each, or one piece of a line."""
        shapes, bulk, number = self._shapes, self._bulk, start - 1
        for piece in pieces:
            number += 1
            if not piece:
                continue
            shape = piece.translate(None, DIGITS)
            hits = shapes.get(shape)
            if hits is None:
                hits = self._look(shape)
            if self._blocks or self._masked or self._tables.open:
                self._line(start, number, pieces, hits)
            elif hits is NOTHING:
                continue
            elif hits.bulk and (not self._live or self.hurry):
                end = piece.find(b")", 0, 96) + 1 if piece[0] in _PARENTHESIS else 0
                state = bulk.get((hits.kind, piece[:end]))
                if state is None or state.keep or state.minute not in piece:
                    self._one_of_many(start, number, pieces, hits)
                    continue
                if piece[0] not in _PREFIXED:
                    self._above(start, number, pieces)
                state.ring.append((number, piece, hits, self._context))
                state.unread += 1
            else:
                self._line(start, number, pieces, hits)
        self._leave(start, pieces)
        self._lines = max(self._lines, number)

    def _look(self, shape: bytes) -> Hits:
        hits = self._table.hits(_ACTOR.sub(b"", shape, count=1))
        if len(shape) <= SHAPE:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = hits
        return hits

    # -- prefixes of lines above

    def _above(self, start: int, number: int, pieces: Sequence[bytes]) -> _Context:
        """The context of line `number`: the newest prefix above it. Lines in between were not looked at yet."""
        seen = self._context
        if seen.number >= number - 1:
            return seen
        time_only: Prefix | None = None
        for at in range(number - 1, max(start - 1, seen.number, number - LOOK_BACK), -1):
            piece = pieces[at - start]
            if piece[:1] and piece[0] not in _PREFIXED:
                continue
            prefix = self._prefix(piece)
            if not prefix.given:
                continue
            if prefix.time is None and time_only is None:
                time_only = prefix
                continue
            self._enter(time_only or prefix, number - 1, prefix.time)
            return self._context
        if time_only is not None:
            self._enter(time_only, number - 1, None)
        seen.number = max(seen.number, number - 1)
        return self._context

    def _leave(self, start: int, pieces: Sequence[bytes]) -> None:
        """Take the prefix of the last lines along: the next lines may have none."""
        if pieces:
            self._above(start, start + len(pieces), pieces)

    def _prefix(self, piece: bytes) -> Prefix:
        prefix = read_prefix(piece[:2048].decode("utf-8", "replace"), self._near)
        if prefix.dated:
            self._near = prefix.time
        return prefix

    def _enter(self, prefix: Prefix, number: int, time: float | None) -> None:
        old = self._context
        owner, certain = self._owner_of(prefix)
        time = time if time is not None else old.time
        self._context = _Context(
            number,
            owner,
            certain,
            prefix.actor,
            prefix.pid,
            prefix.node,
            self._rank_of(prefix),
            prefix.tags,
            prefix.level,
            time,
        )
        if time is not None:
            self._first_time = time if self._first_time is None else min(self._first_time, time)
            self._last_time = time if self._last_time is None else max(self._last_time, time)

    def _owner_of(self, prefix: Prefix) -> tuple[Owner, bool]:
        if prefix.actor and (owner := owner_of_actor(prefix.actor)):
            if not is_hybrid(prefix.actor):
                return owner, True
            return ("engine", True) if prefix.tags else (owner, False)
        if prefix.rank is not None:
            return ("engine" if self._owner == "engine" else "trainer"), True
        if prefix.tags:
            return "engine", True
        return self._owner, False

    def _rank_of(self, prefix: Prefix) -> int | None:
        if prefix.rank is not None:
            return prefix.rank
        return prefix.tags.get("TP") if prefix.tags else self._rank

    def _make(self, start: int, number: int, pieces: Sequence[bytes]) -> Line:
        prefix = read_prefix(pieces[number - start][:TEXT].decode("utf-8", "replace"), self._near)
        if prefix.time is None:
            self._above(start, number, pieces)
        elif prefix.dated:
            self._near = prefix.time
        if prefix.given:
            self._enter(prefix, number, prefix.time)
        else:
            self._context = replace(self._context, number=number)
        context = self._context
        inherits = not prefix.given
        return Line(
            text=prefix.text,
            raw=prefix.plain,
            source=self._name,
            number=number,
            own_prefix=prefix.given,
            time_of_its_own=prefix.time is not None,
            certain_owner=context.certain,
            owner=context.owner,
            actor=context.actor,
            pid=context.pid,
            node=context.node,
            rank=context.rank,
            engine=self._engine if context.owner == "engine" else None,
            level=prefix.level if not inherits else "",
            time=context.time,
            tags=context.tags,
            repeated=prefix.repeated,
        )

    # -- one line that may say something

    def _line(self, start: int, number: int, pieces: Sequence[bytes], hits: Hits) -> None:
        line = self._make(start, number, pieces)
        if (self._masked or "model" in hits.taps) and self._is_model_text(line):
            return
        if "sample" in hits.taps and (text := self.taken.samples.take(line)):
            self._close_of(line)
            if not logtext.ends(text):  # a text over several lines
                self._masked, self._masked_by = 1, self._key(line)
            return
        if self._tables.open and self._tables.take(line.text, number):
            return
        if self._block(line, hits):
            return
        self._recognise(line, hits, None)
        if hits.taps:
            self._tap(line, hits)

    def _is_model_text(self, line: Line) -> bool:
        """The line continues, or begins, a printed text of its process."""
        if self._masked and self._key(line) != self._masked_by:
            return False
        goes_on = logtext.still_masked(line, self._masked)
        inside = bool(goes_on) or (self._masked > 0 and logtext.ends(line.text))
        self._masked, self._masked_by = goes_on, self._key(line)
        return inside

    def _tap(self, line: Line, hits: Hits) -> None:
        taps = hits.taps
        if "dict" in taps:
            self._metrics(line)
        if "timer" in taps and (phase := logtext.phase_of(line)):
            self.taken.phases.append(phase)
            self._count("phase")
        if "args" in taps:
            self.taken.args += (found := self._tables.start(line))
            self._tell(found, line)
        if "actor" in taps and line.text.startswith(":actor_name:"):
            self._owner = owner_of_actor(line.text.removeprefix(":actor_name:").strip()) or self._owner

    def _metrics(self, line: Line) -> None:
        found = logtext.metrics_of(line)
        if found is None:
            return
        self._count("metrics")
        rows = self._rollouts.place(found, line)
        for row in rows:
            self.taken.rows.append(row)
        if found.label in ("perf", "rollout") and found.axis == "rollout":
            self._tell(self.taken.samples.settle(found.id, line.actor), line)
        self._tell(rows, line)

    def _tell(self, found: Iterable[Fact], line: Line) -> None:
        if self._facts is not None:
            for fact in found:
                self._facts(fact, line.actor, line.pid)

    # -- tracebacks

    def _key(self, line: Line) -> tuple[object, ...]:
        return (line.actor, line.pid, line.node, line.rank)

    def _block(self, line: Line, hits: Hits) -> bool:
        """The line is part of a traceback. Others of the same process are closed."""
        key: tuple[object, ...] = self._key(line)
        candidates = [key] if line.own_prefix else [key, ()]
        if line.own_prefix and line.rank is None and not line.time_of_its_own:
            # Ray repeats the actor on every line, SGLang its rank on the first line of a message only.
            candidates += [one for one in self._blocks if len(one) == len(key) and one[:3] == key[:3] and one != key]
        for old in [one for one, block in self._blocks.items() if line.number - block.newest > SILENCE]:
            self._close(old)
        for one in candidates:
            block = self._blocks.get(one)
            if block is None:
                continue
            if block.takes(line):
                self._recognise(line, hits, block)
                self._aborts(line, hits)
                return True
            self._close(one)
        if "error" not in hits.taps or not opens(line.text):
            return False
        if len(self._blocks) >= MOST_BLOCKS:
            self._close(next(iter(self._blocks)))
        block = Block(line)
        block.takes(line)
        self._blocks[key if line.own_prefix else ()] = block
        self._recognise(line, hits, block)
        self._aborts(line, hits)
        return True

    def _close_of(self, line: Line) -> None:
        self._close(self._key(line))

    def _close(self, key: tuple[object, ...]) -> None:
        block = self._blocks.pop(key, None)
        for event in block.close() if block else ():
            self._keep(event)

    def _aborts(self, line: Line, hits: Hits) -> None:
        if "abort" in hits.taps:
            event, _ = event_of("nan_abort", line, {})
            self.taken.aborts = [*self.taken.aborts[:63], event]

    # -- recognisers and bulk lines

    def _recognise(self, line: Line, hits: Hits, block: Block | None) -> None:
        found = False
        for recogniser in hits.recognisers:
            data = self._parse(recogniser, line)
            if data is None:
                continue
            event, told = event_of(recogniser.kind, line, data)
            if block is not None:
                block.events.append((event, told))
                del block.events[200:]
            else:
                self._keep(event)
            found = found or not recogniser.bulk
        if block is None and "abort" in hits.taps:
            self._aborts(line, hits)
        if found or block is not None:
            self._something_happened()

    def _parse(self, recogniser: Recogniser, line: Line) -> Mapping[str, object] | None:
        try:
            return recogniser.parse(line)
        except Exception as error:  # one recogniser must not end the reading of a log
            self.taken.defects.setdefault(recogniser.kind, (line.number, f"{type(error).__name__}: {error}"))
            return None

    def _keep(self, event: LogEvent, count: int = 1) -> None:
        if not self._owner and event.kind in _ENGINE_KINDS and not event.actor:
            self._owner = "engine"
        kept = self.taken.events.get(event.kind)
        if kept is None:
            limits = LIVE_EVENTS if self._live and event.kind in _BULK_KINDS else self._most
            kept = self.taken.events[event.kind] = FirstAndNewest(*limits)
        kept.append(event)
        if self._told is not None:
            self._told(event)
        if self._facts is not None:
            self._facts(event, event.actor, event.pid)
        self._count(event.kind, count)

    def _count(self, kind: str, by: int = 1) -> None:
        self.taken.counts[kind] = self.taken.counts.get(kind, 0) + by

    def _one_of_many(self, start: int, number: int, pieces: Sequence[bytes], hits: Hits) -> None:
        """A bulk line that is kept: among the first of its process or near another event, read now; or the first of a
        minute, read at the end if it is still kept then."""
        piece = pieces[number - start]
        end = piece.find(b")", 0, 96) + 1 if piece[0] in _PARENTHESIS else 0
        state = self._bulk.get((hits.kind, piece[:end]))
        if state is None:
            key = (hits.kind, piece[:end] if len(self._bulk) < MOST_STREAMS else b"")
            state = self._bulk.setdefault(key, _Bulk())
        minute = _MINUTE.search(piece, end, end + 64)
        state.minute = minute[0] if minute else b""
        if state.keep:
            state.keep -= 1
            self._one(self._make(start, number, pieces), hits)
            return
        kept = self._minutes.setdefault(hits.kind, FirstAndNewest(*EVENTS))
        if state.ring:
            kept.append(state.ring.pop())  # the line before a gap tells how long the gap was
        if piece[0] not in _PREFIXED:
            self._above(start, number, pieces)
        kept.append((number, piece, hits, self._context))
        state.unread += 1

    def _many(self, number: int, piece: bytes, hits: Hits, above: _Context) -> None:
        """A line that waited in the ring; what is above newer lines stays as it is."""
        context, self._context = self._context, replace(above, number=number)
        line = self._make(number, number, [piece])
        self._context = context
        self._one(line, hits)

    def _one(self, line: Line, hits: Hits) -> None:
        for recogniser in hits.recognisers:
            data = self._parse(recogniser, line)
            if data is not None:
                event, _ = event_of(recogniser.kind, line, data)
                self._keep(event)

    def _something_happened(self) -> None:
        """An event that is no bulk line: the bulk lines around it are evidence."""
        for state in self._bulk.values():
            self._empty(state)
            state.keep = RING

    def _empty(self, state: _Bulk) -> None:
        waiting = list(state.ring)
        state.ring.clear()
        state.unread -= len(waiting)
        for entry in waiting:
            self._many(*entry)

    # -- the end

    def settle(self) -> bool:
        """Nothing came for a while: what a traceback has so far is all of it. False where none was open."""
        open_blocks = list(self._blocks)
        for key in open_blocks:
            self._close(key)
        return bool(open_blocks)

    def so_far(self) -> tuple[list[LogEvent], LogSource, list[MetricRow]]:
        """Events, summary and metric rows of a log that still grows. Bulk lines that wait for what comes next are left
        out, and so is a traceback that is not over."""
        taken = self.taken
        events = sorted(
            (event for kept in taken.events.values() for event in kept), key=lambda event: event.where.line or 0
        )
        return events, self._summary(dict(taken.counts)), list(taken.rows)

    def _summary(self, counts: Mapping[str, int]) -> LogSource:
        return LogSource(
            self._name,
            self._lines,
            self._owner,
            bool(self.taken.args or self._tables.so_far() or counts.get("startup")),
            self._first_time,
            self._last_time,
            counts,
        )

    def finish(self, sink: Sink) -> bool:
        """Hands everything to the sink. False if no line said anything."""
        for key in list(self._blocks):
            self._close(key)
        for (kind, _), state in self._bulk.items():
            self._empty(state)
            self._count(kind, state.unread)
        for kind, minutes in self._minutes.items():
            for entry in minutes:
                self._many(*entry)
            self._count(kind, -len(minutes))
        self._tables.finish()
        return self.give(sink)

    def give(self, sink: Sink) -> bool:
        """Hands over what was found so far, also of a log that still grows: without a traceback or a table of arguments
        that is not over. False if no line said anything."""
        taken = self.taken
        printed = [*taken.args, *self._tables.so_far()]
        events = sorted(
            (event for kept in taken.events.values() for event in kept), key=lambda event: event.where.line or 0
        )
        sink.events += events
        sink.metrics += self._rollouts.finish(taken.rows)
        sink.phases += taken.phases
        sink.samples += taken.samples.finish()
        sink.args += printed
        for kind, (number, error) in taken.defects.items():
            why = f"rltop's own recogniser of {kind} failed on it ({error}), which is a defect of rltop"
            sink.problems.append(Problem(Where(self._name, number), "log", why))
        sink.lines += [logtext.text_line(event) for event in taken.aborts]
        counts = dict(taken.counts)
        if taken.samples.seen:
            counts["sample"] = taken.samples.seen
        if printed:
            counts["args"] = len(printed)
        sink.logs.append(self._summary(counts))
        return bool(counts or self._first_time is not None)


def read(source: Source, sink: Sink) -> None:
    """Reads a log file, also one that is packed with gzip."""
    scan = LogScan(source.name, names=sink.names)
    splitter = Splitter()
    try:
        with source.path.open("rb") as file:
            head = file.read(4096)
            packed = head.startswith(GZIP)
            if not packed and is_binary(head):
                how = how_packed(head)
                why = f"it is packed with {how[0]}: {how[1]} it first" if how else "the file is binary"
                sink.problem(source, "log", why, line=1, whole=True)
                return
            file.seek(0)
            for data in unpacked(file) if packed else chunks(file):
                for start, pieces in splitter.feed(data):
                    scan.feed(start, pieces)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        sink.problem(source, "log", f"can not be read: {why}", whole=splitter.line == 1)
    for start, pieces in splitter.end():
        scan.feed(start, pieces)
    scan.finish(sink)
    sink.files.append(source.name)


_LOOKS = re.compile(
    rb"^(?:\x1b\[\d*m)*(?:\([\w:. ]+ ?pid=\d+|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d|\[rank\d+\]|"
    rb"Traceback \(most recent call last\)|\[[A-Z]\d{3,4} \d\d:|(?:INFO|WARNING|ERROR):? |"
    rb"\s*File \"[^\"]+\", line \d+)",
    re.MULTILINE,
)


def sniff(source: Source, head: bytes) -> bool:
    """A line looks like one of a log."""
    return _LOOKS.search(head) is not None


PACKED = ("*.log.gz", "*.out.gz", "*.err.gz", "*log*.txt.gz", "*.log.zst", "*.log.xz", "*.log.bz2")
"""Logs that were rotated away. Only gzip is read; of the others it is said how to unpack them."""
READERS: tuple[Reader, ...] = (
    Reader(
        "log",
        ("*.log", "*.log.[0-9]*", "dmesg*.txt", "engine_start*.txt", "*.out", "*.err", "*log*.txt", *PACKED),
        read,
        sniff,
    ),
)
