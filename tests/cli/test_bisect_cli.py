"""`rltop bisect …` without engines: what is said of a bisection, refused, and read from a record on disk."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rltop.bisect.story import Story
from rltop.bisect.story_of import story_of
from rltop.cli.bisect_act import _away
from rltop.cli.bisect_export import excerpt
from rltop.cli.bisect_show import Narrator, exit_code, lines
from rltop.cli.engine import Ask, refused
from rltop.cli.main import main
from rltop.client import Client
from rltop.daemon.bisect_record import Crash, Ending, Record, Records, TrialRow
from rltop.engines.ground import Ground
from rltop.engines.requests import Config, Required
from rltop.engines.trials import Subject
from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, Rejected
from rltop.train.cpu_engine.faults import VARIABLE
from rltop.train.cpu_engine.process import CRASH_VARIABLE
from tests.bisect.stories import NOW, ended, found, running, trial
from tests.daemon.test_bisect_culprits import until_crash
from tests.daemon.util import Viewer, real_daemon

Capture = pytest.CaptureFixture[str]


def story(cell: dict[str, object]) -> Story:
    made = story_of(cell)
    assert made is not None
    return made


def test_status_in_words() -> None:
    told = "\n".join(lines(story(running()), "night", NOW, 100))
    assert told.startswith("bisection 3 of run night: searching; so far cuda_graph x speculative (71%)")
    assert "kernel     build_tree_efficient, block 12, 0, 0 (core dump)" in told
    assert "time       58 min of at most 24 h, begun 1h00m ago; 20 to 90 min left" in told
    assert "fact       kernel build_tree_efficient (speculative decoding): speculative x15" in told
    assert "6 trials: 2 running, 2 crashed, 1 quiet, 1 lost" in told
    assert "only speculative" in told
    assert "next, engine 1: try only cuda_graph" in told
    assert max(map(len, told.splitlines())) <= 100


def test_an_engine_that_is_not_back_is_said_and_is_a_failure() -> None:
    cell = found(restored={"0": "original", "1": "its disk is full"})
    assert "NOT BACK   engine 1: its disk is full" in "\n".join(lines(story(cell), "night", NOW, 100))
    assert exit_code(story(cell)) == 1
    assert exit_code(story(found())) == 0
    assert exit_code(story(ended("failed", "the disk is full"))) == 1


def test_the_narrator_tells_each_thing_once() -> None:
    narrator = Narrator()
    first = narrator.news(story(running()))
    (over,) = [line for line in first if "trial 2 on engine 0" in line]
    assert over.split()[0] != first[-1].split()[0], "it has the time of its end"
    assert "(so far cuda_graph x speculative 71%)" in first[-1]
    assert narrator.news(story(running())) == []
    crashed = [*running()["trials"][:4], trial(5, ["deepep", "overlap_schedule"], "crashed", 6.0)]
    told = narrator.news(story(running(trials=crashed)))
    assert len(told) == 1
    assert "trial 5 on engine 1: crashed after 6.0 min, without deepep, overlap_schedule, ima/" in told[0]
    told = narrator.news(story(running(state="paused", trials=crashed)))
    assert "paused: no traffic" in told[0]
    told = narrator.news(story(found(trials=crashed)))
    assert "found: cuda_graph x speculative (97%): crashes with nothing else on" in told[0]
    assert "engine 0: back on its own flags" in told[1]


def test_what_is_no_trial_and_what_does_not_count_is_told() -> None:
    trials = [
        *running()["trials"],
        trial(7, ["deepep"], "crashed", 2.0, counts=False, fingerprint="oom/serve/1a2b3c"),
    ]
    more = {
        "trials": trials,
        "unserved": "no engine serves: both are on trial",
        "kernel_stage": "cuda-gdb reads the core dump of trial 2",
        "kernel_runs": [{"engine": "1", "generation": 9, "why": "once more, with core dumps", "outcome": "running"}],
        "outside": [{"engine": "3", "generation": 1, "minutes": 7.5, "fingerprint": "ima/decode-graph/656fb6"}],
        "dropped": {"0": "somebody stopped it"},
    }
    told = "\n".join(lines(story(running(**more)), "night", NOW, 200))
    for words in (
        "NO SERVICE no engine serves: both are on trial",
        "kernel now cuda-gdb reads the core dump of trial 2",
        "kernel run engine 1: once more, with core dumps: running; no trial",
        "meanwhile  engine 3, which was not on trial, crashed after 7.5 min with everything on",
        "left out   engine 0: somebody stopped it",
        "7 trials: 2 running, 2 crashed, 1 quiet, 1 lost, 1 crashed of another kind",
        "uncounted  2 not counted: 1 lost (no port was free), 1 another crash (oom/serve/1a2b3c)",
    ):
        assert words in told, words
    narrator = Narrator()
    first = "\n".join(narrator.news(story(running(**more))))
    for words in ("no engine serves", "cuda-gdb reads", "for the kernel, no trial: engine 1", "engine 0 takes no part"):
        assert words in first, words
    assert narrator.news(story(running(**more))) == []


def test_a_narrow_terminal_loses_no_word() -> None:
    note = "its source line is not known: there is no cuda-gdb here; where there is one: cuda-gdb -batch -ex bt"
    told = lines(story(running(notes=[note])), "night", NOW, 60)
    assert " ".join(" ".join(told).split()).count(note) == 1
    assert max(map(len, told)) <= 60


def test_the_log_excerpt_is_around_the_first_fault() -> None:
    data = "\n".join([*(f"line {n}" for n in range(100)), "CUDA error: boom", *(f"after {n}" for n in range(100))])
    crash = {"line": 512, "evidence": ["stdout.log:3: line 2", "stdout.log:512: CUDA error: boom"]}
    found_lines = excerpt(data.encode(), crash)
    assert found_lines[0] == "line 88"
    assert "CUDA error: boom" in found_lines
    assert excerpt(b"a\nb", {}) == ["a", "b"]
    counts = "\n".join(f"[1] coredump: SM {n}/132 has finished state collection" for n in range(1, 133))
    cored = f"a batch\n{counts}\n[1] coredump: Detected an exception\nafter".encode()
    crash = {"line": 134, "evidence": ["stdout.log:134: [1] coredump: Detected an exception"]}
    assert excerpt(cored, crash) == ["a batch", "[1] coredump: Detected an exception", "after"]
    assert excerpt(b"", {}) == []


# ---------------------------------------------------------------------- commands


def record(run_dir: Path) -> None:
    """A finished bisection, with the evidence of its crash."""
    toggles = ("cuda_graph", "speculative")
    config = Config(args=("--speculative-algorithm", "NGRAM", "--api-key", "s3cr3t"), env={"HF_TOKEN": "hf_x"})
    rows = [
        TrialRow(n=1, engine="0", asked_on=("speculative",), outcome="quiet", minutes=40.0, started=NOW, ended=NOW + 9),
        TrialRow(n=2, engine="0", asked_on=("cuda_graph",), outcome="crashed", minutes=4.0, started=NOW, ended=NOW + 9),
    ]
    Records(run_dir).write(
        Record(
            id="1",
            state="found",
            mode="in-fleet",
            engines=("0",),
            subject=Subject(
                id="0", kind="sglang", model_path="/data/mallory/qwen", launcher="local", config=config,
                version="0.5.23", generation=2, state="HEALTHY", runs=True, busy="",
            ),
            ground=Ground(
                toggles=toggles, off=dict.fromkeys(toggles, "off"), on={"cuda_graph": "on", "speculative": "NGRAM"},
                fixed={}, together={}, config=config, pins=(), notes=(),
            ),
            crash=Crash(
                engine="0", generation=1, fingerprint="ima/decode/abc123", kind="ima", phase="decode",
                cause="died on 10.1.2.3 in /home/mallory/x.py",
            ),
            weights=Required(version="default", source="base"),
            started=NOW,
            ended=NOW + 60,
            budget_min=60.0,
            restart_min=2.0,
            who="mallory",
            reason="a secret project",
            trials=rows,
            verdict=Ending(state="found", culprit=("cuda_graph",), words="cuda_graph", p=0.96, text="cuda_graph: sure"),
            restored={"0": "original"},
        )
    )  # fmt: skip
    folder = run_dir / "engines" / "0" / "1"
    folder.mkdir(parents=True)
    crash = {
        "crash": {"line": 2, "evidence": ["stdout.log:2: CUDA error"]},
        "versions": {"torch": "2.9"},
        "node": "nn7",
    }
    (folder / "crash.json").write_text(json.dumps(crash))
    (folder / "crash.log").write_text("on nn7\nCUDA error in /home/mallory/y.py\n")


def test_a_finished_bisection_is_read_without_a_daemon(tmp_path: Path, capsys: Capture) -> None:
    with real_daemon(tmp_path, "gone") as info:
        assert main(["bisect", "status"]) == 1
        assert "run 'gone' has no bisection" in capsys.readouterr().err
        assert main(["bisect", "start", "--yes"]) == 2
        assert "rltop: bisect start: refused (bad-args)\n  why: " in capsys.readouterr().err
        for given in (["--toggles", ""], ["--toggles", " , "], ["--on", ""]):
            assert main(["bisect", "start", "--yes", *given]) == 2
            assert f"rltop: bisect start {given[0]}: {given[1]!r} names nothing\n  do:  " in capsys.readouterr().err
        assert main(["bisect", "stop"]) == 2
        assert "rltop: bisect stop: refused (bad-args)\n  why: " in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLTOP_DIR", str(tmp_path))
        record(info.path)
        assert main(["bisect", "status", "--run", "gone"]) == 0
        assert "found: cuda_graph (96%)" in capsys.readouterr().out
        assert main(["bisect", "status", "--run", "gone", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["bisect"]["verdict"]["culprit"] == ["cuda_graph"]
        assert main(["bisect", "status", "--run", "gone", "--id", "7"]) == 1
        assert "no bisection '7'\n  why: it has 1\n  do:  --id 1," in capsys.readouterr().err
        assert main(["bisect", "status"]) == 0, "no run is alive: the newest that has one"
        assert "bisection 1 of run gone (no run is alive; the newest that has one)" in capsys.readouterr().out
        assert main(["bisect", "export", "--to", "json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["state"] == "found"
        assert "bisection 1 of run gone (no run is alive" in err
        with real_daemon(tmp_path, "other"):
            assert main(["bisect", "status"]) == 1
            assert (
                "run 'other' has no bisection\n  why: none was begun in it\n  do:  --run gone"
                in capsys.readouterr().err
            )
        assert main(["bisect", "export", "--run", "gone"]) == 0
        told = capsys.readouterr().out
        assert "# Illegal memory access in decode with cuda_graph (SGLang 0.5.23)" in told
        assert "--api-key '***'" in told
        assert "CUDA error in PATH/y.py" in told
        assert "on HOST" in told
        for word in ("mallory", "s3cr3t", "hf_x", "10.1.2.3", "secret project", "nn7"):
            assert word not in told, word
        for command in ("pause", "resume", "stop"):
            assert main(["bisect", command, "--run", "gone"]) == 1, "it can not be reached"
        capsys.readouterr()
        assert main(["bisect", "export", "--run", "gone", "-o", str(tmp_path / "no" / "report.md")]) == 1
        assert "the report cannot be written" in capsys.readouterr().err
        file = tmp_path / "report.json"
        assert main(["bisect", "export", "--run", "gone", "--to", "json", "-o", str(file)]) == 0
        data = json.loads(file.read_text())
        assert data["smallest_on"] == ["cuda_graph"]
        assert "--speculative-algorithm" not in data["smallest_argv"]
        assert "--speculative-algorithm" in data["crashed_argv"]
        (info.path / "bisect" / "1" / "record.json").write_text("{")
        assert main(["bisect", "export", "--run", "gone"]) == 1
        assert "it cannot be read" in capsys.readouterr().err


def test_a_bisection_whose_daemon_is_gone_is_not_shown_as_going_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    run_dir = tmp_path / "runs" / "cut"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text("{}")
    record(run_dir)
    (left,), _ = Records(run_dir).read_all()
    left.state, left.verdict, left.ended = "running", None, None
    Records(run_dir).write(left)
    for command in (["status"], ["status", "--follow"]):
        assert main(["bisect", *command, "--run", "cut"]) == 0
        assert "NOT GOING ON: its daemon is gone; rltop up CONFIG --name cut" in capsys.readouterr().out
    assert main(["bisect", "export"]) == 0
    assert "it is not over: its daemon is gone" in capsys.readouterr().err


def test_a_refusal_has_the_one_form_whatever_the_daemon_says() -> None:
    asks = {
        "rltop: bisect start --engine 2: refused (bad-args)": (Ask("bisect-start", "2", {}), "bad-args"),
        "rltop: bisect stop: not now (busy)": (Ask("bisect-stop", "", {}), "busy"),
        "rltop: engine set --engine 0,1: refused (refused-by-rules)": (
            Ask("engine-set", "0,1", {}),
            "refused-by-rules",
        ),
        "rltop: engine ab --engine all: refused (bad-args)": (Ask("engine-ab-end", "all", {}), "bad-args"),
        "rltop: engine cancel 7: refused (bad-args)": (Ask("cancel", "7", {}), "bad-args"),
    }
    for head, (ask, code) in asks.items():
        error = refused(ask, Rejected(code, "for a reason", ""))
        told = f"rltop: {error}".splitlines()
        assert told[:2] == [head, "  why: for a reason"]
        assert told[2].startswith("  do:  ")
        assert error.exit_code == (1 if code == "busy" else 2)
        assert str(refused(ask, Rejected(code, "for a reason", "this"))).endswith("  do:  this")


def test_nobody_there_to_say_yes(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    from rltop.cli.bisect_act import _confirmed

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(RltopError, match="nobody is there"):
        _confirmed()


def test_from_the_crash_to_the_report_in_the_shell(tmp_path: Path, capsys: Capture) -> None:
    """A real bisection of a null engine: plan, yes, a line per trial, the verdict, the report."""
    (tmp_path / "model").mkdir()
    env = {VARIABLE: "ima:radix_cache:hazard=0.2", CRASH_VARIABLE: "0.02"}
    engines = {"kind": "null", "model_path": str(tmp_path / "model"), "env": env, "keep_serving": 0, "drain_s": 1}
    with real_daemon(tmp_path, "night", config={"engines": engines}) as run:
        with Viewer(run, "control") as viewer:
            viewer.hello()
            until_crash(run, viewer)
        args = ["bisect", "start", "--toggles", "overlap_schedule,radix_cache", "--exclusive", "--time-scale", "60"]
        assert main([*args, "--dry-run"]) == 0
        plan = capsys.readouterr().out
        assert "hunt ima/" in plan
        assert "expected: " in plan
        assert "no engine serves until the bisection ends" in plan
        assert main(["bisect", "start", "--toggles", "deepep", "--yes"]) == 2
        assert "deepep is off already" in capsys.readouterr().err
        assert main([*args, "--yes", "--follow", "--reason", "ticket 7"]) == 0
        out, err = capsys.readouterr()
        assert "hunt ima/" in err
        assert "trial 1 on engine 0" in out
        assert "found: radix_cache" in out
        assert "engine 0: back on its own flags" in out
        assert main(["bisect", "pause"]) == 1, "a state, no argument"
        assert "bisect pause: not now (not-running)\n  why: no bisection is running" in capsys.readouterr().err
        assert main(["bisect", "export"]) == 0
        told = capsys.readouterr().out
        assert "with radix_cache (SGLang" in told
        assert "> **A rehearsal, not a bug report:**" in told
        assert "**radix_cache off** (trial" in told
        assert "- SGLang, add: `--disable-radix-cache`\n- slime, add: `--sglang-disable-radix-cache`" in told
        assert "of service:" in told.split("As it crashed first")[1]
        assert "illegal memory access was encountered" in told
        assert str(tmp_path) not in told
        assert "ticket 7" not in told


class _Seen:
    """A client that sees one picture after another."""

    def __init__(self, *pictures: dict[str, object]) -> None:
        self.pictures = list(pictures)
        self.problem, self.status = "", "live"

    @property
    def mirror(self) -> SimpleNamespace:
        return SimpleNamespace(state=self.pictures[0], run="night")

    async def wait_change(self) -> None:
        self.pictures.pop(0)


async def test_resume_returns_when_it_goes_on(capsys: Capture) -> None:
    op = {"state": "running", "t": 100.0}
    cut = {"id": "4", "state": "stopped", "ended": 50.0, "cut_off": True}
    goes_on = {"id": "4", "state": "running", "ended": None}
    seen = _Seen({}, {"bisect": cut, "op/7": op}, {"bisect": {**goes_on, "state": "paused"}, "op/7": op},
                 {"bisect": goes_on, "op/7": op})  # fmt: skip
    answer = Accepted("7", [])
    assert await _away(cast(Client, seen), "bisect resume", answer, (), follow=False, as_json=False) == 0
    assert capsys.readouterr().out == "bisection 4 runs (operation 7): rltop bisect status --follow\n"
    failed = _Seen({"bisect": cut, "op/7": {**op, "state": "failed", "text": "no room"}})
    with pytest.raises(RltopError, match="bisect resume: it could not be begun"):
        await _away(cast(Client, failed), "bisect resume", answer, (), follow=False, as_json=False)


def test_the_engines_states_are_no_news_while_nobody_serves() -> None:
    narrator = Narrator()
    assert "engine 0 is LAUNCHING" in "\n".join(narrator.news(story(running(unserved="engine 0 is LAUNCHING"))))
    assert narrator.news(story(running(unserved="engine 0 is LOADING"))) == []
    assert "an engine serves the run again" in narrator.news(story(running()))[0]


def test_a_verdict_does_not_say_twice_what_its_headline_says() -> None:
    spent = story(ended("budget", "the budget is spent; left: cuda_graph 60%"))
    assert (spent.headline(), spent.explained()) == ("the budget is spent", "left: cuda_graph 60%")
    both = story(ended("not-separable", "outcomes that contradict each other"))
    assert both.headline() == "no set of up to three toggles explains it (two bugs at once?)"
    assert "what to do: hunt one fingerprint at a time" in both.explained()


def test_a_log_excerpt_has_the_whole_traceback() -> None:
    head = ["a", "Scheduler hit an exception: Traceback (most recent call last):"]
    data = "\n".join([*(f"line {n}" for n in range(100)), *head, *(f"  frame {n}" for n in range(30)), "CUDA error"])
    told = excerpt(data.encode(), {"line": 9, "evidence": ["stdout.log:9: CUDA error"]})
    assert told[0] == "line 89"
    assert head[1] in told
