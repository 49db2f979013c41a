"""Dumps opened sample by sample: whatever a pickler writes comes back, in any order, and memory stays flat."""

from __future__ import annotations

import io
import pickle
import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rltop.errors import RltopError
from rltop.evidence import pickle_samples
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.pickle_samples import Samples
from rltop.evidence.pickle_values import Map, Seq, Unreadable
from tests.evidence.files import lines
from tests.evidence.test_saved import Touch, archive, tensor


def plain(value: Any) -> Any:
    if isinstance(value, Seq):
        return [plain(one) for one in value.items]
    if isinstance(value, Map):
        return {key: plain(one) for key, one in value.items.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def made(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Samples as slime has them: the four of a group share prompt and metadata, lists cross the pickler's batches."""
    pick = random.Random(seed)
    found: list[dict[str, Any]] = []
    prompt, meta = "", {}
    for at in range(count):
        if at % 4 == 0:
            prompt, meta = f"prompt {at} " + "x" * pick.choice([0, 300]), {"nested": [at, {"deep": (at,)}]}
        found.append(
            {
                "group_index": at // 4,
                "index": at,
                "prompt": prompt,
                "metadata": meta,
                "tokens": [pick.randrange(200_000) for _ in range(pick.choice([0, 1, 3, 400]))],
                "rollout_log_probs": [-pick.random() for _ in range(pick.choice([0, 1, 350]))],
                "reward": {"score": 1.0} if at % 3 else None,
                "shape": (1, 2, 3, (4, 5, 6, 7)),
                "large": 2**70,
                "rows": [[1, 2], [3, 4]],
                "empty": {},
            }
        )
    found[-1:] = [{**one, "tokens": list(range(2100))} for one in found[-1:]]
    return found


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("count", [0, 1, 2, 1001])
def test_every_sample_comes_back_in_any_order(protocol: int, count: int) -> None:
    samples = made(count)
    shared = {"x": [1, 2], "samples": {"aime": samples, "math": samples[:3], "gsm": made(2, seed=2)}, "after": [1.5]}
    for value in ({"rollout_id": 7, "samples": samples, "after": [1.5], "dp_shards": [{"a": 1}]}, shared):
        listed: Any = value["samples"]
        expected = listed if isinstance(listed, list) else [one for part in listed.values() for one in part]
        found = Samples(memoryview(pickle.dumps(value, protocol)))
        for _ in found.scan():
            pass
        assert (len(found), found.ended) == (len(expected), True)
        places = random.Random(3).sample(range(len(expected)), min(len(expected), 12))
        for at in [*places, *range(max(len(expected) - 2, 0), len(expected))]:
            assert plain(found.element(at)) == expected[at]
        assert plain(found.head.get("after")) == [1.5]
        if isinstance(listed, dict) and count > 1:
            assert [found.group(at) for at in (0, count, len(expected) - 1)] == ["aime", "math", "gsm"]


def test_the_first_samples_are_there_before_the_rest_was_looked_at() -> None:
    raw = pickle.dumps({"rollout_id": 7, "samples": made(400)}, 2)
    found = Samples(memoryview(raw))
    steps = found.scan()
    while len(found) < 3:
        next(steps)
    assert plain(found.element(2)) == made(400)[2]
    assert found.at < len(raw) / 50
    assert not found.ended
    assert found.head.get("rollout_id") == 7


def test_a_pickle_that_is_cut_gives_what_was_before(tmp_path: Path) -> None:
    raw = pickle.dumps({"rollout_id": 7, "samples": made(40)}, 2)
    path = archive(tmp_path / "7.pt", raw[: len(raw) // 2])
    with DumpFile.open(path) as dump:
        before = dump.page(0, 100)
        assert 5 < len(before) < 40
        assert before[3].tokens == made(40)[3]["tokens"]
        with pytest.raises(RltopError, match=f"cannot read this dump\n  why: the pickle is cut off .*{len(before)}"):
            dump.sample(39)
        with pytest.raises(RltopError) as error:
            list(dump)
        assert error.value.exit_code == 2
        assert dump.count() is None


def test_a_hostile_sample_is_named_and_its_neighbours_are_read(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    samples: list[Any] = made(6)
    samples[2]["metadata"] = {"evil": Touch(mark), "good": 1}
    samples[4] = Touch(mark)
    with DumpFile.open(archive(tmp_path / "7.pt", {"rollout_id": 7, "samples": samples})) as dump:
        found = list(dump)
        assert dump.foreign == ("posix.mkdir",)
    assert found[2].refused == ("metadata: posix.mkdir",)
    assert found[2].metadata is not None
    assert found[2].metadata["good"] == 1
    assert found[4].refused == ("sample: posix.mkdir",)
    assert [one.index for one in found] == [0, 1, 2, 3, None, 5]
    assert not mark.exists()


def test_tensors_stay_in_the_file_until_they_are_asked_for(tmp_path: Path) -> None:
    out = io.BytesIO(b"")
    out.write(b"\x80\x02}(X\x07\x00\x00\x00samples](")
    for key in ("0", "1"):
        out.write(b"}(X\x09\x00\x00\x00log_probs" + tensor(key, "FloatStorage", 3, (3,)))
        out.write(b"X\x07\x00\x00\x00routing" + tensor(key, "FloatStorage", 3, (3, 1)) + b"u")
    out.write(b"eu.")
    records = {f"data/{key}": struct.pack("<3f", *(float(key) + 0.5 for _ in range(3))) for key in ("0", "1")}
    with DumpFile.open(archive(tmp_path / "7.pt", out.getvalue(), entries=records)) as dump:
        second = dump.sample(1)
        assert second.log_probs == [1.5, 1.5, 1.5]
        assert second.extra["routing"].shape == (3, 1)
        assert second.extra["routing"].values() == [1.5, 1.5, 1.5]


def test_missing_fields_are_none_and_later_fields_are_kept(tmp_path: Path) -> None:
    path = archive(tmp_path / "7.pt", {"samples": [{"response": "a", "status": "Status.TRUNCATED", "later": [1]}]})
    with DumpFile.open(path) as dump:
        assert (dump.rollout_id, dump.kind) == (7, "rollout")
        one = dump.sample(0)
    assert (one.index, one.tokens, one.reward, one.metadata) == (None, None, None, None)
    assert (one.status, one.extra) == ("truncated", {"later": [1]})


@pytest.mark.parametrize("name", ["7.pt", "7.jsonl"])
def test_a_dump_that_is_written_anew_while_it_is_read_is_an_error(tmp_path: Path, name: str) -> None:
    """slime overwrites a path without {rollout_id}; behind the end of a mapped file is a SIGBUS."""
    samples = [{"index": at, "response": "x" * 5_000} for at in range(40)]
    path = tmp_path / name
    path = archive(path, {"samples": samples}) if name.endswith(".pt") else lines(path, samples)
    with DumpFile.open(path) as dump:
        assert dump.sample(0).index == 0
        path.write_bytes(b"")
        with pytest.raises(RltopError, match="overwritten while it was read"):
            list(dump)


def test_chat_messages_are_rendered_and_kept(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    with DumpFile.open(archive(tmp_path / "7.pt", {"samples": [{"prompt": prompt}]})) as dump:
        one = dump.sample(0)
    assert one.prompt == "user: <image>what?"
    assert one.messages == prompt


def test_columns_of_an_old_train_dump_become_samples(tmp_path: Path) -> None:
    data = {
        "tokens": [[1, 2, 3], [4, 5]],
        "response_lengths": [2, 1],
        "log_probs": [[-0.5, -0.25], [-1.0]],
        "partition": [1, 3],
        "raw_reward": [1.0, 0.0, 1.0, 0.0],
        "num_microbatches": [1],
    }
    path = archive(tmp_path / "7_1.pt", {"rollout_id": 7, "rank": 1, "rollout_data": data})
    with DumpFile.open(path) as dump:
        assert dump.kind == "train-v1"
        one, two = dump
    assert (one.tokens, one.log_probs, one.extra) == ([1, 2, 3], [-0.5, -0.25], {"rollout_position": 1})
    assert (two.response_tokens, two.extra) == ([5], {"rollout_position": 3})


def test_lines_of_relax_are_read_and_a_broken_one_is_named(tmp_path: Path) -> None:
    rows = [
        {
            "rollout_id": 7,
            "sample_index": at,
            "group_index": 0,
            "prompt": "p",
            "response": "r",
            "response_length": 2,
            "response_token_ids": [8, 9],
            "response_rollout_log_probs": [-0.5, float("nan")],
            "status": "completed",
        }
        for at in range(3)
    ]
    path = lines(tmp_path / "eval" / "7.jsonl", rows)
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], "{broken", *text[1:]]))
    with DumpFile.open(path) as dump:
        assert (dump.kind, dump.rollout_id, dump.is_eval, dump.count()) == ("samples", 7, True, None)
        found = list(dump)
        assert dump.count() == 4
    assert (found[0].response_tokens, found[2].index) == ([8, 9], 1)
    assert found[0].rollout_log_probs is not None
    assert found[1].refused


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 cut", "without a directory"),
        (b"just some text\n" * 9, "pickle"),
        (b'{"unfinished', "no JSON object"),
    ],
)
def test_what_is_no_dump_says_what_where_why_and_what_to_do(tmp_path: Path, raw: bytes, why: str) -> None:
    path = tmp_path / "7.pt"
    path.write_bytes(raw)
    with pytest.raises(RltopError) as error:
        DumpFile.open(path)
    assert why in error.value.why
    assert (error.value.what, error.value.where, error.value.exit_code) == ("cannot read this dump", str(path), 2)
    assert error.value.do


