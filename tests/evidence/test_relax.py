"""What Relax leaves behind, read and judged: files built from its format strings (`tests/data/relax/make.py`)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.found import LogEvent
from rltop.checks.observe import Args, MetricRow, Observations, Where
from rltop.checks.verdict import Verdict
from rltop.evidence.args import parse_args, parse_words
from rltop.evidence.collect import collect
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_find import find_dumps
from rltop.evidence.launch_script import read_script
from rltop.evidence.logs import LogScan
from rltop.evidence.pieces import Splitter

DATA = Path(__file__).parents[1] / "data" / "relax"


def seen(name: str, tmp_path: Path, *more: str) -> Observations:
    """A folder with one of the logs, and more of the files, as `rltop check` reads it."""
    for one in (name, *more):
        shutil.copy(DATA / one, tmp_path / one)
    return collect([tmp_path])


def judged(obs: Observations) -> dict[str, Verdict]:
    report = evaluate(obs)
    assert not [v for v in report.verdicts if isinstance(v.value, dict) and "rule_error" in v.value]
    return {v.id: v for v in report.verdicts}


def firing(obs: Observations) -> set[str]:
    return {id_ for id_, verdict in judged(obs).items() if verdict.status in ("warn", "fail")}


def value(obs: Observations, name: str, step: int) -> float:
    """A metric at a step of its own axis."""
    found = {row.values[name] for row in obs.metrics if name in row.values and row.step == step}
    assert len(found) == 1, (name, step, found)
    return found.pop()


def test_every_line_of_metrics_is_read_to_its_step(tmp_path: Path) -> None:
    obs = seen("job.log", tmp_path)
    assert value(obs, "rollout/response_len/mean", 1) == 156.5
    assert value(obs, "rollout/raw_reward", 2) == 0.0
    assert value(obs, "rollout/log_probs", 0) == value(obs, "rollout/ref_log_probs", 0) == -0.25
    assert value(obs, "perf/rollout_time", 2) == 12.5
    assert value(obs, "perf/mfu/actor_train", 1) == 0.0126
    assert value(obs, "passrate/pass@4", 1) == 0.5
    assert value(obs, "eval/aime-pass@1", 1) == 0.5
    assert value(obs, "train/ppo_kl", 3) == 0.0004
    assert value(obs, "train/mismatch_kl", 5) == 0.0011
    steps = [(row.rollout_id, row.step_in_rollout, row.step) for row in obs.metrics if "train/loss" in row.values]
    assert steps == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3), (2, 0, 4), (2, 1, 5)]


def test_a_sound_job_passes_the_checks_of_step_1(tmp_path: Path) -> None:
    verdicts = judged(seen("job.log", tmp_path, "run.sh"))
    assert not {id_ for id_, one in verdicts.items() if one.status in ("warn", "fail")}
    passed = {"kl.on-policy", "logprob.ref-equal", "train.nan", "ckpt.loaded", "cluster.restarts", "args.batch"}
    assert {id_: verdicts[id_].status for id_ in passed} == dict.fromkeys(passed, "pass")


def test_the_load_from_hugging_face_names_its_directory(tmp_path: Path) -> None:
    loaded = judged(seen("job.log", tmp_path))["ckpt.loaded"]
    assert loaded.value["loaded"] == "/models/Qwen3-4B"


def test_a_rollout_is_a_phase_although_the_timers_are_silent(tmp_path: Path) -> None:
    obs = seen("job.log", tmp_path)
    assert [(one.name, one.edge, one.rollout_id) for one in obs.phases] == [
        ("rollout", edge, at) for at in range(3) for edge in ("enter", "leave")
    ]
    first = obs.phases[:2]
    assert first[0].time is not None
    assert first[1].time is not None
    assert first[1].time - first[0].time == 15.0


def test_samples_keep_the_score_of_a_reward_of_several_values(tmp_path: Path) -> None:
    obs = seen("job.log", tmp_path)
    assert {(one.rollout_id, one.reward, one.label_shown) for one in obs.samples} == {
        (at, 1.0, True) for at in range(3)
    }


def test_a_load_that_holds_nothing_is_a_fresh_start_where_the_saves_go_there(tmp_path: Path) -> None:
    verdict = judged(seen("job-load-missing.log", tmp_path, "run.sh"))["ckpt.loaded"]
    assert verdict.status == "pass"
    assert "A fresh start from --hf-checkpoint /models/Qwen3-4B" in verdict.cause


def test_a_load_that_holds_nothing_is_told_where_it_was_meant(tmp_path: Path) -> None:
    obs = seen("job-load-missing.log", tmp_path)
    (tmp_path / "args.txt").write_text("framework=relax --load /exps/Qwen3-4B_mcore_8xgpu/ --save /exps/next/\n")
    verdict = judged(collect([tmp_path]))["ckpt.loaded"]
    assert (verdict.status, verdict.value["expected"]) == ("warn", "/exps/Qwen3-4B_mcore_8xgpu/")
    assert "at iteration 0 and without an optimizer" in verdict.cause
    assert judged(obs)["ckpt.loaded"].status == "pass", "without the arguments nobody knows where the saves go"


def test_restarts_are_told_with_service_and_reason(tmp_path: Path) -> None:
    verdict = judged(seen("job-restarts.log", tmp_path))["cluster.restarts"]
    assert verdict.status == "warn"
    assert verdict.value == {"restarts": {"reference": 1, "actor": 1}, "global": 1, "ended": False}
    assert "service reference: RuntimeError: NCCL communicator was aborted" in verdict.cause
    assert "from the newest checkpoint" in verdict.cause
    assert [one.line for one in verdict.evidence] == sorted(one.line or 0 for one in verdict.evidence)


def test_an_engine_that_the_monitor_killed_died_after_its_third_failure(tmp_path: Path) -> None:
    obs = seen("job-restarts.log", tmp_path)
    kills = [event.data["kills"] for event in obs.events if event.kind == "health"]
    assert kills == [False, False, True]
    died = judged(obs)["engine.died"]
    assert (died.status, died.engine) == ("warn", 0)
    assert "before it was ready" not in died.cause


def test_an_error_that_ends_relax_is_a_fail(tmp_path: Path) -> None:
    obs = seen("job-fatal.log", tmp_path)
    verdict = judged(obs)["cluster.restarts"]
    assert verdict.status == "fail"
    assert "service actor reported a permanent error: ValueError: no column 'prompt'" in verdict.cause


def test_the_fleet_grows_and_shrinks_without_an_alarm(tmp_path: Path) -> None:
    obs = seen("job-autoscaler.log", tmp_path)
    told = [{**event.data} for event in obs.events if event.kind == "scale"]
    assert told == [
        {"what": "out", "why": "token_usage above 0.85 for 30s", "count": 1},
        {"what": "in", "why": "all engines idle", "count": 1},
        {"what": "removed", "why": "", "engine_id": "group_2_engine_0"},
        {"what": "evicted", "why": "", "engine_id": "group_1_engine_0"},
    ]
    assert firing(obs) == set()


def test_the_layout_without_colorlog_and_timers_at_debug(tmp_path: Path) -> None:
    obs = seen("worker-plain.err", tmp_path)
    assert value(obs, "train/grad_norm", 0) == 0.1873
    assert [(one.name, one.edge, one.elapsed_s) for one in obs.phases] == [
        ("actor_train", "enter", None),
        ("actor_train", "leave", 21.7),
    ]


# -- a log that grows


def live(name: str, size: int) -> tuple[list[LogEvent], list[MetricRow]]:
    """Events and rows of a log that arrives in pieces of some bytes, as `rltop watch` reads it."""
    scan, splitter, data = LogScan(name, live=True), Splitter(), (DATA / name).read_bytes()
    for at in range(0, len(data), size):
        for start, pieces in splitter.feed(data[at : at + size]):
            scan.feed(start, pieces)
    events, _, rows = scan.so_far()
    return events, rows


@pytest.mark.parametrize("size", [7, 4096])
def test_the_live_reader_sees_what_the_whole_log_holds(size: int, tmp_path: Path) -> None:
    whole = seen("job-restarts.log", tmp_path)
    events, rows = live("job-restarts.log", size)
    assert [(row.axis, row.step, row.values) for row in rows] == [
        (row.axis, row.step, row.values)
        for row in sorted(whole.metrics, key=lambda row: (row.where and row.where.line) or 0)
    ]
    assert [one.data for one in events if one.kind == "service"] == [
        one.data for one in whole.events if one.kind == "service"
    ]


# -- dumps


def test_a_rollout_dump_and_the_train_dumps_of_its_ranks(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dumps", tmp_path / "dumps")
    refs = find_dumps(str(tmp_path / "dumps"))
    assert [(one.rollout_id, one.kind, len(one.train)) for one in refs] == [(0, "rollout", 2)]
    with DumpFile.open(refs[0].path) as dump:
        samples = list(dump)
    assert len(samples) == 16
    assert [one.score for one in samples[:4]] == [1.0, 1.0, 1.0, -1.0]
    assert samples[0].status == "truncated"
    assert "engine.died" not in firing(collect([tmp_path]))


def test_the_log_probs_of_both_sides_are_joined_by_the_tokens(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dumps", tmp_path / "dumps")
    obs = collect([tmp_path])
    assert len({sample.index for sample in obs.samples}) == 16
    verdict = judged(obs)["dump.join"]
    assert (verdict.status, verdict.value["joined"]) == ("pass", 16)
    assert "by the tokens" in verdict.cause
    assert [row.fields["mult_prob_error"] for row in obs.rows] == [pytest.approx(1.002002)] * 16


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dumps", tmp_path / "dumps")
    (tmp_path / "dumps" / "train_data" / "0_1.pt").unlink()
    verdict = judged(collect([tmp_path]))["dump.join"]
    assert verdict.status == "warn"
    assert verdict.value["missing"] == list(range(1, 16, 2))


@pytest.mark.parametrize(("kind", "count", "dataset"), [("train", 16, None), ("eval", 2, "aime")])
def test_the_lines_that_are_always_written(kind: str, count: int, dataset: str | None) -> None:
    path = DATA / "save" / "rollout_result" / kind / "0.jsonl"
    with DumpFile.open(path) as dump:
        samples = list(dump)
        assert (dump.kind, dump.rollout_id, dump.is_eval) == ("samples", 0, kind == "eval")
    assert len(samples) == count
    assert samples[1].response_length == 7
    assert list(samples[1].response_tokens or ()) == [200, 201, 202, 203, 204, 205, 301]
    assert samples[1].extra.get("dataset") == dataset


# -- flags


def debug_flags(text: str) -> list[tuple[str, str]]:
    report = evaluate(Observations(args=parse_args(f"framework=relax {text}", "args.txt")))
    return [(one.status, one.cause) for one in report.verdicts if one.id == "args.debug-flags"]


def test_every_rank_writes_a_train_dump() -> None:
    (status, cause), *_ = debug_flags("--save-debug-train-data d/{rollout_id}.pt")
    assert status == "warn"
    assert "lacks {rank}: in Relax every trainer rank writes this file" in cause
    assert debug_flags("--save-debug-train-data d/{rollout_id}_{rank}.pt")[0][0] == "pass"
    slime = evaluate(Observations(args=parse_args("framework=slime --save-debug-train-data d/{rollout_id}.pt", "a")))
    assert {one.status for one in slime.verdicts if one.id == "args.debug-flags"} == {"pass"}


def test_dump_details_names_the_files_of_the_framework() -> None:
    assert "d/train_data/{rollout_id}_{rank}.pt" in debug_flags("--dump-details d")[0][1]


def test_a_launch_script_of_relax_is_read(tmp_path: Path) -> None:
    launch = read_script((DATA / "run.sh").read_text(), "run.sh")
    args = parse_words(((word.text, word.line) for word in launch.words), "run.sh")
    assert args.framework == "relax"
    assert args.text("save") == "/exps/Qwen3-4B_mcore_8xgpu/"
    assert args.number("rollout_batch_size") == 4
    assert launch.env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"
    assert "colocate" in args.flags


@pytest.mark.parametrize(
    ("flags", "gpus", "mode"),
    [
        ({"resource": '{"actor": [1, 8], "rollout": [1, 8]}', "colocate": True}, 8, "colocate"),
        (
            {"resource": '{"actor": [1, 4], "rollout": [1, 2], "reference": [1, 2]}', "fully_async": True},
            8,
            "decoupled",
        ),
        ({"resource": '{"actor": [1, 4], "rollout": [1, 4]}', "hybrid": True, "colocate": True}, 8, "decoupled"),
        ({"resource": '{"actor": [1, 4], "rollout": [1, 4], "critic": [1, 2]}', "colocate": True}, 6, "colocate"),
    ],
)
def test_the_gpus_of_a_job_come_from_its_resource_flag(flags: Mapping[str, Any], gpus: int, mode: str) -> None:
    from rltop.checks.rules.cluster_gpus import needed

    need = needed(Observations(args=Args(flags, "relax", Where("run.sh", 1))))
    assert need is not None
    assert (need.gpus, need.mode) == (gpus, mode)


@pytest.mark.parametrize("resource", ["", "{", "[]", '{"actor": 8}', '{"actor": [1, "8"]}', '{"actor": [1, true]}'])
def test_a_resource_flag_that_says_nothing_is_no_need(resource: str) -> None:
    from rltop.checks.rules.cluster_gpus import needed

    assert needed(Observations(args=Args({"resource": resource}, "relax"))) is None
