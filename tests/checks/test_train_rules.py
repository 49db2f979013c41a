"""The checks on loss and gradient against the real situations of the catalogue."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.observe import MetricRow, Observations, RunStart, SyncEvent, TextLine
from rltop.checks.thresholds import DEFAULTS
from tests.checks.build import at, firing, healthy, obs, rollout, sample, train, verdict
from tests.checks.corpus import ORDINARY, salad

HIGH = "train.grad-high"
ZERO = "train.grad-zero"
SCALE = "train.grad-scale"
NANS = "train.nan"
NAN, INF = math.nan, math.inf


def norms(*values: float, **changes: float) -> list[MetricRow]:
    return [healthy(step, grad_norm=value, **changes) for step, value in enumerate(values)]


@pytest.mark.parametrize("check", [HIGH, ZERO, SCALE])
def test_a_good_norm_before_numbers_that_are_none_is_no_pass(check: str) -> None:
    before, after = [0.3] * 20, [NAN] * 40
    found = verdict(check, obs(*norms(*before, *after)))
    why = "train/grad_norm is NaN since step 20; the last number was 0.3 at 19"
    assert (found.status, found.cause) == ("skip", why)
    assert verdict(check, obs(*norms(*before, *after, 0.3))).status == "pass"


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*norms(0.3)), "pass", "0.3"),
        (obs(*norms(10.0)), "pass", "10"),
        (obs(*norms(200.0)), "warn", "first step"),
        (obs(*norms(1500.0)), "fail", "first step"),
        (obs(*norms(200.0), rollout(0, log_probs=-1.2)), "warn", "the data is the cause"),
        (obs(*norms(200.0), rollout(0, log_probs=-0.3)), "warn", "divided by the tokens"),
        (obs(*norms(*[0.3] * 20, 6.0)), "warn", "median of the steps before is 0.3"),
        (obs(*norms(*[0.3] * 20, 2.9)), "pass", "2.9"),
        (obs(*norms(*[0.6] * 20, 5.9)), "pass", "no spike"),
        (obs(*norms(*[0.1] * 20, 4.9)), "pass", "no spike"),
        (obs(*norms(*[0.3] * 20, 6.0, *[0.3] * 49)), "warn", "step 20"),
        (obs(*norms(*[0.3] * 20, 6.0, *[0.3] * 50)), "pass", "no spike"),
        (obs(*norms(0.3, 0.3, 6.0)), "pass", "no spike"),
        (obs(*norms(NAN)), "skip", "not in the evidence"),
        (obs(*norms(200.0), mode="rollout-only"), "skip", "no trainer"),
        (obs(live=True), "skip", "not seen yet"),
        # an excerpt from the middle of a run has no first step
        (obs(train(300, grad_norm=200.0), starts=()), "pass", "200"),
        (obs(train(1, grad_norm=200.0), starts=()), "warn", "first step"),
        (obs(train(20, rollout=20, on=0, grad_norm=200.0), starts=[RunStart(0, 20, False)]), "warn", "first step"),
    ],
)
def test_the_gradient_norm_is_judged_at_the_first_step_and_for_spikes(
    observations: Observations, status: str, words: str
) -> None:
    found = verdict(HIGH, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_several_steps_per_rollout_still_have_one_first_step() -> None:
    rows = [train(k, on=k, rollout=0, grad_norm=200.0 if k else 0.3, loss=0.1) for k in range(4)]
    assert verdict(HIGH, obs(*rows)).status == "pass"


@pytest.mark.parametrize(
    ("observations", "status"),
    [
        (obs(*norms(2.89e9, 2.88e9, 2.87e9)), "fail"),
        (obs(*norms(2.89e9, 2.88e9)), "skip"),
        (obs(*norms(2e4, 9e4, 4e4)), "pass"),
        (obs(*norms(9e3, 9e3, 9e3)), "pass"),
        (obs(*norms(2e9, 2e9, 2e9, loss=80.0)), "skip"),
        (obs(*norms(2e9, 2e9, 2e9, loss=NAN)), "skip"),
        (obs(*norms(2e9, 2e9, 2e9, ppo_kl=0.01)), "skip"),
        (obs(*norms(2e9, 2e9, 2e9, train_rollout_logprob_abs_diff=0.4)), "skip"),
        (obs(*norms(0.3, 0.3, 0.3), mode="rollout-only"), "skip"),
    ],
)
def test_a_huge_constant_norm_with_a_healthy_loss_is_a_matter_of_scale(observations: Observations, status: str) -> None:
    assert verdict(SCALE, observations).status == status


def test_a_norm_that_follows_the_token_count_is_an_undivided_loss() -> None:
    sizes = [1000, 2500, 1400, 3000]
    rows = [healthy(i, grad_norm=0.02 * n, tokens_per_micro_batch=n) for i, n in enumerate(sizes)]
    found = verdict(SCALE, obs(*rows))
    assert (found.status, found.value["kind"]) == ("fail", "tokens")
    assert "not divided by the token count" in found.cause
    assert verdict(SCALE, obs(*rows[:3])).status == "pass"
    noisy = [
        healthy(i, grad_norm=0.02 * n * (1 + 0.1 * (i % 2)), tokens_per_micro_batch=n) for i, n in enumerate(sizes)
    ]
    assert verdict(SCALE, obs(*noisy)).status == "pass"
    even = [healthy(i, grad_norm=0.02 * n, tokens_per_micro_batch=n) for i, n in enumerate([1000, 1100, 1200, 1300])]
    assert verdict(SCALE, obs(*even)).status == "pass"


def test_what_scale_owns_is_not_also_called_high() -> None:
    observations = obs(*norms(2.89e9, 2.88e9, 2.87e9, 2.86e9))
    assert verdict(HIGH, observations).status == "skip"
    assert verdict(SCALE, observations).status == "fail"


FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
GROUPS = {"rollout_batch_size": 8}


def replay(step: int, loss: float, norm: float, there: tuple[float, float], allowed: float | None) -> MetricRow:
    """A step beside the one of the run before; allowed: how far both may differ, None where nobody knows."""
    limits = {} if allowed is None else {"replay_loss_tolerance": allowed, "replay_grad_norm_tolerance": allowed}
    values = {"loss": loss, "grad_norm": norm, "replay_loss": there[0], "replay_grad_norm": there[1]}
    return MetricRow("train", step, {f"train/{name}": value for name, value in (values | limits).items()})


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*norms(0.3)), "skip", "no steps of an earlier run"),
        (obs(*norms(0.3), mode="rollout-only"), "skip", "no trainer"),
        (obs(replay(0, 0.1, 0.3, (0.1, 0.3), 0.0), replay(1, 0.2, 0.4, (0.2, 0.4), 0.0)), "pass", "2 steps"),
        (obs(replay(0, 0.1, 0.3, (0.1, 0.3), 0.0)), "pass", "bit for bit"),
        (obs(replay(0, NAN, NAN, (NAN, NAN), 0.0)), "pass", "bit for bit"),
        (obs(replay(0, 0.1, 0.3, (0.1, 0.30001), 1e-4)), "pass", "tolerance 0.0001"),
        (obs(replay(0, 0.1, 0.3, (0.1, 0.30001), 0.0)), "fail", "the same bits"),
        (obs(replay(0, 0.1, 0.3, (0.1, 0.301), 1e-4)), "fail", "other parallel sizes explain less"),
        (obs(replay(0, NAN, 0.3, (0.1, 0.3), 1e-4)), "fail", "train/loss is NaN at step 0"),
        (obs(replay(0, 0.1, 0.3, (0.1, 0.3), 0.0), replay(1, 0.2, 0.3, (0.1, 0.3), 0.0)), "fail", "at step 1"),
        (obs(replay(0, 0.1, 0.3, (0.5, 0.9), None)), "info", "not comparable"),
    ],
)
def test_a_replay_gives_the_steps_of_the_run_before(observations: Observations, status: str, words: str) -> None:
    found = verdict("train.replay", observations)
    assert (found.status, words in found.cause) == (status, True), found


def counts(step: int, zero: float, one: float) -> MetricRow:
    return MetricRow("rollout", step, {"rollout/zero_std/count_0": zero, "rollout/zero_std/count_1": one})


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*norms(0.0, 0.0)), "fail", "the loss is 0.02"),
        (obs(*norms(0.0, 0.0), flags=FUSED), "fail", "TransformerEngine"),
        (obs(*norms(0.0)), "pass", "in a row"),
        (obs(*norms(0.0, 0.3, 0.0)), "pass", "in a row"),
        (obs(*norms(0.0, 0.0, loss=0.0)), "pass", "in a row"),
        (obs(*norms(0.0, 0.0), counts(0, 5, 3), counts(1, 8, 0), flags=GROUPS), "pass", "one reward"),
        (obs(*norms(0.0, 0.0, loss=0.0), counts(0, 5, 1), counts(1, 2, 2), flags=GROUPS), "fail", "different rewards"),
        (obs(*norms(0.0, 0.0, 0.3)), "fail", "from step 0 to step 1"),
        (obs(*norms(0.0, 0.0, *[0.3] * 49)), "fail", "from step 0 to step 1"),
        (obs(*norms(0.0, 0.0, *[0.3] * 50)), "pass", "There is a gradient"),
        (obs(*norms(NAN, NAN)), "skip", "not in the evidence"),
        (obs(*norms(0.0, 0.0), mode="rollout-only"), "skip", "no trainer"),
    ],
)
def test_no_gradient_with_something_to_learn(observations: Observations, status: str, words: str) -> None:
    found = verdict(ZERO, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_the_rewards_of_the_samples_tell_whether_there_is_something_to_learn() -> None:
    spread = [sample(rollout_id=r, index=i, group_index=0, reward=float(i)) for r in range(2) for i in range(2)]
    assert verdict(ZERO, obs(*norms(0.0, 0.0, loss=0.0), *spread)).status == "fail"


def test_a_missing_norm_is_not_a_zero_norm() -> None:
    rows = [train(step, on=0, rollout=step, loss=0.5) for step in range(5)]
    assert verdict(ZERO, obs(*rows)).status == "skip"
    assert firing(evaluate(obs(*rows))) == {}


ABORT = (
    "RuntimeError: Rank 23, node node-c, device 7, iteration 58: Unexpected result nan (message='found NaN in local "
    "grad norm for bucket #0 in backward pass before data-parallel communication collective')"
)
NO_CHECK = {"no_check_for_nan_in_loss_and_grad": True}


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*norms(0.3, 0.3)), "pass", "are numbers"),
        (obs(*norms(0.3, NAN)), "fail", "train/grad_norm is NaN at step 1"),
        (obs(*norms(0.3, INF)), "fail", "train/grad_norm is Inf at step 1"),
        (obs(*norms(0.3, 0.3, loss=-INF)), "fail", "train/loss is -Inf at step 0"),
        (obs(*norms(0.3), rollout(0, log_probs=NAN)), "fail", "rollout/log_probs is NaN in rollout 0"),
        (obs(*norms(0.3), sample(log_probs=[-0.1, NAN])), "fail", "per-token log-probs"),
        (obs(*norms(0.3, NAN, 0.3, NAN), flags=NO_CHECK), "pass", "skipped"),
        (obs(*norms(0.3, NAN), rollout(1, log_probs=NAN), flags=NO_CHECK), "fail", "rollout 1"),
        (obs(mode="rollout-only"), "skip", "no trainer"),
        (obs(), "skip", "not in the evidence"),
        (obs(live=True), "skip", "not seen yet"),
    ],
)
def test_anything_that_is_not_a_number_is_found(observations: Observations, status: str, words: str) -> None:
    found = verdict(NANS, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_plain_megatron_without_the_check_only_hides_the_nan() -> None:
    hidden = obs(*norms(0.3, NAN), flags=NO_CHECK)
    hidden = dataclasses.replace(hidden, args=dataclasses.replace(hidden.args, framework="megatron"))
    assert verdict(NANS, hidden).status == "fail"


@pytest.mark.parametrize(
    ("later", "reached", "words"),
    [
        ([], True, "next sync spoils the engines"),
        ([SyncEvent("2", 2)], True, "the sync of version 2 has given them"),
        ([SyncEvent("1", 1)], True, "next sync spoils"),
        ([rollout(2, log_probs=NAN)], True, "the log-probs after it are not numbers"),
        ([rollout(2, log_probs=NAN), SyncEvent("2", 2)], True, "the sync of version 2 gave them"),
        ([rollout(2, log_probs=-0.3)], False, "did not reach the weights"),
        ([healthy(1, grad_norm=NAN, step_skipped=1.0)], False, "the trainer skipped the step"),
        ([healthy(1, grad_norm=NAN), healthy(2), healthy(3)], False, "the numbers of later steps are finite"),
        ([healthy(1, grad_norm=NAN), healthy(2, loss=NAN)], True, "next sync spoils"),
    ],
)
def test_it_says_whether_the_step_reached_the_weights(later: list[Any], reached: bool, words: str) -> None:
    rows = (
        norms(0.3, NAN) if not (later and isinstance(later[0], MetricRow) and later[0].axis == "train") else norms(0.3)
    )
    found = verdict(NANS, obs(*rows, *later))
    assert (found.value["reached_weights"], words in found.cause) == (reached, True), found
    assert any("stop the run" in advice for advice in found.advice) is reached


def test_what_stands_above_the_bad_step_in_its_log_says_nothing_of_the_weights() -> None:
    """Two runs in one log: rollout 2 of the first is no rollout after step 1 of the second."""

    def placed(row: MetricRow, line: int) -> MetricRow:
        return dataclasses.replace(row, where=at(line))

    bad = [placed(healthy(0), 230), placed(healthy(1, loss=NAN), 238)]
    above = [placed(rollout(2, log_probs=-0.3), 104), placed(healthy(2), 106)]
    found = verdict(NANS, obs(*bad, *above, SyncEvent("2", 2, where=at(110))))
    assert found.value["reached_weights"] is True
    assert found.cause.endswith("the weights hold it and the next sync spoils the engines.")
    spoiled = verdict(NANS, obs(*bad, placed(rollout(2, log_probs=NAN), 104)))
    assert "the log-probs after it are not numbers" not in spoiled.cause
    below = verdict(NANS, obs(*bad, placed(rollout(2, log_probs=-0.3), 250)))
    assert below.value["reached_weights"] is False


@pytest.mark.parametrize(("later", "words"), [(2, "learned nothing from them."), (0, "does not learn.")])
def test_skipped_steps_are_named_in_cause_and_advice_alike(later: int, words: str) -> None:
    rows = norms(NAN, *[0.3] * 8, NAN, NAN, NAN, *[0.3] * later)
    found = verdict("train.skipped-steps", obs(*rows, flags=NO_CHECK))
    assert "skipped steps 9 to 11, 3 in a row (4 in all)" in found.cause
    assert found.cause.endswith(words)
    assert found.advice[0].endswith("the data of steps 9 to 11")


def test_an_abort_in_megatrons_words_is_a_sentence() -> None:
    found = verdict(NANS, obs(lines=(TextLine(ABORT, "trainer"),)))
    assert found.cause.startswith("At step 58 on rank 23, node node-c: found NaN in local grad norm")
    assert "is NaN" not in found.cause


def test_an_abort_names_rank_node_and_iteration() -> None:
    found = verdict(NANS, obs(*norms(0.3), lines=(TextLine(ABORT, "trainer"),)))
    assert (found.status, found.rank, found.step) == ("fail", 23, 58)
    assert "node node-c" in found.cause
    assert "aborted" in found.cause
    assert found.value["iteration"] == 58


def test_the_first_incident_decides_and_all_bad_numbers_of_that_step_are_evidence() -> None:
    found = verdict(NANS, obs(*norms(0.3, NAN, NAN, loss=0.1), healthy(3, loss=NAN), rollout(2, log_probs=NAN)))
    assert (found.step, found.value["quantity"]) == (1, "train/grad_norm")
    both = verdict(NANS, obs(healthy(0, loss=NAN, grad_norm=NAN)))
    assert both.value["quantity"] == "train/loss"
    assert [e.source for e in both.evidence] == ["train/loss@0", "train/grad_norm@0"]


def test_a_kl_term_that_jumps_under_an_exponential_estimator_is_suspected() -> None:
    rows = [healthy(30, kl_loss=0.6), healthy(31, kl_loss=41.7, grad_norm=NAN)]
    assert "low_var_kl estimator overflowed" in verdict(NANS, obs(*rows, flags={"kl_loss_type": "low_var_kl"})).cause
    assert "estimator" not in verdict(NANS, obs(*rows, flags={"kl_loss_type": "k1"})).cause


def test_one_rank_of_several_is_named_and_a_lone_source_is_not() -> None:
    good, bad = healthy(0), healthy(0, grad_norm=NAN)
    several = obs(dataclasses.replace(good, rank=0), dataclasses.replace(bad, rank=5))
    assert verdict(NANS, several).rank == 5
    assert verdict(NANS, obs(dataclasses.replace(bad, rank=0))).rank is None


def test_responses_that_repeat_one_token_are_folded_under_the_nan() -> None:
    report = evaluate(obs(*norms(0.3, NAN), sample("!" * 200, rollout_id=2)))
    assert firing(report) == {NANS: "fail"}
    (text,) = (v for v in report.verdicts if v.id == "rollout.text")
    assert (text.status, text.consequence_of) == ("fail", (NANS,))


def test_salad_and_earlier_text_are_not_folded_under_the_nan() -> None:
    assert set(firing(evaluate(obs(*norms(0.3, NAN), sample(salad(1), rollout_id=2))))) == {NANS, "rollout.text"}
    assert set(firing(evaluate(obs(*norms(0.3, NAN), sample("!" * 99, rollout_id=0))))) == {NANS, "rollout.text"}


def test_a_threshold_can_be_moved() -> None:
    assert verdict(HIGH, obs(*norms(200.0)), dataclasses.replace(DEFAULTS, grad_first_warn=500)).status == "pass"


def test_healthy_steps_with_healthy_text_fire_nothing() -> None:
    rows = [rollout(r, log_probs=-0.3, ref_log_probs=-0.3, rollout_log_probs=-0.301) for r in range(1)]
    texts = [sample(text, index=i) for i, text in enumerate(ORDINARY.values())]
    report = evaluate(obs(*norms(*[0.3] * 30), *rows, *texts))
    assert firing(report) == {}
    assert report.summary["fail"] == report.summary["warn"] == 0