def test_values_shared_through_every_sample_take_no_time() -> None:
    """Each sample holds the lists of the two before it, twice: the last one is a tree of 2^300 leaves."""
    samples: list[dict[str, Any]] = [{"x": [0.5]}, {"x": [0.25]}]
    for _ in range(300):
        samples.append({"x": [samples[-1]["x"], samples[-2]["x"], samples[-1]["x"]]})
    for protocol in (2, 4):
        found = Samples(memoryview(pickle.dumps({"samples": samples}, protocol)))
        for _ in found.scan():
            pass
        begin = time.process_time()
        assert isinstance(found.element(301), Map)
        assert time.process_time() - begin < 2
        assert plain(found.element(4)) == samples[4]


def test_memory_does_not_grow_with_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        {"tokens": [*range(at, at + 2_000)], "rollout_log_probs": [-0.5] * 2_000, "response": f"{at}" * 1_000}
        for at in range(150)
    ]
    path = archive(tmp_path / "7.pt", {"samples": samples})
    assert path.stat().st_size > 3_000_000
    monkeypatch.setattr(pickle_samples, "KEPT_BYTES", 200_000)
    tracemalloc.start()
    try:
        with DumpFile.open(path) as dump:
            total = sum(len(sample.tokens or ()) for sample in dump)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 150 * 2_000
    assert peak < 3_000_000  # all samples together are 20 MB


