"""Evidence that is not what it seems at first: launch scripts as arguments, and files that were packed."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.evidence.collect import collect

# -- launch scripts

SCRIPT = (
    "set -e\nexport N=8\nARGS=(\n  --rollout-batch-size 32\n  --n-samples-per-prompt ${N}\n)\n"
    'python3 train.py --global-batch-size 256 "${ARGS[@]}" --num-rollout ${ROUNDS}\n'
)
STEP = "(MegatronTrainRayActor pid=1) [2026-03-02 10:00:00] model.py:9 - step 0: {'train/loss': 0.1, 'train/step': 0}\n"


def test_a_launch_script_gives_the_arguments_that_the_run_did_not_leave(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "stop.sh").write_text("ray stop --force\npkill -9 python\n")
    (tmp_path / "convert.sh").write_text("python3 convert.py --hf-checkpoint /m\n")
    (tmp_path / "train.log").write_text(STEP)
    obs = collect([tmp_path])
    assert (obs.args.number("global_batch_size"), obs.args.number("n_samples_per_prompt")) == (256, 8)
    assert not obs.args.given("num_rollout")  # only a shell knows it
    assert "run.sh" in obs.files
    assert obs.args.where is not None
    assert (obs.args.where.source, obs.args.lines["global_batch_size"]) == ("run.sh", 7)


def test_what_the_run_printed_counts_more_than_its_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "args.txt").write_text("python3 train.py --rollout-batch-size 4 --global-batch-size 4\n")
    obs = collect([tmp_path])
    assert obs.args.number("global_batch_size") == 4
    assert "run.sh" not in obs.files


def test_of_two_launch_scripts_neither_is_taken_for_the_run_s(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    (tmp_path / "b.sh").write_text(SCRIPT.replace("256", "128"))
    (tmp_path / "train.log").write_text(STEP)
    assert not collect([tmp_path]).args.flags


@pytest.mark.parametrize("text", [SCRIPT, "ray stop --force\n"])
def test_a_script_alone_is_for_the_doctor(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    for path in (tmp_path, tmp_path / "run.sh"):
        with pytest.raises(RltopError) as error:
            collect([path])
        assert f"rltop doctor {tmp_path / 'run.sh'}" in str(error.value)


# -- packed files


def test_a_log_that_was_packed_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.log.1.gz").write_bytes(gzip.compress(STEP.encode()))
    (tmp_path / "old.log.gz").write_bytes(gzip.compress((STEP * 50_000).encode())[:-2000])
    obs = collect([tmp_path])
    assert {row.where.source for row in obs.metrics if row.where} == {"train.log.1.gz", "old.log.gz"}
    (problem,) = obs.problems
    assert (problem.where.source, problem.whole) == ("old.log.gz", False)


@pytest.mark.parametrize(
    ("name", "data", "tool"),
    [
        ("metrics.jsonl.gz", gzip.compress(b"{}", mtime=0), "gunzip"),
        ("train.log.zst", b"\x28\xb5\x2f\xfd\0\0", "unzstd"),
        ("train.log", b"\xfd7zXZ\0\0\0", "unxz"),
        ("args.txt.bz2", bz2.compress(b"x"), "bunzip2"),
    ],
    ids=["gzip", "zstd", "xz", "bzip2"],
)
def test_of_other_packed_files_it_is_said_how_to_unpack_them(tmp_path: Path, name: str, data: bytes, tool: str) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "run.log").write_text(STEP)
    (tmp_path / "images.tar.gz").write_bytes(gzip.compress(b"not evidence"))
    (problem,) = collect([tmp_path]).problems
    assert (problem.where.source, tool in problem.why) == (name, True)
