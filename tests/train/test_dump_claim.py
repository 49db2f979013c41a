"""Two runs, one path of dumps: the second is refused while the first lives, and told what the first left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.dump_claim import claimed, earlier

HOLD = """
import sys
from rltop.train.arguments import TrainConfig
from rltop.train.dump_claim import claimed
with claimed(TrainConfig(save_debug_rollout_data=sys.argv[1]), "first"):
    print("held", flush=True)
    sys.stdin.read()
"""


def config(folder: Path, pattern: str = "{rollout_id}.pt", *, rollouts: int = 4) -> TrainConfig:
    return TrainConfig(save_debug_rollout_data=str(folder / pattern), num_rollout=rollouts)


def test_a_living_run_keeps_its_path_and_a_killed_one_gives_it_back(tmp_path: Path) -> None:
    mine = config(tmp_path)
    command = [sys.executable, "-c", HOLD, str(mine.save_debug_rollout_data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RltopError) as caught, claimed(mine, "second"):
            pass
        assert caught.value.exit_code == 2
        assert caught.value.where == f"--save-debug-rollout-data {mine.save_debug_rollout_data}"
        assert f"run first, process {first.pid}" in caught.value.why
        with claimed(config(tmp_path, "other_{rollout_id}.pt"), "second"):
            pass
        first.kill()
    with claimed(mine, "second"):
        pass
    assert list(tmp_path.iterdir()) == [], "nothing stays beside the dumps"


def test_both_kinds_of_dumps_are_claimed(tmp_path: Path) -> None:
    details = TrainConfig(dump_details=tmp_path)
    with claimed(details, "first"), pytest.raises(RltopError) as caught, claimed(details, "second"):
        pass
    assert "run first" in caught.value.why
    train = TrainConfig(save_debug_train_data=str(tmp_path / "train_data" / "{rollout_id}_{rank}.pt"))
    with claimed(train, "first"), pytest.raises(RltopError) as caught, claimed(train, "second"):
        pass
    assert caught.value.where.startswith("--save-debug-train-data")


def test_the_spelling_of_a_path_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = TrainConfig(save_debug_rollout_data="x/../d/{rollout_id}.pt")
    with claimed(config(tmp_path / "d"), "first"), pytest.raises(RltopError), claimed(other, "second"):
        pass


def test_a_place_without_room_or_locks_costs_the_claim_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mine = config(tmp_path / "file" / "d")
    with claimed(mine, "first"), claimed(mine, "second"):
        pass


@pytest.mark.parametrize("pattern", ["{rollout_id}.pt", "{rollout_id:03d}.pt"])
def test_files_that_will_be_replaced_are_counted(tmp_path: Path, pattern: str) -> None:
    mine = config(tmp_path, pattern, rollouts=4)
    assert earlier(mine, 0) == []
    for rollout_id in (0, 1, 3, 7):
        (tmp_path / pattern.format(rollout_id=rollout_id)).write_text("")
    (told,) = earlier(mine, 0)
    assert "3 files of an earlier run are there and will be replaced" in told
    (told,) = earlier(mine, 2)
    assert "1 file of an earlier run is there" in told
    assert earlier(mine, 4) == []
