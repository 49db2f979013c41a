"""Run directories, names, sockets, registry and liveness."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rltop import runs
from rltop.errors import RltopError
from rltop.runs import places

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
nas:/home /home nfs4 rw 0 0
/dev/sdb1 /home/fast xfs rw 0 0
lustre@tcp:/scratch /scratch lustre rw 0 0
sshfs#h: /mnt/with\\040space fuse.sshfs rw 0 0
overlay /over fuse.fuse-overlayfs rw 0 0
"""


@pytest.fixture(autouse=True)
def _own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "shared_base", lambda: tmp_path / "shared")
    monkeypatch.delenv("RLTOP_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def fake_run(folder: Path, *, started: float = 1.0, **fields: object) -> Path:
    folder.mkdir(parents=True)
    runs.write_run_json(folder, {"name": folder.name, "started": started, **fields})
    return folder


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/opt/x", "ext4", False),
        ("/home/u/.local", "nfs4", True),
        ("/home/fast/u", "xfs", False),
        ("/scratch/u", "lustre", True),
        ("/mnt/with space/u", "fuse.sshfs", True),
        ("/over/u", "fuse.fuse-overlayfs", False),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_point(path: str, kind: str, network: bool) -> None:
    assert runs.fs_type(Path(path), MOUNTS) == kind
    assert runs.on_network_disk(Path(path), MOUNTS) is network


def test_rltop_dir_wins_over_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "mine"))
    assert runs.runs_root() == tmp_path / "mine" / "runs"
    assert stat.S_IMODE(runs.runs_root().stat().st_mode) == 0o700


def test_a_network_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "on_network_disk", lambda path: "state" in path.parts or ".local" in path.parts)
    assert runs.runs_root() == tmp_path / "shared" / "runs"


def test_nowhere_to_write_names_every_place_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "on_network_disk", lambda path: True)
    with pytest.raises(RltopError) as caught:
        runs.runs_root()
    assert str(tmp_path / "state") in caught.value.why
    assert str(tmp_path / "shared") in caught.value.why


def test_a_directory_of_ours_that_others_may_enter_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    runs.private_dir(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_is_not_taken_for_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RltopError, match="not a directory of this user"):
        runs.private_dir(tmp_path / "link")


def test_sockets_lie_in_the_run_directory_when_the_path_is_short() -> None:
    folder = Path(f"/tmp/rltop-test-{os.getpid()}")
    runs.private_dir(folder)
    try:
        assert runs.socket_paths(folder)["view"] == folder / "sock" / "view.sock"
    finally:
        (folder / "sock").rmdir()
        folder.rmdir()


@pytest.mark.parametrize("temp_length", [1, 120])
def test_long_run_paths_get_short_private_socket_folders(tmp_path: Path, temp_length: int) -> None:
    run = tmp_path / ("r" * 120)
    run.mkdir()
    paths = runs.socket_paths(run, temp=tmp_path / ("t" * temp_length))
    for path in paths.values():
        assert len(os.fsencode(path)) <= runs.MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert runs.socket_paths(run, temp=tmp_path / ("t" * temp_length)) == paths
    paths["view"].parent.rmdir()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "x" * 65, "é", "a\n"])
def test_names_that_cannot_be_a_file_or_a_url_are_refused(name: str) -> None:
    with pytest.raises(RltopError):
        runs.check_name(name)


def test_new_names_count_up_and_never_collide() -> None:
    taken: list[str] = ["hand-made", "qwen3-4b-try2"]
    for number in range(1, 30):
        name = runs.new_name(taken)
        assert name.endswith(f"-{number}")
        assert runs.check_name(name) not in taken
        taken.append(name)


def test_a_name_taken_meanwhile_is_skipped(tmp_path: Path) -> None:
    first = runs.make_run_dir(None, tmp_path)
    second = runs.make_run_dir(None, tmp_path)
    assert first != second
    assert runs.make_run_dir(second.name, tmp_path) == second


