"""`rltop engine …` against a daemon whose fleet has no processes (`tests.daemon.fake_fleet`)."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.engine import HEAD, ab_lines, block, changes_of, rows, signal_letters, toggle_words, why_words
from rltop.cli.main import main
from rltop.errors import RltopError
from rltop.runs import RunInfo
from tests.cli.terminal import terminal
from tests.daemon.util import Producer, Viewer, real_daemon, wait_for

Capture = pytest.CaptureFixture[str]
ENGINES = {"engines": {"model_path": "/m", "kind": "cpu", "count": 3}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunInfo]:
    """Three engines of the daemon's and one, `x`, that others run."""
    root = tmp_path_factory.mktemp("r")
    env = {"RLTOP_FAKE_PACE": "0.02", "PYTHONPATH": str(Path(__file__).parents[2])}
    with real_daemon(root, "e-1", config=ENGINES, module="tests.daemon.fake_fleet", env=env) as info:
        with Producer(info) as producer:
            producer.send("engine", {"id": "x", "state": "HEALTHY", "generation": 1})
        with Viewer(info) as viewer:
            viewer.hello()
            viewer.until_state(lambda state: all(state[f"engine/{name}"]["state"] == "HEALTHY" for name in "012x"))
            viewer.until_state(lambda state: state["op/1"]["state"] == "done")
        yield info


