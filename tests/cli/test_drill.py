"""`rltop drill`: what is planted is found, said at the end, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rltop.cli.drill import CULPRITS, TOGGLES, TRAINED, Card, drill, planted
from rltop.runs import list_runs

NAMES = ("ima", "hang", "oom", "nan", "stale")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))


def test_out_of_memory_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    assert drill("oom", seed=0, tell=False, as_json=True) == 0
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert (told["drill"], told["found"], told["rehearsal"]) == ("oom", True, True)
    assert [line["what"] for line in told["lines"]] == ["out of memory of engine 0", "engine 0 serves again"]
    assert "oom/" in told["lines"][0]["text"]
    assert err.index("found ") < err.index("what was planted"), "not before the end"
    assert [run.alive for run in list_runs()] == [False]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_every_drill(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert drill(name, seed=1, tell=True, as_json=False) == 0  # type: ignore[arg-type]  # they are those names
    assert "everything was found" in capfd.readouterr().out


def test_the_scorecard() -> None:
    told: list[str] = []
    card = Card("ima", "x", told.append)
    seen = [card.ok]  # nothing looked for is nothing found
    for name, found in (("a", True), ("b", False)):
        card.add(name, found, "text")
        seen.append(card.ok)
    assert seen == [False, True, False]
    assert [line.startswith("NOT FOUND") for line in told] == [False, True], "each line once"


def test_what_may_be_planted() -> None:
    assert all(set(culprit) <= set(TOGGLES) for culprit in CULPRITS)
    assert len({planted(name, CULPRITS[0]) for name in NAMES}) == len(NAMES)  # type: ignore[arg-type]
    from rltop.train.inject import CATALOGUE

    assert all(fault in CATALOGUE for fault, _ in TRAINED.values())