def pieces() -> st.SearchStrategy[Any]:
    leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary()
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=4), inner, max_size=4)
            | st.tuples(inner, inner)
        ),
        max_leaves=12,
    )


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(pieces(), max_size=6), st.integers(2, 5), st.booleans())
def test_samples_of_any_shape_are_found(values: list[Any], protocol: int, twice: bool) -> None:
    listed = values * 2 if twice else values
    if len(listed) == 1 and not isinstance(listed[0], dict):  # the pickler opens no batch for it: taken for no sample
        listed = [{"x": listed[0]}]
    raw = pickle.dumps({"a": values[:1], "samples": listed, "b": [1]}, protocol)
    if protocol < 3 and (b"_codecs" in raw or b"__builtin__" in raw):  # bytes are a call there
        return
    found = Samples(memoryview(raw))
    for _ in found.scan():
        pass
    assert [plain(found.element(at)) for at in range(len(found))] == listed


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=40), st.integers(0, 2000), st.integers(1, 6), st.sampled_from([0, 2, 4]))
@example(b"\0\0", 832, 4, 2)  # a size of eight bytes that reaches behind everything
def test_no_damage_raises_anything_else(noise: bytes, at: int, width: int, protocol: int) -> None:
    good = bytearray(pickle.dumps({"rollout_id": 1, "samples": made(5)[:4]}, protocol))
    at %= len(good)
    good[at : at + width] = noise[:width]
    try:
        found = Samples(memoryview(bytes(good)))
        for _ in _some(found.scan()):
            pass
    except Unreadable:
        return
    for place in range(len(found)):
        try:
            found.element(place)
        except Unreadable:
            continue


def _some(steps: Iterator[int]) -> Iterator[int]:
    for count, step in enumerate(steps):
        assert count < 10_000
        yield step
