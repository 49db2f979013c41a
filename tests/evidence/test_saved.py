"""`.pt` files: what torch writes is read, what a hostile file wants is only named, and nothing takes for ever."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rltop.evidence import dumps, saved
from rltop.evidence.pickle_values import Map, Seq, TensorRef, Unreadable
from rltop.evidence.pickles import Walker
from rltop.evidence.sink import Sink, Source


class Touch:
    """Would leave a file behind if anything called it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def archive(path: Path, value: Any, *, entries: dict[str, bytes] | None = None, compress: bool = False) -> Path:
    """A file as torch.save lays it out; `value` is pickled, or is a pickle already."""
    raw = value if isinstance(value, bytes) else pickle.dumps(value, 2)
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as out:
        out.writestr("a/data.pkl", raw)
        out.writestr("a/byteorder", b"little")
        for name, data in (entries or {}).items():
            out.writestr(f"a/{name}", data)
    return path


def tensor(key: str, kind: str, size: int, shape: tuple[int, ...], offset: int = 0) -> bytes:
    """The opcodes of a tensor as torch writes them."""
    out = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"\nX"
    out += (
        struct.pack("<I", len(key)) + key.encode() + b"X\x03\x00\x00\x00cpuK" + bytes([size]) + b"tQK" + bytes([offset])
    )
    stride: list[int] = []
    step = 1
    for one in reversed(shape):
        stride.insert(0, step)
        step *= one
    for numbers in (shape, tuple(stride)):
        out += b"(" + b"".join(b"K" + bytes([one]) for one in numbers) + b"t"
    return out + b"\x89ccollections\nOrderedDict\n)RtR"


def test_containers_numbers_and_strings_come_back_plain(tmp_path: Path) -> None:
    value = {"a": [1, 2, 70_000, -5], "b": (1.5, None, True), "c": "grün", "d": {"x": [0.25] * 500}, "e": 2**100}
    for protocol in range(6):
        path = archive(tmp_path / "v.pt", pickle.dumps(value, protocol))
        with saved.opened(path) as found:
            items = found.value.items
            assert list(items["a"].items) == [1, 2, 70_000, -5]
            assert items["b"] == (1.5, None, True)
            assert items["c"] == "grün"
            assert list(items["d"].items["x"].items) == [0.25] * 500
            assert items["e"] == 2**100
            assert found.foreign == ()


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        ("FloatStorage", struct.pack("<3f", 1.0, -2.5, 0.0), [1.0, -2.5, 0.0]),
        ("BFloat16Storage", b"\x80\x3f\xc0\x3f\x00\x00", [1.0, 1.5, 0.0]),
        ("HalfStorage", struct.pack("<3e", 1.0, 0.5, -1.0), [1.0, 0.5, -1.0]),
        ("LongStorage", struct.pack("<3q", 1, 2, -3), [1.0, 2.0, -3.0]),
        ("BoolStorage", b"\x01\x00\x01", [1.0, 0.0, 1.0]),
    ],
)
def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path, kind: str, raw: bytes, expected: list[float]) -> None:
    path = archive(tmp_path / "t.pt", b"\x80\x02" + tensor("0", kind, 3, (3,)) + b".", entries={"data/0": raw})
    with saved.opened(path) as found:
        assert isinstance(found.value, TensorRef)
        assert found.floats(found.value) == expected


def test_a_slice_is_read_from_its_offset_and_a_transposed_one_is_left_alone(tmp_path: Path) -> None:
    raw = struct.pack("<6f", *range(6))
    path = archive(
        tmp_path / "t.pt", b"\x80\x02" + tensor("0", "FloatStorage", 6, (3,), 2) + b".", entries={"data/0": raw}
    )
    with saved.opened(path) as found:
        assert found.floats(found.value) == [2.0, 3.0, 4.0]
        assert found.floats(TensorRef("float32", (2, 3), "0", 0, contiguous=False)) == []
        assert found.floats(TensorRef("float32", (99,), "0", 0)) == []
        assert found.floats(TensorRef("float32", (3,), "gone", 0)) == []


