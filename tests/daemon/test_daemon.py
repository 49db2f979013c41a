"""A real daemon process: viewers of every kind, its own death and return, bad input and bad disks."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from rltop import runs
from rltop.daemon import schema, spawn
from rltop.daemon.__main__ import main
from rltop.errors import RltopError
from rltop.protocol.codec import MAGIC, encode
from rltop.protocol.messages import Accepted, Ack, Err, Ping, Rejected, SeriesQuery
from rltop.runs import RunInfo
from tests.daemon.util import Producer, Viewer, real_daemon, wait_for

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunInfo]:
    """One daemon for the tests that leave it as they found it, but for what they feed."""
    with real_daemon(tmp_path_factory.mktemp("shared")) as run:
        yield run


def kill(run: RunInfo) -> None:
    """SIGKILL to the daemon, and wait until its lock is free."""
    os.kill(run.pid, signal.SIGKILL)
    os.waitpid(run.pid, 0)
    assert runs.lock_holder(run.path) is None


def reached(name: str, step: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a metric has come to a step."""
    return lambda state: state.get(f"metric/{name}", {}).get("step", -1) >= step


# ---------------------------------------------------------------- viewers


def test_sockets_and_run_json_are_for_the_owner_only(shared: RunInfo) -> None:
    for address in shared.sockets.values():
        path = Path(address.removeprefix("ipc://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((shared.path / "run.json").stat().st_mode) == 0o600


def test_a_viewer_that_reads_nothing_slows_nobody_and_ends_on_the_true_state(shared: RunInfo) -> None:
    payload = {"engine": "x" * 200_000}
    with Viewer(shared, rcvhwm=1) as stuck, Viewer(shared) as neighbour, Producer(shared, pid=2) as producer:
        stuck.hello()
        neighbour.hello()
        # Queries need no credit: their answers fill the stuck one's pipe until the daemon may send it nothing more.
        for step in range(400):
            producer.metrics(step, stuck=float(step))
            stuck.send("series?", SeriesQuery(["stuck"], buckets=10_000), message_id=f"s{step}")
            if step % 50 == 0:
                producer.send("weights", {"version": str(step), "rollout_id": step, "engines": payload})
                neighbour.until_state(reached("stuck", step))
        neighbour.until_state(reached("stuck", 399))
        neighbour.until_state(lambda s: s["daemon"]["refused"] > 0)
        stuck.until_state(reached("stuck", 399))
        assert stuck.state["metric/stuck"]["value"] == 399.0


def test_a_viewer_that_does_not_acknowledge_gets_two_frames_and_then_everything_at_once(shared: RunInfo) -> None:
    with Viewer(shared) as slow, Viewer(shared) as quick, Producer(shared, pid=3) as producer:
        slow.acking = False
        slow.hello()
        quick.hello()
        slow.until(lambda message: message.header.t == "snap")
        for step in range(20):
            producer.metrics(step, slow=float(step))
            producer.send("log", {"level": "info", "text": f"line {step}"})
            quick.until_state(reached("slow", step))
        slow.until(lambda message: message.header.t == "delta")
        slow.until(lambda message: message.header.t == "tick")
        slow.until(lambda message: message.header.t == "tick")
        assert slow.seq == 2, "two frames in flight and no more"
        slow.acking = True
        slow.send("ack", Ack(2))
        slow.until_state(lambda s: s["metric/slow"]["step"] == 19)
        slow.until_event(text="line 19")
        lines = [event["text"] for event in slow.events if event["text"].startswith("line ")]
        assert lines == [f"line {step}" for step in range(20)], "events are never left out"
        assert slow.gaps == []
        assert slow.frames.count("delta") <= 4


def test_a_viewer_that_comes_back_resumes_where_it_was(shared: RunInfo) -> None:
    with Viewer(shared) as first, Producer(shared, pid=4) as producer:
        first.hello()
        first.until_state(lambda s: s)
        with Viewer(shared) as again:
            again.state, again.epoch, again.ver, again.eseq = first.state, first.epoch, first.ver, first.eseq
            producer.send("log", {"level": "info", "text": "while you were away"})
            first.until_event(text="while you were away")
            assert again.hello(resume=True).resumed
            again.until_event(text="while you were away")
            assert "snap" not in again.frames
            assert again.state["run"] == first.state["run"]


def test_ticks_come_though_nothing_happens_and_say_how_old_the_sources_are(shared: RunInfo) -> None:
    with Viewer(shared) as viewer, Producer(shared, role="quiet", pid=5) as producer:
        viewer.hello()
        producer.send("log", {"level": "info", "text": "once"})
        viewer.until(lambda message: viewer.tick is not None and "quiet/0" in viewer.tick.ages)
        assert viewer.tick is not None
        assert viewer.tick.viewers >= 1
        assert viewer.tick.lag_ms >= 0
        assert "quiet/0" in viewer.tick.ages


def test_bytes_that_are_no_message_are_answered_or_counted_and_kill_nothing(shared: RunInfo) -> None:
    junk = [[b""], [b"x"], [MAGIC], [MAGIC, b"\xc1", b""], [MAGIC, b"\x80", b"\x80"], [b"RL2", b"", b""], [b"\0"] * 99]
    with Viewer(shared) as viewer, Producer(shared, pid=6) as producer:
        for frames in junk:
            viewer.raw(frames)
            assert isinstance(viewer.until(lambda message: message.header.t == "err").body, Err)
            producer.raw(frames)
        producer.raw(encode("ping", Ping()))
        unknown = viewer.ask("ping", Ping()).body
        assert isinstance(unknown, Err)
        assert unknown.code == "hello-first"
        viewer.hello()
        producer.metrics(1, alive=1.0)
        viewer.until_state(lambda s: "metric/alive" in s)
        viewer.raw([MAGIC, b"\x82\xa1v\x63\xa1t\xa5hello", b"\x80"])
        refused = viewer.until(lambda message: message.header.t == "err").body
        assert isinstance(refused, Err)
        assert refused.code == "proto"
        assert "1 to 1" in refused.why
        assert viewer.ask("ping", Ping()).header.t == "pong"


def test_records_of_another_run_are_refused(shared: RunInfo) -> None:
    with Viewer(shared) as viewer, Producer(shared, pid=7) as producer:
        viewer.hello()
        producer.run = "another"
        producer.metrics(1, foreign=1.0)
        viewer.until(lambda m: any("another" in event["text"] for event in viewer.events))
        assert "metric/foreign" not in viewer.state


def test_operators_act_and_viewers_only_look(shared: RunInfo) -> None:
    with Viewer(shared) as viewer, Viewer(shared, "control", name="ana") as operator:
        viewer.hello()
        operator.hello()
        refused = viewer.command("note", args={"text": "no"})
        assert isinstance(refused, Rejected)
        assert refused.code == "not-control"
        done = operator.command("note", args={"text": "yes"}, reason="because")
        assert isinstance(done, Accepted)
        event = viewer.until_event(kind="op", op=done.op)
        assert "yes" in event["text"]
        assert "ana (unverified" in event["text"]
        no_trainer = operator.command("stop-run")
        assert isinstance(no_trainer, Rejected)


def test_the_checks_look_at_the_records(shared: RunInfo) -> None:
    with Viewer(shared) as viewer, Producer(shared, pid=8) as producer:
        viewer.hello()
        producer.send("run", {"framework": "rltop", "num_rollout": 5})
        values = {"train/grad_norm": float("nan"), "train/loss": 0.1}
        producer.send("metrics", {"values": values, "step": 0, "axis": "train", "rollout_id": 0, "step_in_rollout": 0})
        viewer.until_state(lambda s: s.get("check/train.nan", {}).get("status") == "fail")
        assert viewer.until_event(kind="verdict", id="train.nan")["to"] == "fail"
        viewer.until_state(lambda s: "train.nan" in s.get("checks", {}).get("root_causes", ()))


# ---------------------------------------------------------------- life and death


def test_a_second_daemon_for_a_run_is_refused(shared: RunInfo) -> None:
    argv = [sys.executable, "-m", "rltop.daemon", "--run-dir", str(shared.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "already running" in done.stderr
    assert str(shared.pid) in done.stderr
    assert "Traceback" not in done.stderr
    with Viewer(shared) as viewer:
        viewer.hello()


def test_killed_and_started_again_it_has_a_new_epoch_and_everything_that_was_written(tmp_path: Path) -> None:
    with real_daemon(tmp_path) as run:
        with Viewer(run, "control") as viewer, Producer(run) as producer:
            viewer.hello()
            producer.send("run", {"framework": "rltop"})
            for step in range(700):
                producer.metrics(step, m=float(step))
            producer.send("log", {"level": "info", "text": "before"})
            viewer.until_state(lambda s: s.get("metric/m", {}).get("step") == 699)
            note = viewer.command("note", message_id="uuid-1", args={"text": "kept"})
            assert isinstance(note, Accepted)
            viewer.until_state(lambda s: s.get("op/1", {}).get("state") == "done")
            # A command is answered once it is on disk, and with it everything before.
            assert isinstance(viewer.command("note", args={"text": "the last words"}), Accepted)
            old = viewer.epoch, viewer.eseq, viewer.ver
            kill(run)
        sockets = [Path(address.removeprefix("ipc://")) for address in run.sockets.values()]
        assert all(path.exists() for path in sockets), "stale sockets of the dead daemon"
        again = spawn.start_daemon("t-1")
        assert again.pid != run.pid
        with Viewer(again, "control") as viewer:
            viewer.epoch, viewer.eseq, viewer.ver = old
            assert not viewer.hello(resume=True).resumed
            assert viewer.epoch != old[0]
            viewer.until_state(lambda s: s)
            assert viewer.state["metric/m"]["step"] == 699
            assert viewer.state["run"]["framework"] == "rltop"
            assert any(event["text"] == "before" for event in viewer.events)
            answer, _ = viewer.series(["m"], buckets=1000)
            assert answer.cols["m"]["n"] == 700
            assert viewer.command("note", message_id="uuid-1", args={"text": "kept"}) == note
            page = viewer.event_page(text="KEPT")
            assert len(page.events) == 1, "told once, by the first daemon"
            assert [event["eseq"] for event in viewer.events] == list(range(1, viewer.eseq + 1))


def test_the_trainer_outlives_a_killed_daemon_and_the_next_one_stops_it(tmp_path: Path) -> None:
    with real_daemon(tmp_path, trainer=SLEEPER) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            trainer = viewer.until_state(lambda s: s.get("trainer"))["trainer"]["pid"]
            # The key must be in the journal before the kill for the next daemon to know of it.
            viewer.until(lambda message: message.header.t == "tick")
        kill(run)
        assert psutil.pid_exists(trainer)
        again = spawn.start_daemon("t-1", trainer=SLEEPER)
        with Viewer(again) as viewer:
            viewer.hello()
            viewer.until_state(lambda s: s.get("trainer"))
            assert (viewer.state["trainer"]["pid"], viewer.state["trainer"]["state"]) == (trainer, "running")
        spawn.stop_daemon(again)
        wait_for(lambda: not _lives(trainer), "the adopted trainer was not stopped")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_whole_run_from_trainer_to_viewer(tmp_path: Path) -> None:
    code = (
        "import os\nfrom rltop.reporter import Reporter\n"
        "with Reporter() as r:\n"
        "    r.run(framework='test', num_rollout=3)\n"
        "    for i in range(3):\n"
        "        with r.phase('rollout', i): r.metrics({'rollout/raw_reward': i / 2}, step=i)\n"
        "    r.bye('done', os.environ['RLTOP_RUN'])\n"
    )
    with real_daemon(tmp_path, "whole-1", trainer=[sys.executable, "-c", code]) as run:
        assert run.command[:2] == [sys.executable, "-c"]
        with Viewer(run) as viewer:
            viewer.hello()
            viewer.until_state(lambda s: s.get("trainer", {}).get("state") == "exited")
            viewer.until_state(lambda s: s["run"]["state"] == "done")
            assert viewer.state["run"]["text"] == "whole-1"
            assert viewer.state["trainer"]["exit_code"] == 0
            assert viewer.state["metric/rollout/raw_reward"]["value"] == 1.0
            viewer.until_state(lambda s: s["source/trainer/0"]["records"] == 11)
            assert viewer.state["source/trainer/0"]["lost"] == 0


def test_a_trainer_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    trainer = [sys.executable, "-c", "raise SystemExit('no GPU here')"]
    with real_daemon(tmp_path, trainer=trainer) as run, Viewer(run) as viewer:
        viewer.hello()
        viewer.until_state(lambda s: s["run"]["state"] == "failed")
        assert "no GPU here" in viewer.state["run"]["text"]
        assert viewer.state["trainer"]["exit_code"] == 1


def test_stop_run_stops_the_trainer_and_shutdown_the_daemon_too(tmp_path: Path) -> None:
    with real_daemon(tmp_path, trainer=SLEEPER) as run, Viewer(run, "control") as operator:
        operator.hello()
        accepted = operator.command("stop-run", reason="enough")
        assert isinstance(accepted, Accepted)
        operator.until_state(lambda s: s.get("op/1", {}).get("state") == "done")
        operator.until_state(lambda s: s["run"]["state"] == "interrupted")
        assert isinstance(operator.command("shutdown"), Accepted)
        operator.until(lambda message: message.header.t == "bye")
        wait_for(lambda: runs.lock_holder(run.path) is None)
        os.waitpid(run.pid, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_in_good_order(tmp_path: Path, number: int, code: int) -> None:
    with real_daemon(tmp_path, trainer=SLEEPER) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            trainer = viewer.until_state(lambda s: s.get("trainer"))["trainer"]["pid"]
            os.kill(run.pid, number)
            viewer.until(lambda message: message.header.t == "bye")
        assert os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1]) == code
        assert not _lives(trainer)
        assert not any(Path(address.removeprefix("ipc://")).exists() for address in run.sockets.values())
        assert (run.path / "daemon.log").read_text() == ""
        with closing(schema.connect(run.path / "journal.sqlite", read_only=True)) as connection:
            texts = [text for (text,) in connection.execute("SELECT text FROM events ORDER BY eseq")]
        assert any(signal.Signals(number).name in text for text in texts)
        assert any("run interrupted" in text for text in texts)


def test_a_daemon_that_does_not_react_is_killed_and_what_may_be_left_is_said(tmp_path: Path) -> None:
    with real_daemon(tmp_path) as run:
        os.kill(run.pid, signal.SIGSTOP)
        with pytest.raises(RltopError, match=r"did not stop within 0\.2 s and was killed"):
            spawn.stop_daemon(run, timeout_s=0.2)
        assert runs.lock_holder(run.path) is None


# ---------------------------------------------------------------- bad input, bad disks


def test_a_journal_of_a_newer_version_stops_the_start_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    run_dir = runs.make_run_dir("t-1")
    with closing(schema.connect(run_dir / "journal.sqlite")) as connection:
        schema.prepare(connection, run_dir, wal=True)
        schema.set_meta(connection, "schema_version", 99)
    with pytest.raises(RltopError, match="did not start") as caught:
        spawn.start_daemon("t-1")
    assert "newer rltop" in caught.value.why
    assert "pip install --upgrade" in caught.value.why
    assert "Traceback" not in caught.value.why
    assert runs.list_runs() == []


def test_engines_of_a_newer_version_stop_the_start_and_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    run_dir = runs.make_run_dir("t-1")
    slot = run_dir / "engines" / "0" / "slot.json"
    slot.parent.mkdir(parents=True)
    slot.write_text('{"schema": 2, "state": "SLEEPING"}')
    with pytest.raises(RltopError, match="did not start") as caught:
        spawn.start_daemon("t-1", config={"engines": {}}, trainer=["touch", str(tmp_path / "begun")])
    assert caught.value.exit_code == 2
    assert "this engine's slot was written by a newer rltop" in caught.value.why
    assert "it ended with exit code 2" in caught.value.why
    assert "Traceback" not in caught.value.why
    assert slot.read_text() == '{"schema": 2, "state": "SLEEPING"}'
    assert not (tmp_path / "begun").exists()
    assert not (run_dir / "journal.sqlite").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "/no/such/file.json"], "cannot read the configuration"),
        (["--run", "a/b"], "cannot be the name of a run"),
        (["--run-dir", "/proc/rltop-1"], "cannot make the directory"),
    ],
)
def test_bad_arguments_are_one_message_and_exit_code_2(
    tmp_path: Path,
    argv: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_on_a_disk_that_takes_nothing_more_it_goes_on_and_says_so(tmp_path: Path) -> None:
    with real_daemon(tmp_path) as run, Viewer(run) as viewer, Producer(run) as producer:
        viewer.hello()
        viewer.until_state(lambda s: s)
        # Files of the daemon may not grow any more: what it writes fails as on a full disk.
        limits = resource.prlimit(run.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        for step in range(50):
            producer.metrics(step, m=float(step))
        viewer.until_state(lambda s: s["daemon"]["journal"] != "ok")
        problem = viewer.until_event(source="journal")
        assert problem["level"] == "error"
        assert "goes on in memory" in problem["text"]
        producer.metrics(50, m=50.0)
        viewer.until_state(lambda s: s.get("metric/m", {}).get("step") == 50)
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, limits)
        spawn.stop_daemon(run)
        with closing(schema.connect(run.path / "journal.sqlite", read_only=True)) as connection:
            (points,) = connection.execute("SELECT count(*) FROM points").fetchone()
        assert points == 51, "what could not be written at once was written later"


def test_on_a_disk_that_takes_nothing_at_all_it_does_not_start_and_says_why(tmp_path: Path) -> None:
    # `ulimit -f 0`: no file may grow, for the daemon and nobody else.
    command = 'ulimit -f 0; exec "$0" -m rltop.daemon --run-dir "$1"'
    argv = ["bash", "-c", command, sys.executable, str(tmp_path / "t-1")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "cannot write in the run directory" in done.stderr
    assert "File too large" in done.stderr


def test_a_run_that_is_started_again_begins_anew_and_keeps_its_history(tmp_path: Path) -> None:
    ends = [sys.executable, "-c", "from rltop.reporter import Reporter\nwith Reporter() as r: r.bye('done')"]
    with real_daemon(tmp_path, trainer=ends) as run, Viewer(run) as viewer:
        viewer.hello()
        viewer.until_state(lambda s: s["trainer"]["state"] == "exited" and s["run"]["state"] == "done")
    with real_daemon(tmp_path, trainer=[sys.executable, "-c", "raise SystemExit(3)"]) as run, Viewer(run) as viewer:
        viewer.hello()
        viewer.until_state(lambda s: s["run"]["state"] == "failed")
        assert any(event["text"] == "run done" for event in viewer.events)


def test_run_json_says_what_the_run_was_started_with(tmp_path: Path) -> None:
    with real_daemon(tmp_path, config={"preset": "demo"}) as run:
        fields = json.loads((run.path / "run.json").read_text())
    assert fields["config"] == {"preset": "demo"}
    assert (fields["name"], fields["pid"], fields["proto"]) == ("t-1", run.pid, [1, 1])


def test_a_peer_that_is_no_zeromq_at_all_harms_nobody(shared: RunInfo) -> None:
    import socket

    for address in shared.sockets.values():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address.removeprefix("ipc://"))
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 1000)
    with zmq.Context() as context, context.socket(zmq.SUB) as wrong:
        wrong.linger = 0
        wrong.connect(shared.sockets["view"])
        with Viewer(shared) as viewer:
            viewer.hello()
