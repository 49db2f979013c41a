"""Live checks: records in, verdicts out; the same verdicts as on the whole evidence; bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.evaluate import evaluate
from rltop.checks.observe import Args, MetricRow, Observations, RunStart, Sample, SyncEvent
from rltop.checks.registry import metric_names
from rltop.checks.samples import make_sample
from rltop.daemon.live_checks import LiveChecks
from rltop.protocol.messages import Record, Source
from tests.checks.build import GOOD_TEXT, Recorder, firing
from tests.checks.corpus import salad

NAN = math.nan
SALAD = [salad(seed) for seed in range(4)]
SORTED = ["Sorted: 1 3 7.", "Sorted: 2 2 9.", "Sorted: 0 4 5.", "Sorted: 6 8 8."]

Change = Callable[[int], dict[str, float]]


def run_of(
    rollouts: Iterable[int],
    record: Recorder | None = None,
    *,
    begin: bool = True,
    actor: Change = lambda r: {},
    step: Change = lambda r: {},
    texts: Callable[[int], list[str]] = lambda r: SORTED,
    sync: Callable[[int], dict[str, Any]] = lambda r: {},
    **facts: Any,
) -> Iterator[Record]:
    """What rltop's own trainer sends, healthy but for the changes; rollout r is sampled with weights version r."""
    record = record or Recorder()
    if begin:
        yield record.run(**facts)
        yield record.sync("default", 0, engines={"0": {"ok": True, "same": True}})
    for r in rollouts:
        yield record("phase", name="rollout", edge="enter", rollout_id=r)
        perf = {"perf/rollout_time": 1.0, "rollout/zero_std/count_0.0": 1.0}
        yield record("metrics", axis="rollout", step=r, rollout_id=r, values=perf)
        logged = {"log_probs": -0.3, "ref_log_probs": -0.3, "rollout_log_probs": -0.3, "raw_reward": 0.5}
        yield record.metrics("rollout", r, logged | actor(r))
        yield record.samples(r, texts(r), reward=1.0, group_index=0)
        values = {
            "loss": 0.01,
            "pg_loss": 0.01,
            "kl_loss": 1e-4 * r,
            "ppo_kl": 0.0,
            "pg_clipfrac": 0.0,
            "lr-pg_0": 1e-3,
        }
        values |= {"grad_norm": 0.3 + 0.01 * (r % 7), "train_rollout_logprob_abs_diff": 1e-6, "step_skipped": 0.0}
        yield record.metrics("train", r, values | step(r))
        answer: dict[str, Any] = {"ok": True, "engines": {"0": {"ok": True, "same": True, "digest": "cafe"}}}
        yield record.sync(str(r + 1), r + 1, digest="cafe", **answer | sync(r + 1))


def watch(records: Iterable[Record]) -> LiveChecks:
    checks = LiveChecks()
    for record in records:
        checks.feed(record)
    assert not checks.problems
    return checks


