"""What ends a command does not cut a start or a stop in two."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

import pytest

from rltop.cli.output import note
from rltop.cli.signals import held, raised


def test_an_interrupt_in_a_held_block_is_raised_behind_it() -> None:
    done: list[str] = []
    noticed: list[str] = []

    def command() -> None:
        with held(lambda: noticed.append("heard")):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the rest of the block")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        command()
    assert done == ["the rest of the block"]
    assert noticed == ["heard", "heard"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_closed_terminal_unwinds(number: signal.Signals, code: int) -> None:
    cleaned: list[str] = []

    def command() -> None:
        with raised():
            try:
                os.kill(os.getpid(), number)
            finally:
                cleaned.append("up")

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == code
    assert cleaned == ["up"]


def test_the_handlers_from_before_are_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with raised(), held():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_narration_to_a_terminal_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed window must not keep `rltop demo` from stopping what it started."""

    class Gone(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    note("stopping the run")
