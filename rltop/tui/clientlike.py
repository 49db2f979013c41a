"""What the dashboard needs of a client, as protocols: `rltop.client.Client` has it, and so do fakes in tests."""

from __future__ import annotations

from collections.abc import Mapping, Reversible, Sequence
from typing import Any, Literal, Protocol

from rltop.protocol.messages import (
    Accepted,
    DumpPageAnswer,
    DumpPageQuery,
    DumpsAnswer,
    EventsAnswer,
    LinesAnswer,
    Rejected,
    Tick,
)

Status = Literal["connecting", "live", "lost"]


class SeriesLike(Protocol):
    """History of one metric in buckets: five columns of one length, oldest bucket first."""

    @property
    def step(self) -> Sequence[float]:
        """Last step in each bucket."""

    @property
    def lo(self) -> Sequence[float]:
        """Smallest finite value, NaN where there is none."""

    @property
    def hi(self) -> Sequence[float]:
        """Largest finite value, NaN where there is none."""

    @property
    def last(self) -> Sequence[float]:
        """Last finite value, NaN where there is none."""

    @property
    def nan(self) -> Sequence[int]:
        """Number of NaN and Inf values."""


class MirrorLike(Protocol):
    """The viewer's copy of the daemon's state. Values are replaced, never changed in place."""

    @property
    def state(self) -> Mapping[str, Any]: ...

    @property
    def events(self) -> Reversible[dict[str, Any]]: ...

    @property
    def gaps(self) -> Sequence[tuple[int, int]]: ...

    @property
    def tick(self) -> Tick | None: ...

    @property
    def server_time(self) -> float:
        """The daemon's wall clock in its newest welcome or tick; 0 before."""

    @property
    def run(self) -> str: ...

    @property
    def epoch(self) -> str: ...

    @property
    def role(self) -> str: ...

    def take_dirty(self) -> set[str]:
        """Keys changed since the last call."""


class ClientLike(Protocol):
    """A connection that comes back by itself. Nothing here blocks; `run` is cancelled to stop."""

    @property
    def mirror(self) -> MirrorLike: ...

    @property
    def status(self) -> Status: ...

    @property
    def since(self) -> float:
        """Monotonic time of the last frame."""

    @property
    def problem(self) -> str:
        """Why there is no connection, in words; empty while there is one."""

    async def run(self) -> None: ...

    async def wait_live(self, timeout: float) -> None: ...  # noqa: ASYNC109 - the client's interface

    async def series(
        self, keys: Sequence[str], lo: float | None = None, hi: float | None = None, buckets: int = 200
    ) -> Mapping[str, SeriesLike]: ...

    async def events(self, **query: Any) -> EventsAnswer: ...

    async def lines(self, source: str, line: int, **query: Any) -> LinesAnswer: ...

    async def dumps(self) -> DumpsAnswer: ...

    async def dump_page(self, query: DumpPageQuery) -> DumpPageAnswer: ...

    async def command(
        self, name: str, target: str = "", args: dict[str, Any] | None = None, **kw: Any
    ) -> Accepted | Rejected: ...

    async def close(self) -> None: ...