def only(rollout: int, changed: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """A change in one rollout, or (`since`) from one on."""
    return lambda r: changed if r == rollout else {}


def since(rollout: int, changed: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    return lambda r: changed if r >= rollout else {}


SPOILED = {"ok": False, "engines": {"0": {"ok": True, "same": False, "digest": "beef"}}}

FAULTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "none": ({}, {}),
    "reference perturbed": (
        {"actor": since(0, {"ref_log_probs": -0.289}), "step": since(0, {"kl_loss": 0.01})},
        {"logprob.ref-equal": "fail"},
    ),
    "no chat template": (
        {"actor": since(0, {"log_probs": -0.9, "ref_log_probs": -0.9, "rollout_log_probs": -0.9})},
        {"logprob.magnitude": "warn"},
    ),
    "one NaN gradient": ({"step": only(1, {"grad_norm": NAN, "step_skipped": 1.0})}, {"train.nan": "fail"}),
    "loss not divided": ({"step": lambda r: {"grad_norm": 290.0 + 30 * r}}, {"train.grad-high": "warn"}),
    "layers swapped at the first sync": (
        {
            "actor": only(1, {"log_probs": -4.5, "ref_log_probs": -4.4, "rollout_log_probs": -1.2}),
            "step": only(1, {"train_rollout_logprob_abs_diff": 4.2}),
            "sync": only(1, SPOILED),
        },
        {"weights.compare": "fail"},
    ),
    "NaN in the weights": (
        {
            "actor": since(2, {"log_probs": NAN, "rollout_log_probs": NAN}),
            "step": since(1, {"grad_norm": NAN, "train_rollout_logprob_abs_diff": NAN}),
            "texts": lambda r: ["!" * 64] * 4 if r > 1 else SORTED,
        },
        {"train.nan": "fail"},
    ),
    "salad from the second rollout on": (
        {"texts": lambda r: SALAD if r else [GOOD_TEXT] * 4},
        {"weights.sync-garble": "fail"},
    ),
    "no gradient": ({"step": since(0, {"grad_norm": 0.0})}, {"train.grad-zero": "fail"}),
    "kernel not deterministic": ({"step": since(0, {"ppo_kl": 3e-4})}, {"kl.on-policy": "warn"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rollouts", [2, 3, 30])
def test_a_planted_fault_turns_exactly_its_own_verdict(fault: str, rollouts: int) -> None:
    changes, expected = FAULTS[fault]
    assert firing(watch(run_of(range(rollouts), **changes)).report()) == expected


def test_the_swapped_layers_name_the_sync() -> None:
    changes, _ = FAULTS["layers swapped at the first sync"]
    report = watch(run_of(range(2), **changes)).report()
    (found,) = (v for v in report.verdicts if v.id == "logprob.train-rollout")
    assert found.value["change_point"] == {"rollout": 1, "weights_version": "1"}
    assert "weights version 1: that sync is the change point" in found.cause
    assert "digest of engine 0 differs" in found.cause
    assert [e.source for e in found.evidence][-1] == "weights@1"


def test_text_that_repeats_after_the_nan_is_its_consequence() -> None:
    changes, _ = FAULTS["NaN in the weights"]
    report = watch(run_of(range(4), **changes)).report()
    (text,) = (v for v in report.verdicts if v.id == "rollout.text")
    assert (text.status, text.consequence_of) == ("fail", ("train.nan",))
    (nan,) = (v for v in report.verdicts if v.id == "train.nan")
    assert "version 2" in nan.cause
    assert nan.value["reached_weights"] is True


def offline(records: Iterable[Record]) -> Observations:
    """The same records as a reader of files would hold them: everything, nothing thinned."""
    rows: list[MetricRow] = []
    texts: list[Sample] = []
    syncs: list[SyncEvent] = []
    facts: dict[str, Any] = {}
    for record in records:
        payload = record.payload
        if record.kind == "metrics":
            place = (payload.get("rollout_id"), payload.get("step_in_rollout"))
            rows.append(MetricRow(payload["axis"], payload["step"], payload["values"], *place))
        elif record.kind == "samples":
            texts += [make_sample(fields, rollout_id=payload["rollout_id"]) for fields in payload["samples"]]
        elif record.kind == "weights":
            lone = watch([record]).observations().syncs
            syncs += lone
        elif record.kind == "run":
            facts = {"args": Args(payload["args"], payload["framework"]), "vocab_size": payload["vocab_size"]}
    fresh = (RunStart(0, 0, True),)
    return Observations(tuple(rows), tuple(texts), tuple(syncs), starts=fresh, live=True, **facts)


LONG = ("layers swapped at the first sync", "salad from the second rollout on", "no gradient", "NaN in the weights")


@pytest.mark.parametrize("fault", FAULTS)
def test_live_and_offline_say_the_same_in_the_same_words(fault: str) -> None:
    changes, _ = FAULTS[fault]
    for length in (1, 2, 5, *((260,) if fault in LONG else ())):
        records = list(run_of(range(length), **changes))
        assert watch(records).report() == evaluate(offline(records))


def test_verdicts_on_a_long_run_stay_those_of_the_whole_run() -> None:
    def step(r: int) -> dict[str, float]:
        spike = {"grad_norm": 300.0} if r == 700 else {}
        bad = {"train_rollout_logprob_abs_diff": 0.4} if 500 <= r < 510 else {}
        return spike | bad

    records = list(run_of(range(1_000), step=step))
    live, whole = watch(records).report(), evaluate(offline(records))
    assert live == whole
    (gap,) = (v for v in live.verdicts if v.id == "logprob.train-rollout")
    assert (gap.status, gap.rollout, gap.value["change_point"]["weights_version"]) == ("info", 500, "500")
    assert "last bad rollout is 509" in gap.cause


def test_memory_does_not_grow_with_the_run() -> None:
    sizes = []
    for length in (700, 2_100):
        seen = watch(run_of(range(length))).observations()
        sizes.append((len(seen.metrics), len(seen.samples), len(seen.syncs), len(seen.phases)))
    assert all(large <= small + 10 for small, large in zip(*sizes, strict=True))
    assert sizes[1][0] < 1_400
    names, prefixes = metric_names()
    assert all(name in names or name.startswith(prefixes) for row in seen.metrics for name in row.values)


def test_nothing_is_evaluated_when_nothing_relevant_was_fed() -> None:
    record = Recorder()
    checks = watch(run_of(range(3), record))
    report = checks.report()
    checks.feed(record("metrics", axis="rollout", step=2, rollout_id=2, values={"perf/step_time": 1.0}))
    checks.feed(record("phase", name="train", edge="leave", rollout_id=2, elapsed_s=1.0))
    checks.feed(record("log", level="info", text="Timer train end"))
    checks.feed(record("unheard-of"))
    assert checks.report() is report
    checks.feed(record.metrics("train", 3, {"grad_norm": NAN}))
    assert checks.report() is not report


def test_an_unreadable_record_is_counted_and_does_not_take_the_others_with_it() -> None:
    record = Recorder()
    checks = LiveChecks()
    for odd in (
        record("metrics", values=3, step=0),
        record("metrics", values={"train/loss": 1.0}),
        record("samples", rollout_id="x", samples=[]),
        record("weights", version=3),
        record("run", framework="rltop", args=[1]),
        record("engine", id="0", generation="x"),
    ):
        checks.feed(odd)
    assert checks.problems == {"metrics": 2, "samples": 1, "weights": 1, "run": 1, "engine": 1}
    checks.feed(record.metrics("train", 0, {"grad_norm": NAN, "loss": "many"}))  # type: ignore[dict-item] # on purpose
    assert firing(checks.report()) == {"train.nan": "fail"}


def test_without_an_axis_the_names_say_what_the_step_counts() -> None:
    record, checks = Recorder(), LiveChecks()
    for step in range(5):
        values = {"train/grad_norm": NAN if step == 3 else 0.2, "rollout/raw_reward": 0.5, "perf/step_time": 1.0}
        checks.feed(record("metrics", values=values, step=step))
    (nan,) = (v for v in checks.report().verdicts if v.id == "train.nan")
    assert (nan.status, nan.step) == ("fail", 3)
    axes = {name: row.axis for row in checks.observations().metrics for name in row.values}
    assert axes["train/grad_norm"] == "train"
    assert axes["rollout/raw_reward"] == "rollout"


def test_an_axis_that_is_given_holds_for_all_names() -> None:
    record, checks = Recorder(), LiveChecks()
    checks.feed(record("metrics", values={"train/grad_norm": 0.2, "rollout/raw_reward": 0.5}, step=0, axis="rollout"))
    assert {row.axis for row in checks.observations().metrics} == {"rollout"}


def test_a_restart_begins_a_new_segment_for_every_source_that_goes_back() -> None:
    trainer, manager = Recorder(), Recorder(Source("rollout", 0, "node", 2))
    checks = LiveChecks()
    checks.feed(trainer.run())
    for r in range(3):
        checks.feed(manager.metrics("rollout", r, {"log_probs": -0.3}))
        checks.feed(trainer.metrics("train", r, {"loss": 0.1}))
    checks.feed(trainer.metrics("train", 1, {"loss": 0.1}))  # goes back
    checks.feed(manager.metrics("rollout", 2, {"log_probs": -0.3}))  # late, still of the first run
    checks.feed(manager.metrics("rollout", 1, {"log_probs": -0.3}))  # follows
    checks.feed(trainer.metrics("train", 2, {"loss": 0.1}))
    found = sorted((row.axis, row.segment, row.step) for row in checks.observations().metrics)
    assert found == [
        *(("rollout", 0, step) for step in (0, 1, 2, 2)),
        ("rollout", 1, 1),
        *(("train", 0, step) for step in (0, 1, 2)),
        *(("train", 1, step) for step in (1, 2)),
    ]


def test_a_second_run_record_is_a_resume_and_the_fresh_start_keeps_its_verdict() -> None:
    record = Recorder()
    checks = watch(run_of(range(5), record))
    for resumed in run_of(
        range(5, 8), record, start_rollout_id=5, fresh_start=False, actor=lambda r: {"ref_log_probs": -0.4}
    ):
        checks.feed(resumed)
    assert checks.observations().starts == (RunStart(0, 0, True), RunStart(1, 5, False))
    report = checks.report()
    assert firing(report) == {}
    assert next(v.status for v in report.verdicts if v.id == "logprob.ref-equal") == "pass"


def test_a_second_source_with_run_facts_is_no_restart() -> None:
    trainer, hook = Recorder(), Recorder(Source("hook", 0, "node", 2))
    checks = LiveChecks()
    for record in (trainer.run(), trainer.metrics("train", 0, {"loss": 0.1}), hook.run(framework="slime")):
        checks.feed(record)
    assert checks.observations().starts == (RunStart(0, 0, True),)


def test_the_end_of_the_run_turns_not_yet_into_not_there() -> None:
    record = Recorder()
    checks = watch([record.run()])
    waiting = {v.cause for v in checks.report().verdicts if v.id == "train.grad-high"}
    checks.feed(record("bye", reason="done"))
    ended = {v.cause for v in checks.report().verdicts if v.id == "train.grad-high"}
    assert (waiting, ended) == ({"not seen yet: train/grad_norm"}, {"not in the evidence: train/grad_norm"})


ABORT = "Rank 23, node node-c, device 7, iteration 58: Unexpected result nan (message='found NaN in local grad norm')"


@pytest.mark.parametrize("kind", ["log", "bye"])
def test_an_abort_in_a_log_line_or_at_the_end_is_seen(kind: str) -> None:
    record = Recorder()
    last = record("log", level="error", text=ABORT) if kind == "log" else record("bye", reason="failed", text=ABORT)
    report = watch([*run_of(range(2), record), last]).report()
    (found,) = (v for v in report.verdicts if v.id == "train.nan")
    assert (found.status, found.rank) == ("fail", 23)


def test_model_text_in_a_log_line_is_never_evidence() -> None:
    record = Recorder()
    lines = [
        record("log", level="error", text=f"{mark} ['{ABORT}']")
        for mark in ("First rollout sample:", "Finish rollout:")
    ]
    assert firing(watch([*run_of(range(2), record), *lines]).report()) == {}


def test_samples_carry_token_differences_into_the_reference_check() -> None:
    record = Recorder()
    tokens = {"log_probs": [-0.1, -0.5], "ref_log_probs": [-0.2, -0.4], "rollout_log_probs": [-0.1, -0.5]}
    extra = record.samples(0, ["Sorted: 1 2 3."], **tokens)
    report = watch([*run_of(range(1), record), extra]).report()
    assert firing(report) == {"logprob.ref-equal": "fail"}


def test_a_fact_about_an_engine_that_did_not_change_is_no_news() -> None:
    record = Recorder()
    checks = watch([record("engine", id="0", kind="cpu", version="0.1")])
    report = checks.report()
    checks.feed(record("engine", id="0", kind="cpu", version="0.1"))
    assert checks.report() is report
    checks.feed(record("engine", id="0", kind="cpu", version="0.2"))
    assert checks.observations().engines[0].version == "0.2"


numbers = st.floats() | st.integers(-3, 3) | st.none() | st.text(max_size=2)
KEYS = ["values", "step", "axis", "rollout_id", "samples", "version", "engines", "args", "text", "level", "id"]
KINDS = ["run", "metrics", "samples", "weights", "engine", "log", "bye"]
payloads = st.dictionaries(
    st.sampled_from(KEYS),
    numbers | st.dictionaries(st.text(max_size=3), numbers, max_size=2) | st.lists(numbers, max_size=2),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), payloads), max_size=6))
def test_no_record_breaks_the_checks(found: list[tuple[str, dict[str, Any]]]) -> None:
    record, checks = Recorder(), LiveChecks()
    for kind, payload in found:
        checks.feed(record(kind, **payload))
    checks.report()
