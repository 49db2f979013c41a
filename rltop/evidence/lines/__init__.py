"""What log lines can say: a table of recognisers, by who writes the line."""

from __future__ import annotations

from rltop.evidence.lines import address, ends, engine, faults, host, progress, ray, relax, trainer
from rltop.evidence.lines.line import Line, Recogniser

RECOGNISERS: tuple[Recogniser, ...] = (
    *engine.RECOGNISERS,
    *trainer.RECOGNISERS,
    *ray.RECOGNISERS,
    *address.RECOGNISERS,
    *host.RECOGNISERS,
    *faults.RECOGNISERS,
    *ends.RECOGNISERS,
    *progress.RECOGNISERS,
    *relax.RECOGNISERS,
)
"""All recognisers; a line may match several, and each makes its own event."""

__all__ = ["RECOGNISERS", "Line", "Recogniser"]
