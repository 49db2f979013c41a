"""`get`, `ps`, `attach --once`, `up` and `down` against a real daemon."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from rltop.runs import RunInfo, find_run
from tests.daemon.util import Producer, Viewer, real_daemon, wait_for

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunInfo]:
    """A run with ten steps, one of them NaN."""
    with real_daemon(tmp_path_factory.mktemp("r"), "t-1") as info, Producer(info) as producer:
        producer.send("run", {"framework": "rltop", "num_rollout": 10})
        for step in range(10):
            producer.metrics(step, rollout__raw_reward=step / 10, train__grad_norm=float("nan") if step == 7 else 1.0)
        viewer = Viewer(info)
        viewer.hello()
        viewer.until_state(lambda state: (state.get("metric/train/grad_norm") or {}).get("step") == 9)
        viewer.close()
        yield info


def get_json(capsys: Capture, *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    assert found["schema"] == 1
    return found


def test_snapshot(run: RunInfo, capsys: Capture) -> None:
    for argv in (["get", "snapshot"], ["attach", "--once"], ["attach", "--once", "t-1"]):
        found = get_json(capsys, *argv)
        assert found["run"] == "t-1"
        assert found["state"]["run"]["framework"] == "rltop"
        assert found["state"]["metric/rollout/raw_reward"]["value"] == 0.9


def test_the_text_picture(run: RunInfo, capsys: Capture) -> None:
    assert main(["attach", "--once"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("run t-1  running  rltop")
    assert "rollout/raw_reward  9" in out
    assert err == ""


def test_metrics(run: RunInfo, capsys: Capture) -> None:
    assert get_json(capsys, "get", "metrics")["metrics"]["train/grad_norm"]["nan"] == 1


def test_series_are_exact_where_nothing_is_folded(run: RunInfo, capsys: Capture) -> None:
    both = get_json(capsys, "get", "series", "rollout/*", "metric/train/grad_norm")["series"]
    assert both["rollout/raw_reward"]["value"] == [step / 10 for step in range(10)]
    assert both["rollout/raw_reward"]["last"][3] == 0.3
    assert both["train/grad_norm"]["value"][6:9] == [1.0, "NaN", 1.0]
    folded = get_json(capsys, "get", "series", "rollout/raw_reward", "--buckets", "3")["series"]["rollout/raw_reward"]
    assert "value" not in folded
    empty = get_json(capsys, "get", "series", "rollout/raw_reward", "--lo", "50")["series"]["rollout/raw_reward"]
    assert empty["step"] == empty["value"] == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train/grad_nrm"], "close ones: train/grad_norm"),
        (["nothing/*"], "no metric 'nothing/*'"),
        (["train/grad_norm", "--lo", "5", "--hi", "3"], "--lo is above --hi"),
        (["train/grad_norm", "--lo", "nan"], "is not a step"),
    ],
)
def test_series_that_can_not_be_are_refused(run: RunInfo, argv: list[str], said: str, capsys: Capture) -> None:
    assert main(["get", "series", *argv]) == 2
    assert said in capsys.readouterr().err


def test_names_tell_what_was_renamed(runs_dir: Path, capsys: Capture) -> None:
    with real_daemon(runs_dir, "v-1") as info, Producer(info) as producer, closing(Viewer(info)) as viewer:
        producer.send("run", {"framework": "verl"})
        producer.send("metrics", {"values": {"actor/grad_norm": 0.5}, "step": 1})
        viewer.hello()
        viewer.until_state(lambda state: (state.get("metric/train/grad_norm") or {}).get("step") == 1)
        found = get_json(capsys, "get", "names", "--run", "v-1")["names"]
        assert found["train/grad_norm"]["reported"] == "actor/grad_norm"
        assert main(["get", "names", "--run", "v-1"]) == 0
        assert "dp_actor.py" in capsys.readouterr().out
        metrics = get_json(capsys, "get", "metrics", "--run", "v-1")["metrics"]
        assert set(metrics) == {"actor/grad_norm", "train/grad_norm"}


def test_sources_tell_what_was_lost(run: RunInfo, capsys: Capture) -> None:
    found = get_json(capsys, "get", "sources")
    assert (found["sources"]["trainer/0"]["records"], found["sources"]["trainer/0"]["lost"]) == (11, 0)
    assert found["roles"] == {}
    assert main(["get", "sources"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["trainer/0", "elsewhere", "1", "11"]


def test_series_keep_the_nan(run: RunInfo, capsys: Capture) -> None:
    series = get_json(capsys, "get", "series", "train/grad_norm", "--lo", "6", "--hi", "8")["series"]["train/grad_norm"]
    assert series["step"] == [6, 7, 8]
    assert series["nan"] == [0, 1, 0]
    assert series["last"] == [1, "NaN", 1]
    folded = get_json(capsys, "get", "series", "metric/train/grad_norm", "--buckets", "2")["series"]["train/grad_norm"]
    assert sum(folded["nan"]) == 1
    assert len(folded["step"]) <= 2


def test_a_metric_that_is_not_there_names_the_closest(run: RunInfo, capsys: Capture) -> None:
    assert main(["get", "series", "train/grad_nrom"]) == 2
    assert "close ones: train/grad_norm" in capsys.readouterr().err


def test_around(run: RunInfo, capsys: Capture) -> None:
    around = get_json(capsys, "get", "around", "7", "--window", "1")
    assert around["metrics"]["rollout/raw_reward"]["values"] == pytest.approx({"6": 0.6, "7": 0.7, "8": 0.8})
    assert around["metrics"]["train/grad_norm"]["values"] == {"6": 1, "7": "NaN", "8": 1}
    assert main(["get", "around", "7"]) == 0
    assert "rollout/raw_reward" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["checks", "engines", "events"])
def test_the_rest_answers_in_both_forms(run: RunInfo, capsys: Capture, what: str) -> None:
    assert isinstance(get_json(capsys, "get", what)[what], list | dict)
    assert main(["get", what]) == 0


def test_ps(run: RunInfo, capsys: Capture) -> None:
    rows = get_json(capsys, "ps")["runs"]
    assert [(row["run"], row["state"], row["reward"]) for row in rows] == [("t-1", "running", 0.9)]
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("t-1  running")


def test_up_and_down(runs_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nname = "tiny"\n[trainer]\ncommand = ["sh", "-c", "echo $GREETING; exec sleep 1000"]\n'
        '[env]\nGREETING = "hello"\n'
    )
    assert main(["up", str(config)]) == 0
    out, err = capsys.readouterr()
    try:
        assert out == "tiny\n"
        assert "rltop attach tiny" in err
        trainer = get_json(capsys, "get", "snapshot", "--run", "tiny")["state"]["trainer"]
        assert trainer["state"] == "running"
        assert main(["up", str(config)]) == 2
        assert "tiny" in capsys.readouterr().err
    finally:
        assert main(["down", "tiny"]) == 0
    assert not find_run("tiny").alive
    assert not Path(f"/proc/{trainer['pid']}").exists()
    assert (find_run("tiny").path / "trainer.log").read_text() == "hello\n"
    assert main(["down", "tiny"]) == 0
    assert "is not running" in capsys.readouterr().err


def test_a_run_that_has_ended_and_still_has_its_daemon_says_what_to_do(
    runs_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "tiny"\n[trainer]\ncommand = ["true"]\n')
    assert main(["up", str(config)]) == 0
    try:
        capsys.readouterr()
        assert main(["up", str(config)]) == 2
        err = capsys.readouterr().err
        assert "run 'tiny' has ended, but its daemon is still up" in err
        assert "rltop down tiny first" in err
    finally:
        assert main(["down", "tiny"]) == 0
    assert main(["up", str(config)]) == 0
    assert main(["down", "tiny"]) == 0


def test_a_failing_start_shows_only_what_this_start_said(runs_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "tiny"\n[trainer]\ncommand = ["sh", "-c", "echo the first one broke; exit 3"]\n')
    assert main(["up", str(config)]) == 1
    assert "the first one broke" in capsys.readouterr().err
    config.write_text('[run]\nname = "tiny"\n[trainer]\ncommand = ["sh", "-c", "exit 4"]\n')
    assert main(["up", str(config)]) == 1
    err = capsys.readouterr().err
    assert "the first one broke" not in err
    assert "ended with code 4; its log ends:\n(it is empty)" in err


def test_a_refused_start_leaves_no_run_behind(runs_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "two"\n[trainer]\ncommand = ["sleep", "1000"]\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["up", str(config), "--ingest-tcp", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    err = capsys.readouterr().err
    assert "the daemon of run 'two' did not start" in err
    assert "ddress already in use" in err
    assert list((runs_dir / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "mode", "said"),
    [
        ('["./no.sh"]', None, "there is no "),
        ('["./tell.sh"]', 0o600, "tell.sh is not executable"),
        ('["no-such-program-here"]', None, "there is no no-such-program-here"),
    ],
)
def test_a_hook_that_can_not_run_is_refused_with_its_line(
    argv: str, mode: int | None, said: str, runs_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[trainer]\ncommand = ["sleep", "1000"]\n\n[checks]\non_fail = {argv}\n')
    if mode is not None:
        (tmp_path / "tell.sh").write_text("#!/bin/sh\n")
        (tmp_path / "tell.sh").chmod(mode)
    assert main(["up", str(config)]) == 2
    err = capsys.readouterr().err
    assert f"{config}:5: can not run on_fail" in err
    assert said in err
    assert not (runs_dir / "runs").exists()


def test_a_hook_is_seen_from_the_folder_of_its_configuration(
    runs_dir: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "conf", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "tell.sh").write_text('#!/bin/sh\necho "$RLTOP_CHECK" > told\n')
    (folder / "tell.sh").chmod(0o700)
    script = (
        "from rltop import Reporter; import time\n"
        "with Reporter() as r:\n"
        "    r.run(framework='mine')\n"
        "    r.metrics({'train/grad_norm': float('nan')}, step=0, axis='train')\n"
        "    time.sleep(60)\n"
    )
    config = folder / "run.toml"
    config.write_text(
        f"[run]\nname = 'tiny'\n[trainer]\ncommand = {json.dumps([sys.executable, '-c', script])}\n"
        "[checks]\non_fail = ['./tell.sh']\n"
    )
    monkeypatch.chdir(elsewhere)
    assert main(["up", str(config)]) == 0
    try:
        wait_for(lambda: (folder / "told").exists() and (folder / "told").read_text())
    finally:
        assert main(["down", "tiny"]) == 0
    assert (folder / "told").read_text() == "train.nan\n"


def test_down_without_a_name_asks_which_when_there_are_several(runs_dir: Path, capsys: Capture) -> None:
    with real_daemon(runs_dir, "a"), real_daemon(runs_dir, "b"):
        assert main(["down"]) == 2
        assert "alive: " in capsys.readouterr().err
        assert find_run("a").alive
        assert find_run("b").alive
