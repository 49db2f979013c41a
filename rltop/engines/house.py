"""What the supervisors of one fleet share: where they are, whom they ask and tell. Passed in, never looked up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.checks.known import KnownCrash
from rltop.engines.client import AsyncEngineClient
from rltop.engines.launcher import Launcher
from rltop.engines.requests import Required
from rltop.engines.scrape import EngineStats
from rltop.engines.slots import SlotStore
from rltop.engines.states import FleetPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class House:
    """What the engines of one fleet share; see `Fleet` for the fields."""

    run: str
    run_dir: Path
    launchers: Mapping[str, Launcher]
    http: Callable[[str], AsyncEngineClient]
    policy: FleetPolicy
    clock: Callable[[], float]
    wall: Callable[[], float]
    publish: Callable[[str, dict[str, Any] | None], None]
    tell: Callable[[str, str, str, str, str], None]
    required: Callable[[], Required]
    updating: Callable[[], bool]
    lent: Callable[[], bool]
    store: SlotStore
    known: tuple[KnownCrash, ...] = ()
    """Public reports that a crash is compared with."""
    looked: Callable[[str, EngineStats, float], None] = lambda engine_id, stats, now: None
    """Told every scrape of an engine that serves (the A/B comparison)."""
    left: Callable[[str, bool], None] = lambda engine_id, crashed: None
    """Told when an engine leaves the rotation."""
    leaving: Callable[[str], Awaitable[None]] | None = None
    """Awaited with the URL of an engine before it drains, within a moment: who sends it requests is told there."""
