"""What a run was started with: captured from a real Python, a real git repository and real files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rltop.daemon import capture as module
from rltop.daemon.capture import capture, checkpoint, write_manifest
from rltop.runs import places
from tests.hostile import hostile


@pytest.fixture(autouse=True)
def _own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "shared_base", lambda: tmp_path / "shared")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "job"
    root.mkdir()
    (root / "train.py").write_text("print(1)\n")

    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "First")
    return root


def test_a_python_trainer_in_a_repository(repository: Path) -> None:
    (repository / "train.py").write_text("print(2)\n")
    (repository / "new.txt").write_text("x")
    found = capture(
        attempt=3,
        command=[sys.executable, "train.py", "--lr", "1", "--wandb-key", "s3cret"],
        env={**os.environ, "HF_TOKEN": "s3cret", "MINE": "1"},
        cwd=repository,
        config={"env": ["MINE"]},
    )
    assert "s3cret" not in str(found)
    assert found["environment"]["MINE"] == {"value": "1"}
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["safetensors"]
    (git,) = found["git"]
    assert git["root"] == str(repository)
    assert git["subject"] == "First"
    assert len(git["commit"]) == 40
    assert (git["dirty"], git["untracked"]) == (2, ["new.txt"])
    assert "1 file changed, 1 insertion(+), 1 deletion(-)" in git["diff_stat"][-1]
    assert not (repository / ".git" / "index.lock").exists()
    before = git["diff"]
    (repository / "train.py").write_text("print(3)\n")
    (again,) = capture(attempt=3, command=[], env={}, cwd=repository, config={})["git"]
    assert again["diff"] != before


def test_a_script_with_a_python_in_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "launch"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    found = capture(attempt=1, command=[str(script)], env=dict(os.environ), cwd=tmp_path, config={})
    assert found["versions"]["executable"] == sys.executable
    assert found["git"] == []
    assert any(note.startswith("git: ") and "not a git repository" in note for note in found["notes"])


def test_versions_are_asked_wherever_the_trainer_runs(tmp_path: Path) -> None:
    found = capture(attempt=1, command=[sys.executable], env=dict(os.environ), cwd=hostile(tmp_path), config={})
    assert found["versions"]["executable"] == sys.executable
    assert not [note for note in found["notes"] if note.startswith("versions")]


def test_what_is_no_python_is_a_note(tmp_path: Path) -> None:
    found = capture(attempt=1, command=["bash", "-c", "python x.py"], env=dict(os.environ), cwd=tmp_path, config={})
    assert "python" not in found["versions"]
    assert any("bash is no Python program" in note for note in found["notes"])


def test_without_git_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = capture(attempt=1, command=[sys.executable], env=dict(os.environ), cwd=tmp_path, config={})
    assert "git: it is not installed" in found["notes"]


def test_checkpoints_are_told_by_tracker_and_configuration(tmp_path: Path) -> None:
    inner = tmp_path / "ck" / "iter_0000012"
    inner.mkdir(parents=True)
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("12\n")
    (inner / "metadata.json").write_text("{}")
    (inner / "shard").write_bytes(b"x" * 10)
    found = checkpoint("ck", tmp_path)
    assert (found["step"], found["files"], found["bytes"]) == ("12", 2, 12)
    assert len(found["metadata.json"]) == 16
    assert checkpoint("nowhere", tmp_path) == {"path": "nowhere", "exists": False}
    flags = capture(attempt=1, command=["bash", "--ref-load=ck", "--load", "nowhere"], env={}, cwd=tmp_path, config={})
    assert flags["checkpoints"].keys() == {"ref-load", "load"}


def test_the_manifest_of_the_attempt_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_versions", lambda *_: {})
    for attempt in (1, 2, 2):
        write_manifest(tmp_path, attempt=attempt, command=["x"], env={}, cwd=tmp_path, config={})
    assert sorted(path.name for path in tmp_path.glob("manifest*")) == ["manifest.1.json", "manifest.json"]
    assert (tmp_path / "manifest.json").stat().st_mode & 0o777 == 0o600