def test_a_foreign_class_is_named_and_nothing_is_called(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = archive(tmp_path / "evil.pt", {"rollout_id": 3, "evil": Touch(mark), "after": [1, 2]})
    with saved.opened(path) as found:
        assert found.foreign == ("posix.mkdir",)
        assert found.value.items["rollout_id"] == 3
        assert list(found.value.items["after"].items) == [1, 2]
    assert not mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'touch x'\ntR.",
        b"(S'touch x'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch x'\no.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x07touch x\x85R.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_every_way_to_name_a_global_is_seen(raw: bytes) -> None:
    walker = Walker(memoryview(raw))
    walker.next()
    assert len(walker.foreign) == 1


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 and no more", "archive"),
        (b"\x80\x02]q", "cut off"),
        (b"\x80\x02", "no end"),
        (b"not a pickle at all", "no pickle opcode|cut off|broken"),
        (b"\x80\x02X\xff\xff\xff\x7fab.", "cut off"),
        (b"\x80\x02h\x07.", "broken"),
        (b"\x80\x02\x85.", "broken|stack"),
    ],
)
def test_a_broken_file_says_why(tmp_path: Path, raw: bytes, why: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(raw)
    with pytest.raises(Unreadable, match=why), saved.opened(path):
        pass


def test_a_truncated_archive_and_one_without_pickle_are_told_apart(tmp_path: Path) -> None:
    whole = archive(tmp_path / "w.pt", {"a": 1}).read_bytes()
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole[:-30])
    with pytest.raises(Unreadable, match="truncated or damaged"), saved.opened(cut):
        pass
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(other, "w") as out:
        out.writestr("readme.txt", "hello")
    with pytest.raises(Unreadable, match="without data"), saved.opened(other):
        pass


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "bomb.pt", b"\x80\x02" + b"N0" * (140 << 20) + b".", compress=True)
    assert path.stat().st_size < 2 << 20
    begin = time.monotonic()
    with pytest.raises(Unreadable, match="more than is read"), saved.opened(path):
        pass
    assert time.monotonic() - begin < 5


def test_shared_tuples_and_cycles_take_no_time() -> None:
    out = io.BytesIO()
    out.write(b"\x80\x02)")
    for at in range(200):  # each holds the one before twice: 2^200 leaves
        out.write(b"q" + bytes([at]) + b"h" + bytes([at]) + b"\x86")
    out.write(b"}h\xc7K\x01s0.")
    begin = time.monotonic()
    Walker(memoryview(out.getvalue())).next()
    cycle = Walker(memoryview(b"\x80\x02]q\x00h\x00a.")).next()
    assert isinstance(cycle, Seq)
    assert dumps.tensor_bytes(cycle) == 0
    assert time.monotonic() - begin < 2


def test_the_older_format_of_several_pickles_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    parts: tuple[Any, ...] = (
        0x1950A86A20F9469CFC6C,
        1001,
        {"little_endian": True},
        {"rollout_id": 5, "samples": []},
        [],
    )
    path.write_bytes(b"".join(pickle.dumps(part, 2) for part in parts))
    with saved.opened(path) as found:
        assert found.value.items["rollout_id"] == 5


def test_the_bytes_of_a_field_are_those_of_its_pickle(tmp_path: Path) -> None:
    with saved.opened(archive(tmp_path / "s.pt", {"small": 1, "large": "x" * 9_000, "list": [0.5] * 1_000})) as found:
        value = found.value
        assert isinstance(value, Map)
        assert 9_000 < value.sizes["large"] < 9_020
        assert 9_000 < value.sizes["list"] < 9_050
        assert value.sizes["small"] < 5


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_raise_anything_else(noise: bytes, at: int, byte: int) -> None:
    good = bytearray(pickle.dumps({"rollout_id": 1, "samples": [{"tokens": [1, 2], "x": (1.5, "y")}]}, 4))
    good[at % len(good)] = byte
    for raw in (noise, bytes(good)):
        with contextlib.suppress(Unreadable):
            Walker(memoryview(raw)).next()


