"""An actor that holds an SGLang server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class SGLangEngine:
    """One server."""

    def __init__(self, args: Any, rank: int) -> None:
        self.args, self.rank = args, rank

    def init(self, port: int) -> None:
        """Start it."""
        self.node_rank, self.server_host, self.server_port = 0, "10.0.0.1", port
        self.process = SimpleNamespace(pid=4711)

    def release_memory_occupation(self) -> None:
        """Lend its memory to the trainer."""

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take it back."""

    def shutdown(self) -> None:
        """End it."""
