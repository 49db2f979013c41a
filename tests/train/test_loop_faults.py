"""A healthy run satisfies the step-1 checks, and each planted fault turns exactly the verdict that it should.

Real trainer, real CPU engine, real records into the real live checks; only Ray is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rltop.checks.verdict import Report
from rltop.daemon.live_checks import LiveChecks
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.presets import demo_args
from rltop.train.rollout_manager import RolloutManager
from rltop.train.trainer_actor import TrainActor
from tests.train.local import Outcome, run_locally

pytestmark = pytest.mark.train

STEP_1 = (
    "rollout.text",
    "logprob.ref-equal",
    "logprob.magnitude",
    "logprob.train-rollout",
    "kl.on-policy",
    "train.grad-high",
    "train.grad-zero",
    "train.nan",
)


@pytest.fixture(scope="session")
def demo() -> TrainConfig:
    """The demo's arguments with a small batch: what its faults show must not hang on its size."""
    config = parse_args(demo_args(deterministic=True, num_engines=1))
    return replace(config, num_rollout=2, rollout_batch_size=8, n_samples_per_prompt=8, global_batch_size=None)


@pytest.fixture(scope="session")
def base(demo: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model after its cold start."""
    directory = tmp_path_factory.mktemp("cold")
    trainer, manager = TrainActor(demo, str(directory)), RolloutManager(demo)
    manager.load(trainer.load().checkpoint)
    losses = trainer.cold_start(manager.demonstrations())
    assert losses[-1] < 0.2
    return Path(trainer.freeze_base(str(directory / "initial")).checkpoint)


def report(outcome: Outcome) -> Report:
    checks = LiveChecks()
    for record in outcome.records:
        checks.feed(record)
    return checks.report()


def verdicts(outcome: Outcome) -> dict[str, str]:
    return {verdict.id: verdict.status for verdict in report(outcome).verdicts if verdict.id in STEP_1}


@pytest.fixture(scope="session")
def outcome_of(demo: TrainConfig, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The run with this fault planted (no name: a healthy one), run once however many tests look at it."""

    @functools.cache
    def run(fault: str) -> Outcome:
        config = replace(demo, hf_checkpoint=base, cold_start_steps=0, inject=(fault,) if fault else ())
        return run_locally(config, tmp_path_factory.mktemp("run"))

    return run


def test_a_healthy_run_passes_every_step_1_check(outcome_of: Callable[[str], Outcome]) -> None:
    outcome = outcome_of("")
    assert verdicts(outcome) == dict.fromkeys(STEP_1, "pass")
    first, step = outcome.history.first_rollout, outcome.history.steps[0]
    assert first["rollout/log_probs"] == first["rollout/ref_log_probs"]
    assert step["ppo_kl"] == 0.0
    assert step["kl_loss"] == 0.0
    assert 0 < step["grad_norm"] < 10
    assert step["train_rollout_logprob_abs_diff"] < 1e-5
    assert 0 < outcome.history.rewards[0] < 0.4
    assert outcome.history.mismatches == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("ref-perturb", {"logprob.ref-equal": "fail"}),
        ("no-template", {"logprob.magnitude": "warn"}),
        ("nan-grad", {"train.nan": "fail"}),
        ("loss-sum", {"train.grad-high": "warn"}),
        ("swap-layers", {"logprob.train-rollout": "fail", "rollout.text": "fail"}),
    ],
)
def test_a_planted_fault_turns_its_verdict_and_nothing_but_its_consequences(
    outcome_of: Callable[[str], Outcome], fault: str, expected: dict[str, str]
) -> None:
    outcome = outcome_of(fault)
    found = verdicts(outcome)
    # Without its template the model cuts a few characters in halves: shown, and no verdict that calls for anybody.
    assert found | ({"rollout.text": "pass"} if found["rollout.text"] == "info" else {}) == (
        dict.fromkeys(STEP_1, "pass") | expected
    )
    (root,) = report(outcome).root_causes
    assert root == ("weights.compare" if fault == "swap-layers" else next(iter(expected)))
    assert all(v.consequence_of for v in report(outcome).verdicts if v.id in expected and v.id != root)
    (run,) = outcome.payloads("run")
    assert run["injected_faults"] == [fault]
    assert len(outcome.history.rewards) == 2


def test_swapped_layers_are_seen_at_the_sync_and_in_the_next_rollout(outcome_of: Callable[[str], Outcome]) -> None:
    outcome = outcome_of("swap-layers")
    assert outcome.history.mismatches == ["1"]
    gaps = [step["train_rollout_logprob_abs_diff"] for step in outcome.history.steps]
    assert gaps[0] < 1e-5
    assert gaps[1] > 1
    assert [sync["ok"] for sync in outcome.payloads("weights")] == [True, False, True]


def test_tensors_by_value_reach_two_engines_as_well(demo: TrainConfig, base: Path, tmp_path: Path) -> None:
    config = replace(
        demo, hf_checkpoint=base, cold_start_steps=0, rollout_num_engines=2, weight_transport="tensor", num_rollout=2
    )
    outcome = run_locally(config, tmp_path)
    syncs = outcome.payloads("weights")
    assert [sync["version"] for sync in syncs] == ["default", "1", "2"]
    assert len({sync["digest"] for sync in syncs}) == 3
    for sync in syncs:
        assert {reply["digest"] for reply in sync["engines"].values()} == {sync["digest"]}
        assert set(sync["engines"]) == {"0", "1"}
    shown = [sample for payload in outcome.payloads("samples") for sample in payload["samples"]]
    assert {(sample["weight_version"], sample["engine"]) for sample in shown} == {
        (version, engine) for version in ("default", "1") for engine in ("0", "1")
    }


def test_the_fixed_map_of_samples_to_engines_does_not_change_a_number(
    demo: TrainConfig, base: Path, outcome_of: Callable[[str], Outcome], tmp_path: Path
) -> None:
    """One random stream per sample: who samples it, and with whom, must not matter."""
    config = replace(demo, hf_checkpoint=base, cold_start_steps=0, rollout_num_engines=2, weight_transport="disk")
    assert run_locally(config, tmp_path).history.steps == outcome_of("").history.steps
