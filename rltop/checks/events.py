"""What the rules ask of log events: fields of an event, errors and what they are, who owns them, what came after.

Kinds and their `data` are defined by the recognisers (`rltop/evidence/lines/`). A traceback is one event: `exception`
(class name), `message`, `frames` ((file, line, function), outermost first), `own_frame`, `chain`, `method`; events of
its lines (an `ima`, an `oom`) carry its frames too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.found import LogEvent, Owner
from rltop.checks.observe import Observations

ERRORS = ("traceback", "ima", "oom", "memory_saver", "port_in_use", "entry_missing", "no_attention", "fatal", "death")
"""Kinds in which something breaks."""
_PROGRESS = ("prefill", "decode", "timer", "iteration")
_TRAINER_FRAME = re.compile(r"megatron/|(?:slime|relax|miles)/backends/megatron_utils|/fsdp|verl/workers/actor")
_ENGINE_FRAME = re.compile(r"sglang/|sgl_kernel|vllm/")


def of_kind(obs: Observations, *kinds: str) -> tuple[LogEvent, ...]:
    """Events of these kinds in order of time."""
    key = ("events", "", "")
    if key not in obs.memo:
        by_kind: dict[str, list[LogEvent]] = {}
        for event in sorted(obs.events, key=lambda event: event.order):
            by_kind.setdefault(event.kind, []).append(event)
        obs.memo[key] = by_kind
    table: dict[str, list[LogEvent]] = obs.memo[key]
    if len(kinds) == 1:
        return tuple(table.get(kinds[0], ()))
    found = [event for kind in kinds for event in table.get(kind, ())]
    return tuple(sorted(found, key=lambda event: event.order))


def number(event: LogEvent, name: str) -> float | None:
    """A number of the event's data."""
    value = event.data.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a damaged line may hold an integer of hundreds of digits
        return None


def whole(event: LogEvent, name: str) -> int | None:
    """A whole number of the event's data."""
    value = number(event, name)
    return int(value) if value is not None and value == value and abs(value) < 1e18 else None


def word(event: LogEvent, name: str) -> str:
    """A text of the event's data, empty where it has none."""
    value = event.data.get(name)
    return "" if value is None else str(value)


def frames(event: LogEvent) -> tuple[str, ...]:
    """Frames of a traceback, outermost first."""
    value = event.data.get("frames")
    return tuple(_frame(frame) for frame in value) if isinstance(value, list | tuple) else ()


def _frame(frame: object) -> str:
    if isinstance(frame, list | tuple) and len(frame) == 3:
        return f"{frame[0]}:{frame[2]}" if frame[2] else str(frame[0])
    return str(frame)


def own_frame(event: LogEvent) -> str:
    """The innermost frame that is no library's, as `file:line in function`; empty without a traceback."""
    frame = event.data.get("own_frame")
    if isinstance(frame, list | tuple) and len(frame) == 3:
        return f"{frame[0]}:{frame[1]}" + (f" in {frame[2]}" if frame[2] else "")
    inner = frames(event)
    return next((one for one in reversed(inner) if not _LIBRARY.search(one)), inner[-1] if inner else "")


def whole_text(event: LogEvent) -> str:
    """The event's text with exception, message and frames, to search in."""
    return "\n".join(
        [event.text, word(event, "exception"), word(event, "message"), word(event, "chain"), *frames(event)]
    )


_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python|<frozen|<string>|/torch/|^torch/|^ray/|/triton/")
_UNKNOWN: Owner = ""
_LIFE = re.compile(r"(?:^|/)engines/(?P<engine>[^/]{1,80})/(?P<generation>\d{1,9})/[^/]+$")


def engine_life(source: str) -> tuple[str, int] | None:
    """(engine, generation) of a log that one process of an engine wrote: `engines/<id>/<generation>/…`."""
    found = _LIFE.search(source)
    return (found["engine"], int(found["generation"])) if found else None


def of_life(events: Iterable[LogEvent], one: LogEvent) -> tuple[LogEvent, ...]:
    """Those events that may be of the same process of an engine as `one`: where every process has a log of its own,
    the lines of the others say nothing about it."""
    life = engine_life(one.where.source)
    if life is None:
        return tuple(events)
    return tuple(event for event in events if engine_life(event.where.source) in (life, None))


def side(obs: Observations, event: LogEvent) -> Owner:
    """Who owns the event: its own owner, else by its frames, its log, or because only one side writes logs at all."""
    if event.owner in ("trainer", "engine"):
        return event.owner
    text = "\n".join(frames(event))
    if _ENGINE_FRAME.search(text):
        return "engine"
    if _TRAINER_FRAME.search(text):
        return "trainer"
    if event.owner:
        return event.owner
    return _sources(obs).get(event.where.source, _UNKNOWN)


