"""The table of all readers, in the order in which they are asked: by name first, then by content.

A new kind of evidence is a reader in a module of its own and one entry here.
"""

from __future__ import annotations

from rltop.evidence import (
    documents,
    dumps,
    hf,
    http,
    logs,
    megatron,
    metrics,
    ray_status,
    samples,
    settings,
    tables,
)
from rltop.evidence.sink import Reader

READERS: tuple[Reader, ...] = (
    *megatron.READERS,
    *hf.READERS,
    *samples.READERS,
    *http.READERS,
    *tables.READERS,
    *documents.READERS,
    *ray_status.READERS,
    *dumps.READERS,
    *settings.READERS,
    *metrics.READERS,
    *logs.READERS,
)
"""Directories first: what a directory reader claims is not offered to the others."""
