"""`rltop train` with several ranks, as people run it: one Ray actor per rank, two engines, and a fault of the sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rltop.checks.verdict import Verdict
from rltop.daemon.live_checks import LiveChecks
from rltop.train.resume import find_checkpoint
from tests.train.test_run import TINY, Ended, read_until, running, train

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

PP2 = ("--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
TP2 = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
DP2 = ("--actor-num-gpus-per-node", "2")
WARM = ("--cold-start-steps", "150", "--cold-start-loss", "0.15", "--lr", "1e-4", "--num-rollout", "2")


def syncs(ended: Ended) -> list[dict[str, Any]]:
    return [record.payload for record in ended.records if record.kind == "weights"]


def verdicts(ended: Ended) -> dict[str, Verdict]:
    checks = LiveChecks()
    for record in ended.records:
        checks.feed(record)
    return {verdict.id: verdict for verdict in checks.report().verdicts}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(tmp_path_factory.mktemp("pp"), *PP2, *WARM, "--rollout-num-engines", "2", "--inject", "pp-layer-ids")


def test_a_pipeline_stage_that_restarts_its_layer_ids_is_found_at_the_sync(planted: Ended) -> None:
    assert planted.result["injected_faults"] == ["pp-layer-ids"]
    assert "Injected fault: pp-layer-ids" in planted.stderr
    assert planted.result["weight_mismatches"] == ["1"]
    start, first, second = syncs(planted)
    assert (start["ok"], first["ok"], second["ok"]) == (True, False, True)
    assert (first["layers"], second["layers"]) == ([[0], [0]], [[0], [1]])
    assert set(first["engines"]) == {"0", "1"}
    assert "were pushed with layer ids 0 | 0 (pipeline stages between bars)" in planted.stderr
    assert planted.stderr.count("were pushed with layer ids") == 1
    assert all("model.layers.0." in reply["message"] for reply in first["engines"].values())


def test_the_live_checks_name_the_sync_as_the_change_point(planted: Ended) -> None:
    verdict = verdicts(planted)["logprob.train-rollout"]
    assert verdict.status == "fail"
    assert "sync" in verdict.cause
    gaps = [
        r.payload["values"].get("train/train_rollout_logprob_abs_diff") for r in planted.records if r.kind == "metrics"
    ]
    measured = [gap for gap in gaps if gap is not None]
    assert measured[0] < 1e-5 < 0.1 < measured[2]


@pytest.mark.soak
@pytest.mark.parametrize("layout", [TP2, DP2], ids=["TP2", "DP2"])
def test_a_healthy_run_of_the_same_seed_gives_the_same_bits(layout: tuple[str, ...], tmp_path: Path) -> None:
    first, again = train(tmp_path, *layout), train(tmp_path, *layout)
    for name in ("rewards", "losses", "grad_norms", "first_rollout"):
        assert again.result[name] == first.result[name]
    assert first.result["weight_mismatches"] == []
    assert {record.source.name for record in first.records} == {"trainer/0"}
    assert "Traceback" not in first.stderr


@pytest.mark.soak
def test_a_dead_rank_is_named_and_not_the_one_that_waited_for_it(tmp_path: Path) -> None:
    with running(tmp_path, *DP2, "--num-rollout", "1000") as (process, family):
        read_until(process, "step 0: ", family)
        ranks = sorted(family.named("ray::TrainActor"), key=lambda actor: actor.pid)
        assert len(ranks) == 2
        ranks[-1].kill()
        _, errors = process.communicate()
        assert process.returncode == 1
        assert family.alive() == []
    assert f"died (pid {ranks[-1].pid})" in errors
    assert "trainer rank " in errors


@pytest.mark.soak
def test_engines_that_share_by_load_answer_every_prompt_once(tmp_path: Path) -> None:
    """Without --deterministic; the random streams of the samples do not depend on who draws them."""
    flags = [flag for flag in TINY if flag != "--deterministic"]
    two = train(tmp_path, "--rollout-num-engines", "2", base=flags)
    one = train(tmp_path, base=flags)
    assert two.result["rewards"] == one.result["rewards"]
    shown = [sample for r in two.records if r.kind == "samples" for sample in r.payload["samples"]]
    assert {sample["engine"] for sample in shown} == {"0", "1"}


@pytest.mark.soak
def test_a_killed_run_resumes_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """Killed without warning some time after its second save, on two replicas."""
    flags = (*DP2, "--seed", "1", "--cold-start-steps", "60", "--kl-loss-coef", "0.1")
    whole = train(tmp_path, *flags, "--num-rollout", "8").result
    saved = tmp_path / "saved"
    keep = ("--save", str(saved), "--save-interval", "2", "--load", str(saved))
    with running(tmp_path, *flags, *keep, "--num-rollout", "1000") as (process, family):
        read_until(process, "successfully saved checkpoint from iteration       3", family)
        process.kill()
        process.communicate()
        assert family.alive() == []
    found = find_checkpoint(saved)
    assert found is not None
    assert found.iteration >= 3
    rollouts = max(8, found.iteration + 3)
    if rollouts > 8:
        whole = train(tmp_path, *flags, "--num-rollout", str(rollouts)).result
    resumed = train(tmp_path, *flags, *keep, "--num-rollout", str(rollouts))
    assert "fresh start" not in resumed.stderr
    first = found.iteration + 1
    assert resumed.result["rewards"] == whole["rewards"][first:]
    assert resumed.result["losses"] == whole["losses"][2 * first :]
    assert resumed.result["grad_norms"] == whole["grad_norms"][2 * first :]
    assert max(resumed.result["grad_norms"]) > 0
