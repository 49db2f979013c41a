"""Where the dump screen has its samples from: files of this machine, or the daemon of a run. Both answer alike.

Failure policy: nothing raises. What is in the way is the `why` of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from rltop.errors import RltopError
from rltop.evidence.dump_find import DumpRef
from rltop.evidence.dump_pages import DumpPages, listed
from rltop.protocol.messages import DumpPageAnswer, DumpPageQuery, DumpsAnswer
from rltop.tui.clientlike import ClientLike

T = TypeVar("T")


class DumpSource(Protocol):
    """Dumps and pages of them."""

    async def list(self) -> DumpsAnswer:
        """The dumps, oldest rollout first."""

    async def page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Samples of one. Comes back within a second, perhaps not `done`."""

    def close(self) -> None:
        """Nobody asks any more."""


class LocalDumps:
    """Files of this machine, read in one thread beside the screen."""

    def __init__(self, refs: Sequence[DumpRef], tokenizer: Path | None = None) -> None:
        self._refs = list(refs)
        self._by_path = {str(ref.path): ref for ref in refs}
        self._pages = DumpPages()
        self._pages.checkpoints = () if tokenizer is None else (tokenizer,)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rltop-dump")

    async def list(self) -> DumpsAnswer:
        """The dumps that were found at the start."""
        return await self._beside(lambda: listed(self._refs, []))

    async def page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Samples of one."""
        ref = self._by_path.get(query.path)
        if ref is None:
            return DumpPageAnswer(query.path, why="it is not one of the dumps that were asked for")
        try:
            return await self._beside(lambda: self._pages.answer(ref, query))
        except Exception as error:  # a fault of ours: it must not cost the pager
            return DumpPageAnswer(query.path, why=f"fault in the reader: {type(error).__name__}: {error}")

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Close the files once the thread is through."""
        self._thread.submit(self._pages.close)
        self._thread.shutdown(wait=False)


class DaemonDumps:
    """Dumps on the daemon's machine."""

    def __init__(self, client: ClientLike) -> None:
        self._client = client

    async def list(self) -> DumpsAnswer:
        """The run's dumps."""
        answer, why = await _told(self._client.dumps)
        return answer or DumpsAnswer(why=why)

    async def page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Samples of one."""
        answer, why = await _told(lambda: self._client.dump_page(query))
        return answer or DumpPageAnswer(query.path, why=why)

    def close(self) -> None:
        """The client is not ours."""


async def _told(ask: Callable[[], Awaitable[T]]) -> tuple[T | None, str]:
    """(answer, why there is none)."""
    try:
        return await ask(), ""
    except RltopError as error:
        if error.why == "unsupported":
            return None, "the daemon of this run is older than this rltop: it cannot read dumps for a viewer"
        return None, f"{error.what}: {error.why}" if error.why else error.what
    except TimeoutError:
        return None, "the daemon did not answer"
