"""Engines' processes on one machine, with shell scripts in the place of engines: nothing is lost, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rltop.engines import ports, processes
from rltop.engines.gpu_memory import Holder, Reading, parse_smi, visible
from rltop.engines.host import Host
from rltop.engines.launcher import MARKER, Launched, LaunchSpec, LostNode
from rltop.engines.processes import Ident, alive, ident
from rltop.errors import RltopError
from tests.engines.stand_in import ENDS_WELL, ESCAPES, SERVES, spec, until
from tests.faults.test_disk_faults import mounted


class Started:
    """Hosts' engines, killed at the end of a test."""

    def __init__(self) -> None:
        self.host = Host()
        self._all: list[tuple[Host, Launched]] = []

    def __call__(self, wanted: LaunchSpec, host: Host | None = None, *, ready: bool = True) -> Launched:
        host = host or self.host
        launched = host.start(wanted)
        self._all.append((host, launched))
        if ready:
            until(lambda: "ready" in text(launched), "it did not get ready")
        return launched

    def end(self) -> None:
        for host, launched in reversed(self._all):  # generations of one slot share its lock
            host.kill(launched)
            left = host.remains(launched)
            assert left.clean, left


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    started.end()


def text(launched: Launched) -> str:
    return Path(launched.log).read_text()


def child_of(launched: Launched) -> Ident:
    """The process that the script named as its child."""
    found = ident(int(text(launched).split("child ")[1].split()[0]))
    assert found is not None
    return found


def leader_of(launched: Launched) -> Ident:
    return Ident(launched.pid, launched.birth)


def keeper_of(launched: Launched) -> Ident:
    found = ident(launched.keeper_pid)
    assert found is not None
    return found


# ---------------------------------------------------------------------- start and look


def test_an_engine_leads_its_own_session_and_carries_its_marker(tmp_path: Path, start: Started) -> None:
    wanted = spec(tmp_path, generation=4)
    launched = start(wanted)
    assert os.getsid(launched.pid) == launched.pid
    assert psutil.Process(launched.pid).environ()[MARKER] == launched.marker == f"{wanted.run}/0/4"
    assert psutil.Process(launched.pid).ppid() == launched.keeper_pid
    seen = start.host.look(launched)
    assert (seen.alive, seen.exit_code, seen.ended, seen.lock_held) == (True, None, None, True)
    assert seen.log_size == len(text(launched))
    assert start.host.read_log(launched, 0, 5) == b"child"
    assert start.host.read_log(launched, 10_000, 5) == b""


def test_what_an_engine_inherits(tmp_path: Path, start: Started) -> None:
    environ = {"PATH": os.environ["PATH"], "RLTOP_JOB": "trainer", "CUDA_LAUNCH_BLOCKING": "1", "A": "1", "B": "1"}
    wanted = spec(tmp_path, "env; echo ready", env={"B": "2"}, unset=("CUDA_LAUNCH_BLOCKING",))
    launched = start(wanted, Host(environ=environ))
    found = dict(line.partition("=")[::2] for line in text(launched).splitlines())
    assert (found["A"], found["B"], found["PYTHONUNBUFFERED"]) == ("1", "2", "1")
    assert "CUDA_LAUNCH_BLOCKING" not in found
    assert "RLTOP_JOB" not in found, "the end of the trainer clears away whoever carries its marker"


def test_the_environment_that_an_engine_shows_holds_nothing_but_switches(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path, env={"CUDA_LAUNCH_BLOCKING": "1", "HF_TOKEN": "hunter2"}))
    found = start.host.environ(launched)
    assert found is not None
    assert found["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "HF_TOKEN" not in found
    assert start.host.environ(replace(launched, birth="another")) is None


@pytest.mark.parametrize(("body", "code"), [("exit 3", 3), ("exit 0", 0), ("kill -9 $$", -9)])
def test_how_an_engine_ended_is_known_from_the_first_look_on(
    tmp_path: Path, start: Started, body: str, code: int
) -> None:
    launched = start(spec(tmp_path, f"echo ready; {body}"))
    seen = until(lambda: (look := start.host.look(launched)).alive is False and look)
    assert seen.exit_code == code
    assert seen.ended is not None
    assert seen.ended >= launched.started
    until(lambda: not start.host.look(launched).lock_held)


def test_children_are_seen_and_missed(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path))
    child = child_of(launched)
    # A process is first seen under the name of the one that forked it, and then under its own.
    until(lambda: start.host.look(launched).children == ((child.pid, "sleep 600"),))
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: not start.host.look(launched).alive or not start.host.look(launched).children)


