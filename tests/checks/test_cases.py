"""Small runs as folders of evidence, each with what a check of it must and must not say.

`cases/<name>/expected.json`: `fail`, `warn`, `info` (ids that must be at least that), `quiet` (ids that must not fire;
`all_quiet`: nothing may), `root` (first root cause), `facts` (`rank`, `engine`, `step`, `rollout` in the field of that
name of a verdict that says something, others anywhere in those), `not_say` (patterns that no advice may match). The
folders are invented after kinds of fault, none is a real run's.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.verdict import Report, Verdict
from rltop.evidence.collect import collect

CASES = sorted(Path(__file__).with_name("cases").glob("*/expected.json"))
LEVELS = {"fail": ("fail",), "warn": ("warn", "fail"), "info": ("info", "warn", "fail")}
FIELDS = ("rank", "engine", "step", "rollout")
ONE_OF_MANY = re.compile(
    r"(?<![\w./=:-])1 (?:\w+ )?(?:checks|files|reports|responses|rollouts|runs|samples|sequences|steps|tensors)\b"
)
"""`1 steps`; `of step 1 tensors are …` does not occur."""


def faults(want: dict[str, Any], report: Report) -> list[str]:
    """What the report says wrongly, or does not say."""
    statuses: dict[str, set[str]] = {}
    for verdict in report.verdicts:
        statuses.setdefault(verdict.id, set()).add(verdict.status)
    found = [
        f"{one} must be {level}, is {statuses.get(one)}"
        for level, allowed in LEVELS.items()
        for one in want.get(level, [])
        if not statuses.get(one, set()) & set(allowed)
    ]
    loud = [v for v in report.verdicts if v.status in LEVELS["warn"]]
    found += [
        f"{v.id} must be quiet, is {v.status}" for v in loud if want.get("all_quiet") or v.id in want.get("quiet", [])
    ]
    if (root := want.get("root")) and report.root_causes[:1] != (root,):
        found.append(f"the first root cause is not {root}: {report.root_causes}")
    telling = [v for v in report.verdicts if v.status in LEVELS["info"]]
    text = "\n".join(_text(v) for v in telling)
    found += [
        f"{name} {fact} is not stated"
        for name, fact in want.get("facts", {}).items()
        if not _stated(name, fact, telling, text)
    ]
    return found + [
        f"advice of {v.id} says {pattern}"
        for v in loud
        for advice in v.advice
        for pattern in want.get("not_say", [])
        if re.search(pattern, advice, re.IGNORECASE)
    ]


def _text(verdict: Verdict) -> str:
    return json.dumps(msgspec.to_builtins(verdict), ensure_ascii=False)


def _stated(name: str, fact: Any, telling: list[Verdict], text: str) -> bool:
    if name in FIELDS:
        return any(getattr(v, name) == fact for v in telling)
    if isinstance(fact, dict):
        return any(_stated(name, one, telling, text) for one in fact["any"])
    if isinstance(fact, int | float):
        return bool(re.search(rf"(?<![\d.]){re.escape(str(fact))}(?![\d]|\.[1-9])", text))
    return str(fact).lower() in text.lower()


@pytest.mark.parametrize("expected", CASES, ids=[path.parent.name for path in CASES])
def test_a_run_is_judged_as_it_should_be(expected: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    shutil.copytree(expected.parent, evidence, ignore=shutil.ignore_patterns("expected.json"))
    report = evaluate(collect([evidence]))
    assert faults(json.loads(expected.read_text(encoding="utf-8")), report) == []
    texts = [text for verdict in report.verdicts for text in (verdict.cause, *verdict.advice)]
    assert [text for text in texts if ONE_OF_MANY.search(text)] == []


def test_the_comparison_sees_what_is_missing_and_what_is_too_much(tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text("--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 64\n")
    report = evaluate(collect([tmp_path]))
    assert faults({"fail": ["args.batch"], "root": "args.batch", "facts": {"size": 64}}, report) == []
    wrong = {"warn": ["train.nan"], "quiet": ["args.batch"], "root": "train.nan", "facts": {"size": 63, "rank": 1}}
    assert len(faults(wrong | {"not_say": ["global-batch-size"]}, report)) >= 6
