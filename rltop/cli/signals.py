"""Signals of commands that own other processes: not in the middle of a start, not in the middle of a stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def held(notice: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold back what would end this process until the block is done; then it ends it.

    notice: called for each one that comes, so that the user knows it was heard.
    Raises KeyboardInterrupt for SIGINT and SystemExit(128 + number) for the others, behind the block.
    """
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        notice()

    with _handled(handler, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield
    if came:
        _end(came[0])


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP (a closed terminal) unwind as SIGINT does by itself, so that `finally` runs."""

    def handler(number: int, frame: FrameType | None) -> None:
        _end(number)

    with _handled(handler, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], numbers: Sequence[int]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _end(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