def test_liveness_is_the_lock_and_not_the_pid_in_run_json(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "a-1", pid=os.getpid())
    dead = runs.read_run(folder)
    assert dead is not None
    assert not dead.alive
    fd = runs.acquire_lock(folder)
    alive = runs.read_run(folder)
    assert alive is not None
    assert alive.alive
    assert alive.pid == os.getpid()
    os.close(fd)
    assert runs.lock_holder(folder) is None


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    fd = runs.acquire_lock(tmp_path)
    with pytest.raises(RltopError, match="already running") as caught:
        runs.acquire_lock(tmp_path)
    assert str(os.getpid()) in caught.value.why
    os.close(fd)


def test_the_lock_dies_with_its_process_and_is_not_inherited(tmp_path: Path) -> None:
    holder = (
        "import subprocess, sys, pathlib; from rltop import runs; runs.acquire_lock(pathlib.Path(sys.argv[1]));"
        "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert runs.lock_holder(tmp_path) == process.pid
            process.kill()
            process.wait()
            assert runs.lock_holder(tmp_path) is None
        finally:
            os.kill(child, 9)


def test_another_lookup_at_the_same_moment_does_not_look_like_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert runs.lock_holder(tmp_path) is None


def test_runs_are_found_through_the_registry_from_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_run(tmp_path / "batch" / "runs" / "job-7", started=5.0)
    runs.register(folder)
    runs.register(folder)
    fake_run(runs.runs_root() / "home-1", started=9.0)
    assert [run.name for run in runs.list_runs()] == ["home-1", "job-7"]
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "batch"))
    assert [run.name for run in runs.list_runs()] == ["job-7"]


def test_links_to_removed_runs_leave_the_registry(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "gone")
    runs.register(folder)
    (folder / "run.json").unlink()
    folder.rmdir()
    assert runs.list_runs() == []
    assert list(runs.registry_dir().iterdir()) == []


def test_a_damaged_run_json_is_listed_and_breaks_nothing() -> None:
    folder = fake_run(runs.runs_root() / "bad-1")
    (folder / "run.json").write_text('{"pid": "x", "started": [], "sockets": 3')
    assert [run.name for run in runs.list_runs()] == ["bad-1"]
    (folder / "run.json").write_text('{"pid": "x", "started": [], "sockets": 3, "command": "no"}')
    (run,) = runs.list_runs()
    assert (run.pid, run.sockets, run.command) == (0, {}, [])


def test_find_run_takes_the_newest_living_one_and_names_candidates() -> None:
    root = runs.runs_root()
    with pytest.raises(RltopError, match="no run is alive"):
        runs.find_run()
    old, new = fake_run(root / "a-1", started=1.0), fake_run(root / "b-2", started=2.0)
    with pytest.raises(RltopError) as caught:
        runs.find_run()
    assert "b-2, a-1" in caught.value.why
    fd = runs.acquire_lock(old)
    assert runs.find_run().name == "a-1"
    assert runs.find_run("b-2").path == new
    other = runs.acquire_lock(new)
    assert runs.find_run().name == "b-2"
    runs.mark_rehearsal(runs.find_run())
    assert runs.find_run().name == "a-1", "a drill is not what is meant, while another run lives"
    os.close(fd)
    assert runs.find_run().name == "b-2"
    os.close(other)
    fd = runs.acquire_lock(old)
    with pytest.raises(RltopError, match="no run 'c-3'") as caught:
        runs.find_run("c-3")
    assert "a-1 (alive)" in caught.value.why
    os.close(fd)


def test_a_run_that_lives_on_another_machine_says_where() -> None:
    folder = fake_run(runs.runs_root() / "a-1", host="node17.cluster")
    fd = runs.acquire_lock(folder)
    with pytest.raises(RltopError) as caught:
        runs.find_run("a-1")
    assert caught.value.do == "rltop attach ssh://node17.cluster/a-1"
    os.close(fd)


def test_run_json_is_for_the_owner_only(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "a-1")
    runs.write_run_json(folder, {"name": "a-1"})
    assert stat.S_IMODE((folder / "run.json").stat().st_mode) == 0o600
