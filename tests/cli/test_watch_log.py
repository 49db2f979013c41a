"""`rltop watch --log FILE`: a real daemon over a log, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.connect import Place
from rltop.cli.main import main
from rltop.cli.watch import Subjects
from rltop.cli.watch_far import watch_far
from rltop.cli.watch_places import checked_args, checked_logs, checked_ray, log_doubts
from rltop.errors import RltopError
from rltop.protocol.messages import LinesAnswer, LinesQuery
from rltop.runs import find_run
from tests.cli.test_watch import INFO, METRICS, SERVER, Sglang
from tests.daemon.slime_log import Plan, text
from tests.daemon.util import Viewer

Capture = pytest.CaptureFixture[str]
RAY_STATUS = "======== Autoscaler status: x ========\nNode status\nActive:\n 2 node_a\nUsage:\n 0.0/8.0 GPU\n"


def test_what_will_show_nothing_is_said_before_it_is_watched(tmp_path: Path) -> None:
    binary, text_file, empty = tmp_path / "bin.log", tmp_path / "t.log", tmp_path / "empty.log"
    binary.write_bytes(bytes(range(256)) * 8)
    text_file.write_text("a line\n")
    empty.touch()
    later = str(tmp_path / "later*.log")
    assert log_doubts([str(binary), str(text_file), str(empty), later]) == [
        f"log bin.log cannot be read: it is no text ({binary})",
        f"nothing matches {later} yet; it is looked for again",
    ]


def test_a_run_is_seen_from_its_log_alone(tmp_path: Path, runs_dir: Path, capsys: Capture) -> None:
    log, status, args = tmp_path / "train.log", tmp_path / "ray_status.txt", tmp_path / "run.sh"
    log.write_text(text(Plan(rollouts=9, dies_in=None)))
    status.write_text(RAY_STATUS)
    args.write_text("python train.py --rollout-batch-size 16 --lr 1e-6\n")
    words = ["watch", "--log", str(log), "--ray", str(status), "--args", str(args), "--headless", "--name", "w-1"]
    later = str(tmp_path / "later*.log")
    assert main([*words, "--log", later, "--json"]) == 0
    said = capsys.readouterr()
    assert f"nothing matches {later} yet" in said.err
    found = json.loads(said.out)
    assert found["logs"].pop() == later
    assert (found["logs"], found["ray"], found["args"], found["engines"]) == ([str(log)], str(status), str(args), [])
    try:
        with Viewer(find_run("w-1")) as viewer:
            viewer.hello()
            viewer.until_state(lambda state: state["check/rollout.text"]["status"] == "fail" and state["cluster"])
            state = viewer.state
            assert (state["run"]["state"], state["metric/train/grad_norm"]["step"]) == ("running", 8)
            assert (state["cluster"]["gpus"], state["run"]["args"]["lr"]) == (8.0, "1e-6")
            evidence = state["check/rollout.text"]["evidence"][0]
            answer = viewer.ask("lines?", LinesQuery(evidence["source"], evidence["line"], 0, 0)).body
            assert isinstance(answer, LinesAnswer)
            assert "rollout sample" in answer.lines[0] or "Finish rollout" in answer.lines[0]
            assert state["log/train.log"]["state"] == "followed"
            with log.open("a") as file:
                file.write("Job 'raysubmit_x' succeeded\n")
            viewer.until_state(lambda state: state["run"]["state"] == "done")
        assert main(["get", "checks", "--run", "w-1"]) == 0
        assert "weights.sync-garble" in capsys.readouterr().out
        assert main(["ps"]) == 0
        assert "w-1" in capsys.readouterr().out
    finally:
        assert main(["down", "w-1"]) == 0


def fail(what: Callable[[], object], code: int = 2) -> RltopError:
    with pytest.raises(RltopError) as raised:
        what()
    assert raised.value.exit_code == code
    return raised.value


@pytest.mark.parametrize(
    ("make", "typed", "says"),
    [
        ("", "none.log", "there is no such file"),
        ("", " ", "an empty path"),
        ("d/x.bin", "d", "the directory holds no log"),
        ("packed.log.gz", "packed.log.gz", "is packed with gzip"),
        ("", "/dev/null", "is neither a file nor a directory"),
        ("", "no\nsuch.log", "there is no such file"),
    ],
)
def test_logs_that_can_not_be_watched(tmp_path: Path, make: str, typed: str, says: str) -> None:
    if make:
        (tmp_path / make).parent.mkdir(exist_ok=True)
        (tmp_path / make).write_bytes(b"\x1f\x8b\0")
    error = fail(lambda: checked_logs([typed], tmp_path))
    assert says in error.what
    assert error.where.startswith("watch --log")
    assert error.do, "what to do next"
    assert all(line.startswith(("watch --log", "  why: ", "  do:  ")) for line in str(error).splitlines())


def test_a_pattern_need_not_match_yet_and_a_name_with_a_star_is_a_file(tmp_path: Path) -> None:
    assert checked_logs(["later*.log", "later*.log"], tmp_path) == [str(tmp_path / "later*.log")]
    (tmp_path / "a*.log").write_text("x")
    assert checked_logs(["a*.log", "./a*.log"], tmp_path) == [str(tmp_path / "a*.log")]


async def _down(url: str) -> Any:
    raise OSError("ConnectError: refused")


async def _up(url: str) -> Any:
    return {}


def test_a_cluster_that_does_not_answer_or_is_none(tmp_path: Path) -> None:
    assert "Ray does not answer" in fail(lambda: checked_ray("head:8265", tmp_path, _down), 1).what
    for place in ("ray://head:10001", "http://", "http://head:0", "http://a b"):
        assert "no address of a dashboard" in fail(lambda place=place: checked_ray(place, tmp_path, _up)).what  # type: ignore[misc]
    assert checked_ray("head", tmp_path, _up) == "http://head:8265"
    assert checked_ray("https://[::1]:1/", tmp_path, _up) == "https://[::1]:1"
    (tmp_path / "s.txt").write_text("hello")
    assert "no output of `ray status`" in fail(lambda: checked_ray("s.txt", tmp_path, _up)).what


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("a.sh", "", "holds no arguments"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "{}", "holds no arguments"),
        ("a.txt", "\0\0", "is no text"),
    ],
)
def test_arguments_that_are_none(tmp_path: Path, name: str, body: str, says: str) -> None:
    (tmp_path / name).write_text(body)
    error = fail(lambda: checked_args(name, tmp_path))
    assert (says in error.what, error.where.startswith("watch --args ")) == (True, True)
    assert "can not be read" in fail(lambda: checked_args("none.sh", tmp_path)).what


@pytest.mark.parametrize(
    "body",
    [
        'ray job submit --runtime-env-json=\'{"env_vars": {"A": "1"}}\' -- python3 train.py --lr 1 --kl-coef 0\n',
        "--lr 1 --kl-coef 0",
        "------- arguments -------\n  lr ......... 1\n  kl_coef .... 0\n",
        "Namespace(lr=1, kl_coef=0)",
        '{"lr": 1, "kl-coef": 0}',
    ],
)
def test_arguments_in_every_form(tmp_path: Path, body: str) -> None:
    from rltop.evidence.launch_file import read_launch_file
    from rltop.evidence.sink import Sink

    path, sink = tmp_path / "a.txt", Sink()
    path.write_text(body)
    read_launch_file(path, sink)
    assert sink.args[0].number("lr") == 1
    assert sink.args[0].number("kl_coef") == 0


def test_one_mistake_starts_nothing(tmp_path: Path, runs_dir: Path, capsys: Capture) -> None:
    (tmp_path / "t.log").write_text("x\n")
    words = ["watch", "--log", str(tmp_path / "t.log"), "--headless"]
    assert main([*words, "--ray", "http://127.0.0.1:1"]) == 1
    assert main([*words, "--args", str(tmp_path / "none")]) == 2
    assert main([*words, "--log", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().out == ""
    assert not (runs_dir / "runs").exists()


def test_what_is_named_is_looked_at_before_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    assert main(["watch", "--log", str(tmp_path / "none.log")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_far_away_the_same_words_are_typed_there(capsys: Capture) -> None:
    asked: list[list[str]] = []

    def run(argv: list[str], patience_s: float) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        doubt = (
            "motd\x1b[2J\n/t.log: it is empty so far\nrun oak-1 goes on: rltop attach oak-1   (rltop down oak-1 …)\n"
        )
        return subprocess.CompletedProcess(argv, 0, 'welcome {to} node7\n{"schema": 1, "run": "oak-1"}\n', doubt)

    place = Place("ssh://ana@node7:23")
    subjects = Subjects(logs=["~/a b.log"], ray="http://h:1", start="end")
    options: dict[str, Any] = {"control": False, "keep": False, "headless": True, "as_json": False, "ascii_only": False}
    assert watch_far(place, subjects, name=None, run=run, **options) == 0
    told = capsys.readouterr()
    assert told.out == "oak-1\n"
    assert told.err.splitlines() == [
        "node7: motd",
        "node7: /t.log: it is empty so far",
        "run oak-1 goes on: rltop attach ssh://ana@node7:23/oak-1",
    ]
    assert asked[0][-2] == "ana@node7"
    there = "rltop watch --log ~/'a b.log' --ray http://h:1 --from end --headless --json"
    assert asked[0][-1] == there
    place = Place("", via="kubectl exec -i pod --", remote_rltop="docker exec -i box rltop")
    watch_far(place, Subjects(logs=["/t.log"]), name="x", run=run, **options)
    assert asked[1][:9] == ["kubectl", "exec", "-i", "pod", "--", "docker", "exec", "-i", "box"]
    assert "rltop attach oak-1 --via 'kubectl exec -i pod --'" in capsys.readouterr().err


def test_what_rltop_says_far_away_is_said_here() -> None:
    def run(argv: list[str], patience_s: float) -> subprocess.CompletedProcess[str]:
        said = "motd\nrltop: watch --log x: there is no such file\n  do:  a pattern\n"
        return subprocess.CompletedProcess(argv, 2, "", said)

    options: dict[str, Any] = {"control": False, "keep": False, "headless": True, "as_json": False, "ascii_only": False}
    error = fail(lambda: watch_far(Place("ssh://node7"), Subjects(logs=["x"]), name=None, run=run, **options))
    assert "node7: watch --log x: there is no such file" in error.what


@pytest.fixture
def engine() -> Iterator[Sglang]:
    """A server that answers as SGLang does."""
    server = Sglang({"/model_info": INFO, "/server_info": SERVER, "/metrics": METRICS})
    yield server
    server.stop()


def test_an_engine_that_the_log_names_is_asked_and_never_made_to_run(
    engine: Sglang, tmp_path: Path, runs_dir: Path
) -> None:
    port = engine.url.rpartition(":")[2]
    log = tmp_path / "train.log"
    where = f"{{'host': '127.0.0.1', 'port': {port}, 'nccl_port': 1}}"
    log.write_text(f"(RolloutManager pid=4) [2026-03-01 10:00:00] rollout.py:911 - Ports for engine 0: {where}\n")
    assert main(["watch", "--log", str(log), "--headless", "--name", "w-1"]) == 0
    try:
        with Viewer(find_run("w-1")) as viewer:
            viewer.hello()
            viewer.until_state(lambda state: state["engine/0"]["state"] == "HEALTHY" and state["toggles/0"])
            cell = viewer.state["engine/0"]
            assert (cell["owner"], cell["weight_version"], cell["running"]) == ("other", "7", 3)
            with log.open("a") as file:
                file.write("health_monitor.py:153 - Health check failed for rollout engine 0. Killing actor.\n")
            viewer.until_state(lambda state: state["engine/0"]["state"] == "CRASHED")
            assert "its health monitor killed it (train.log:2" in viewer.state["engine/0"]["cause"]
    finally:
        assert main(["down", "w-1"]) == 0
    assert not {"GET /health", "GET /health_generate", "POST /generate"} & set(engine.asked)