def test_pickletools_reads_what_the_tests_write() -> None:
    out = io.StringIO()
    pickletools.dis(b"\x80\x02" + tensor("0", "FloatStorage", 3, (3,)) + b".", out)
    assert "_rebuild_tensor_v2" in out.getvalue()


# -- dumps


def entries(*indices: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "index": i,
            "group_index": i // 2,
            "response": f"The sum is {i}.",
            "response_length": 2,
            "tokens": [9, 8, 1, 2],
            "label": str(i),
            "reward": 1.0,
            "status": "completed",
            "weight_versions": ["3"],
            "rollout_log_probs": [-0.1, -0.2],
            **more,
        }
        for i in indices
    ]


def read(path: Path) -> Sink:
    sink = Sink()
    dumps.read(Source(path, path.name), sink)
    return sink


def test_a_rollout_dump_becomes_samples(tmp_path: Path) -> None:
    sink = read(archive(tmp_path / "7.pt", {"rollout_id": 7, "samples": entries(4, 5)}))
    (one,) = sink.dumps
    assert (one.kind, one.rollout_id, one.indices, one.foreign) == ("rollout", 7, (4, 5), ())
    first = sink.samples[0]
    assert (first.rollout_id, first.index, first.group, first.reward, first.weight_version) == (7, 4, 2, 1.0, "3")
    assert (first.text.counted_ids, first.last_token, first.label_shown) == (2, 2, True)


def test_an_eval_dump_gives_no_samples_of_the_training(tmp_path: Path) -> None:
    sink = read(archive(tmp_path / "eval_7.pt", {"rollout_id": 7, "samples": entries(4, 5)}))
    assert sink.dumps[0].is_eval
    assert sink.samples == []


@pytest.mark.parametrize(
    ("value", "kind", "indices", "rank"),
    [
        (
            {"format_version": 2, "rollout_id": 7, "samples": [{"sample_index": 4}], "dp_shards": []},
            "train-v2",
            (4,),
            None,
        ),
        ({"version": 2, "rollout_id": 7, "samples": [{"sample_index": 4}]}, "train-v2", (4,), None),
        ({"rollout_id": 7, "rank": 1, "samples": [{"sample_index": 4}]}, "train-v1", (4,), 1),
        (
            {"rollout_id": 7, "rank": 3, "rollout_data": {"sample_indices": [4, 6], "tokens": [[1]]}},
            "train-v1",
            (4, 6),
            3,
        ),
        ({"sample_offset": 64, "epoch_id": 0, "sample_index": 5}, "state", (), None),
        ({"weights": [1.0]}, "other", (), None),
    ],
)
def test_the_kind_of_a_dump_is_known_by_its_keys(
    tmp_path: Path, value: Any, kind: str, indices: tuple[int, ...], rank: int | None
) -> None:
    (one,) = read(archive(tmp_path / "7_1.pt" if rank == 1 else tmp_path / "7.pt", value)).dumps
    assert (one.kind, one.indices, one.rank) == (kind, indices, rank)


def test_a_train_dump_gives_the_error_of_each_sequence(tmp_path: Path) -> None:
    samples = [{"sample_index": 4, "log_probs": [-0.1, -0.2], "rollout_log_probs": [-0.1, -2.2]}]
    (row,) = read(archive(tmp_path / "7.pt", {"version": 2, "rollout_id": 7, "samples": samples})).rows
    assert row.fields["mult_prob_error"] == pytest.approx((1 + 7.389056) / 2)


def test_a_damaged_dump_is_a_problem_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "9.pt"
    path.write_bytes(b"PK\x03\x04 cut")
    sink = read(path)
    assert sink.problems[0].whole
    assert "archive" in sink.problems[0].why
