"""The framework: every id once at least, isolation of a broken rule, folding, order, the JSON schema."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.catalogue import CATALOGUE, STEP1, entry_of
from rltop.checks.evaluate import NO_RULE, assemble, evaluate
from rltop.checks.facts import fires
from rltop.checks.found import LogSource
from rltop.checks.observe import EngineSync, MetricRow, Mode, Observations, RunStart, SyncEvent, TextLine
from rltop.checks.registry import RULES, Rule, metric_names
from rltop.checks.thresholds import DEFAULTS, Thresholds
from rltop.checks.verdict import STATUSES, Report, Verdict, report_from_state
from tests.checks.build import healthy, obs, rollout, sample, verdict
from tests.checks.corpus import BROKEN, ORDINARY, salad

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["schema", "verdicts", "root_causes", "summary"],
    "additionalProperties": False,
    "properties": {
        "schema": {"const": 1},
        "root_causes": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "summary": {
            "type": "object",
            "required": list(STATUSES),
            "additionalProperties": False,
            "properties": {status: {"type": "integer", "minimum": 0} for status in STATUSES},
        },
        "verdicts": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": [
                    *("id", "status", "rollout", "step", "engine", "rank", "value", "threshold", "evidence", "cause"),
                    *("advice", "confidence", "consequence_of", "refs"),
                ],
                "properties": {
                    "id": {"enum": [entry.id for entry in CATALOGUE]},
                    "status": {"enum": list(STATUSES)},
                    "rollout": {"type": ["integer", "null"]},
                    "step": {"type": ["integer", "null"]},
                    "engine": {"type": ["integer", "string", "null"]},
                    "rank": {"type": ["integer", "null"]},
                    "value": {},
                    "threshold": {},
                    "cause": {"type": "string", "minLength": 1},
                    "advice": {"type": "array", "items": {"type": "string", "minLength": 1}},
                    "confidence": {"enum": ["low", "medium", "high"]},
                    "consequence_of": {"type": "array", "items": {"type": "string"}},
                    "refs": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    "evidence": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["source", "line", "text"],
                            "properties": {
                                "source": {"type": "string", "minLength": 1},
                                "line": {"type": ["integer", "null"], "minimum": 1},
                                "text": {"type": "string"},
                            },
                        },
                    },
                },
            },
        },
    },
}


VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def check_report(report: Report) -> None:
    """Everything that holds for any report."""
    document = json.loads(msgspec.json.encode(report))
    VALIDATOR.validate(document)
    # Nothing that JSON would change, NaN above all.
    assert json.loads(json.dumps(msgspec.to_builtins(report), allow_nan=False)) == document
    assert list(dict.fromkeys(v.id for v in report.verdicts)) == [entry.id for entry in CATALOGUE]
    for status in STATUSES:
        assert report.summary[status] == sum(v.status == status for v in report.verdicts)
    for found in report.verdicts:
        assert found.status in entry_of(found.id).statuses, found
        if found.status in ("warn", "fail"):
            assert found.advice, found
            assert found.evidence, found
            assert found.value is not None, found
            assert found.threshold is not None, found
    roots = {v.id for v in report.verdicts if v.status in ("warn", "fail") and not v.consequence_of}
    assert set(report.root_causes) == roots


def test_nothing_at_all_gives_a_skip_for_every_check() -> None:
    report = evaluate(Observations())
    check_report(report)
    assert report.summary["skip"] == len(CATALOGUE) == 62
    assert {v.cause for v in evaluate(Observations(), rules=()).verdicts} == {NO_RULE}
    assert {rule.id for rule in RULES} == {entry.id for entry in CATALOGUE}


def test_every_step_one_check_has_a_rule_and_every_rule_an_entry() -> None:
    ids = [entry.id for entry in CATALOGUE]
    assert len(set(ids)) == len(ids)
    assert {rule.id for rule in RULES} >= set(STEP1)
    assert {rule.id for rule in RULES} <= set(ids)
    with pytest.raises(KeyError):
        entry_of("train.nothing")


def test_what_explains_what_has_no_circle_and_names_checks_that_exist() -> None:
    ids = {entry.id for entry in CATALOGUE}
    below = {
        entry.id: {i for e in entry.explains for i in ids if i == e.target or i.startswith(e.target.removesuffix("*"))}
        for entry in CATALOGUE
    }
    for entry in CATALOGUE:
        for rule in entry.explains:
            assert rule.target in ids or rule.target == "logprob.*"

    def reachable(start: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        for target in below[start] - seen:
            seen |= reachable(target, seen | {target})
        return seen

    assert not [i for i in ids if i in reachable(i)]


def test_a_rule_that_raises_is_isolated_and_named() -> None:
    def broken(_: Observations, __: Thresholds) -> Iterable[Verdict]:
        raise ZeroDivisionError("division by zero")

    report = evaluate(
        obs(healthy(0, grad_norm=math.nan)),
        rules=[Rule("kl.on-policy", broken), *(rule for rule in RULES if rule.id == "train.nan")],
    )
    (found,) = (v for v in report.verdicts if v.id == "kl.on-policy")
    assert (found.status, found.confidence) == ("skip", "low")
    assert "ZeroDivisionError: division by zero" in found.cause
    assert report.root_causes == ("train.nan",)


def test_a_rule_of_a_later_stage_sees_what_the_earlier_ones_said() -> None:
    def early(seen: Observations, t: Thresholds) -> Iterable[Verdict]:
        assert seen.verdicts == ()
        return [Verdict("train.nan", "fail")]

    def late(seen: Observations, t: Thresholds) -> Iterable[Verdict]:
        assert fires(seen, "train.*")
        assert not fires(seen, "engine.*")
        return [Verdict("args.kernels", "warn", cause=fires(seen, "train.nan")[0].id)]

    rules = [Rule("args.kernels", late, stage=1), Rule("train.nan", early)]
    report = evaluate(Observations(), rules=rules)
    assert [v.cause for v in report.verdicts if v.id == "args.kernels"] == ["train.nan"]
    assert [v.id for v in report.verdicts] == [entry.id for entry in CATALOGUE]


def test_a_rule_that_says_nothing_is_a_skip() -> None:
    report = evaluate(obs(), rules=[Rule("kl.on-policy", lambda *_: [])])
    (found,) = (v for v in report.verdicts if v.id == "kl.on-policy")
    assert (found.status, found.cause) == ("skip", "the rule found nothing to judge")


def fired(id: str, status: str = "fail", **more: Any) -> Verdict:  # noqa: A002
    return msgspec.convert({"id": id, "status": status, **more}, Verdict)


@pytest.mark.parametrize(
    ("cause", "effect", "folded"),
    [
        (fired("logprob.magnitude"), fired("train.grad-high"), True),
        (fired("logprob.magnitude", "warn"), fired("train.grad-high", "warn"), True),
        (fired("logprob.magnitude", "info"), fired("train.grad-high"), False),
        (fired("logprob.magnitude", rollout=0), fired("train.grad-high", rollout=0, step=0), True),
        (fired("logprob.magnitude", rollout=3), fired("train.grad-high", rollout=2), False),
        (fired("weights.sync-garble", rollout=1), fired("logprob.drift", rollout=4), True),
        (fired("train.nan"), fired("rollout.text", value={"pattern": "repeated"}), True),
        (fired("train.nan"), fired("rollout.text", value={"pattern": "salad"}), False),
        (fired("train.nan"), fired("rollout.text"), False),
        (fired("ckpt.loaded"), fired("rollout.text"), True),
        (fired("ckpt.loaded", "warn"), fired("rollout.text"), False),
        (fired("args.batch"), fired("train.nan", step=0), True),
        (fired("args.batch"), fired("train.nan", step=7), False),
        (fired("engine.oom", engine=1), fired("engine.ima", engine=1), True),
        (fired("engine.oom", engine=1), fired("engine.ima", engine=2), False),
        (fired("engine.oom"), fired("engine.ima", engine=2), True),
        (fired("train.ima", rank=1), fired("train.collective", rank=2), False),
    ],
)
def test_a_consequence_is_folded_under_its_cause(cause: Verdict, effect: Verdict, folded: bool) -> None:
    for order in ([cause, effect], [effect, cause]):
        report = assemble(order)
        (found,) = (v for v in report.verdicts if v.id == effect.id)
        assert found.consequence_of == ((cause.id,) if folded else ())
        assert (effect.id in report.root_causes) is not folded


def test_root_causes_come_fails_first_then_from_cause_to_symptom_then_by_time() -> None:
    report = assemble(
        [
            fired("rollout.text", "fail", rollout=0, value={"pattern": "salad"}),
            fired("kl.on-policy", "warn", rollout=0),
            fired("train.grad-zero", "fail", rollout=9),
            fired("args.batch", "warn"),
        ]
    )
    assert report.root_causes == ("train.grad-zero", "rollout.text", "args.batch", "kl.on-policy")


def test_the_same_check_on_several_subjects_is_one_root_cause() -> None:
    report = assemble([fired("engine.oom", engine=1), fired("engine.oom", engine=0)])
    assert report.root_causes == ("engine.oom",)
    assert report.summary["fail"] == 2


def test_a_report_survives_the_daemon_s_state_table() -> None:
    report = evaluate(obs(healthy(0, grad_norm=math.nan), sample(salad(1))))
    stored = [{**msgspec.to_builtins(v), "since": 1.0, "subjects": 1} for v in report.verdicts]
    assert report_from_state(stored, report.root_causes) == report
    with pytest.raises(msgspec.ValidationError):
        report_from_state([{"id": 3}], [])


def test_rules_declare_every_metric_that_they_read() -> None:
    names, prefixes = metric_names()
    read: set[str] = set()

    class Spy(dict[str, float]):
        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

    rows = [MetricRow("train", i, Spy({"train/grad_norm": 0.0, "train/loss": math.nan}), i, 0) for i in range(9)]
    rows += [MetricRow("rollout", i, Spy({"rollout/log_probs": -0.3}), i) for i in range(9)]
    evaluate(obs(*rows))
    assert read - names == set()
    assert prefixes == ("rollout/zero_std/",)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.3, -0.3, 1e-9, 3e9])
TRAIN_NAMES = sorted(name for name in metric_names()[0] if name.startswith("train/"))
ROLLOUT_NAMES = [*sorted(name for name in metric_names()[0] if name.startswith("rollout/")), "rollout/zero_std/count_0"]
maybe_step = st.none() | st.integers(0, 3)


def rows_of(axis: str, names: list[str]) -> st.SearchStrategy[MetricRow]:
    return st.builds(
        MetricRow,
        axis=st.just(axis),
        step=st.integers(-2, 40),
        values=st.dictionaries(st.sampled_from(names), numbers, max_size=6),
        rollout_id=st.none() | st.integers(-1, 12),
        step_in_rollout=maybe_step,
        segment=st.integers(0, 2),
        rank=st.none() | st.integers(0, 2),
        span=st.sampled_from([1, 1, 8]),
    )


fields = st.fixed_dictionaries(
    {},
    optional={
        "response": st.sampled_from([*ORDINARY.values(), *(text for text, _ in BROKEN.values()), ""]),
        "reward": numbers | st.text(max_size=3),
        "group_index": st.integers(0, 2) | st.none(),
        "token_ids": st.lists(st.integers(0, 2), max_size=30) | st.just(7),
        "log_probs": st.lists(numbers, max_size=3) | st.just("x"),
        "ref_log_probs": st.lists(numbers, max_size=3),
        "rollout_log_probs": st.lists(numbers | st.none(), max_size=3),
        "response_length": st.integers(0, 9) | st.none(),
        "weight_version": st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
    },
)
samples = st.builds(
    lambda found, rollout_id, segment: sample(**found, rollout_id=rollout_id, segment=segment),
    fields,
    st.none() | st.integers(0, 5),
    st.integers(0, 1),
)
flags = st.dictionaries(
    st.sampled_from(
        [
            *(
                "load",
                "ref_load",
                "num_steps_per_rollout",
                "rollout_batch_size",
                "n_samples_per_prompt",
                "kl_loss_type",
            ),
            *("global_batch_size", "use_rollout_routing_replay", "num_experts", "hf_checkpoint", "rollout_temperature"),
            *("no_check_for_nan_in_loss_and_grad", "context_parallel_size", "fp8_rollout", "lora_rank"),
        ]
    ),
    st.none()
    | st.booleans()
    | st.integers(-1, 9)
    | st.floats()
    | st.sampled_from(["", "0", "x", "k3", "M-FP8", "nan"]),
)
syncs = st.builds(
    SyncEvent,
    version=st.sampled_from(["", "1", "2"]),
    rollout_id=st.none() | st.integers(0, 5),
    ok=st.booleans(),
    engines=st.lists(st.builds(EngineSync, engine=st.just("0"), digest=st.sampled_from(["", "a"])), max_size=2).map(
        tuple
    ),
    digest=st.sampled_from(["", "a", "b"]),
    segment=st.integers(0, 1),
)
starts = st.lists(
    st.builds(RunStart, st.integers(0, 2), st.none() | st.integers(0, 3), st.sampled_from([None, True, False])),
    max_size=3,
).map(tuple)


@st.composite
def observations(draw: st.DrawFn) -> Observations:
    rows = draw(st.lists(rows_of("train", TRAIN_NAMES) | rows_of("rollout", ROLLOUT_NAMES), max_size=25))
    return obs(
        *rows,
        *draw(st.lists(samples, max_size=5)),
        *draw(st.lists(syncs, max_size=3)),
        flags=draw(flags),
        starts=draw(starts),
        mode=draw(st.sampled_from(["full", "rollout-only", "train-only"])),
        vocab_size=draw(st.none() | st.integers(-1, 300)),
        live=draw(st.booleans()),
        lines=tuple(TextLine(text) for text in draw(st.lists(st.text(max_size=30), max_size=2))),
    )


@settings(max_examples=50, deadline=None)
@given(observations())
def test_no_observations_break_a_rule(seen: Observations) -> None:
    report = evaluate(seen)
    check_report(report)
    broken = [v for v in report.verdicts if isinstance(v.value, dict) and "rule_error" in v.value]
    assert not broken


@settings(max_examples=40, deadline=None)
@given(observations(), st.randoms(use_true_random=False))
def test_the_order_in_which_facts_arrive_does_not_matter(seen: Observations, chance: random.Random) -> None:
    metrics, texts, events = list(seen.metrics), list(seen.samples), list(seen.syncs)
    for facts in (metrics, texts, events):
        chance.shuffle(facts)
    shuffled = dataclasses.replace(seen, metrics=tuple(metrics), samples=tuple(texts), syncs=tuple(events))
    assert verdict_keys(evaluate(shuffled)) == verdict_keys(evaluate(seen))


def verdict_keys(report: Report) -> list[tuple[str, str, int | None, int | None]]:
    return [(v.id, v.status, v.rollout, v.step) for v in report.verdicts]


def test_evaluating_twice_gives_the_same() -> None:
    seen = obs(healthy(0), healthy(1, grad_norm=math.nan), rollout(0, log_probs=-1.0), sample(salad(3)))
    assert evaluate(seen) == evaluate(seen) == evaluate(seen, DEFAULTS)


def test_a_mode_without_trainer_skips_what_needs_one() -> None:
    found = [verdict(i, obs(sample(), mode="rollout-only")) for i in STEP1]
    assert [v.id for v in found if v.status != "skip"] == ["rollout.text"]


@pytest.mark.parametrize(("mode", "area"), [("train-only", "engine"), ("rollout-only", "train")])
def test_a_side_that_was_not_started_has_passed_nothing(mode: Mode, area: str) -> None:
    quiet = evaluate(obs(logs=(LogSource("a.log"),), mode=mode))
    assert {v.status for v in quiet.verdicts if v.id.startswith(f"{area}.")} == {"skip"}
    both = evaluate(obs(logs=(LogSource("a.log"),)))
    assert "pass" in {v.status for v in both.verdicts if v.id.startswith(f"{area}.")}


def _rows(steps: Iterable[int], *, bad: bool = False) -> list[MetricRow]:
    """Steps and rollouts of a healthy run, or of one in which nothing is a number any more."""
    found: list[MetricRow] = []
    for step in steps:
        its_rollout = rollout(step, raw_reward=0.5 + 0.01 * step, log_probs=-0.5, truncated_ratio=0.0)
        for row in (healthy(step), its_rollout):
            values = dict.fromkeys(row.values, math.nan) if bad else row.values
            found.append(dataclasses.replace(row, values=values))
    return found


OF_THE_NEWEST = (
    "train.grad-scale", "train.grad-high", "train.grad-zero", "train.collapse", "kl.on-policy", "logprob.train-rollout",
    "logprob.drift", "rollout.truncated", "rollout.reward-flat",
)  # fmt: skip


def test_numbers_of_earlier_steps_are_no_pass_while_the_newest_is_none() -> None:
    fine, bad, back = _rows(range(12)), _rows(range(12, 52), bad=True), _rows(range(52, 60))
    status = {v.id: v.status for v in evaluate(obs(*fine)).verdicts}
    assert {status[id_] for id_ in OF_THE_NEWEST} == {"pass"}
    after = evaluate(obs(*fine, *bad)).verdicts
    assert {v.status for v in after if v.id in OF_THE_NEWEST} == {"skip"}
    assert not [v.id for v in after if v.status == "pass" and v.step is not None and 0 < v.step < 51]
    (zero,) = (v for v in after if v.id == "train.grad-zero")
    assert zero.cause == "train/grad_norm is NaN since step 12; the last number was 0.3 at 11"
    assert next(v for v in after if v.id == "logprob.magnitude").status == "pass", "it speaks of the first rollout"
    again = evaluate(obs(*fine, *bad, *back)).verdicts
    assert next(v for v in again if v.id == "train.grad-zero").status == "pass"


def test_one_skipped_step_at_the_end_takes_no_pass_back() -> None:
    fine = _rows(range(12))
    one = obs(*fine, healthy(12, grad_norm=math.nan, step_skipped=1.0))
    two = obs(*fine, *(healthy(step, grad_norm=math.nan, step_skipped=1.0) for step in (12, 13)))
    untold = obs(*fine, healthy(12, grad_norm=math.nan))
    assert [verdict("train.grad-zero", seen).status for seen in (one, two, untold)] == ["pass", "skip", "skip"]