def _sources(obs: Observations) -> dict[str, Owner]:
    """Log -> the side that writes it: by the file's name, else because only one side has lines in it."""
    key = ("event-sources", "", "")
    if key not in obs.memo:
        owners: dict[str, set[Owner]] = {}
        for event in obs.events:
            if event.owner:
                owners.setdefault(event.where.source, set()).add(event.owner)
        table = {source: next(iter(found)) for source, found in owners.items() if len(found) == 1}
        obs.memo[key] = table | {log.source: log.owner for log in obs.logs if log.owner}
    found_: dict[str, Owner] = obs.memo[key]
    return found_


def last_time(obs: Observations) -> float | None:
    """The newest time in the evidence."""
    times = [event.time for event in obs.events if event.time is not None]
    times += [log.last_time for log in obs.logs if log.last_time is not None]
    times += [row.time for row in obs.metrics if row.time is not None]
    times += [phase.time for phase in obs.phases if phase.time is not None]
    return max(times, default=None)


def before(left: LogEvent, right: LogEvent) -> bool:
    """`left` came before `right`."""
    return left.order < right.order


def newest(events: Iterable[LogEvent], than: LogEvent) -> LogEvent | None:
    """The last of the events that came before `than`."""
    found = None
    for event in events:
        if event.order < than.order:
            found = event
    return found


def same_process(left: LogEvent, right: LogEvent) -> bool:
    """Both lines are of one process, as far as the evidence says."""
    for name in ("pid", "engine", "rank"):
        a, b = getattr(left, name), getattr(right, name)
        if a is not None and b is not None and a != b:
            return False
    return left.pid is not None or left.where.source == right.where.source


def goes_on(obs: Observations, event: LogEvent) -> bool:
    """The run made progress after the event: a finished step or rollout, or work of the side that owns it."""
    newest_rows, lines = _newest_rows(obs)
    if event.time is not None and newest_rows:
        # A later segment is the job that was started again after the event.
        if newest_rows.get(event.segment, event.time) > event.time:
            return True
    elif lines.get(event.where.source, 0) > (event.where.line or 0):
        return True
    owner = side(obs, event)
    orders = _newest_work(obs)
    if event.pid is None:
        same = (order for (one, _, part), order in orders.items() if (one, part) == (owner, event.segment))
        return max(same, default=-1) > event.order
    same = (order for (one, pid, _), order in orders.items() if one == owner and pid == event.pid)
    return max(*same, orders.get((owner, None, event.segment), -1), -1) > event.order


def _newest_rows(obs: Observations) -> tuple[dict[int, float], dict[str, int]]:
    """Time of the newest metric row of each segment, and the last line with a row without time of each source."""
    key = ("newest-rows", "", "")
    if key not in obs.memo:
        times: dict[int, float] = {}
        for row in obs.metrics:
            if row.time is not None:
                times[row.segment] = max(times.get(row.segment, row.time), row.time)
        lines: dict[str, int] = {}
        for row in obs.metrics:
            if row.where is not None and row.where.line:
                lines[row.where.source] = max(lines.get(row.where.source, 0), row.where.line)
        obs.memo[key] = (times, lines)
    found: tuple[dict[int, float], dict[str, int]] = obs.memo[key]
    return found


def _newest_work(obs: Observations) -> dict[tuple[Owner, int | None, int], int]:
    """(side, pid, segment) -> place of its newest line that shows work."""
    key = ("newest-work", "", "")
    if key not in obs.memo:
        table: dict[tuple[Owner, int | None, int], int] = {}
        for event in of_kind(obs, *_PROGRESS):
            table[side(obs, event), event.pid, event.segment] = event.order
        obs.memo[key] = table
    found: dict[tuple[Owner, int | None, int], int] = obs.memo[key]
    return found


def who(event: LogEvent) -> str:
    """The process for a sentence: `MegatronTrainRayActor rank 3 (pid 4101, node-a)`."""
    name = event.actor or {"trainer": "the trainer", "engine": "the engine"}.get(
        event.owner, event.owner or "a process"
    )
    if event.engine is not None and not event.actor:
        name = f"engine {event.engine}"
    if event.rank is not None:
        name += f" rank {event.rank}"
    more = [f"pid {event.pid}"] if event.pid is not None else []
    more += [event.node] if event.node else []
    return f"{name} ({', '.join(more)})" if more else name


def distinct(values: Iterable[object]) -> list[object]:
    """Each once, in order."""
    return list(dict.fromkeys(values))


def hidden(events: Sequence[LogEvent]) -> bool:
    """Ray hid the same line of other processes."""
    return any(event.repeated for event in events)


DEDUP = "RAY_DEDUP_LOGS=0 (Ray hid the same line of other ranks)"
"""Advice where `hidden`."""
