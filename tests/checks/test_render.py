"""The report as text."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len

from rltop.checks.evaluate import evaluate
from rltop.checks.layout import cells, cut, wrap
from rltop.checks.observe import EngineSync, SyncEvent
from rltop.checks.render import render, render_folded
from rltop.checks.verdict import Evidence, Report, Verdict
from tests.checks.build import at, healthy, obs, rollout, sample


def test_a_healthy_run_is_two_lines_of_text() -> None:
    rows = [healthy(step) for step in range(3)]
    rows.append(rollout(0, log_probs=-0.3, ref_log_probs=-0.3, rollout_log_probs=-0.301))
    text = render(evaluate(obs(*rows, sample())), width=200)
    first, empty, *rest = text.splitlines()
    assert first.startswith("checks: 0 fail, 0 warn, 0 info, ")
    assert empty == ""
    assert {line[:6] for line in rest} <= {"pass  ", "skip  ", "      "}
    assert "train.nan" in rest[0]
    assert "train.grad-scale, train.grad-high, train.grad-zero" in rest[0]


def test_the_root_cause_comes_first_with_evidence_and_advice_and_its_consequences_under_it() -> None:
    report = evaluate(obs(healthy(0), healthy(1, grad_norm=math.nan), sample("!" * 99, rollout_id=2)))
    lines = render(report, width=110).splitlines()
    assert lines[2].startswith("FAIL  train.nan  rollout 1, step 1")
    block = "\n".join(lines)
    assert "at  train/grad_norm@1" in block
    assert "do  stop the run before the next save and sync" in block
    assert "explains rollout.text (fail): In rollout 2" in block
    assert block.count("rollout.text") == 1
    assert block.index("train.nan") < block.index("explains rollout.text") < block.index("pass  ")


def test_every_line_fits_the_width() -> None:
    sync = SyncEvent("1", 1, engines=(EngineSync("0", digest="a" * 64),), digest="b" * 64)
    report = evaluate(obs(healthy(0), healthy(1, train_rollout_logprob_abs_diff=2.5), sync))
    for width in (40, 60, 80, 120):
        text = render(report, width=width, injected_faults=["swap-layers@0"])
        assert max(map(len, text.splitlines())) <= width
        assert "injected on purpose: swap-layers@0" in text


def test_offline_evidence_is_a_file_and_a_line_and_references_on_demand() -> None:
    row = healthy(0, grad_norm=math.inf)
    report = evaluate(obs(type(row)(row.axis, row.step, row.values, 0, 0, where=at(12))))
    assert "at  train.log:12  train/grad_norm = Inf at train step 0" in render(report)
    assert "ref F13 B19" in render(report, refs=True)


def test_what_a_model_wrote_cannot_steer_the_terminal() -> None:
    report = evaluate(obs(sample("\x1b[2J\x1b]0;owned\x07" * 30)))
    text = render(report)
    assert "rollout.text" in text
    assert not [ch for ch in text if ch != "\n" and not ch.isprintable()]


def test_a_consequence_of_a_consequence_is_not_lost() -> None:
    verdicts = (
        Verdict("ckpt.resume", "fail", cause="a"),
        Verdict("ckpt.loaded", "fail", cause="b", consequence_of=("ckpt.resume",)),
        Verdict("logprob.magnitude", "fail", cause="c", consequence_of=("ckpt.loaded",)),
        Verdict("other.unknown", "info", cause="d", evidence=(Evidence("x", None, "y"),)),
    )
    text = render(Report(verdicts, ("ckpt.resume",), {}))
    assert "explains ckpt.loaded (fail): b" in text
    assert "explains logprob.magnitude (fail): c" in text
    assert "info  other.unknown: d" in text


def test_values_are_readable() -> None:
    verdict = Verdict("train.nan", "fail", cause="c", value={"a": {"b": 1, "c": 0.123456}, "d": None, "e": "NaN"})
    assert "value a=(b=1, c=0.1235), e=NaN  threshold -" in render(Report((verdict,), ("train.nan",), {}))


def test_the_folded_report_fits_a_small_screen_and_leaves_out_what_is_not_wrong() -> None:
    report = evaluate(obs(healthy(0), healthy(1, grad_norm=math.nan), sample("!" * 99, rollout_id=2)))
    for width in (40, 80, 120):
        lines = render_folded(report, width=width, injected_faults=["x"]).splitlines()
        assert max(map(len, lines)) <= width
    assert lines[0] == "injected on purpose: x"
    assert lines[2] == "1 root cause, with 1 consequence (1 fail):"
    assert lines[4].startswith("FAIL  train.nan  rollout 1, step 1")
    assert any(line.startswith("      so  rollout.text (fail): ") for line in lines)
    assert lines[-1].endswith("rltop check --all has it all, uncut.")
    assert not any(line.startswith(("pass", "skip")) for line in lines)


def test_folded_warnings_are_not_called_causes_and_nothing_wrong_comes_first() -> None:
    warn = Verdict("kl.on-policy", "warn", cause="c", confidence="low")
    text = render_folded(Report((warn,), ("kl.on-policy",), {}))
    assert text.startswith("1 warning:\n\nWARN  kl.on-policy  (confidence low)\n")
    assert render_folded(Report((), (), {})).startswith("Nothing is wrong in what could be tested.")
    many = tuple(Verdict(f"a.{i}", "fail", cause="c", advice=("do it",)) for i in range(5))
    text = render_folded(Report(many, tuple(v.id for v in many), {}))
    assert text.startswith("5 root causes:")
    assert text.count("do it") == 3
    assert text.count("do  1 more thing to do: rltop check --all") == 2


def test_a_fail_below_a_warning_is_seen_as_a_fail() -> None:
    cause = "The engine refused the update. " * 6
    verdicts = (
        Verdict("quant.map", "warn", cause="w"),
        Verdict("weights.update-failed", "fail", engine=3, cause=cause, consequence_of=("quant.map",)),
        Verdict("rollout.truncated", "warn", cause="t", consequence_of=("quant.map",)),
    )
    text = render_folded(Report(verdicts, ("quant.map",), {}), width=80)
    assert text.startswith("1 FAIL, explained by 1 warning, with 1 more consequence:\n")
    assert "\nFAIL  weights.update-failed  engine 3\n" in text
    assert " ".join(text.split()).count("The engine refused the update.") == 6
    assert "(explained by quant.map)" in text
    fail = Verdict("quant.map", "fail", cause="w")
    text = render_folded(Report((fail, *verdicts[1:]), ("quant.map",), {}), width=80)
    assert text.startswith("1 root cause, with 2 consequences (1 fail):\n")
    assert "\n      so  weights.update-failed (fail): The engine" in text


def test_one_cause_in_many_places_is_told_once() -> None:
    found = tuple(Verdict("dump.size", "fail", cause=f"file {i}", advice=("same", f"own {i}")) for i in range(9))
    text = render_folded(Report(found, ("dump.size",), {}))
    assert text.startswith("1 root cause in 9 places:")
    assert text.count("do  same") == 1
    assert text.count("do  own") == 6
    assert text.count("1 more thing to do") == 3


def test_a_brief_text_ends_at_a_word_and_quiet_notes_are_named_only() -> None:
    verdicts = (
        Verdict("args.token-budget", "info", cause="long " * 90),
        Verdict("dump.size", "info", cause="wordy " * 90, advice=("skip it",)),
        Verdict("train.nan", "pass"),
    )
    lines = render_folded(Report(verdicts, (), {}), width=80).splitlines()
    assert len([line for line in lines if line.startswith("note")]) == 1
    assert lines[3].endswith(" wordy …")
    told = "1 check passed, 1 remark (args.token-budget), 0 could not be tested: rltop check --all has it all, uncut."
    assert " ".join(lines[-2:]) == told


def test_the_whole_report_keeps_what_the_folded_one_leaves_out() -> None:
    verdicts = (
        Verdict("a.b", "fail", cause="c"),
        Verdict("c.d", "warn", cause="e", evidence=(Evidence("x.log", 3, "text"),), consequence_of=("a.b",)),
        Verdict("dump.size", "info", cause="f", evidence=(Evidence("y.pt", None, "big"),), advice=("skip it",)),
    )
    text = render(Report(verdicts, ("a.b",), {}))
    for line in (
        "      explains c.d (warn): e\n      at  x.log:3  text\n",
        "info  dump.size: f\n      at  y.pt  big\n",
    ):
        assert line in text
    assert text.endswith("      do  skip it")


@pytest.mark.parametrize("width", [40, 61, 80, 120])
def test_lines_break_at_spaces_and_are_measured_in_cells(width: int) -> None:
    flags = "--save-debug-rollout-data DIR/{rollout_id}.pt, then --load-debug-rollout-data to replay that"
    wide = "馬車が走る" * 40
    assert {w for line in wrap(flags, "do  ", width) for w in line.split()} == {"do", *flags.split()}
    for text in (wide, f"a {wide} b", "e\u0301" * 200, "/very/long" * 40, f"{flags} {wide}"):
        lines = wrap(text, "do  ", width)
        assert max(map(cells, lines)) <= width
        assert "".join("".join(lines).split()) == "".join(f"do {text}".split())
        assert cells(cut(text, width)) <= width
    report = Report((Verdict("a.b", "fail", cause=wide, evidence=(Evidence("x", 1, wide),)),), ("a.b",), {})
    for text in (render(report, width=width), render_folded(report, width=width)):
        assert max(map(cell_len, text.splitlines())) <= width
