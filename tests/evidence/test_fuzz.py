"""Damaged evidence never crashes: the mutation fuzzer in small, and properties of the parsers."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.evidence import literal
from rltop.evidence.args import parse_args
from rltop.evidence.logs import LogScan
from rltop.evidence.pieces import MOST, Splitter, lines_of
from rltop.evidence.prefix import read_prefix
from rltop.evidence.sink import Sink
from tests.evidence import fuzz

CI_INPUTS = 2_000


def test_damaged_evidence_never_crashes(tmp_path: Path) -> None:
    counts, crashes = fuzz.run(CI_INPUTS, 20260302, tmp_path)
    assert crashes == []
    assert counts["judged"] > CI_INPUTS // 4  # most inputs get as far as the rules
    assert sum(counts.values()) == CI_INPUTS


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_damaged_inputs(tmp_path: Path) -> None:
    counts, crashes = fuzz.run(100_000, 1, tmp_path)
    print(dict(counts))
    assert crashes == []


def test_the_fuzzer_sees_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(obs: object) -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(fuzz, "evaluate", broken)
    counts, crashes = fuzz.run(20, 1, tmp_path)
    assert counts["crashed"] > 0
    assert "ZeroDivisionError: planted" in crashes[0]


@given(st.binary(max_size=4000), st.integers(1, 50))
def test_lines_are_the_same_for_every_size_of_read(data: bytes, chunk: int) -> None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or data[:4] == b"\0\0\xfe\xff" or data[:3] == b"\xef\xbb\xbf":
        return  # a mark decides by the first read
    whole = [piece for piece in lines_of(io.BytesIO(data)) if piece[1]]
    parts = [piece for piece in lines_of(io.BytesIO(data), chunk=chunk) if piece[1]]
    assert parts == whole
    assert b"".join(piece for _, piece in whole) == data.replace(b"\n", b"").replace(b"\r", b"")


@given(st.lists(st.binary(max_size=3 * MOST), max_size=4))
@settings(max_examples=30)
def test_nothing_longer_than_the_bound_is_kept(parts: list[bytes]) -> None:
    splitter = Splitter()
    for part in parts:
        for _, pieces in splitter.feed(part):
            assert all(len(piece) <= MOST for piece in pieces)


_LINES = st.lists(st.one_of(st.text(max_size=200), st.sampled_from(fuzz.SEEDS[0][1].decode().split("\n"))), max_size=30)


@given(_LINES)
@settings(max_examples=150, deadline=None)
def test_any_lines_make_a_log(lines: list[str]) -> None:
    scan, sink = LogScan("train.log"), Sink()
    scan.feed(1, [line.replace("\n", " ").encode("utf-8", "replace") for line in lines])
    scan.finish(sink)
    assert sink.problems == []
    assert all(event.where.line and 1 <= event.where.line <= len(lines) for event in sink.events)


@given(_LINES, st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_log_is_the_same_for_every_size_of_read(lines: list[str], size: int) -> None:
    def events(step: int) -> list[object]:
        scan, sink = LogScan("train.log"), Sink()
        data = [line.replace("\n", " ").encode("utf-8", "replace") for line in lines]
        for at in range(0, len(data), step):
            scan.feed(at + 1, data[at : at + step])
        scan.finish(sink)
        return [(event.kind, event.owner, event.pid, event.time, event.where) for event in sink.events]

    assert events(size) == events(10_000)


@given(st.text(max_size=300))
def test_any_line_has_a_prefix_or_none(line: str) -> None:
    prefix = read_prefix(line)
    assert prefix.time is None or math.isfinite(prefix.time)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), _VALUES, max_size=5))
def test_what_python_prints_is_read_back(value: dict[str, object]) -> None:
    assert literal.parse(repr(value)) == value
    assert literal.parse_map(json.dumps(value)) == value


@given(st.text(max_size=300))
def test_any_text_is_a_literal_or_refused(text: str) -> None:
    with contextlib.suppress(literal.Unreadable):
        literal.parse(text)


@given(st.text(max_size=400))
def test_any_text_is_arguments(text: str) -> None:
    args = parse_args(text, "args.txt")
    assert all(isinstance(name, str) and name for name in args.flags)
