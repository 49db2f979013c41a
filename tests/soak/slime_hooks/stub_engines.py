"""A stand-in for slime's SGLangEngine: it starts nothing and tells what it was given."""

from __future__ import annotations

import os
from typing import Any


class StubEngine:
    """One engine."""

    def __init__(self, args: Any, rank: int, worker_type: str = "regular", **given: Any) -> None:
        self.rank, self.given = rank, given

    def init(self, **addresses: Any) -> None:
        """Would start the server."""

    def told(self) -> dict[str, Any]:
        """What a server would have got."""
        blocking = os.environ.get("CUDA_LAUNCH_BLOCKING")
        return {
            "rank": self.rank,
            "overrides": self.given["sglang_overrides"],
            "blocking": blocking,
            "pid": os.getpid(),
        }

    def shutdown(self) -> None:
        """Would end the server."""
