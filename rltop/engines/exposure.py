"""For how long a generation had requests to work on: the exposure of its crash. Idle time proves nothing of a bug.

Fed with every answer of its routes (`scrape`), once a second. A process that an earlier daemon watched has worked
before: its token counters count from its start, so what was not seen is estimated from the tokens of it.

Pure: the clock is passed in.
"""

from __future__ import annotations

from rltop.engines.scrape import EngineStats

MOST_GAP_S = 5.0
"""Between two answers; of a longer silence (released, a daemon that stood still) nothing more is known."""


class Exposure:
    """Of one generation."""

    def __init__(self) -> None:
        self._busy = 0.0
        self._last: float | None = None
        self._worked = False
        """It had requests at the last answer."""
        self._first_tokens: float | None = None
        self._tokens: float | None = None

    def scraped(self, stats: EngineStats, now: float) -> None:
        """An answer. One that says nothing of requests or tokens counts for nothing."""
        if not stats.reachable:
            return
        works, tokens = _works(stats), _tokens(stats)
        moved = tokens is not None and self._tokens is not None and tokens > self._tokens
        if self._last is not None and (works or self._worked or moved):
            self._busy += min(max(0.0, now - self._last), MOST_GAP_S)
        if self._first_tokens is None:
            self._first_tokens = tokens
        self._last, self._worked = now, works
        self._tokens = self._tokens if tokens is None else tokens

    def seconds(self, ended: float, up_s: float) -> float:
        """Until it ended, at most as long as it was up. What ended it came under traffic: since the last answer it had
        work, or got its first."""
        since = up_s if self._last is None else min(max(0.0, ended - self._last), MOST_GAP_S)
        tail = min(since, MOST_GAP_S) * (1.0 if self._worked else 0.5)
        return min(self._busy * self._unseen() + tail, up_s)

    def _unseen(self) -> float:
        """All tokens of the process over those that were seen to be made."""
        first, last = self._first_tokens or 0.0, self._tokens or 0.0
        return last / (last - first) if last > first else 1.0


def _works(stats: EngineStats) -> bool:
    """SGLang refreshes the gauges of an idle scheduler late: the front's count is asked first."""
    return bool(stats.active if stats.active is not None else (stats.running or stats.queued))


def _tokens(stats: EngineStats) -> float | None:
    known = [one for one in (stats.decode_tokens_total, stats.prefill_tokens_total) if one is not None]
    return sum(known) if known else None
