"""docs/bisect.md against the code: a number there is a number here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from rltop.bisect.belief import Trial
from rltop.bisect.hazard import laws
from rltop.bisect.planner import NONE_LEFT, PATIENCE, SURE, Planner
from rltop.bisect.proof import SURVIVES, WITNESSED, quiet_for
from rltop.bisect.space import OTHER, space
from rltop.evidence.priors import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bisect.md").read_text(encoding="utf-8")
TABLES = load()
SPACE = space(("cuda_graph", "speculative", "overlap_schedule"), TABLES.priors)
ARMS = {"everything on": 7, "only cuda_graph": 1, "without cuda_graph": 6}


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose head starts so."""
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_worked_example_is_what_the_code_computes() -> None:
    columns = [
        SPACE.mask(["cuda_graph"]),
        0,
        SPACE.mask(["speculative"]),
        SPACE.mask(["cuda_graph", "speculative"]),
        OTHER,
    ]
    trials: list[Trial] = []
    planner = Planner(SPACE)
    for what, outcome, *told in rows("| trial | outcome |"):
        if found := re.fullmatch(r"(crashed|quiet), (\d+) min", outcome):
            trials.append(Trial(ARMS[what], float(found[2]), crashed=found[1] == "crashed"))
        belief = planner.believe(trials)
        assert told == [f"{belief.of(culprit):.1%}".replace("%", " %") for culprit in columns], what
    assert len(trials) == 5
    verdict = planner.verdict(trials)
    assert verdict.state == "found"
    assert f"*{verdict.text}*" in " ".join(PAGE.split())


def test_what_the_columns_leave_out_is_said() -> None:
    rest = [100 - sum(float(cell.rstrip(" %")) for cell in row[2:]) for row in rows("| trial | outcome |")]
    assert f"{rest[0]:.1f} % of the priors, {rest[1]:.1f} % after the first crash" in " ".join(PAGE.split())
    assert max(rest[2:]) < 1
    every = [SPACE.names(one) for one in SPACE.culprits if "overlap_schedule" in SPACE.names(one)]
    assert len(every) == 4


def test_the_sum_by_hand_is_near_what_the_code_says() -> None:
    by_hand = 8.1 / 28.8 / (1 + 90 / 21) ** 2
    assert f"{by_hand:.3f}" in PAGE
    last = [float(cell.rstrip(" %")) for cell in rows("| trial | outcome |")[-1][2:4]]
    assert f"The table has {last[1] / last[0]:.3f}" in PAGE
    assert last[1] / last[0] == pytest.approx(by_hand, rel=0.4)


def test_the_tables_of_priors_are_the_shipped_ones() -> None:
    weights = TABLES.priors.weights
    told = {name.strip("`"): (float(weight), source) for name, weight, source in rows("| toggle | weight |")}
    assert told == {name: (weight, TABLES.sources[f"toggles.{name}"]) for name, weight in weights.items()}
    pairs = {frozenset(re.findall(r"`(\w+)`", pair)): float(factor) for pair, factor, _ in rows("| pair | factor |")}
    assert pairs == TABLES.priors.affinity


def test_the_constants_are_the_codes() -> None:
    flat = " ".join(PAGE.split())
    assert f"a grid of {len(laws())} laws" in flat
    assert f"at least {SURE[0]:.0%} ({SURE[1]:.0%} on several engines)".replace("%", " %") in flat
    assert f"at most {NONE_LEFT[0]:.1%} ({NONE_LEFT[1]:.1%})".replace("%", " %") in flat
    assert f"for {SURVIVES[0]} mean times to a crash (of a pair {SURVIVES[1]}, of a triple {SURVIVES[2]})" in flat
    told = f"{SURVIVES[0] - quiet_for(1, 15.0):.1f} (the logarithm of 15) of the {SURVIVES[0]} have been shown"
    assert told in flat
    assert f"is asked for {quiet_for(1, 15.0):.1f} mean times" in flat
    assert f"{WITNESSED} is always asked for" in flat
    assert f"at least {PATIENCE} times better" in flat


def test_the_planted_example_says_what_was_wrong_and_gives_rehearsals_time() -> None:
    spec = importlib.util.spec_from_file_location("planted", ROOT / "examples" / "bisect_planted_ima.py")
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    given = ["--bug", "verify", "--out", "x"]
    assert planted._options(given).budget_min == 60
    assert planted._options([*given, "--kind", "cpu"]).budget_min == 600
    assert planted._options([*given, "--kind", "cpu", "--budget-min", "9"]).budget_min == 9
    report = {"state": "budget", "minutes": 61.0, "text": "the minutes are spent", "culprit": None, "kernel": None}
    told = planted.wrongs(report, right=False, kernel=False, flags=True)
    assert told[0].startswith("nothing was named (it ended budget after 61 min: ")
    assert "--budget-min gives it longer" in told[0]
    assert told[1] == "the kernel is not known"
    assert planted.wrongs(report, right=True, kernel=True, flags=True) == []