# ---------------------------------------------------------------------- ports


def test_servers_that_bind_late_get_ports_of_their_own_that_stay_free_for_them(tmp_path: Path, start: Started) -> None:
    first = start(spec(tmp_path, 'echo "$@"; echo ready; sleep 600'))
    second = start(spec(tmp_path / "", "echo ready; sleep 600", engine_id="1", lock=str(tmp_path / "1")))
    one, two = start.host.look(first).port, start.host.look(second).port
    assert f"--port {one}" in text(first)
    assert abs(one - two) >= 700
    with pytest.raises(OSError, match="in use"), socket.socket() as unlucky:
        unlucky.bind(("127.0.0.1", one))
    with socket.create_server(("127.0.0.1", one)), socket.create_connection(("127.0.0.1", one)):
        pass  # the server itself is let in: asyncio and uvicorn set SO_REUSEADDR as `create_server` does


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RltopError, match=f"port {port} is in use") as failed:
            Host().start(spec(tmp_path, port=port))
    assert f"held by pid {os.getpid()}" in failed.value.why
    assert not (tmp_path / "engines").exists()


def test_the_ports_of_a_machine_can_be_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.reserve("127.0.0.1") as one:
        monkeypatch.setattr(ports, "RESERVED", (one.getsockname()[1],))
        with ports.reserve("127.0.0.1") as other:  # then any free one will do
            assert other.getsockname()[1] != one.getsockname()[1]
    with pytest.raises(RltopError, match="cannot bind"):
        ports.reserve("192.0.2.1")


# ---------------------------------------------------------------------- ending


def test_terminate_reaches_the_leader_alone(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path, ENDS_WELL))
    child = child_of(launched)
    start.host.terminate(launched)
    seen = until(lambda: (look := start.host.look(launched)).alive is False and look)
    assert (seen.exit_code, seen.lock_held) == (0, True)
    assert [pid for pid, _ in seen.children] == [child.pid], "an orphan stays in sight"
    left = start.host.remains(launched)
    assert [pid for pid, _ in left.processes] == [child.pid]
    assert not left.clean
    assert launched.keeper_pid in [pid for pid, _ in left.lock_holders]


@pytest.mark.parametrize("body", [SERVES, ESCAPES], ids=["in its session", "in none of its own"])
def test_a_killed_leader_leaves_nothing_behind(tmp_path: Path, start: Started, body: str) -> None:
    launched = start(spec(tmp_path, body))
    child = child_of(launched)
    os.kill(launched.pid, signal.SIGKILL)
    seen = until(lambda: (look := start.host.look(launched)).alive is False and look)
    assert seen.exit_code == -9
    assert alive(child)
    assert seen.lock_held, "the orphan is the keeper's child now, and the keeper holds the lock for it"
    start.host.kill(launched)
    assert not alive(child)
    assert start.host.remains(launched).clean
    start.host.kill(launched)  # safe to repeat


def test_kill_does_what_term_does_not(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path, "trap '' TERM; echo ready; while :; do sleep 600; done"))
    start.host.terminate(launched)
    start.host.kill(launched)
    seen = start.host.look(launched)
    assert (seen.alive, seen.exit_code, seen.children, seen.lock_held) == (False, -9, (), False)
    assert start.host.look(launched) == seen


def test_the_keeper_survives_what_is_meant_for_the_engine(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(launched.keeper_pid, number)
    os.kill(launched.pid, signal.SIGTERM)
    seen = until(lambda: (look := start.host.look(launched)).alive is False and look)
    assert seen.exit_code == -15


def test_without_its_keeper_an_engine_goes_on_and_is_still_ended_whole(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path, ESCAPES))
    child = child_of(launched)
    until(lambda: start.host.look(launched).children)
    keeper = keeper_of(launched)
    os.kill(keeper.pid, signal.SIGKILL)
    until(lambda: not alive(keeper))
    seen = start.host.look(launched)
    assert (seen.alive, seen.lock_held) == (True, True), "the engine inherited the lock"
    os.kill(launched.pid, signal.SIGKILL)
    seen = until(lambda: (look := start.host.look(launched)).alive is False and look)
    assert (seen.exit_code, seen.ended) == (None, None), "nobody is left who knows"
    start.host.kill(launched)
    assert not alive(child)


