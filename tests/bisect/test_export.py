"""What goes into a bug report."""

from __future__ import annotations

import json

from rltop.bisect.belief import Trial, believe
from rltop.bisect.export import Report, as_json, as_markdown
from rltop.bisect.facts import CrashFacts, weigh
from rltop.bisect.planner import Planner
from rltop.bisect.space import space
from rltop.evidence.priors import load

TABLES = load()
TOGGLES = ("cuda_graph", "speculative", "deepep")


def report(*trials: Trial, stand_in: str = "") -> Report:
    factors, moved = weigh(CrashFacts(kernel="build_tree_efficient"), TOGGLES, TABLES)
    found = space(TOGGLES, TABLES.priors, factors=factors)
    seen = [Trial(found.all_on, 5.0, crashed=True), *trials]
    return Report(
        title="IMA on engine 1",
        verdict=Planner(found).verdict(seen),
        belief=believe(found, seen),
        trials=seen,
        moved=moved,
        kernel="build_tree_efficient",
        versions={"sglang": "0.5.14"},
        argv=["python", "-m", "sglang.launch_server"],
        env={"CUDA_LAUNCH_BLOCKING": "0"},
        minutes=61.4,
        stand_in=stand_in,
    )


def test_a_found_culprit_is_the_headline_and_every_trial_is_in_the_matrix() -> None:
    rest, alone = Trial(0b101, 200.0, crashed=False), Trial(0b010, 6.0, crashed=True)
    others = [Trial(0b110, 4.0, crashed=True), Trial(0b011, 7.0, crashed=True)]
    page = as_markdown(report(rest, alone, *others))
    assert "**speculative (" in page
    assert "quiet with any of it off" in page
    assert "| 2 | on | **off** | on | quiet | 200.0 min |" in page
    assert page.count("crashed |") == 4
    assert "speculative x15" in page
    assert "CUDA_LAUNCH_BLOCKING=0 python -m sglang.launch_server" in page


def test_what_was_not_counted_is_shown_as_such() -> None:
    page = as_markdown(report(Trial(0b111, 9.0, crashed=False, counts=False)))
    assert "quiet, not counted" in page
    assert "not finished" in page


def test_a_stand_in_is_named() -> None:
    assert "> Not the real thing: CPU engine, injected fault." in as_markdown(
        report(stand_in="CPU engine, injected fault")
    )


def test_the_data_is_json_and_has_names_not_masks() -> None:
    told = json.loads(json.dumps(as_json(report(Trial(0b101, 200.0, crashed=False)))))
    assert told["schema"] == 1
    assert told["trials"][1] == {
        "on": ["cuda_graph", "deepep"],
        "minutes": 200.0,
        "outcome": "quiet",
        "counts": True,
    }
    assert told["state"] == "open"
    assert set(told["involved"]) == set(TOGGLES)
