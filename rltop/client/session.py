"""The client's session: connect, say hello, keep the mirror current, notice the end, come back.

Failure policy: trouble with the connection never leaves `run()`; it becomes `status`, `since` and `problem`, the mirror
keeps the last picture, and the next attempt follows after a backoff (100 ms doubling to 5 s, reset by success).
A frame behind a hole is never applied: the session resumes from the last version that the mirror really has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from rltop import __version__
from rltop.client.mirror import Mirror, SequenceError, Series, series_from_answer
from rltop.client.transport import ConnectionLost, Dial, Transport
from rltop.errors import RltopError
from rltop.protocol.codec import Message, WireError, decode, encode
from rltop.protocol.messages import (
    PROTO_MAX,
    PROTO_MIN,
    Accepted,
    Ack,
    Bye,
    Command,
    Delta,
    DumpPageAnswer,
    DumpPageQuery,
    DumpsAnswer,
    DumpsQuery,
    Err,
    EventsAnswer,
    EventsQuery,
    Hello,
    LinesAnswer,
    LinesQuery,
    Ping,
    Rejected,
    Role,
    SeriesAnswer,
    SeriesQuery,
    Snap,
    Welcome,
)

Status = Literal["connecting", "live", "lost"]
T = TypeVar("T", bound=msgspec.Struct)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
PING_AFTER_S = 2.0
"""The client speaks at least so often; the daemon drops it after `lease_s` (10 s) of silence."""
SILENCE_S = 5.0
"""The daemon ticks at 1 Hz, so silence for so long means that it, or the way to it, is gone."""
ANSWER_S = 10.0
"""Longest wait for the answer to a query or command."""


@dataclass(slots=True)
class _Request:
    frames: list[bytes]
    answer: asyncio.Future[Message] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Client:
    """One viewer or operator of one run. `run()` must be running for anything to happen."""

    def __init__(
        self,
        dial: Dial,
        *,
        role: Role = "view",
        name: str = "",
        fps: float = 2.0,
        want: Sequence[str] = ("*",),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """dial: opens one connection. name: self-declared operator name. fps: most deltas per second.

        want: globs of state keys. clock: monotonic seconds.
        """
        self.mirror = Mirror()
        self.status: Status = "connecting"
        self.problem = ""
        """Why the status is not `live`, one sentence; empty while it is."""
        self.since = clock()
        """Monotonic time of the last frame from the daemon (before the first: of this object's making)."""
        self.attempts = 0
        """Connections tried so far."""
        self._dial, self._clock = dial, clock
        self._role: Role = role
        self._name, self._fps, self._want = name, fps, list(want)
        self._transport: Transport | None = None
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count(1)
        self._final = False
        self._spoke = self.since
        self._changed = asyncio.Event()
        self._task: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Stay connected until cancelled or closed. A second call while one runs only waits for that one to end."""
        first = self._task is None
        task = self._task = self._task or asyncio.ensure_future(self._run())
        try:
            await asyncio.wait({task})
        finally:
            if first:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self._task = None
        if first and not task.cancelled():
            task.result()

    async def _run(self) -> None:
        retry = FIRST_RETRY_S
        while True:
            lost = await self._connect_once()
            if self.status == "live":
                self.status, retry = "lost", FIRST_RETRY_S
            self.problem, self._final = lost.problem, lost.final
            self._notify()
            await asyncio.sleep(retry)
            retry = min(2 * retry, LAST_RETRY_S)

    async def _connect_once(self) -> ConnectionLost:
        """One connection from dial to end; returns why it ended."""
        self.attempts += 1
        try:
            self._transport = await self._dial()
            while await self._session(self._transport):
                pass
        except ConnectionLost as lost:
            return lost
        except SequenceError as error:
            return ConnectionLost(f"a frame was lost on the way ({error}); asking for it again")
        except WireError as error:
            return ConnectionLost(_mismatch(str(error)), final=error.code == "proto")
        except OSError as error:
            return ConnectionLost(f"can not connect: {error}")
        finally:
            if self._transport is not None:
                await self._transport.close()
                self._transport = None
        raise AssertionError("a session only ends by an exception")

    async def close(self) -> None:
        """Say goodbye, so that the daemon forgets this client at once, and end `run()`."""
        if self._transport is not None:
            with contextlib.suppress(ConnectionLost):  # already gone: then there is nobody to say it to
                await self._send(encode("bye", Bye("closed")))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_live(self, timeout: float) -> None:  # noqa: ASYNC109 - the caller wants our error, not a TimeoutError
        """Wait until the mirror holds the state.

        Raises RltopError (exit code 1) with the problem: after `timeout` seconds, or at once where only a person helps.
        """
        try:
            async with asyncio.timeout(timeout):
                while self.status != "live":
                    if self._final:
                        raise RltopError(self.problem, exit_code=1)
                    await self._changed.wait()
        except TimeoutError:
            raise RltopError(self.problem or f"no answer from the daemon in {timeout:g} s", exit_code=1) from None

    async def wait_change(self) -> None:
        """Wait until a frame was applied or the status changed."""
        await self._changed.wait()

    # ------------------------------------------------------------ session

    async def _session(self, transport: Transport) -> bool:
        """Hello, then frames. True: the daemon forgot us, say hello again on the same connection."""
        await self._send(encode("hello", self._hello(), v=PROTO_MIN))
        heard = self._clock()
        while True:
            now = self._clock()
            if now - heard >= SILENCE_S:
                raise ConnectionLost(f"no sign of life from the daemon for {SILENCE_S:.0f} s")
            if now - self._spoke >= PING_AFTER_S:
                await self._send(encode("ping", Ping()))
            wait = min(heard + SILENCE_S, self._spoke + PING_AFTER_S) - self._clock()
            try:
                async with asyncio.timeout(max(wait, 0.0)):
                    frames = await transport.receive()
            except TimeoutError:
                continue
            heard = self.since = self._clock()
            if await self._take(frames):
                return True

    def _hello(self) -> Hello:
        mirror = self.mirror
        return Hello(
            proto=(PROTO_MIN, PROTO_MAX),
            client=f"rltop/{__version__}",
            role=self._role,
            name=self._name,
            fps=self._fps,
            want=self._want,
            epoch=mirror.epoch,
            ver=mirror.ver,
            eseq=mirror.eseq,
        )

    async def _take(self, frames: list[bytes]) -> bool:
        """Handle one message; True when the daemon wants a new hello."""
        try:
            message = decode(frames)
        except WireError as error:
            if error.code != "unsupported" or error.header is None:
                raise
            await self._send(encode("err", Err("unsupported", str(error)), re=error.header.id))
            return False
        request = self._requests.get(message.header.re) if message.header.re else None
        if request is not None:
            if not request.answer.done():
                request.answer.set_result(message)
            return False
        match message.body:
            case Snap() | Delta():
                self.mirror.apply(message)
                await self._send(encode("ack", Ack(message.header.seq)))
                await self._go_live()
            case Welcome() as welcome:
                if not PROTO_MIN <= welcome.proto <= PROTO_MAX:
                    raise ConnectionLost(_mismatch(f"the daemon chose {welcome.proto}"), final=True)
                self.mirror.apply(message)
            case Err(code="hello-first"):
                return True
            case Err(code=code, why=why):
                raise ConnectionLost(_mismatch(why) if code == "proto" else why, final=code in ("proto", "not-control"))
            case Bye(reason=reason):
                raise ConnectionLost(f"the daemon said goodbye: {reason}" if reason else "the daemon said goodbye")
            case _:
                self.mirror.apply(message)
        self._notify()
        return False

    async def _go_live(self) -> None:
        if self.status == "live":
            return
        self.status, self.problem, self._final = "live", "", False
        for request in list(self._requests.values()):
            await self._send(request.frames)

    async def _send(self, frames: list[bytes]) -> None:
        if self._transport is None:
            raise ConnectionLost("not connected")
        await self._transport.send(frames)
        self._spoke = self._clock()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ------------------------------------------------------------ questions

    async def series(
        self,
        keys: Sequence[str],
        lo: float | None = None,
        hi: float | None = None,
        buckets: int = 200,
        *,
        exact: bool = False,
    ) -> dict[str, Series]:
        """History of metrics (`rollout/raw_reward`, without `metric/`) over the steps lo..hi; unknown keys are absent.

        exact: the float64 values too, of series where every point is its own bucket (an older daemon has none).
        Raises RltopError when no answer comes in `ANSWER_S`; a question survives a reconnect within that time.
        """
        message = await self._ask("series?", SeriesQuery(list(keys), lo, hi, buckets, exact), f"q{next(self._ids)}")
        answer = _expect(message, SeriesAnswer)
        try:
            return series_from_answer(answer, message.blobs)
        except WireError as error:
            raise RltopError(f"the daemon's answer is broken: {error}", exit_code=1) from error

    async def events(self, **query: Any) -> EventsAnswer:
        """A page of the event log; keywords are the fields of `EventsQuery`. Raises RltopError."""
        return _expect(await self._ask("events?", EventsQuery(**query), f"q{next(self._ids)}"), EventsAnswer)

    async def lines(self, source: str, line: int, **query: Any) -> LinesAnswer:
        """Lines around one line of a log; keywords are further fields of `LinesQuery`. Raises RltopError."""
        message = await self._ask("lines?", LinesQuery(source, line, **query), f"q{next(self._ids)}")
        return _expect(message, LinesAnswer)

    async def dumps(self) -> DumpsAnswer:
        """The run's dumps of rollouts. Raises RltopError, with `why` "unsupported" from a daemon that is too old."""
        return _expect(await self._ask("dumps?", DumpsQuery(), f"q{next(self._ids)}"), DumpsAnswer)

    async def dump_page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Samples of one of them. Raises RltopError."""
        return _expect(await self._ask("dump-page?", query, f"q{next(self._ids)}"), DumpPageAnswer)

    async def command(
        self, name: str, target: str = "", args: dict[str, Any] | None = None, **kw: Any
    ) -> Accepted | Rejected:
        """Send a command on the control socket.

        Keywords are further fields of `Command` (if_epoch, if_gen, dry_run, reason) and `id`: the command is idempotent
        by it (default: a new one), so it survives a reconnect.
        Raises RltopError when this client is read-only or no answer comes in `ANSWER_S`.
        """
        if self._role != "control":
            raise RltopError("this connection is read-only", do="attach with --control")
        command_id = kw.pop("id", "") or uuid.uuid4().hex
        message = await self._ask("cmd", Command(name, target, args or {}, **kw), command_id)
        match message.body:
            case Accepted() | Rejected() as answer:
                return answer
            case _:
                return _expect(message, Accepted)

    async def _ask(self, tag: str, body: msgspec.Struct, request_id: str) -> Message:
        request = _Request(encode(tag, body, id=request_id))
        self._requests[request_id] = request
        try:
            async with asyncio.timeout(ANSWER_S):
                if self.status == "live":
                    try:
                        await self._send(request.frames)
                    except ConnectionLost as lost:
                        self.problem = lost.problem  # run() notices as well, and sends it again when it is back
                return await request.answer
        except TimeoutError:
            why = self.problem or "the daemon is there but did not answer"
            raise RltopError(f"no answer to {tag!r} in {ANSWER_S:g} s", why=why, exit_code=1) from None
        finally:
            del self._requests[request_id]


def _mismatch(why: str) -> str:
    ours = f"this rltop {__version__} speaks {PROTO_MIN} to {PROTO_MAX}"
    return f"protocol mismatch: {why}; {ours}: install matching versions on both sides"


def _expect(message: Message, kind: type[T]) -> T:
    body = message.body
    if isinstance(body, kind):
        return body
    if isinstance(body, Err):
        raise RltopError(f"the daemon refused: {body.why}", why=body.code, exit_code=1)
    raise RltopError(f"the daemon answered with {message.header.t!r}", why=f"expected {kind.__name__}", exit_code=1)