def test_a_keeper_that_is_stuck_does_not_hold_the_slot_for_ever(
    tmp_path: Path, start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltop.engines.host.KEEPER_S", 0.2)
    launched = start(spec(tmp_path))
    os.kill(launched.keeper_pid, signal.SIGSTOP)
    send = processes.send

    def late(process: Ident, number: signal.Signals) -> bool:
        """As on a machine that is crowded: what was sent has not happened yet."""
        if process.pid != launched.keeper_pid:
            return send(process, number)
        threading.Timer(0.2, send, (process, number)).start()
        return True

    monkeypatch.setattr(processes, "send", late)
    start.host.kill(launched)
    assert start.host.remains(launched).clean


def test_strangers_are_named_and_left_alone(tmp_path: Path, start: Started) -> None:
    launched = start(spec(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as stranger:
        other = ident(stranger.pid)
        assert other is not None
        # Its number, as if it had been given away since.
        reused = replace(launched, pid=stranger.pid, birth=launched.birth[:-1] + "x", marker=launched.marker + "x")
        assert not start.host.look(reused).alive
        start.host.terminate(reused)
        start.host.kill(reused)
        assert alive(other)
        assert alive(leader_of(launched)), "nor was the engine taken for its neighbour"
        stranger.kill()


def test_a_run_of_the_same_name_elsewhere_is_a_stranger(tmp_path: Path, start: Started) -> None:
    one = start(spec(tmp_path, run="twin"))
    other = start(spec(tmp_path, run="twin", directory=str(tmp_path / "b"), lock=str(tmp_path / "lock")), Host())
    assert one.marker == other.marker
    start.host.kill(one)
    assert alive(leader_of(other))
    assert Host().adopt(str(tmp_path / "c"), one.marker) is None


def test_until_its_keeper_has_said_how_it_ended_an_engine_counts_as_alive(tmp_path: Path) -> None:
    now = 0.0
    host = Host(clock=lambda: now)
    launched = host.start(spec(tmp_path, "exec sleep 600"))
    os.kill(launched.keeper_pid, signal.SIGSTOP)  # a machine so crowded that it gets no turn
    os.kill(launched.pid, signal.SIGKILL)
    until(lambda: not alive(leader_of(launched)))
    assert host.look(launched).alive
    now = 3.0
    seen = host.look(launched)
    assert (seen.alive, seen.exit_code) == (False, None), "but not for ever"
    os.kill(launched.keeper_pid, signal.SIGCONT)
    until(lambda: host.look(launched).exit_code == -9)
    until(lambda: not host.look(launched).lock_held)


def test_an_engine_ends_with_the_process_that_it_is_tied_to(tmp_path: Path, start: Started) -> None:
    with subprocess.Popen(["sleep", "600"]) as raylet:
        launched = start(spec(tmp_path, ENDS_WELL), Host(tether=ident(raylet.pid)))
        child = child_of(launched)
        assert start.host.look(launched).alive
        raylet.kill()
        raylet.wait()
    until(lambda: not alive(leader_of(launched)))
    assert "bye" in text(launched), "it is asked first"
    until(lambda: not alive(child))
    until(lambda: not start.host.look(launched).lock_held)


# ---------------------------------------------------------------------- one process tree per slot


def test_an_orphan_keeps_the_next_generation_out(tmp_path: Path, start: Started) -> None:
    first = start(spec(tmp_path, ENDS_WELL))
    child = child_of(first)
    start.host.terminate(first)
    until(lambda: not start.host.look(first).alive)
    with pytest.raises(RltopError, match="engine 0 still has a process") as refused:
        start.host.start(spec(tmp_path, generation=2))
    assert str(child.pid) in refused.value.why
    assert not (tmp_path / "engines" / "0" / "2" / "record.json").exists()
    start.host.kill(first)
    assert start.host.look(start(spec(tmp_path, generation=2))).alive


def test_of_two_starts_at_once_one_is_refused(tmp_path: Path, start: Started) -> None:
    barrier = threading.Barrier(2)

    def one(generation: int) -> Launched | RltopError:
        barrier.wait()
        try:
            return start(spec(tmp_path, generation=generation))
        except RltopError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, (1, 2)))
    assert sorted(type(result).__name__ for result in results) == ["Launched", "RltopError"]


# ---------------------------------------------------------------------- what cannot be started


@pytest.mark.parametrize(("name", "why"), [("/no/such/python", "No such file"), ("plain", "Permission denied")])
def test_an_interpreter_that_cannot_run_is_one_message(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "plain").write_text("not a program")
    python = name if name.startswith("/") else str(tmp_path / name)
    with pytest.raises(RltopError, match="cannot start engine 0") as failed:
        Host().start(spec(tmp_path, python=python))
    assert failed.value.where == python
    assert why in failed.value.why
    assert not processes.locked(tmp_path / "engines" / "0" / "lock")


def test_a_directory_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("a file")
    with pytest.raises(RltopError, match="cannot write in the engine's directory") as failed:
        Host().start(spec(tmp_path))
    assert failed.value.where.startswith(str(tmp_path / "engines"))


def test_a_full_disk_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=256k", "tmpfs", at=tmp_path / "disk") as real:
        if not real:
            pytest.skip("no file system may be mounted here")
        disk = tmp_path / "disk"
        counts = f"i=0; while :; do i=$((i+1)); echo line $i; echo $i > {tmp_path}/count; sleep 0.02; done"
        wanted = spec(tmp_path, counts, directory=str(disk / "1"), lock=str(disk / "lock"))
        (disk / "1").mkdir()
        (disk / "1" / "stdout.log").touch()
        (disk / "lock").touch()
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        host = Host()
        launched = host.start(wanted)
        try:
            until(lambda: (tmp_path / "count").exists() and int((tmp_path / "count").read_text() or 0) > 5)
            assert host.look(launched).alive
            assert not (disk / "1" / "record.json").exists()
            adopted = Host().adopt(wanted.directory, wanted.marker)
            assert adopted is not None
            assert (adopted.pid, adopted.birth, adopted.keeper_pid) == (
                launched.pid,
                launched.birth,
                launched.keeper_pid,
            )
        finally:
            host.kill(launched)
        assert host.remains(launched).clean


# ---------------------------------------------------------------------- adoption

DAEMON = """
import sys
sys.path[:0] = [{root!r}]
from pathlib import Path
from rltop.engines.host import Host
from tests.engines.stand_in import spec
print(Host().start(spec(Path(sys.argv[1]), run="adopted-" + sys.argv[2])).pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_of_a_killed_daemon_is_adopted(tmp_path: Path, start: Started) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", DAEMON.format(root=root), str(tmp_path), tmp_path.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        daemon.kill()
    wanted = spec(tmp_path, run=f"adopted-{tmp_path.name}")
    assert start.host.adopt(wanted.directory, wanted.marker + "1") is None
    launched = start.host.adopt(wanted.directory, wanted.marker)
    assert launched is not None
    try:
        assert launched.pid == pid
        assert start.host.look(launched).alive
    finally:
        start.host.kill(launched)
    assert start.host.look(launched).exit_code == -9


def test_an_engine_that_ended_while_nobody_looked_is_adopted_with_its_exit_code(tmp_path: Path, start: Started) -> None:
    wanted = spec(tmp_path, "echo ready; exit 7")
    first = start(wanted)
    until(lambda: not start.host.look(first).lock_held)
    later = Host()
    launched = later.adopt(wanted.directory, wanted.marker)
    assert launched == first
    assert (later.look(first).alive, later.look(first).exit_code) == (False, 7)


def test_the_orphans_of_an_engine_without_a_record_are_found_by_their_marker(tmp_path: Path, start: Started) -> None:
    wanted = spec(tmp_path, ENDS_WELL)
    launched = start(wanted)
    child = child_of(launched)
    keeper = keeper_of(launched)
    leader = leader_of(launched)
    os.kill(keeper.pid, signal.SIGKILL)
    os.kill(leader.pid, signal.SIGKILL)
    until(lambda: not alive(keeper) and not alive(leader))
    (Path(wanted.directory) / "record.json").unlink()
    later = Host()
    found = later.adopt(wanted.directory, wanted.marker)
    assert found is not None
    assert not later.look(found).alive
    later.kill(found)
    assert not alive(child)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"marker": "other"}', '{"marker": "MARKER", "pid": "x"}'])
def test_a_broken_record_is_no_record(tmp_path: Path, content: str) -> None:
    wanted = spec(tmp_path)
    Path(wanted.directory).mkdir(parents=True)
    (Path(wanted.directory) / "record.json").write_text(content.replace("MARKER", wanted.marker))
    assert Host().adopt(wanted.directory, wanted.marker) is None


def test_a_record_holds_no_environment(tmp_path: Path, start: Started) -> None:
    wanted = spec(tmp_path, env={"SECRET": "hunter2"}, args=("--api-key", "hunter3"))
    launched = start(wanted)
    record = (Path(launched.directory) / "record.json").read_text()
    assert "hunter" not in record
    assert json.loads(record)["pid"] == launched.pid


# ---------------------------------------------------------------------- GPU memory


def test_gpu_memory_of_ours_is_waited_for_and_that_of_others_named(tmp_path: Path, start: Started) -> None:
    readings: list[Holder] = []
    host = Host(gpus=lambda: Reading("nvml", tuple(readings)))
    launched = start(spec(tmp_path, env={"CUDA_VISIBLE_DEVICES": "1"}), host)
    readings += [
        Holder(0, "GPU-a", launched.pid, 10),
        Holder(1, "GPU-b", launched.pid, 44000),
        Holder(1, "GPU-b", os.getpid(), 500),
    ]
    host.kill(launched)
    left = host.remains(launched)
    assert [(use.index, use.pid, use.mib, use.ours) for use in left.gpu] == [
        (1, launched.pid, 44000, True),
        (1, os.getpid(), 500, False),
    ], "its process is gone, its memory not yet; the other device is not its own"
    assert not left.clean
    assert "python" in left.gpu[1].name
    del readings[1]
    left = host.remains(launched)
    assert left.clean, "a stranger's memory is told, and not waited for"
    assert [use.ours for use in left.gpu] == [False]


def test_a_gpu_shared_with_the_runs_own_engines_and_trainer_is_nothing_to_tell(tmp_path: Path, start: Started) -> None:
    readings: list[Holder] = []
    host = Host(gpus=lambda: Reading("nvml", tuple(readings)))
    launched = start(spec(tmp_path), host)
    other = start(
        spec(tmp_path, engine_id="1", directory=str(tmp_path / "engines" / "1" / "1"), lock=str(tmp_path / "1")), host
    )
    with (
        subprocess.Popen(["sleep", "600"], env={**os.environ, "RLTOP_RUN_DIR": str(tmp_path)}) as trainer,
        subprocess.Popen(["sleep", "600"], env={**os.environ, "RLTOP_RUN_DIR": str(tmp_path) + "2"}) as stranger,
        # As SGLang's children, which write their title over their environment.
        subprocess.Popen(
            ["sh", "-c", "env -i sleep 600 & echo $!; wait"],
            env={**os.environ, "RLTOP_RUN_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        ) as parent,
    ):
        assert parent.stdout is not None
        bare = psutil.Process(int(parent.stdout.readline()))
        until(lambda: bare.name() == "sleep")
        assert not bare.environ()
        pids = [launched.pid, other.pid, child_of(other).pid, trainer.pid, stranger.pid, bare.pid]
        readings += [Holder(0, "GPU-a", pid, 1092) for pid in pids]
        seen = until(lambda: len(found := host.remains(launched).gpu) == 2 and found)
        assert [(use.pid, use.ours) for use in seen] == [(launched.pid, True), (stranger.pid, False)]
        readings.clear()
        bare.kill()
        trainer.kill()
        stranger.kill()


def test_what_nvidia_smi_prints() -> None:
    gpus = "0, GPU-aa\n1, GPU-bb\n"
    apps = "GPU-bb, 4123, 44088\nGPU-aa, 77, [N/A]\nNo running processes found\nGPU-cc, 1, 2\n"
    found = parse_smi(gpus, apps)
    assert found == Reading("nvidia-smi", (Holder(1, "GPU-bb", 4123, 44088), Holder(0, "GPU-aa", 77, 0)))
    assert visible(found.holders, None) == found.holders
    assert visible(found.holders, "1") == found.holders[:1]
    assert visible(found.holders, "GPU-a") == found.holders[1:]
    assert visible(found.holders, "") == ()


def test_a_lost_node_keeps_its_words_when_it_travels() -> None:
    import pickle

    lost = pickle.loads(pickle.dumps(LostNode("node gone", where="n1", exit_code=1)))
    assert (type(lost), str(lost), lost.exit_code) == (LostNode, "n1: node gone", 1)


def test_a_start_that_the_lock_forbids_touches_nothing_of_the_one_that_runs(tmp_path: Path, start: Started) -> None:
    """Also not when its number is given a second time: its record may be all that is known of it."""
    launched = start(spec(tmp_path))
    folder = Path(launched.directory)
    (folder / "port").write_text("4711")
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert {"record.json", "port", "stdout.log"} <= set(before)
    with pytest.raises(RltopError, match="still has a process"):
        start.host.start(spec(tmp_path))
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    assert Host().adopt(launched.directory, launched.marker) == launched
