"""The quota: the oldest dead runs go, a living one never, and leftovers only when their owner is provably gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rltop import runs
from rltop.daemon.housekeeping import prune, tidy
from rltop.errors import RltopError
from rltop.runs import RunInfo, leftovers, places, read_run
from rltop.runs.leftovers import OWNER, YOUNG_S, clean, find_leftovers, owned_dir
from rltop.runs.prune import Weighed, plan, remove_run
from rltop.settings import Settings

LATER = time.time() + 10 * YOUNG_S


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(places, "shared_base", lambda: tmp_path / "shared")
    monkeypatch.setattr(leftovers, "temporary_places", lambda: [tmp_path / "temp"])
    monkeypatch.setattr("rltop.daemon.housekeeping.temporary_places", lambda: [tmp_path / "temp"])
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "home"))


def run(name: str, *, size: int = 10_000, touched: float = 1000.0) -> RunInfo:
    """A dead run with `size` bytes."""
    folder = runs.make_run_dir(name)
    runs.write_run_json(folder, {"name": name, "started": touched})
    (folder / "journal.sqlite").write_bytes(os.urandom(size))
    for path in folder.iterdir():
        os.utime(path, (touched, touched))
    runs.register(folder)
    found = read_run(folder)
    assert found is not None
    return found


def weighed(name: str, size: int, touched: float, removable: bool = True) -> Weighed:
    return Weighed(RunInfo(name, Path("/x") / name, 0, touched, False, {}, [], ""), size, touched, removable)


def doomed(*found: Weighed, most: int, age_s: float | None = None, now: float = 100.0) -> list[str]:
    return [gone.weighed.run.name for gone in plan(found, most_bytes=most, age_s=age_s, now=now)]


def test_the_oldest_go_until_the_rest_fits() -> None:
    three = weighed("c", 10, 3.0), weighed("a", 10, 1.0), weighed("b", 10, 2.0)
    assert doomed(*three, most=30) == []
    assert doomed(*three, most=29) == ["a"]
    assert doomed(*three, most=10) == ["a", "b"]
    assert doomed(*three, most=0) == ["a", "b", "c"]


def test_a_living_run_counts_and_never_goes() -> None:
    assert doomed(weighed("old", 50, 1.0, removable=False), weighed("new", 10, 2.0), most=20) == ["new"]


def test_too_old_goes_whatever_its_size() -> None:
    assert doomed(weighed("a", 1, 1.0), weighed("b", 1, 99.0), most=10**9, age_s=50.0) == ["a"]


def test_removed_runs_are_gone_everywhere_and_named() -> None:
    old, new = run("old-1", touched=1000.0), run("new-2", touched=2000.0)
    assert len(list(runs.registry_dir().iterdir())) == 2
    dry = prune(Settings(runs_bytes=25_000), [old, new], dry_run=True)
    assert [gone.weighed.run.name for gone in dry.runs] == ["old-1"]
    assert old.path.exists()
    found = prune(Settings(runs_bytes=25_000), [old, new], dry_run=False)
    assert [gone.weighed.run.name for gone in found.runs] == ["old-1"]
    assert [path.name for path in new.path.parent.iterdir()] == ["new-2"]
    assert [link.resolve() for link in runs.registry_dir().iterdir()] == [new.path.resolve()]
    assert runs.list_runs()[0].name == "new-2"


def test_a_run_that_is_taken_up_in_this_moment_stays_and_is_said() -> None:
    dead = run("busy-1")
    lock = runs.acquire_lock(dead.path)
    try:
        with pytest.raises(RltopError, match="already running"):
            remove_run(dead)
        found = prune(Settings(runs_bytes=0), [dead], dry_run=False)
        assert found.runs == []
        assert found.problems[0].startswith("busy-1: a daemon is already running")
        assert (dead.path / "journal.sqlite").exists()
    finally:
        os.close(lock)


def test_a_removal_that_was_cut_short_is_finished() -> None:
    stays = run("new-2")
    half = stays.path.parent / ".pruned-old-1-abcd"
    half.mkdir()
    assert [found.name for found in runs.list_runs()] == ["new-2"]
    prune(Settings(), [stays], dry_run=True)
    assert half.exists()
    prune(Settings(), [stays], dry_run=False)
    assert not half.exists()


def test_a_daemon_prunes_at_its_start_only_when_told_and_never_itself() -> None:
    old, own = run("old-1"), run("own-2", touched=1.0)
    assert tidy(Settings(runs_bytes=0), own.path) == []
    (said,) = tidy(Settings(runs_bytes=0, auto_prune=True), own.path)
    assert said.startswith("removed the dead run old-1 (")
    assert not old.path.exists()
    assert own.path.exists()


# ---------------------------------------------------------------- leftovers


def test_an_owned_directory_is_no_leftover_while_its_maker_lives(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    with owned_dir("rltop-train-", temp) as folder:
        assert find_leftovers([temp], now=LATER) == []
        assert folder.exists()
    assert not folder.exists()


def test_the_directory_of_a_killed_maker_goes_and_others_stay(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from pathlib import Path; from rltop.runs.leftovers import owned_dir\n"
            "with owned_dir('rltop-ray-', Path(sys.argv[1])) as folder:\n"
            "    print(folder, flush=True)\n"
            "    os.kill(os.getpid(), 9)",
            str(temp),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    folder = Path(made.stdout.strip())
    assert (folder / OWNER).exists()
    (temp / "rltop-ray-unmarked").mkdir()
    (temp / "rltop-other").mkdir()
    (temp / "rltop-ray-link").symlink_to(tmp_path)
    assert find_leftovers([temp], now=time.time()) == [], "it is too young"
    with subprocess.Popen(["sleep", "60"], cwd=folder) as child:
        assert find_leftovers([temp], now=LATER) == [], "a process works in it"
        child.kill()
    assert find_leftovers([temp], now=LATER, commands=[f"raylet --session-dir={folder}/session"]) == []
    assert [left.path for left in clean(now=LATER)] == [folder]
    assert sorted(path.name for path in temp.iterdir()) == ["rltop-other", "rltop-ray-link", "rltop-ray-unmarked"]


def test_socket_folders_go_when_nobody_listens(tmp_path: Path) -> None:
    base = tmp_path / "temp" / f"rltop-{os.getuid()}"
    alive, dead = base / "a", base / "d"
    for folder in (alive, dead):
        folder.mkdir(parents=True)
    listening, stale = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    try:
        os.chdir(base)  # the path of a unix socket is short
        listening.bind("a/view.sock")
        listening.listen()
        stale.bind("d/view.sock")
    finally:
        os.chdir(here)
    stale.close()
    assert find_leftovers([tmp_path / "temp"], now=time.time()) == [], "a daemon may be about to bind there"
    found = find_leftovers([tmp_path / "temp"], now=LATER)
    listening.close()
    assert [left.path for left in found] == [dead]
