"""Answers to viewers' questions about the past: curves in buckets, pages of the event log, lines of a log.

The same for a living run and for one of which only the journal is left.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rltop.daemon import replay
from rltop.daemon.events import Event, EventRing
from rltop.daemon.lines import SourceLines
from rltop.daemon.series import SeriesStore
from rltop.protocol.messages import EventsAnswer, EventsQuery, LinesAnswer, LinesQuery, SeriesAnswer, SeriesQuery

MAX_SERIES_KEYS = 500
MAX_SERIES_POINTS = 300_000
"""Buckets in one answer, over all keys: 24 bytes each, so that it stays well below the limit of a message."""
MAX_EVENTS = 2000
MAX_EVENT_CHARACTERS = 2_000_000
"""Text in one answer: at most 8 of the 16 MiB of a message, whatever the script."""
_COLUMNS = ("step", "min", "max", "last", "nan")


async def answer_series(store: SeriesStore, query: SeriesQuery) -> tuple[SeriesAnswer, list[bytes]]:
    """Bucketed history; yields between keys, because one answer may touch millions of points."""
    cols: dict[str, dict[str, int]] = {}
    missing: list[str] = []
    blobs: list[bytes] = []
    keys = list(dict.fromkeys(query.keys))[:MAX_SERIES_KEYS]
    buckets = min(query.buckets, MAX_SERIES_POINTS // max(1, len(keys)))  # 8 bytes more each with exact values
    for key in keys:
        found = store.query(key, query.lo, query.hi, buckets)
        if found is None:
            missing.append(key)
            continue
        cols[key] = {"n": len(found.step), **{name: len(blobs) + i for i, name in enumerate(_COLUMNS)}}
        blobs += found.blobs()
        if query.exact and (exact := found.exact()) is not None:
            cols[key]["value"] = len(blobs)
            blobs.append(exact)
        await asyncio.sleep(0)
    return SeriesAnswer(cols, missing), blobs


async def answer_events(ring: EventRing, journal: Path, query: EventsQuery, *, immutable: bool = False) -> EventsAnswer:
    """A page of the event log: the ring, and behind it the journal (`immutable`: nobody writes to it any more)."""
    limit = max(1, min(query.limit, MAX_EVENTS))
    hi = ring.shown if query.hi is None else min(query.hi, ring.shown)
    text = query.text.casefold()

    def matches(event: Event) -> bool:
        return (
            query.lo <= event["eseq"] <= hi
            and (not query.kinds or event["kind"] in query.kinds)
            and text in event["text"].casefold()
        )

    found = [event for event in ring.newest(len(ring)) if matches(event)]
    more = len(found) > limit
    found = found[-limit:]
    oldest = ring.first
    if not more and query.lo < oldest and oldest > 1:
        older, more = await asyncio.to_thread(
            replay.older_events,
            journal,
            lo=query.lo,
            hi=min(hi, oldest - 1),
            kinds=query.kinds,
            text=query.text,
            limit=limit,
            immutable=immutable,
        )
        more = more or len(older) + len(found) > limit
        found = [*older, *found][-limit:]
    kept = _newest_within(found, MAX_EVENT_CHARACTERS)
    return EventsAnswer(kept, more or len(kept) < len(found))


async def answer_lines(sources: SourceLines, query: LinesQuery) -> LinesAnswer:
    """Lines of a log around one line; the log is gone through in a thread."""
    path = sources.find(query.source)
    return await asyncio.to_thread(sources.answer, query, path)


def _newest_within(events: list[Event], characters: int) -> list[Event]:
    for index in range(len(events) - 1, -1, -1):
        characters -= len(events[index]["text"])
        if characters < 0:
            return events[index + 1 :]
    return events