def json_of(capsys: Capture, *argv: str, code: int = 0) -> dict[str, Any]:
    assert main([*argv, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    assert found["schema"] == 1
    return found


def generation(capsys: Capture, engine: str) -> int:
    return int(json_of(capsys, "engine", "list", "--engine", engine)["engines"][engine]["generation"])


def refused(capsys: Capture, *argv: str, code: int = 2) -> str:
    assert main(["engine", *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_list(run: RunInfo, capsys: Capture) -> None:
    assert main(["engine", "list"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == list(HEAD)
    assert re.match(r"0 +HEALTHY +\S+ +✓···· +\d+ +default +- +- +cuda_graph=", lines[1])
    assert "HEALTHY (other's)" in lines[4]
    assert "3 of 3 serve; a rolling change keeps at least 1; required weights default (base)" in err
    assert "not rltop's: x" in err
    assert max(map(len, lines)) <= 120
    assert main(["engine", "list", "--engine", "0,x"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^engine 0\n  state +HEALTHY for ", out), "one block each"
    assert re.search(r"^engine x\n  state +HEALTHY \(other's\)", out, re.MULTILINE)
    found = json_of(capsys, "engine", "list", "--engine", "0,x")
    assert list(found["engines"]) == ["0", "x"]
    assert found["engines"]["0"]["owner"] == "rltop"
    assert found["engines"]["x"]["owner"] == "other"
    assert found["engines"]["0"]["toggle_choices"]["cuda_graph"]["choices"] == ["on", "off"]
    assert found["engines"]["x"]["toggle_choices"] is None
    assert found["fleet"]["total"] == 3
    assert found["ops"][0]["name"] == "engines-start"


def test_set_follows_the_operation_with_its_stages(run: RunInfo, capsys: Capture) -> None:
    before = generation(capsys, "0")
    assert main(["engine", "set", "cuda_graph=off", "--engine", "0", "--reason", "ticket 4"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"done in \d+\.\d s: engine 0 done\n", out)
    told = [line.split()[-1] for line in err.splitlines() if re.match(r" +\d+\.\d s ", line)]
    assert told == ["DRAINING", "LAUNCHING", "STALE", "HEALTHY"]
    assert "engine 0:\n  + --cuda_graph off\n" in err
    found = json_of(capsys, "engine", "set", "cuda_graph=on", "--engine", "0,1", "--reason", "back", "--as", "ana")
    assert (found["state"], found["targets"], found["reason"]) == ("done", ["0"], "back")
    assert found["unchanged"] == ["1"], "it is on there already"
    assert found["who"].startswith("ana (unverified")
    seconds = [stage["seconds"] for stage in found["stages"]]
    assert len(seconds) == 4
    assert seconds == sorted(seconds)
    assert found["seconds"] >= seconds[-1] > 0
    assert found["engines"]["0"]["generation"] == before + 2
    assert found["engines"]["0"]["toggles"] == {"cuda_graph": "on"}


def test_a_dry_run_prints_the_plan_and_does_nothing(run: RunInfo, capsys: Capture) -> None:
    before = generation(capsys, "1")
    assert main(["engine", "set", "launch-blocking=on", "--engine", "1", "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == ["engine 1:", "  + --launch_blocking on", "SetToggles of engine 1"]
    found = json_of(capsys, "engine", "restart", "--engine", "1", "--dry-run")
    assert found == {"schema": 1, "run": "e-1", "op": "", "dry_run": True, "plan": ["Restart of engine 1"]}
    assert generation(capsys, "1") == before


@pytest.mark.parametrize("command", ["restart", "revert", "stop", "start"])
def test_the_other_verbs(run: RunInfo, capsys: Capture, command: str) -> None:
    found = json_of(capsys, "engine", command, "--engine", "2")
    assert (found["name"], found["state"]) == (f"engine-{command}", "done")
    assert found["engines"]["2"]["state"] == ("STOPPED" if command == "stop" else "HEALTHY")


def test_what_fails_is_exit_code_1_with_its_reason(run: RunInfo, capsys: Capture) -> None:
    assert main(["engine", "restart", "--engine", "1", "--reason", "it can not start"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("failed in ")
    assert "why: its port is taken" in out
    assert json_of(capsys, "engine", "start", "--engine", "1")["state"] == "done"


def test_a_toggle_without_effect_is_exit_code_1_and_said_in_the_last_line(run: RunInfo, capsys: Capture) -> None:
    assert main(["engine", "set", "speculative=DFLASH", "--engine", "1,2"]) == 1
    out = capsys.readouterr().out
    words = "without effect on engine 1: speculative, without effect on engine 2: speculative"
    assert re.fullmatch(rf"done in \d+\.\d s, {words}: engine 1, 2 done\n", out)
    found = json_of(capsys, "engine", "set", "speculative=DFLASH", "--engine", "2", code=1)
    assert (found["state"], found["ignored"]) == ("done", {"2": ["speculative"]})
    assert json_of(capsys, "engine", "set", "cuda_graph=off", "--engine", "2")["ignored"] == {}, (
        "nothing of this change"
    )
    assert json_of(capsys, "engine", "set", "cuda_graph=off", "--engine", "1,2")["unchanged"] == ["2"]
    assert main(["engine", "set", "cuda_graph=on", "--engine", "1"]) == 0
    capsys.readouterr()
    assert main(["engine", "set", "cuda_graph=on", "--engine", "1,2"]) == 0
    assert "engine 1 left alone: so already" in capsys.readouterr().out
    for engine in "12":
        assert json_of(capsys, "engine", "set", "speculative=off", "--engine", engine)["ignored"] == {}


def test_mistakes(run: RunInfo, capsys: Capture) -> None:
    assert "did you mean 'cuda_graph'?" in refused(capsys, "set", "cuda_grph=off", "--engine", "0")
    assert "'cuda_graph' is no TOGGLE=VALUE" in refused(capsys, "set", "cuda_graph", "--engine", "0")
    assert "there are 0, 1, 2, x" in refused(capsys, "restart", "--engine", "7")
    assert "rltop did not start it, so it can not restart it" in refused(capsys, "restart", "--engine", "x")
    both = refused(capsys, "set", "speculative=NGRAM", "deepep=auto", "--engine", "0")
    assert "refused-by-rules" in both
    assert "deepep=auto does not go with speculative" in both
    assert "--engine" in refused(capsys, "restart")
    assert "no such engine: '9'" in refused(capsys, "logs", "--engine", "9")
    assert "engine x has no log" in refused(capsys, "logs", "--engine", "x", code=1)
    assert "is not running" in refused(capsys, "cancel", "99")
    assert "--end takes no toggles" in refused(capsys, "ab", "cuda_graph=off", "--end")


def test_an_operator_who_comes_second_is_told_and_ctrl_c_leaves_the_operation_going(
    run: RunInfo, capsys: Capture
) -> None:
    hold = run.path / "hold"
    hold.touch()
    with terminal("engine", "restart", "--engine", "0", env={}) as first:
        first.read_until("DRAINING")
        busy = refused(capsys, "stop", "--engine", "0,1", code=1)
        found = re.search(r"busy\)\n +why: engine 0: operation (\d+) \(engine-restart, by .*\) is not over yet", busy)
        assert found is not None, busy
        op = found[1]
        first.process.send_signal(signal.SIGINT)
        first.read_until(f"operation {op} goes on without this command: rltop engine cancel {op} stops it")
        assert first.end() == 130
    ops = {row["op"]: row["state"] for row in json_of(capsys, "engine", "list")["ops"]}
    assert ops[op] == "running"
    assert main(["engine", "cancel", op]) == 0
    capsys.readouterr()
    ops = {row["op"]: row["state"] for row in json_of(capsys, "engine", "list")["ops"]}
    assert ops[op] == "cancelled"
    assert main(["engine", "restart", "--engine", "0", "--no-wait"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"operation \d+\n", out)
    assert "Restart of engine 0" in err, "the plan is told, whoever waits for it"
    hold.unlink()
    wait_for(lambda: json_of(capsys, "engine", "list")["ops"][-1]["state"] == "done")


def test_over_a_pipe_as_over_ssh(run: RunInfo, capsys: Capture) -> None:
    via = ("--run", "e-1", "--via", f"{sys.executable} -m")
    assert json_of(capsys, "engine", "list", *via)["run"] == "e-1"
    assert json_of(capsys, "engine", "restart", "--engine", "0", *via)["state"] == "done"
    assert main(["engine", "logs", "--engine", "0", "-n", "1", *via]) == 0
    assert capsys.readouterr().out == "HEALTHY\n"


def test_logs_follow_over_a_restart(run: RunInfo, capsys: Capture) -> None:
    with terminal("engine", "logs", "--engine", "1", "-n", "1", "-f", env={}) as shown:
        shown.read_until("HEALTHY")
        assert main(["engine", "restart", "--engine", "1"]) == 0
        shown.read_until("engine 1: generation", "LAUNCHING", behind=len("HEALTHY"))
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 130


def test_http_of_an_engine_that_others_run(run: RunInfo, capsys: Capture) -> None:
    assert "has told no URL" in refused(capsys, "http", "flush", "--engine", "x")
    found = json_of(capsys, "engine", "http", "flush", "--engine", "0")
    assert (found["state"], found["text"]) == ("done", "flush asked of engine 0")


def test_a_run_without_engines_and_a_dead_one(runs_dir: Path, capsys: Capture) -> None:
    with real_daemon(runs_dir, "none") as info:
        wait_for(lambda: (info.path / "journal.sqlite").exists())
        assert main(["engine", "list"]) == 0
        capsys.readouterr()
        assert "the run has no engines" in refused(capsys, "restart", "--engine", "0")
        assert main(["engine", "ab"]) == 1
        assert "no A/B comparison" in capsys.readouterr().err
    told = refused(capsys, "restart", "--engine", "0", "--run", "none", code=1)
    assert "is not running: there is nothing to control" in told
    assert main(["engine", "list", "--run", "none"]) == 0, "what it left can be read"


# ---------------------------------------------------------------- words


def test_changes() -> None:
    assert changes_of(["cuda-graph=off", "attention_backend=fa3"]) == {"cuda_graph": "off", "attention_backend": "fa3"}
    for words in (["x"], ["=x"], ["x="], ["x=1", "x=2"]):
        with pytest.raises(RltopError):
            changes_of(words)


def test_signals_toggles_and_causes_in_words() -> None:
    good, unknown = {"ok": True, "text": "", "t": 1.0}, {"ok": None, "text": "", "t": None}
    assert signal_letters({}) is None
    assert signal_letters({"probe": unknown}) == "·····"
    assert signal_letters({"process": good, "probe": unknown}) == "✓····"
    assert signal_letters({"process": good, "trainer": {"ok": False, "text": "no answer", "t": 1.0}}) == "✓··T·"
    engine = {"toggles": {"cuda_graph": "on", "radix_cache": "on"}, "wanted": {"radix_cache": "off"}}
    assert toggle_words(engine) == "cuda_graph=on radix_cache=on->off"
    ignored = {**engine, "ignored": ["radix_cache"]}
    assert toggle_words(ignored) == "cuda_graph=on radix_cache=on (wanted off: the flag had no effect)"
    assert toggle_words({}) is None
    odd = {"cuda_graph": "on", "speculative": "NGRAM", "launch_blocking": "on"}
    usual = "cuda_graph=on speculative=NGRAM"
    assert toggle_words({"toggles": odd}, every=False) == f"launch_blocking=on {usual}"
    moved = {"toggles": {**odd, "radix_cache": "on"}, "wanted": {"radix_cache": "off"}}
    assert toggle_words(moved, every=False) == f"radix_cache=on->off launch_blocking=on {usual}"
    cell = {"cause": "crashed: illegal memory access", "backoff_until": 130.0, "restarts": 2, "pending": ""}
    assert why_words(cell, 100.0) == "crashed: illegal memory access; again in 30s; 2 restarts"
    assert (why_words({"restarts": 1}, 100.0), why_words({"restarts": 0}, 100.0)) == ("1 restart", None)
    paused = {"state": "HEALTHY", "cause": "answers again", "paused": {"by": "ana", "since": 40.0}}
    assert why_words(paused, 100.0) == "paused by ana since 1m00s: rltop engine http continue"


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_of_the_table_is_longer_than_it_may_be_whatever_engines_say(width: int) -> None:
    long = "word " * 120
    toggles = {"cuda_graph": "off", "speculative": "EAGLE:/a/path/of/a/draft/model", "deepep": "off"}
    signals = {name: {"ok": False, "text": long} for name in ("process", "probe", "progress", "trainer", "log")}
    crash = {
        "id": "0",
        "state": "QUARANTINED",
        "since": 1.0,
        "generation": 117,
        "weight_version": "12345",
        "running": 64,
    }
    crash |= {"tokens_per_s": 12345.6, "signals": signals, "toggles": toggles, "cause": f"died: {long}", "restarts": 7}
    other = {"id": "rollout-engine-of-node-17", "state": "CAPTURING", "owner": "other", "weight_version": "v" * 60}
    lines = rows([crash, other], 7_000.0, width)
    assert max(map(len, lines)) <= width
    assert "PHGTL" in lines[0].split()
    assert "died: word" in "\n".join(lines), "some of the reason, beside the rest or below it"
    if width >= 120:
        assert len(rows([crash, {**crash, "id": "1"}], 7_000.0, width)) == 3
    whole = "\n".join(block(crash, 7_000.0))
    for text in (long.strip(), "speculative=EAGLE:/a/path/of/a/draft/model", "deepep=off", "7 restarts"):
        assert text in whole


def test_what_is_about_one_engine_is_asked_of_each_that_is_named(run: RunInfo, capsys: Capture) -> None:
    assert main(["engine", "http", "flush", "--engine", "0,2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "engine 0: done: flush asked of engine 0",
        "engine 2: done: flush asked of engine 2",
    ]
    assert main(["engine", "http", "flush", "--engine", "all"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "engine 1: done: flush asked of engine 1"
    assert "engine x: refused:" in out[3]
    assert "has told no URL" in out[3]
    found = json_of(capsys, "engine", "http", "flush", "--engine", "0,1", "--dry-run")
    assert [(op["target"], op["state"]) for op in found["ops"]] == [("0", "plan"), ("1", "plan")]


def test_the_lines_of_a_comparison() -> None:
    row = {"name": "tokens/s", "a": 100.0, "b": 120.0, "diff": 20.0, "low": 5.0, "high": 35.0, "n": 40}
    found = {"changes": {"cuda_graph": "off"}, "since": 40.0, "rows": [row], "verdict": "B is faster"}
    lines = ab_lines(found, 100.0)
    assert lines[0] == "B has cuda_graph=off; since 1m00s"
    assert lines[2].split() == ["tokens/s", "100", "120", "20", "5", "…", "35", "40"]
    assert lines[-1] == "B is faster"
