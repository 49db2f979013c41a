"""The traffic of a bisection: read once, off the event loop, before the first trial.

Failure policy: what can not be read any more (a dump that is gone by now) becomes synthetic traffic, and a note says
so.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rltop.daemon.bisect_record import Record
from rltop.daemon.bisect_start import traffic_of
from rltop.engines.traffic import Cycle, Replay, Traffic
from rltop.errors import RltopError


class Later:
    """Implements `rltop.daemon.bisect_bench.Traffic` for a record's traffic; `load` it first."""

    def __init__(self, record: Record, run_dir: Path) -> None:
        self._record, self._run_dir = record, run_dir
        self._traffic = Traffic.synthetic()

    async def load(self) -> None:
        """Read it; the record then says what it is."""
        record, given = self._record, self._record.traffic.get("given")
        try:
            found = await asyncio.to_thread(traffic_of, given, self._run_dir, record.crash)
        except RltopError as error:
            found = self._traffic
            why = f"{error.what}: {error.why}" if error.why else error.what
            record.notes.append(f"its traffic can not be read any more ({why}): synthetic traffic instead")
        record.notes += [note for note in found.notes if note not in record.notes]
        self._traffic = found
        record.traffic = {
            "given": given,
            "source": found.source,
            "requests": len(found.requests),
            "concurrency": found.concurrency,
        }

    def replay(self, seed: int, cycle: Cycle | None = None) -> Replay:
        """See `Traffic.replay`."""
        return self._traffic.replay(seed, cycle)
