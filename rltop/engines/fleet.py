"""The engines of a run: what should run is written down, then done, and done again by the next daemon if this one dies.

The public face: `Fleet`. Requests and plans are in `requests.py`, states and settings in `states.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltop.engines.client import AsyncEngineClient
from rltop.engines.requests import FleetPlan, Refused, Request, Required
from rltop.engines.states import FleetPolicy

Publish = Callable[[str, dict[str, Any] | None], None]
"""Engine id and the fleet's part of its cell; None: the engine is gone."""
Tell = Callable[[str, str, str, str, str], None]
"""Level, text, engine id, state before, state after."""


class Fleet:
    """Supervises the engines of one run."""

    def __init__(
        self,
        *,
        run: str,
        run_dir: Path,
        launchers: Mapping[str, Any],
        http: Callable[[str], AsyncEngineClient],
        policy: FleetPolicy,
        clock: Callable[[], float],
        wall: Callable[[], float],
        publish: Publish,
        event: Tell,
        required: Callable[[], Required],
        updating: Callable[[], bool],
        safe_point: Callable[[], bool] | None = None,
    ) -> None:
        """launchers: may be added to later (a mutable mapping): a request names one. safe_point: between rollouts."""
        raise NotImplementedError

    async def run(self) -> None:
        """The control loop, until cancelled. Adopts first what the slot files say."""
        raise NotImplementedError

    def plan(self, request: Request) -> FleetPlan | Refused:
        """What the request would do; nothing happens."""
        raise NotImplementedError

    async def carry_out(self, plan: FleetPlan, stage: Callable[[str], None]) -> str:
        """Do it. Raises `RltopError`. Cancelling leaves each engine on its old or its new generation, whole."""
        raise NotImplementedError

    async def resume(self, request: Request, before: Mapping[str, int], stage: Callable[[str], None]) -> str:
        """Finish a request that an earlier daemon began: engines already past `before[id]` are only waited for."""
        raise NotImplementedError

    async def stop_all(self, stage: Callable[[str], None]) -> str:
        """End every engine now, without a drain. Never refused: what runs on a slot is cancelled."""
        raise NotImplementedError

    def trainer_saw(self, engine_id: str, generation: int, ok: bool, text: str) -> None:
        """The trainer's requests to this engine fail (or succeed again). Of an old generation: no effect."""
        raise NotImplementedError

    def rollout_done(self) -> None:
        """A rollout ended: the engines have survived one more."""
        raise NotImplementedError

    def released(self, engine_id: str) -> None:
        """The trainer released this engine's memory: probes pause."""
        raise NotImplementedError

    def resumed(self, engine_id: str) -> None:
        """The trainer resumed it: it is STALE until it holds the required weights."""
        raise NotImplementedError

    def ids(self) -> list[str]:
        """The engines that the fleet knows."""
        raise NotImplementedError

    def owns(self, engine_id: str) -> bool:
        """Whether the fleet knows this engine."""
        raise NotImplementedError

    def launch(self, engine_id: str) -> tuple[tuple[str, ...], dict[str, str], str]:
        """argv, environment and SGLang version of the generation that should run."""
        raise NotImplementedError

    def ab(self) -> dict[str, Any] | None:
        """The running A/B comparison for the `fleet` cell."""
        raise NotImplementedError
