"""Following a log: growth, half lines, rotation, truncation, going on after a restart."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rltop.evidence.pieces import MOST
from rltop.evidence.tail import Position, Tail


@pytest.fixture
def follow() -> Iterator[Callable[..., Tail]]:
    """Makes tails that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(path: Path, position: Position | None = None) -> Tail:
            tail = Tail(path, position)
            stack.callback(tail.close)
            return tail

        yield make


def new(tail: Tail) -> list[tuple[int, bytes]]:
    return [(start + i, line) for start, lines in tail.poll() for i, line in enumerate(lines)]


def test_only_whole_lines_come_and_the_rest_waits(tmp_path: Path, follow: Callable[..., Tail]) -> None:
    log = tmp_path / "train.log"
    tail = follow(log)
    assert new(tail) == []  # not there yet
    log.write_bytes(b"one\ntw")
    assert new(tail) == [(1, b"one")]
    with log.open("ab") as file:
        file.write(b"o\nthree\n")
    assert new(tail) == [(2, b"two"), (3, b"three")]
    assert new(tail) == []


def test_a_rotated_file_is_read_to_its_end_before_the_new_one(tmp_path: Path, follow: Callable[..., Tail]) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"a\n")
    tail = follow(log)
    assert new(tail) == [(1, b"a")]
    with log.open("ab") as file:
        file.write(b"b\nhalf")
    log.rename(tmp_path / "train.log.1")
    log.write_bytes(b"c\n")
    assert new(tail) == [(2, b"b"), (3, b"half"), (1, b"c")]
    assert tail.restarts == 1


def test_a_truncated_file_starts_over(tmp_path: Path, follow: Callable[..., Tail]) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"old line number one\nold line number two\n")
    tail = follow(log)
    assert len(new(tail)) == 2
    log.write_bytes(b"new\n")  # the same inode, shorter
    assert new(tail) == [(1, b"new")]
    assert tail.restarts == 1


def test_it_goes_on_after_a_restart_also_in_a_file_that_was_renamed(
    tmp_path: Path, follow: Callable[..., Tail]
) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"one\ntwo\nhal")
    first = follow(log)
    assert len(new(first)) == 2
    at = first.position
    first.close()
    with log.open("ab") as file:
        file.write(b"f\n")
    log.rename(tmp_path / "train.log.1")
    log.write_bytes(b"new\n")
    assert new(follow(log, at)) == [(3, b"half"), (1, b"new")]


def test_another_file_at_the_path_is_read_from_its_start(tmp_path: Path, follow: Callable[..., Tail]) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"one\n")
    info = log.stat()
    forged = Position(info.st_dev, info.st_ino, 3, 2, b"xyz")
    assert new(follow(log, forged)) == [(1, b"one")]


def test_a_line_without_end_takes_no_memory(tmp_path: Path, follow: Callable[..., Tail]) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as file:
        for _ in range(12):
            file.write(b"x" * (1 << 20))
    tail = follow(log)
    tracemalloc.start()
    try:
        assert new(tail) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    with log.open("ab") as file:
        file.write(b"\nnext\n")
    assert [(n, len(line)) for n, line in new(tail)] == [(1, MOST), (2, 4)]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_polling_in_small_parts_gives_the_same_lines(tmp_path: Path, follow: Callable[..., Tail], chunk: int) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(50)))
    tail, lines = follow(log), []
    for _ in range(1000):
        lines += [line for _, part in tail.poll(chunk) for line in part]
        if len(lines) == 50:
            break
    assert lines == [b"line %d" % i for i in range(50)]
