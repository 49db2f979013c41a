"""Lines of any length in any encoding, and prefixes of every framework."""

from __future__ import annotations

import io

import pytest

from rltop.evidence.pieces import MOST, is_binary, lines_of
from rltop.evidence.prefix import owner_of_actor, owner_of_file, read_prefix


def pieces(data: bytes, chunk: int = 1 << 20) -> list[tuple[int, bytes]]:
    return list(lines_of(io.BytesIO(data), chunk=chunk))


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 20])
def test_lines_do_not_depend_on_the_size_of_reads(chunk: int) -> None:
    data = b"one\ntwo\r\nbar 1%\rbar 2%\rtext\n\nlast"
    assert [p for p in pieces(data, chunk) if p[1]] == [
        (1, b"one"),
        (2, b"two"),
        (3, b"bar 1%"),
        (3, b"bar 2%"),
        (3, b"text"),
        (5, b"last"),
    ]


def test_of_a_huge_line_only_the_start_stays_and_the_next_line_keeps_its_number() -> None:
    data = b"first\n" + b"x" * (5 * MOST) + b"\nlast\n"
    for chunk in (1000, 1 << 20):
        assert [(n, len(p)) for n, p in pieces(data, chunk)] == [(1, 5), (2, MOST), (3, 4)]


def test_a_progress_bar_that_never_ends_its_line_does_not_hide_the_text_after_it() -> None:
    data = b"\r".join(b"%d%%|####" % i for i in range(200_000)) + b"\rfinal words\nnext\n"
    found = pieces(data, 65_536)
    assert (1, b"final words") in found
    assert found[-1] == (2, b"next")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
def test_files_with_a_mark_are_read_in_their_encoding(encoding: str) -> None:
    assert pieces("größe 1\nzwei\n".encode(encoding)) == [(1, "größe 1".encode()), (2, b"zwei")]


def test_binary_is_told_from_text() -> None:
    assert is_binary(b"PK\x03\x04\0\0abc")
    assert is_binary(bytes(range(1, 32)) * 4)
    assert not is_binary(b"\x1b[36mcolour\x1b[0m \r 10%")
    assert not is_binary("größe".encode("latin-1"))
    assert not is_binary("x".encode("utf-16"))


T = 1772474400.0  # 2026-03-02 18:00:00 UTC


@pytest.mark.parametrize(
    ("line", "text", "want"),
    [
        (
            "\x1b[36m(SGLangEngine pid=3501, ip=node-a)\x1b[0m [2026-03-02 18:00:00 DP4 TP1] Prefill batch, x",
            "Prefill batch, x",
            {"actor": "SGLangEngine", "pid": 3501, "node": "node-a", "time": T, "tags": {"DP": 4, "TP": 1}},
        ),
        (
            "[rank3]:[E302 18:00:00.500000000 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog",
            "[Rank 3] Watchdog",
            {"rank": 3, "time": T + 0.5, "level": "error"},
        ),
        (
            "(MegatronTrainRayActor pid=4103) [rank3] boom",
            "boom",
            {"actor": "MegatronTrainRayActor", "rank": 3, "time": None},
        ),
        ("[2026-03-02 18:00:00,123 E 12 45] (raylet) a.cc:1: x", "(raylet) a.cc:1: x", {"level": "error"}),
        ("2026-03-02 18:00:00,500 INFO worker.py:1 -- x", "worker.py:1 -- x", {"time": T + 0.5, "level": "info"}),
        ("2026-03-02T19:00:00+01:00 ERROR x", "x", {"time": T, "level": "error"}),
        ("INFO 03-02 18:00:00 file.py:1] x", "file.py:1] x", {"time": T, "level": "info"}),
        ("E0302 18:00:00.250000 77 f.cc:1] x", "77 f.cc:1] x", {"time": T + 0.25, "level": "error"}),
        ("[Mon Mar  2 18:00:00 2026] Out of memory", "Out of memory", {"time": T}),
        ("[18:00:00.5] coredump: x", "coredump: x", {"time": T + 0.5}),
        ("(raylet, ip=10.0.0.2) gone", "gone", {"actor": "raylet", "node": "10.0.0.2", "pid": None}),
        ("x [repeated 7x across cluster]", "x", {"repeated": 7}),
        (
            "x [repeated 7x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable)",
            "x",
            {"repeated": 7},
        ),
        ("[torch_memory_saver.cpp] x", "[torch_memory_saver.cpp] x", {"time": None, "actor": ""}),
        ("    indented code", "    indented code", {}),
        ("[2026-13-45 99:99:99] x", "[2026-13-45 99:99:99] x", {"time": None}),
    ],
)
def test_prefixes(line: str, text: str, want: dict[str, object]) -> None:
    prefix = read_prefix(line, near=T - 3600)
    assert prefix.text == text
    assert {name: getattr(prefix, name) for name in want} == want


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("MegatronTrainRayActor", "trainer"),
        ("SGLangEngine", "engine"),
        ("RolloutManager", "rollout"),
        ("SGLangRouter", "router"),
        ("WorkerDict", "trainer"),
        ("raylet", "ray"),
        ("TaskRunner", "launcher"),
        ("LLMRayActor", "engine"),
        ("ReferenceModelRayActor", "trainer"),
        ("Foo", ""),
    ],
)
def test_owner_by_actor(name: str, owner: str) -> None:
    assert owner_of_actor(name) == owner


def test_owner_by_file() -> None:
    assert owner_of_file("logs/rank3.log") == ("trainer", 3, None)
    assert owner_of_file("engine_2.log") == ("engine", None, 2)
    assert owner_of_file("train/engines/3/12/stdout.log") == ("engine", None, 3)
    assert owner_of_file("engines/eu-1/1/stdout.log") == ("engine", None, "eu-1")
    assert owner_of_file("dmesg_node-a.txt")[0] == "host"
    assert owner_of_file("stdout.txt") == ("", None, None)
