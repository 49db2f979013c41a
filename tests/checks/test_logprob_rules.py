"""The log-prob checks against the real situations of the catalogue."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rltop.checks.observe import EngineSync, MetricRow, Observations, RunStart, Sample, SyncEvent
from rltop.checks.syncs import COMPARE
from tests.checks.build import event, healthy, obs, rollout, sample, train, verdict

NAN = math.nan
REF = "logprob.ref-equal"
MAGNITUDE = "logprob.magnitude"
GAP = "logprob.train-rollout"
KL = "kl.on-policy"
MOE = {"num_experts": 128}


def start(actor: float = -0.3, reference: float | None = None, kl: float | None = 0.0) -> list[MetricRow]:
    """Rollout 0 and its step."""
    step = {"loss": 0.02, "ppo_kl": 0.0, "grad_norm": 0.3}
    first = rollout(0, log_probs=actor, rollout_log_probs=actor - 0.001)
    if reference is not None:
        first = rollout(0, log_probs=actor, rollout_log_probs=actor - 0.001, ref_log_probs=reference)
    return [first, train(0, on=0, rollout=0, **step if kl is None else step | {"kl_loss": kl})]


def tokens(actor: list[float], reference: list[float]) -> Sample:
    return sample(log_probs=actor, ref_log_probs=reference)


def ranks(*gaps: float) -> list[MetricRow]:
    """What trainer ranks measured over all their tokens of rollout 0."""
    name = "rollout/token_gap/actor_ref/mean"
    return [MetricRow("rollout", 0, {name: gap}, rollout_id=0, rank=rank) for rank, gap in enumerate(gaps)]


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*start(-0.3, -0.3)), "pass", "equal"),
        (obs(*start(-0.3, -0.3 + 5e-9)), "pass", "equal"),
        (obs(*start(-0.3, -0.3001)), "warn", "not deterministic"),
        (obs(*start(-0.3, -0.31)), "fail", "other weights"),
        (obs(*start(-0.3, -0.3, kl=1e-4)), "warn", "dropout"),
        (obs(*start(-0.3, None, kl=0.2)), "fail", "kl_loss"),
        (obs(*start(-0.3, None, kl=-7e-12)), "pass", "equal"),
        (obs(*start(-0.3, -0.3), tokens([-0.1, -0.5], [-0.1, -0.5])), "pass", "equal"),
        # the means agree, the tokens do not
        (obs(*start(-0.3, -0.3), tokens([-0.1, -0.5], [-0.2, -0.4])), "fail", "per token"),
        # every rank compared its own tokens: the worst of them counts
        (obs(*start(-0.3, -0.3), *ranks(0.0, 0.0)), "pass", "equal"),
        (obs(*start(-0.3, -0.3), *ranks(0.0, 0.01)), "fail", "per token"),
        (obs(*start(-0.3, -0.3), *ranks(1e-4, 0.0)), "warn", "not deterministic"),
        (obs(*start(-0.3, -0.31), flags={"context_parallel_size": 2}), "fail", "context parallelism"),
        (obs(*start(-0.3127, -0.3157, kl=3e-4), flags={"use_rollout_routing_replay": True}), "info", "replays"),
        (obs(*start(-0.3, -0.32), flags={"use_rollout_routing_replay": True}), "fail", "other weights"),
        (obs(*start(), flags={"lora_rank": 8}), "skip", "adapter"),
        (obs(*start(-0.3, -0.4), starts=[RunStart(0, 20, False)]), "skip", "rollout 20"),
        (obs(*start(-0.3, -0.4), starts=[RunStart(0, 0, False)]), "skip", "resumed"),
        (obs(*start(-0.3, -0.4), starts=(), flags={"load": "A", "ref_load": "B"}), "skip", "--ref-load"),
        (obs(*start(-0.3, -0.3), starts=(), flags={"load": "A", "ref_load": "A"}), "pass", "equal"),
        (obs(rollout(7, log_probs=-0.3, ref_log_probs=-0.4), starts=()), "skip", "rollout 7"),
        (obs(rollout(7, log_probs=-0.3, ref_log_probs=-0.4)), "skip", "begins with rollout 7"),
        (obs(*start(-0.3, None, kl=None)), "skip", "no reference"),
        (obs(*start(NAN, -0.3, kl=None)), "skip", "train.nan"),
        (obs(*start(), mode="rollout-only"), "skip", "no trainer"),
        (obs(), "skip", "not in the evidence"),
        (obs(live=True), "skip", "not seen yet"),
    ],
)
def test_actor_and_reference_are_compared_at_a_fresh_start(observations: Observations, status: str, words: str) -> None:
    found = verdict(REF, observations)
    assert (found.status, words in found.cause) == (status, True), found
    if status in ("pass", "warn", "fail", "info"):
        assert found.threshold == {"equal": 1e-8, "fail": 5e-3}
        assert found.evidence


def test_the_reference_check_shows_all_measures_and_the_token_count_decides() -> None:
    found = verdict(REF, obs(*start(-0.3, -0.3001, kl=0.0), tokens([-0.1] * 4, [-0.2] * 4)))
    assert found.value == {"mean_difference": pytest.approx(1e-4), "token_difference": pytest.approx(0.1), "kl_loss": 0}
    assert found.evidence[0].source == "samples@0"


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*start(-0.3)), "pass", "likely"),
        (obs(*start(-0.95)), "warn", "chat template"),
        (obs(*start(-3.0)), "fail", "configuration"),
        (obs(*start(-11.9), vocab_size=151_936), "fail", "-11.93"),
        (obs(*start(-0.95), flags={"hf_checkpoint": "/m/Qwen3-4B-Base"}), "info", "pretrained"),
        (obs(*start(-4.0), flags={"hf_checkpoint": "/m/Qwen3-4B-Base"}), "warn", "pretrained"),
        (obs(*start(-0.95), flags={"rollout_temperature": 1.2}), "info", "temperature"),
        (obs(*start(-0.95), flags={"hf_checkpoint": "/m/database-7b"}), "warn", "chat template"),
        (obs(rollout(0, ref_log_probs=-0.9)), "warn", "ref_log_probs"),
        (obs(rollout(0, rollout_log_probs=-0.9)), "warn", "rollout_log_probs"),
        (obs(sample(log_probs=[-1.0, -2.0], response_length=2)), "warn", "samples"),
        # later rollouts are other checks' business
        (obs(rollout(0, log_probs=-0.3), rollout(1, log_probs=-9.8)), "pass", "likely"),
        (obs(rollout(5, log_probs=-9.8), starts=()), "skip", "rollout 5"),
        (obs(rollout(5, log_probs=-0.3), starts=[RunStart(0, 5, False)]), "pass", "rollout 5"),
        (obs(rollout(0, log_probs=NAN)), "skip", "train.nan"),
        (obs(), "skip", "not in the evidence"),
    ],
)
def test_the_size_of_the_first_log_probs_is_judged(observations: Observations, status: str, words: str) -> None:
    found = verdict(MAGNITUDE, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_the_engine_alone_gives_a_magnitude_of_low_confidence() -> None:
    assert verdict(MAGNITUDE, obs(rollout(0, rollout_log_probs=-0.9))).confidence == "low"
    assert verdict(MAGNITUDE, obs(*start(-0.9))).confidence == "medium"


def test_the_magnitude_of_every_run_counts_and_the_worst_is_told() -> None:
    restarted = rollout(9, segment=1, log_probs=-1.5)
    found = verdict(MAGNITUDE, obs(*start(-0.3), restarted, starts=[RunStart(0, 0, True), RunStart(1, 9, False)]))
    assert (found.status, found.rollout) == ("warn", 9)


def series(*gaps: float, **changes: Any) -> list[MetricRow]:
    """Train rows with these gaps, one step per rollout."""
    return [healthy(step, train_rollout_logprob_abs_diff=gap, **changes) for step, gap in enumerate(gaps)]


FP8 = {"fp8_rollout": True}


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(*series(0.01, 0.02)), "pass", "agree"),
        (obs(*series(0.1)), "pass", "agree"),
        (obs(*series(0.3)), "warn", "from the first rollout"),
        (obs(*series(1.2)), "fail", "from the first rollout"),
        (obs(*series(0.01, 0.5)), "warn", "the suspect"),
        (obs(*series(*[0.269, 0.271, 0.273] * 4), flags=FP8), "info", "FP8"),
        (obs(*series(0.27), flags={"hf_checkpoint": "M-FP8"}), "info", "FP8"),
        (obs(*series(*[0.27] * 8)), "warn", "from the first rollout"),
        (obs(*series(*[0.4] * 8), flags=MOE), "info", "experts"),
        (obs(*series(*[0.6] * 8), flags=MOE), "warn", "first rollout"),
        (obs(*series(*[0.4] * 8), flags=MOE | {"use_rollout_routing_replay": True}), "warn", "first rollout"),
        (obs(*series(*[1.5] * 8), flags=FP8), "fail", "first rollout"),
        (obs(*series(0.01, 0.01, 0.3, 0.6, 0.9), flags=FP8), "warn", "rollout 2"),
        (obs(*series(0.01, 0.3, *[0.01] * 20)), "info", "last bad rollout is 1"),
        (obs(*series(0.01, 0.3, *[0.01] * 19)), "warn", "last bad rollout is 1"),
        (obs(*series(0.01, 3.0, *[0.01] * 20)), "fail", "last bad rollout is 1"),
        (obs(*series(NAN)), "skip", "train.nan"),
        (obs(*series(0.02, NAN)), "skip", "is NaN since step 1"),
        (obs(*series(0.5), mode="rollout-only"), "skip", "no trainer"),
        (obs(train(0, on=0, loss=0.1)), "skip", "not in the evidence"),
        # no train step: the means, then the samples
        (obs(rollout(0, log_probs=-9.8, rollout_log_probs=-1.9)), "fail", "7.9"),
        (obs(sample(log_probs=[-1.0, -3.0], rollout_log_probs=[-3.0, -1.0])), "fail", "2 nat"),
    ],
)
def test_trainer_and_engine_are_compared(observations: Observations, status: str, words: str) -> None:
    found = verdict(GAP, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_only_on_policy_steps_count_and_growth_inside_a_rollout_is_off_policy() -> None:
    rows = [
        train(4 * r + k, on=k, rollout=r, train_rollout_logprob_abs_diff=0.02 + 0.2 * k)
        for r in range(3)
        for k in range(4)
    ]
    found = verdict(GAP, obs(*rows))
    assert (found.status, "off-policy" in found.cause) == ("info", True)
    bare = [
        train(row.step, train_rollout_logprob_abs_diff=row.values["train/train_rollout_logprob_abs_diff"])
        for row in rows
    ]
    assert verdict(GAP, obs(*bare, flags={"num_steps_per_rollout": 4})).status == "info"
    sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "global_batch_size": 8}
    assert verdict(GAP, obs(*bare, flags=sizes)).status == "info"


def sync(version: str, rollout_id: int, **more: Any) -> SyncEvent:
    return SyncEvent(version, rollout_id, **more)


def test_the_sync_before_the_first_bad_rollout_is_the_change_point() -> None:
    syncs = [sync(str(r), r) for r in range(6)]
    found = verdict(GAP, obs(*series(0.001, 0.002, 0.001, 2.5, 2.4, 2.6), *syncs))
    assert (found.status, found.rollout) == ("fail", 3)
    assert found.value["change_point"] == {"rollout": 3, "weights_version": "3"}
    assert "version 3: that sync is the change point" in found.cause
    assert "at most 0.002 through rollout 2" in found.cause
    assert COMPARE in found.advice
    assert any(e.source == "weights@3" for e in found.evidence)
    assert found.confidence == "medium"


def test_a_spoiled_sync_that_the_next_one_repairs_is_still_named() -> None:
    found = verdict(GAP, obs(*series(0.001, 2.5, 0.001), sync("1", 1), sync("2", 2)))
    assert (found.status, found.value["change_point"]["weights_version"]) == ("fail", "1")
    assert "last bad rollout is 1" in found.cause


@pytest.mark.parametrize(
    ("engine", "digest"),
    [(EngineSync("0", digest="beef"), "cafe"), (EngineSync("0", digest="beef", same=False), "")],
)
def test_a_digest_that_differs_is_named_and_raises_the_confidence(engine: EngineSync, digest: str) -> None:
    found = verdict(GAP, obs(*series(0.001, 2.5), sync("1", 1, digest=digest, engines=(engine,))))
    assert "digest of engine 0 differs" in found.cause
    assert found.confidence == "high"
    assert any("beef" in e.text for e in found.evidence)


def test_equal_digests_clear_the_parameters() -> None:
    engines = (EngineSync("0", digest="cafe"), EngineSync("1", digest="beef", same=True))
    found = verdict(GAP, obs(*series(0.001, 2.5), sync("1", 1, digest="cafe", engines=engines)))
    assert "digests of all engines equal the trainer's" in found.cause
    assert "buffers (rotary tables: see weights.compare)" in found.cause
    assert "rltop weights diff" in found.advice[0]
    assert "do not hold" not in found.cause


@pytest.mark.parametrize(("rollout_of_it", "later"), [(1, True), (3, False)])
def test_equal_digests_clear_nothing_once_the_memory_was_released_after_them(rollout_of_it: int, later: bool) -> None:
    equal = sync("1", 1, digest="cafe", engines=(EngineSync("0", digest="cafe"),))
    how = "gave every token the log-prob -5.5607"
    line = event("no_weights", owner="trainer", engine_id="0", how=how, samples=16, rollout=rollout_of_it)
    seen = obs(*series(0.001, 2.5, 0.001, 0.001), equal, flags={"colocate": True}, events=(line,))
    found = verdict(GAP, seen)
    assert ("so the parameters are right" in found.cause) is not later
    assert ("released and resumed after it (train.colocate-swap)" in found.cause) is later
    compared = verdict("weights.compare", seen)
    assert compared.status == "pass"
    assert "engine 0 released its memory and took it back after that (train.colocate-swap)" in compared.cause


@pytest.mark.parametrize("checked", [False, True])
def test_a_pass_of_the_parameters_says_what_it_does_not_cover(checked: bool) -> None:
    equal = sync("1", 1, digest="cafe", checked=checked, engines=(EngineSync("0", digest="cafe"),))
    found = verdict("weights.compare", obs(equal))
    assert found.status == "pass"
    assert ("Buffers (rotary tables, caches) are not covered" in found.cause) is not checked
    assert ("random numbers" in found.cause) is checked


def test_a_refused_sync_is_named() -> None:
    refused = sync("1", 1, ok=False, engines=(EngineSync("1", ok=False, message="no such tensor"),))
    found = verdict(GAP, obs(*series(0.001, 2.5), refused))
    assert "engine 1 refused it" in found.cause
    assert any("no such tensor" in e.text for e in found.evidence)


def test_a_gap_from_the_first_rollout_on_is_no_change_point() -> None:
    found = verdict(GAP, obs(*series(2.5, 2.5), sync("default", 0), sync("1", 1)))
    assert "change_point" not in found.value
    assert "weights version default" in found.cause


@pytest.mark.parametrize(
    ("observations", "status", "words"),
    [
        (obs(rollout(0, log_probs=-0.3), healthy(0)), "pass", "the same"),
        (obs(rollout(0, log_probs=-0.3), healthy(0, ppo_kl=9e-9)), "pass", "the same"),
        (obs(healthy(0, ppo_kl=-9e-9)), "pass", "the same"),
        (obs(healthy(0)), "skip", "by construction"),
        (obs(healthy(0), actor_pass=True), "pass", "the same"),
        (obs(rollout(0, log_probs=-0.3), healthy(0), actor_pass=False), "skip", "by construction"),
        (obs(healthy(0), flags={"num_steps_per_rollout": 4}), "pass", "the same"),
        (obs(healthy(0), flags={"kl_coef": 0.1}), "pass", "the same"),
        (obs(healthy(0, ppo_kl=3e-4)), "warn", "not deterministic"),
        (obs(healthy(0, ppo_kl=3e-4), flags=MOE), "warn", "permute"),
        (obs(healthy(0, ppo_kl=3e-4), flags=MOE | {"moe_permute_fusion": True}), "warn", "kernel"),
        (obs(healthy(0, ppo_kl=-0.02)), "fail", "ppo_kl"),
        (obs(healthy(0, pg_clipfrac=0.1)), "warn", "pg_clipfrac"),
        (obs(healthy(0, probs_ratio=1.004)), "warn", "probs_ratio"),
        (obs(healthy(0, probs_ratio=1.0000001, ppo_kl=1e-9)), "pass", "the same"),
        (obs(healthy(0, ppo_kl=0.2), flags={"use_rollout_logprobs": True}), "skip", "engine's"),
        (obs(healthy(0, ppo_kl=0.2), flags={"keep_old_actor": True}), "skip", "another model"),
        (obs(healthy(0, ppo_kl=NAN)), "skip", "train.nan"),
        (obs(healthy(0), mode="rollout-only"), "skip", "no trainer"),
        (obs(train(0, on=0, loss=0.1)), "skip", "not in the evidence"),
    ],
)
def test_old_and_new_policy_are_compared_on_policy(observations: Observations, status: str, words: str) -> None:
    found = verdict(KL, observations)
    assert (found.status, words in found.cause) == (status, True), found


def test_off_policy_steps_may_drift() -> None:
    rows = [train(k, on=k, rollout=0, ppo_kl=0.01 * k, pg_clipfrac=0.1 * k) for k in range(4)]
    assert verdict(KL, obs(rollout(0, log_probs=-0.3), *rows)).status == "pass"


def test_without_knowing_the_steps_per_rollout_only_the_first_step_is_surely_on_policy() -> None:
    rows = [train(k, ppo_kl=1e-3 * k) for k in range(4)]
    assert verdict(KL, obs(rollout(0, log_probs=-0.3), *rows)).status == "pass"
    assert verdict(KL, obs(*rows, flags={"num_steps_per_rollout": 1})).status == "warn"


def test_an_expert_model_without_fusion_is_told_the_flag() -> None:
    found = verdict(KL, obs(healthy(0, ppo_kl=3e-4), flags=MOE))
    assert found.advice[0] == "--moe-permute-fusion"
    assert found.confidence == "high"
