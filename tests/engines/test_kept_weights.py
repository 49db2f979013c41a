"""Which versions on a disk can be loaded: whole ones, the newest written first."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from rltop.engines.kept_weights import KeptWeights, incomplete


def shard(file: Path, nbytes: int = 8, cut: int = 0) -> None:
    """A safetensors file with one tensor; the last `cut` bytes are missing."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}).encode()
    file.write_bytes((struct.pack("<Q", len(header)) + header + bytes(nbytes))[: 8 + len(header) + nbytes - cut])


def version(folder: Path, number: int, *, written: float, cut: int = 0, shards: int = 2) -> Path:
    """`weight_vNNNNNN` as slime leaves it."""
    path = folder / f"weight_v{number:06d}"
    path.mkdir(parents=True)
    names = [f"model-{at:05d}-of-{shards:05d}.safetensors" for at in range(1, shards + 1)]
    for name in names:
        shard(path / name, cut=cut if name == names[-1] else 0)
    index = {"metadata": {}, "weight_map": {f"w{at}": name for at, name in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    os.utime(path, (written, written))
    return path


def test_the_newest_written_is_first_for_numbers_begin_again_with_each_run(tmp_path: Path) -> None:
    version(tmp_path, 50, written=100.0)
    version(tmp_path, 1, written=200.0)
    version(tmp_path, 2, written=300.0, cut=1)
    (tmp_path / "weight_vX").mkdir()
    (tmp_path / "weight_v000009").write_text("no folder")
    found = KeptWeights(tmp_path).scan()
    assert [(one.version, one.written) for one in found] == [("2", 300.0), ("1", 200.0), ("50", 100.0)]
    assert found[0].problem == "model-00002-of-00002.safetensors is cut off"
    assert [one.problem for one in found[1:]] == ["", ""]


def test_one_that_is_being_written_becomes_whole(tmp_path: Path) -> None:
    kept = KeptWeights(tmp_path)
    path = version(tmp_path, 3, written=10.0)
    (path / "model-00002-of-00002.safetensors").unlink()
    os.utime(path, (11.0, 11.0))
    assert kept.scan()[0].problem == "there is no model-00002-of-00002.safetensors"
    shard(path / "model-00002-of-00002.safetensors")
    assert kept.scan()[0].problem == ""
    (path / "model-00001-of-00002.safetensors").unlink()
    assert kept.scan()[0].problem == "there is no model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("model.safetensors.index.json", "{", "names no files"),
        ("model.safetensors.index.json", '{"weight_map": {}}', "names no files"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "../x"}}', "which is no plain name"),
        (
            "model.safetensors.index.json",
            '{"metadata": {"version": "000002", "base_version": "000001"}, "weight_map": {}}',
            "it is a difference to version 000001",
        ),
        ("model.safetensors", "short", "it is too short for a header"),
        ("config.json", "{}", "there is no model.safetensors"),
    ],
)
def test_what_can_not_be_loaded_says_why(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    assert problem in incomplete(tmp_path)


def test_a_single_file_is_whole(tmp_path: Path) -> None:
    shard(tmp_path / "model.safetensors")
    assert incomplete(tmp_path) == ""


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        KeptWeights(tmp_path / "nowhere").scan()
