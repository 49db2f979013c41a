"""`rltop bisect simulate`: a rehearsal for people and for scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rltop.cli.main import main


def test_one_bisection_is_played_step_by_step_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", "--bug", "cuda_graph+speculative", "--mean-min", "10", "--seed", "4"]) == 0
    told = capsys.readouterr().out
    assert "The bug: cuda_graph x speculative, a crash every 10 min on average (steady)." in told
    assert "of the belief says that it can crash there" in told
    assert "CRASHED" in told
    assert "quiet without" in told
    assert "That is right." in told
    assert all(len(line) <= 110 for line in told.splitlines())


def test_a_kernel_is_rehearsed_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bisect", "simulate", "--bug", "speculative"]
    minutes = []
    for more in ([], ["--kernel", "build_tree_efficient"]):
        assert main([*words, *more]) == 0
        told = capsys.readouterr().out
        assert "That is right." in told
        assert re.search(r"0\.0  0 +CRASHED with everything on, \d", told), "the crash that began it"
        assert re.search(r"without speculative, and it has to be\s+quiet, \d+ min\s+more", told)
        assert ("Known of the first crash: kernel build_tree_efficient" in told) is bool(more)
        minutes.append(int(re.findall(r"found after (\d+) min", told)[0]))
    assert minutes[1] < minutes[0]


def test_an_arm_has_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", "--bug", "cuda_graph+speculative"]) == 0
    told = re.sub(r"\n {18}", " ", capsys.readouterr().out)
    tried = set(re.findall(r"try ((?:only|without) [\w, ]+?):", told))
    ended = set(re.findall(r"(?:CRASHED|quiet) ((?:only|without) [\w, ]+), \d", told))
    assert {"only cuda_graph, speculative", "without cuda_graph"} <= ended
    assert ended <= tried


def test_a_rehearsal_as_json_has_names_and_no_masks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", "--bug", "deepep", "--engines", "4", "--mean-min", "6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    played = told["rehearsal"]
    assert played["bug"] == {"needs": ["deepep"], "mean_min": 6.0, "law": "steady"}
    assert played["state"] == "found"
    assert played["culprit"] == ["deepep"]
    assert {step["engine"] for step in played["steps"]} == {0, 1, 2, 3}


def test_strategies_are_compared_on_the_same_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", "--bugs", "20", "--json"]) == 0
    rows = {row["strategy"].split(",")[0]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert set(rows) == {"rltop", "checklist", "every toggle off", "delta debugging"}
    assert rows["rltop"]["right"] >= 0.9 > rows["checklist"]["right"]
    assert all(row["right"] + row["wrong"] + row["no_name"] == pytest.approx(1) for row in rows.values())


def test_one_bug_is_played_many_times_beside_what_people_do(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--bug", "cuda_graph_padding", "--bugs", "8", "--mean-min", "0.4", "--restart-min", "0.7"]
    given += ["--engines", "3", "--budget-min", "600", "--toggles", "cuda_graph,cuda_graph_padding,speculative"]
    assert main(["bisect", "simulate", *given]) == 0
    told = capsys.readouterr().out
    assert "8 bisections of one bug, cuda_graph_padding, alone or with cuda_graph, a crash every 0.4 min" in told
    assert main(["bisect", "simulate", *given, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["strategy"].split(",")[0]: row for row in data["strategies"]}
    assert (data["bug"], data["bugs"]) == ("cuda_graph_padding", 8)
    assert rows["rltop"]["right"] > 0.7
    assert rows["checklist"]["wrong"] == 1.0, "without graphs nothing is padded: it stops at cuda_graph"


def test_crashes_at_the_start_are_bisected_by_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", "--bug", "deepep", "--law", "start"]) == 0
    told = capsys.readouterr().out
    assert "half of the starts" in told
    assert "starts without deepep" in told


def test_the_priors_are_the_users(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[toggles.mine]\nweight = 0\n")
    assert main(["bisect", "simulate", "--priors", str(mine)]) == 2
    assert "weight must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--bug", "cuda_grpah"], "'cuda_grpah' is not a toggle"),
        (["--toggles", "cuda_graph,cuda_graph"], "a toggle is there twice"),
        (["--toggles", ","], "can not bisect over 0 toggles"),
    ],
)
def test_what_can_not_be_rehearsed_is_one_error(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", *args]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--toggles", "cuda_graf,speculative", "--bug", "speculative"], "use some of: cuda_graph"),
        (["--toggles", ","], "bisect simulate --toggles: can not bisect over 0 toggles"),
        (["--bug", ""], "bisect simulate --bug"),
        (["--bug", "cuda_graph+cuda_graph"], "names a toggle twice"),
        (["--mean-min", "3"], "--mean-min goes with --bug"),
        (["--kernel", "flash"], "--kernel goes with --bug"),
        (["--bug", "cuda_graph_padding"], "--toggles takes others"),
        (["--bug", "deepep", "--budget-min", "nan"], "bisect simulate --budget-min"),
        (["--bug", "deepep", "--priors", "/nope.toml"], "do:  --priors FILE.toml"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "simulate", *given]) == 2
    assert told in capsys.readouterr().err
