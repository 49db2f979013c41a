"""The weights of a bisection outlive what its trainer removes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from rltop.daemon.bisect_record import Record
from rltop.daemon.bisect_weights import keep, let_go
from rltop.engines.requests import Required
from tests.daemon.bisect_lab import Lab
from tests.engines.fleet_world import run_fleet


@pytest.fixture
def record(tmp_path: Path) -> Record:
    found: list[Record] = []

    async def main() -> None:
        lab = Lab(tmp_path, ("speculative",))
        async with lab.fleet() as fleet:
            await lab.start(fleet, 1)
            found.append(lab.record(fleet))

    run_fleet(main)
    found[0].notes = []
    return found[0]


def published(run_dir: Path, version: int) -> Required:
    folder = run_dir / "train" / "weights" / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights {version}")
    return Required(version=str(version), source="disk", path=str(folder))


def test_they_are_linked_survive_the_trainer_and_are_let_go(record: Record, tmp_path: Path) -> None:
    record.weights = published(tmp_path, 3)
    first = Path(record.weights.path)
    keep(record, tmp_path)
    kept = Path(record.weights.path)
    assert kept == tmp_path / "bisect" / record.id / "weights" / "weight_v000003"
    assert os.path.samefile(first / "model.safetensors", kept / "model.safetensors"), "no second copy on disk"
    shutil.rmtree(first)
    assert (kept / "model.safetensors").read_text() == "weights 3"
    keep(record, tmp_path)  # the next daemon
    assert (Path(record.weights.path), record.notes) == (kept, [])
    let_go(record, tmp_path)
    assert not kept.exists()


def test_they_are_copied_where_links_do_not_reach(record: Record, tmp_path: Path) -> None:
    record.weights = published(tmp_path, 3)

    def no_link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    keep(record, tmp_path, link=no_link)
    assert (Path(record.weights.path) / "model.safetensors").read_text() == "weights 3"
    assert "bisect" in record.weights.path


def test_what_is_gone_by_the_start_is_replaced_by_the_nearest_and_told(record: Record, tmp_path: Path) -> None:
    record.crash = msgspec.structs.replace(record.crash, weight_version="3")
    record.weights = published(tmp_path, 3)
    published(tmp_path, 5)
    shutil.rmtree(record.weights.path)
    keep(record, tmp_path)
    assert record.weights.version == "5"
    assert (Path(record.weights.path) / "model.safetensors").read_text() == "weights 5"
    assert record.notes == ["the weights of the crash (3) are not on disk: the trials use version 5"]


def test_a_disk_without_room_is_told_and_nothing_half_stays(record: Record, tmp_path: Path) -> None:
    record.weights = published(tmp_path, 3)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keep(record, tmp_path, link=full, copy=full)
    assert "train" in record.weights.path
    (note,) = record.notes
    assert "can not be kept (No space left on device)" in note
    assert not (tmp_path / "bisect" / record.id / "weights" / "weight_v000003").exists()
