"""`rltop check`: exit codes, JSON, required checks, thresholds, and the short report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rltop.checks.catalogue import CATALOGUE
from rltop.checks.verdict import Verdict
from rltop.cli.main import main
from rltop.daemon.journal import Journal
from tests.cli.test_imports import HEAVY, modules_after

STEP = "(MegatronTrainRayActor pid=4101) [2026-03-02 10:0{0}:00] model.py:918 - step {0}: {{'train/loss': {1}, "
STEP += "'train/grad_norm': 0.2, 'train/ppo_kl': 0.0, 'train/step': {0}}}\n"


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    (tmp_path / "train.log").write_text("".join(STEP.format(i, 0.2) for i in range(3)))
    return tmp_path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "train.log").write_text("".join(STEP.format(i, "nan" if i == 2 else 0.2) for i in range(4)))
    return folder


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_is_schema_1_with_every_check(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = document(capsys, str(healthy))
    assert code == 0
    assert list(report) == ["schema", "verdicts", "root_causes", "summary"]
    assert report["schema"] == 1
    assert {verdict["id"] for verdict in report["verdicts"]} == {entry.id for entry in CATALOGUE}
    assert report["summary"]["fail"] == 0
    keys = {
        "id", "status", "rollout", "step", "engine", "rank", "value", "threshold", "evidence", "cause", "advice",
        "confidence", "consequence_of", "refs",
    }  # fmt: skip
    assert all(set(verdict) == keys for verdict in report["verdicts"])
    for verdict in report["verdicts"]:
        assert all(set(one) == {"source", "line", "text"} for one in verdict["evidence"])


def test_a_fail_is_exit_1_with_file_and_line(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = document(capsys, str(broken))
    assert code == 1
    assert report["root_causes"][0] == "train.nan"
    (nan,) = [verdict for verdict in report["verdicts"] if verdict["id"] == "train.nan"]
    assert (nan["step"], nan["evidence"][0]["source"], nan["evidence"][0]["line"]) == (2, "train.log", 3)


def test_unusable_input_is_exit_2_and_stdout_stays_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    for path, words in ((tmp_path, "metrics.jsonl:1"), (tmp_path / "missing", "missing")):
        assert main(["check", str(path), "--json"]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert words in told.err


def test_the_short_report_is_the_root_cause_the_line_and_what_to_do(
    broken: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["check", str(broken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 root cause")
    assert lines[2].startswith("FAIL  train.nan")
    assert any(line.startswith("      at  train.log:3  ") for line in lines)
    assert any(line.startswith("      do  ") for line in lines)
    assert "checks passed" in lines[-1]
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_nothing_wrong_is_said_in_the_first_line(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(healthy)]) == 0
    short = capsys.readouterr().out
    assert short.startswith("Nothing is wrong in what could be tested.")
    assert main(["check", str(healthy), "--all"]) == 0
    assert "skip" in capsys.readouterr().out


def test_a_required_check_that_was_not_tested_is_exit_1(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(healthy), "--require", "train.nan"]) == 0
    assert main(["check", str(healthy), "--require", "train.nan,rollout.text"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("uncut.\n")
    assert "1 required check not tested, so this is no pass: rollout.text\n\nNothing is wrong" in said.out
    assert "rollout.text is required and was not tested: " in said.err
    assert "not in the evidence" in said.err
    assert main(["check", str(healthy), "--require", "step1", "--allow-skip"]) == 0
    assert main(["check", str(healthy), "--require", "step2"]) == 1
    capsys.readouterr()
    assert main(["check", str(healthy), "--require", "train.nam"]) == 2
    assert "did you mean train.nan" in capsys.readouterr().err


def test_thresholds_come_from_a_file(healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "rltop.toml"
    config.write_text("[checks.thresholds]\ngrad_first_warn = 0.1\n")
    _, report = document(capsys, str(healthy / "train.log"), "--config", str(config))
    (high,) = [verdict for verdict in report["verdicts"] if verdict["id"] == "train.grad-high"]
    assert high["status"] == "warn"
    for text, words in (
        ("[checks.thresholds]\ngrad_frist_warn = 1\n", "grad_first_warn"),
        ("[x", "is no TOML"),
        (
            "[run]\nname = 'a'\n\n[check.thresholds]\ngap_warn = 0.1\n",
            "rltop.toml:4: unknown table or key 'check'; did you",
        ),
        ("[checks]\nthreshold = {gap_warn = 1}\n", "did you mean 'thresholds'"),
        ("[checks]\nthresholds = 1\n", "thresholds must be a table"),
        ("checks = 1\n", "[checks] must be a table"),
    ):
        config.write_text(text)
        assert main(["check", str(healthy), "--config", str(config)]) == 2
        assert words in capsys.readouterr().err
    assert main(["check", str(healthy), "--config", str(tmp_path / "none.toml")]) == 2
    config.write_text("[run]\nname = 'a'\n[trainer]\nlr = 1\n[env]\nA = '1'\n[checks]\nnotify = 'warn'\n")
    assert main(["check", str(healthy), "--config", str(config)]) == 0


def test_known_crashes_come_from_a_file_beside_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "engine.log").write_text(
        "[2026-01-02 03:04:05 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/layers/my_layer.py", line 3, in my_rare_kernel\n'
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered\n"
    )
    config = tmp_path / "rltop.toml"
    config.write_text('[checks]\nknown_crashes = "mine.toml"\n')
    assert main(["check", str(run), "--config", str(config)]) == 2
    assert "mine.toml" in capsys.readouterr().err
    (tmp_path / "mine.toml").write_text('[[crash]]\nissue = "me/mine#7"\ntitle = "t"\ntext = ["my_rare_kernel"]\n')
    _, report = document(capsys, str(run), "--config", str(config))
    (fault,) = [verdict for verdict in report["verdicts"] if verdict["id"] == "engine.ima"]
    assert fault["value"]["known"] == ["me/mine#7"]
    assert "looks like me/mine#7" in fault["cause"]


def test_several_paths_are_one_run(healthy: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (healthy / "other").mkdir()
    (healthy / "other" / "args.txt").write_text("--colocate\n")
    code, report = document(capsys, str(broken), str(healthy / "other"))
    assert code == 1
    sources = {one["source"] for verdict in report["verdicts"] for one in verdict["evidence"]}
    assert "broken/train.log" in sources


def test_it_imports_nothing_heavy(broken: Path) -> None:
    loaded = modules_after("check", str(broken))
    assert "rltop.evidence.collect" in loaded
    assert not loaded & {*HEAVY, "zmq", "asyncio"}


def test_stdout_is_the_document_and_nothing_else(broken: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rltop", "check", str(broken), "--json"], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    json.loads(done.stdout)
    assert done.stderr == b""


def left_by_a_daemon(run_dir: Path, *verdicts: Verdict, run: dict[str, Any] | None = None) -> Path:
    """The journal of a run whose daemon said these."""
    run_dir.mkdir(exist_ok=True)
    journal = Journal(run_dir / "journal.sqlite")
    journal.start()
    for verdict in verdicts:
        value = {**msgspec.to_builtins(verdict), "subjects": 1, "since": 1.0}
        journal.state(1.0, f"check/{verdict.id}", value)
    journal.state(1.0, "run", {"name": run_dir.name, "state": "done", **(run or {})})
    assert journal.close()
    return run_dir


def of(report: dict[str, Any], check_id: str) -> dict[str, Any]:
    (found,) = [verdict for verdict in report["verdicts"] if verdict["id"] == check_id]
    return dict(found)


def test_what_the_daemon_said_of_a_run_counts_and_the_worse_holds(
    healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert document(capsys, str(healthy))[0] == 0
    said = [
        Verdict("weights.update-failed", "fail", engine="1", cause="engine 1 refused version 3"),
        Verdict("rollout.text", "pass", cause="readable"),
        Verdict("train.nan", "skip", cause="not seen"),
        Verdict("no.such-check", "fail"),
    ]
    left_by_a_daemon(healthy, *said, run={"injected_faults": ["sync-refused"]})
    code, report = document(capsys, str(healthy))
    assert code == 1
    refused = of(report, "weights.update-failed")
    assert (refused["status"], refused["engine"]) == ("fail", "1")
    assert refused["evidence"][-1]["source"] == "journal.sqlite"
    assert report["root_causes"] == ["weights.update-failed"]
    assert report["summary"]["fail"] == 1
    assert sum(report["summary"].values()) == len(report["verdicts"])
    assert of(report, "rollout.text")["status"] == "pass"
    assert of(report, "train.nan")["status"] == "pass", "the log shows more than the daemon saw"
    assert main(["check", str(healthy)]) == 1
    shown = capsys.readouterr()
    assert "sync-refused" in shown.out
    assert "journal.sqlite: the daemon's verdicts count too" in shown.err


def test_a_fault_in_the_log_names_the_log_although_the_daemon_saw_it_too(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left_by_a_daemon(broken, Verdict("train.nan", "fail", step=2, cause="seen live"))
    code, report = document(capsys, str(broken))
    assert code == 1
    assert of(report, "train.nan")["evidence"][0]["line"] == 3


def test_a_journal_alone_is_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = left_by_a_daemon(tmp_path / "r", Verdict("train.nan", "fail", step=5, cause="grad_norm is NaN at step 5"))
    code, report = document(capsys, str(run_dir))
    assert (code, report["root_causes"]) == (1, ["train.nan"])
    assert main(["check", str(run_dir), str(tmp_path / "gone")]) == 2, "a path that is missing stays an error"


def test_a_journal_that_cannot_be_read_is_told(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (healthy / "journal.sqlite").write_bytes(b"no database, but long enough to be looked at" * 100)
    assert main(["check", str(healthy)]) == 0
    assert "journal.sqlite is left out: cannot read the journal" in capsys.readouterr().err


def test_names_of_an_own_table_are_read_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLTOP_CONFIG", str(tmp_path / "rltop.toml"))
    (tmp_path / "rltop.toml").write_text("", encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    rows = "".join(f'{{"step": {step}, "my/gn": {value}}}\n' for step, value in enumerate(("0.1", "0.2", "NaN", "NaN")))
    (run / "metrics.jsonl").write_text(rows, encoding="utf-8")
    own = tmp_path / "metric_names.toml"
    own.write_text('[[map]]\n[map.names]\n"my/gn" = "train/grad_norm"\n', encoding="utf-8")
    assert main(["check", str(run), "--json"]) == 1
    assert '"train.nan"' in capsys.readouterr().out
    own.write_text('[[map]]\n[map.names]\n"my/gn" = 3\n', encoding="utf-8")
    assert main(["check", str(run), "--json"]) == 2
    assert f"{own}:3" in capsys.readouterr().err
