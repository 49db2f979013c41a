"""`docs/checks.md` against the code: the page says what the catalogue, the thresholds, the sets and the tests say.

The coverage tables name, for every statement of the guides, the checks and the tests; here they are looked up. The
tests at the end show what no other test does. `RLTOP_UPDATE_SNAPSHOTS=1 pytest tests/checks/test_coverage.py` takes
over what the catalogue and the table of thresholds say; prose and coverage are for people.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from rltop.checks.catalogue import CATALOGUE, LAUNCH, STEP1, STEP2, Entry, Explains, entry_of
from rltop.checks.evaluate import evaluate
from rltop.checks.found import LogEvent, LogSource
from rltop.checks.observe import Observations
from rltop.checks.registry import RULES
from rltop.checks.thresholds import DEFAULTS, Thresholds
from rltop.checks.verdict import STATUSES, Report
from rltop.cli.check import SETS
from rltop.evidence.readers import READERS
from tests.checks.build import event, healthy, in_order, obs, rollout, sample, verdict
from tests.checks.corpus import salad

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "checks.md"
PAGE = PATH.read_text(encoding="utf-8")
IDS = [entry.id for entry in CATALOGUE]


def section(title: str) -> str:
    """Text of a `## ` section."""
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str) -> list[list[str]]:
    """Rows of all tables in a text, without their headers."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|---"):
            found.pop()  # the header before it
        elif line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def names(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


@lru_cache(maxsize=64)
def functions(path: str) -> frozenset[str]:
    """Test functions of a test file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_"))


# -- the page and the code


def described() -> Iterator[tuple[str, str, str]]:
    """(id, title, text) of every heading of the catalogue."""
    parts = re.split(r"^#### `([^`]+)`: (.+)$", section("Catalogue"), flags=re.MULTILINE)[1:]
    yield from zip(parts[::3], parts[1::3], parts[2::3], strict=True)


def test_the_page_has_every_check_in_the_order_of_the_catalogue() -> None:
    assert [(check, title) for check, title, _ in described()] == [(entry.id, entry.title) for entry in CATALOGUE]
    areas = list(dict.fromkeys(check.split(".")[0] for check in IDS))
    assert re.findall(r"^### (\w+)$", section("Catalogue"), flags=re.MULTILINE) == areas


@pytest.mark.parametrize("entry", CATALOGUE, ids=IDS)
def test_a_check_is_described_as_it_is(entry: Entry) -> None:
    text = next(text for check, _, text in described() if check == entry.id)
    paragraph, prose = text.strip().split("\n\n", 1)
    facts = " ".join(paragraph.split())
    says = ", ".join(status for status in STATUSES if status in entry.statuses and status != "skip")
    explains = ", ".join(map(_explains, entry.explains))
    want = f"*Says* {says}." + (f" *Explains* {explains}." if explains else "")
    want += f" *References* {' '.join(entry.refs)}."
    if facts != want and take_over(f"`{entry.id}`: {entry.title}\n\n{paragraph}", want, width=130):
        return
    assert facts == want
    assert len(prose) > 40


def take_over(old: str, new: str, *, width: int) -> bool:
    """Put the last paragraph of `old` right, if that is wanted."""
    if not os.environ.get("RLTOP_UPDATE_SNAPSHOTS"):
        return False
    head = old.rpartition("\n\n")[0]
    wrapped = textwrap.fill(new, width, break_long_words=False, break_on_hyphens=False)
    page = PATH.read_text(encoding="utf-8")
    assert old in page
    PATH.write_text(page.replace(old, f"{head}\n\n{wrapped}", 1), encoding="utf-8")
    return True


def _explains(one: Explains) -> str:
    limits = {"when it fails": one.only_fail, "at the first step": one.first_step}
    limits[f"text pattern {one.pattern}"] = bool(one.pattern)
    said = ", ".join(words for words, holds in limits.items() if holds)
    return f"`{one.target}`" + (f" ({said})" if said else "")


def test_the_sets_are_those_of_the_command() -> None:
    assert {names(name)[0]: tuple(names(ids)) for name, _, ids in table(section("Sets"))} == SETS
    assert SETS == {"step1": STEP1, "step2": STEP2, "launch": LAUNCH}


def test_every_threshold_is_listed_with_its_default() -> None:
    if os.environ.get("RLTOP_UPDATE_SNAPSHOTS"):
        page = PATH.read_text(encoding="utf-8")
        before, rest = page.split("| name | default | check |\n|---|---|---|\n", 1)
        after = rest[rest.index("\n\n") :]
        head = "| name | default | check |\n|---|---|---|\n"
        PATH.write_text(f"{before}{head}{chr(10).join(threshold_rows())}{after}", encoding="utf-8")
        return
    rows = table(section("Thresholds"))
    listed = {names(name)[0]: default for name, default, _ in rows}
    assert listed == {f.name: repr(getattr(DEFAULTS, f.name)) for f in dataclasses.fields(Thresholds)}
    assert all(set(names(checks)) <= set(IDS) and names(checks) for _, _, checks in rows)


def threshold_rows() -> Iterator[str]:
    """Rows of the table: a comment `# -- id, id` stands before the numbers of a check."""
    checks = ""
    for line in inspect.getsource(Thresholds).splitlines():
        if found := re.match(r"    # -- (.+)", line):
            checks = ", ".join(f"`{check}`" for check in found[1].split(", "))
        elif found := re.match(r"    (\w+): (?:float|int) = ", line):
            named = "`rollout.text`, `logprob.train-rollout`" if found[1] == "recovered_rollouts" else checks
            yield f"| `{found[1]}` | {getattr(DEFAULTS, found[1])!r} | {named} |"


def test_every_pattern_of_file_names_is_listed() -> None:
    listed = set(names(section("Evidence")))
    asked = {pattern for reader in READERS if not reader.directory for pattern in reader.names}
    covered = {pattern for pattern in asked if any(_wider(one, pattern) for one in listed)}
    assert asked == covered


def _wider(listed: str, pattern: str) -> bool:
    """The listed pattern takes whatever the reader's takes."""
    parts = [re.escape(part) for part in listed.split("*")]
    return bool(re.fullmatch(".*".join(parts), pattern.replace("[0-9]", "1"))) or pattern.startswith("*.log.")


# -- the coverage tables


def coverage() -> list[list[str]]:
    return table(section("Coverage"))


def test_every_row_names_checks_and_tests_that_exist() -> None:
    rows = coverage()
    assert len(rows) > 60
    for item, _, checks, tests in rows:
        assert names(checks), item
        assert not set(names(checks)) - set(IDS), item
        assert names(tests), item
        for test in names(tests):
            path, name = test.split("::")
            assert name in functions(path), f"{item}: {test}"


def test_every_check_and_every_item_of_the_guides_is_covered() -> None:
    rows = coverage()
    told = {check for row in rows for check in names(row[2])}
    assert told == set(IDS)
    items = {part.strip().split()[0] for item, *_ in rows for part in item.split(",")}
    wanted = {"D1.1", "D1.2", "D1.3", "D2.1", "D3", "R1", "R2", "R3", "RW", "W"}
    wanted |= {f"D4.{i}" for i in range(1, 5)} | {f"D5.{i}" for i in range(1, 5)} | {f"F{i}" for i in range(1, 14)}
    assert wanted <= items


def test_every_guide_that_a_check_refers_to_is_a_row_with_that_check() -> None:
    rows = [
        ({part.strip().split()[0] for part in item.split(",")}, set(names(checks))) for item, _, checks, _ in coverage()
    ]
    for entry in CATALOGUE:
        guides = [ref for ref in entry.refs if not ref.startswith("B")]
        for ref in guides:
            hits = [checks for items, checks in rows if any(i == ref or i.startswith(f"{ref}.") for i in items)]
            assert hits, (entry.id, ref)


def test_every_reference_is_explained() -> None:
    reports = dict(re.findall(r"(B\d\d) (\S+[#@]\w+)", section("References")))
    for ref in {ref for entry in CATALOGUE for ref in entry.refs if ref.startswith("B")}:
        assert ref in reports or 72 <= int(ref[1:]) <= 79, ref


# -- references of the verdicts


def reports() -> Iterator[Report]:
    """Evaluations that make all sorts of verdicts."""
    yield evaluate(Observations())
    yield evaluate(Observations(live=True))
    yield evaluate(obs(healthy(0, ppo_kl=0.1, kl_loss=0.1, grad_norm=4e4), rollout(0, log_probs=-4.0)))
    yield evaluate(obs(healthy(0), healthy(1, grad_norm=float("nan")), sample("!" * 90, rollout_id=2)))
    yield evaluate(obs(sample(salad(1)), flags={"global_batch_size": 64, "rollout_batch_size": 1}))
    lost = event("oom", owner="trainer", tried_gb=3.0)
    yield evaluate(obs(events=in_order(_access("engine"), lost), logs=(LogSource("train.log"),)))


def test_every_verdict_carries_the_references_of_its_check() -> None:
    fired = set()
    for report in reports():
        assert {found.id for found in report.verdicts} == set(IDS)
        for found in report.verdicts:
            assert found.refs, found.id
            assert set(found.refs) <= set(entry_of(found.id).refs), found.id
            fired |= {found.id} if found.status in ("warn", "fail") else set()
    assert len(fired) >= 8, sorted(fired)


def test_no_rule_gives_references_of_its_own() -> None:
    """So the ones of the catalogue are all that a verdict can have: `evaluate` fills them in."""
    for rule in RULES:
        assert all(entry_of(rule.id).refs)
    for path in sorted((ROOT / "rltop" / "checks" / "rules").glob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
        assert not [path.name for call in calls for word in call.keywords if word.arg == "refs"]


# -- what no other test shows


def test_a_pretrained_model_is_sent_to_its_instruct_sibling() -> None:
    rows = [sample(salad(i), rollout_id=0, index=i) for i in range(4)]
    base = {"hf_checkpoint": "/models/Qwen3-4B-Base"}
    found = verdict("rollout.text", obs(*rows, mode="rollout-only", flags=base))
    assert (found.status, found.rollout) == ("info", 0)
    assert any("instruct model of the same architecture" in advice for advice in found.advice)
    tuned = verdict("rollout.text", obs(*rows, mode="rollout-only", flags={"hf_checkpoint": "/models/Qwen3-4B"}))
    assert tuned.status == "fail"
    assert not any("instruct" in advice for advice in tuned.advice)


def test_a_template_mistake_explains_the_high_norm() -> None:
    report = evaluate(obs(rollout(0, log_probs=-0.8, ref_log_probs=-0.8), healthy(0, grad_norm=40.0)))
    assert report.root_causes == ("logprob.magnitude",)
    high = next(found for found in report.verdicts if found.id == "train.grad-high")
    assert (high.status, high.consequence_of) == ("warn", ("logprob.magnitude",))
    template = next(found for found in report.verdicts if found.id == "logprob.magnitude")
    assert any(advice.startswith("--apply-chat-template") for advice in template.advice)


def _access(owner: str) -> LogEvent:
    data = {"fault": "illegal memory access", "owner": owner}
    return event("ima", "CUDA error: an illegal memory access was encountered", **data)  # type: ignore[arg-type]


def _in_turn(advice: tuple[str, ...], *words: str) -> bool:
    """The words occur, each in a later item than the one before."""
    places = [next((i for i, item in enumerate(advice) if word in item), -1) for word in words]
    return -1 not in places and places == sorted(set(places))


def test_the_ladder_has_every_step_of_the_guide() -> None:
    logs = (LogSource("train.log"),)
    engine = verdict("engine.ima", obs(events=in_order(_access("engine")), logs=logs))
    assert _in_turn(
        engine.advice,
        "--sglang-disable-cuda-graph-padding",
        "--sglang-speculative-",
        "--sglang-moe-a2a-backend none",
        "--sglang-enable-dp-attention",
        "--sglang-enable-hierarchical-cache",
        "image",
        "CUDA_LAUNCH_BLOCKING=1",
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1",
    ), engine.advice
    assert any("--moe-enable-deepep" in item for item in engine.advice)
    flags = {"moe_enable_deepep": True}
    trainer = verdict("train.ima", obs(events=in_order(_access("trainer")), logs=logs, flags=flags))
    order = ("--load-debug-rollout-data", "CUDA_LAUNCH_BLOCKING", "--moe-enable-deepep", "CUDA_COREDUMP_FILE=")
    assert _in_turn(trainer.advice, *order), trainer.advice


def test_equal_to_the_reference_says_nothing_about_the_engine() -> None:
    rows = (rollout(0, log_probs=-0.3, ref_log_probs=-0.3), healthy(0, train_rollout_logprob_abs_diff=2.0))
    seen = replace(obs(*rows), vocab_size=1000)
    assert verdict("logprob.ref-equal", seen).status == "pass"
    assert verdict("logprob.train-rollout", seen).status == "fail"
