"""From a folder to observations: what is found, what can not hurt, segments, mode, metrics and arguments."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.observe import Observations
from rltop.errors import RltopError
from rltop.evidence import metrics
from rltop.evidence import walk as walking
from rltop.evidence.args import parse_args, table_row
from rltop.evidence.collect import collect
from rltop.evidence.literal import Unreadable, parse

STEP = (
    "(MegatronTrainRayActor pid=4101) [2026-03-02 {}] model.py:918 - step {}: {{'train/loss': 0.5, 'train/step': {}}}"
)
PERF = "(RolloutManager pid=3001) [2026-03-02 {}] rollout.py:1 - perf {}: {{'rollout/truncated_ratio': 0.1}}"
LINE = PERF.format("10:00:00", 0) + "\n"


def made(root: Path, files: Mapping[str, str | bytes]) -> Observations:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return collect([root])


def rows(*items: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


# -- what is found


def test_files_are_recognised_by_name_and_then_by_content(tmp_path: Path) -> None:
    obs = made(
        tmp_path,
        {
            "stdout": LINE,  # no telling name
            "history.txt": rows({"train/step": 0, "train/loss": 1.0}),
            "readme.md": "nothing for us",
            "args.txt": "--colocate",
            "env.txt": "HF_HOME=/x\nWANDB_API_KEY=abc\n",
        },
    )
    assert set(obs.files) == {"stdout", "history.txt", "args.txt", "env.txt"}
    assert len(obs.metrics) == 2
    assert obs.args.on("colocate")
    (env,) = obs.documents
    assert env.fields == {"HF_HOME": "/x", "WANDB_API_KEY": "***"}


def test_several_paths_keep_their_names_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(LINE)
    obs = collect([tmp_path / "a", tmp_path / "b" / "train.log"])
    assert obs.files == ("a/train.log", "b/train.log")
    for name in ("x/logs", "y/logs"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "train.log").write_text(LINE)
    assert len(set(collect([tmp_path / "x" / "logs", tmp_path / "y" / "logs"]).files)) == 2


def test_links_are_not_followed_out_of_the_path(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.log").write_text(LINE)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "train.log").write_text(LINE)
    os.symlink(outside / "secret.log", inside / "x.log")
    os.symlink(outside, inside / "folder")
    os.symlink(".", inside / "loop")
    os.symlink("b.log", inside / "a.log")
    os.symlink("a.log", inside / "b.log")
    os.symlink("train.log", inside / "same.log")
    os.symlink("gone.log", inside / "dangling.log")
    found = collect([inside])
    assert found.files == ("same.log", "train.log")
    (told,) = (v for v in evaluate(found).verdicts if v.id == "input.parse")
    assert told.status == "info"
    assert told.value["links"] == 5
    assert told.cause.startswith("5 links out of PATH, or to nothing, were not followed: a.log, b.log, dangling.log")
    assert f"-> {outside}" in [one.text for one in told.evidence]
    (inside / "bad.json").write_text("{")
    (inside / "metrics.jsonl").write_text("{oops\n" + '{"step": 1}\n')
    (told,) = (v for v in evaluate(collect([inside])).verdicts if v.id == "input.parse")
    assert told.status == "warn"
    assert "5 links out of PATH" in told.cause


def test_a_folder_of_links_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LINE)
    inside = tmp_path / "inside"
    inside.mkdir()
    os.symlink(tmp_path / "train.log", inside / "train.log")
    with pytest.raises(RltopError, match=r"train\.log \(a link out of it, not followed\)"):
        collect([inside])


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.log")
    (tmp_path / "b.log").write_text(LINE)
    assert collect([tmp_path]).files == ("b.log",)


def test_a_folder_of_many_files_is_bounded_and_known_names_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walking, "MOST_UNKNOWN", 10)
    monkeypatch.setattr(walking, "MOST_FILES", 5)
    for i in range(100):
        (tmp_path / f"a{i}.tmp").write_bytes(b"x")
    (tmp_path / "zz.log").write_text(LINE)
    obs = collect([tmp_path])
    assert obs.files == ("zz.log",)
    assert obs.problems == ()
    for i in range(20):
        (tmp_path / f"y{i}.log").write_text(LINE)
    obs = collect([tmp_path])
    assert len(obs.files) == 5
    assert "16 files" in obs.problems[0].why


# -- what can not be read


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "nothing that rltop recognises"),
        ({"train.log": b""}, "train.log (empty)"),
        ({"foo.bin": b"hello"}, "foo.bin"),
        ({"train.log": b"\0\1\2" * 1000}, "train.log:1"),
        ({"metrics.jsonl": "xxx\nyyy\n"}, "metrics.jsonl:1"),
        ({"args.txt": "   \n"}, "args.txt:1"),
        ({"ckpt/model.safetensors.index.json": "{"}, "index.json:1"),
        ({"ckpt/model.safetensors": b"\x01\x02\x03"}, "model.safetensors:1"),
    ],
)
def test_nothing_usable_is_one_error_with_the_place(tmp_path: Path, files: Mapping[str, bytes], words: str) -> None:
    with pytest.raises(RltopError) as caught:
        made(tmp_path, files)
    assert caught.value.exit_code == 2
    assert words in str(caught.value)


def test_a_missing_path_is_an_error() -> None:
    with pytest.raises(RltopError, match="can not be read"):
        collect([Path("/nonexistent/rltop")])


def test_a_cut_last_line_is_a_growing_file_and_a_broken_one_elsewhere_is_a_problem(tmp_path: Path) -> None:
    good = rows({"train/step": 0, "train/loss": 1.0})
    obs = made(tmp_path, {"metrics.jsonl": good + '{"train/step": 1, "tra'})
    assert [problem.cut_end for problem in obs.problems] == [True]
    obs = made(tmp_path, {"metrics.jsonl": good + '{"train/step": 1, "tra\n' + good})
    assert [(problem.where.line, problem.cut_end) for problem in obs.problems] == [(2, False)]
    assert len(obs.metrics) == 2


def test_hostile_files_neither_run_nor_blow_up(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.system, (f"touch {tmp_path}/pwned",))

    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\0" * (300 << 20))
    deep = '{"train/step": 0, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    digits = '{"train/step": 1e400, "train/loss": ' + "9" * 10_000 + "}\n"
    with (tmp_path / "long.log").open("wb") as file:
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + LINE.encode())
    tracemalloc.start()
    try:
        obs = made(
            tmp_path,
            {
                "0.pt": pickle.dumps(Evil()),
                "ckpt/config.json": "{}",
                "ckpt/model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../../etc/passwd"}}),
                "metrics.jsonl": deep + digits + rows({"train/step": 2, "train/loss": 1.0}),
                "utf16.log": LINE.encode("utf-16"),
                "latin.log": "(A pid=1) größe\n".encode("latin-1") + LINE.encode(),
            },
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "pwned").exists()
    assert len([row for row in obs.metrics if row.axis == "rollout"]) == 3
    assert not [problem for problem in obs.problems if "defect" in problem.why]
    assert peak < 32 << 20
    assert any("os.system" in name or "posix.system" in name for dump in obs.dumps for name in dump.foreign)


# -- metrics


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"rollout_id": 3, "train/loss": 0.5, "rollout/raw_reward": 1}, {("train", 3), ("rollout", 3)}),
        ({"train/step": 3, "train/loss": 0.5, "rollout/raw_reward": 1}, {("train", 3), ("rollout", 3)}),
        ({"step": 3, "completions/clipped_ratio": 0.9}, {("rollout", 3)}),
        ({"training/global_step": 3, "actor/grad_norm": 0.9}, {("train", 3)}),
        ({"event": "rollout", "rollout_id": 3, "rollout/raw_reward": 1, "weights": "hf"}, {("rollout", 3)}),
    ],
)
def test_rows_find_their_axes(tmp_path: Path, row: dict[str, object], want: set[tuple[str, int]]) -> None:
    obs = made(tmp_path, {"metrics.jsonl": rows(row)})
    assert {(row.axis, row.step) for row in obs.metrics} == want


def test_words_for_nan_python_dicts_and_json_documents(tmp_path: Path) -> None:
    text = '{\'train/step\': 0, \'train/loss\': nan}\n{"train/step": 1, "train/loss": "NaN"}\n'
    obs = made(tmp_path, {"metrics.jsonl": text + '{"train/step": 2, "train/loss": -Infinity}\n'})
    assert [str(row.values["train/loss"]) for row in obs.metrics] == ["nan", "nan", "-inf"]
    obs = made(tmp_path / "document", {"metrics.json": json.dumps([{"train/step": 0, "train/loss": 1}], indent=1)})
    assert len(obs.metrics) == 1


def test_syncs_belong_to_the_next_rollout(tmp_path: Path) -> None:
    obs = made(
        tmp_path,
        {
            "metrics.jsonl": rows(
                {"event": "rollout", "rollout_id": 0, "rollout/raw_reward": 1},
                {"event": "update_weights", "after_step": 0, "ok": False},
                {"event": "rollout", "rollout_id": 1, "rollout/raw_reward": 1},
                {"event": "update_weights", "after_step": 1},
            )
        },
    )
    assert [(sync.rollout_id, sync.ok) for sync in obs.syncs] == [(1, False), (2, True)]


def test_a_file_of_any_number_of_rows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_ROWS", (5, 5))
    obs = made(tmp_path, {"metrics.jsonl": rows(*({"train/step": i, "train/loss": 1.0} for i in range(100)))})
    assert [row.step for row in obs.metrics] == [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]


def test_sequence_errors_are_rows(tmp_path: Path) -> None:
    obs = made(tmp_path, {"metrics.jsonl": rows({"step": 0, "prompt_id": 4, "mult_prob_error": 120})})
    assert [(row.kind, row.fields["prompt_id"]) for row in obs.rows] == [("seq_error", 4)]
    assert obs.metrics == ()


# -- segments


def test_an_id_that_goes_back_begins_a_segment(tmp_path: Path) -> None:
    steps = [0, 1, 2, 3, 2, 3, 4]
    obs = made(tmp_path, {"metrics.jsonl": rows(*({"train/step": i, "train/loss": 1.0} for i in steps))})
    assert [row.segment for row in obs.metrics] == [0, 0, 0, 0, 1, 1, 1]


def test_a_restart_in_a_log_cuts_everything_by_time(tmp_path: Path) -> None:
    lines = [PERF.format(f"10:0{i}:00", i) for i in range(3)] + [STEP.format("10:03:00", 2, 2)]
    lines += ["(SGLangEngine pid=1) [2026-03-02 10:04:00] KeyError: 'between'"]
    lines += [PERF.format(f"10:0{5 + i}:00", 1 + i) for i in range(2)] + [STEP.format("10:07:00", 1, 1)]
    lines += ["(SGLangEngine pid=1) [2026-03-02 10:08:00] KeyError: 'after'"]
    obs = made(tmp_path, {"train.log": "\n".join(lines)})
    assert [row.segment for row in obs.metrics] == [0, 0, 0, 0, 1, 1, 1]
    assert [event.segment for event in obs.events if event.kind == "traceback"] == [0, 1]


def test_asynchronous_rollouts_are_no_restart(tmp_path: Path) -> None:
    train = "(MegatronTrainRayActor pid=4101) [2026-03-02 {}] data.py:1 - rollout {}: {{'rollout/raw_reward': 0.5}}"
    order = [PERF.format("10:00:00", 0), PERF.format("10:01:00", 1), train.format("10:02:00", 0)]
    order += [PERF.format("10:03:00", 2), train.format("10:04:00", 1)]
    assert {row.segment for row in made(tmp_path, {"train.log": "\n".join(order)}).metrics} == {0}


def test_a_step_that_goes_back_with_a_growing_rollout_is_no_restart(tmp_path: Path) -> None:
    # train/step is rollout_id x (steps of this rollout) + step: it may go back when rollouts differ in steps.
    lines = [PERF.format("10:00:00", 5), STEP.format("10:01:00", 10, 10), STEP.format("10:02:00", 11, 11)]
    lines += [PERF.format("10:03:00", 6), STEP.format("10:04:00", 6, 6)]
    assert {row.segment for row in made(tmp_path, {"train.log": "\n".join(lines)}).metrics} == {0}


def test_loading_again_after_training_begins_a_segment(tmp_path: Path) -> None:
    load = "(MegatronTrainRayActor pid=4101) [2026-03-02 {}] successfully loaded checkpoint from X at iteration {}"
    lines = [load.format("10:00:00", 0), load.format("10:00:01", 0), STEP.format("10:01:00", 0, 0)]
    lines += [load.format("10:02:00", 5), STEP.format("10:03:00", 6, 6)]
    obs = made(tmp_path, {"train.log": "\n".join(lines)})
    assert [row.segment for row in obs.metrics] == [0, 1]
    assert [(start.segment, start.fresh) for start in obs.starts] == [(0, True), (1, False)]


def test_runs_are_split_by_name(tmp_path: Path) -> None:
    named = [{"run": name, "train/step": i, "train/loss": 1.0} for name in ("x", "y") for i in range(3)]
    obs = made(tmp_path, {"metrics.jsonl": rows(*named)})
    assert [row.segment for row in obs.metrics] == [0, 0, 0, 1, 1, 1]


def test_a_rotated_file_goes_on(tmp_path: Path) -> None:
    parts = {
        f"metrics_{n}.jsonl": rows(*({"train/step": n * 3 + i, "train/loss": 1.0} for i in range(3))) for n in (2, 10)
    }
    assert {row.segment for row in made(tmp_path, parts).metrics} == {0}


def gap(folder: str, value: float, *, timed: bool = False, count: int = 4) -> dict[str, str]:
    """Metrics of a folder, in a file or, with times, in a log."""
    values = [{"train/step": i, "train/train_rollout_logprob_abs_diff": value} for i in range(count)]
    if not timed:
        return {f"{folder}/metrics.jsonl": rows(*values)}
    line = "(MegatronTrainRayActor pid=1) [2026-03-02 10:0{}:00] model.py:1 - step {}: {}"
    return {f"{folder}/train.log": "\n".join(line.format(i, i, one) for i, one in enumerate(values))}


@pytest.mark.parametrize(
    ("files", "segments"),
    [
        (gap("a", 0.27) | gap("b", 0.01, timed=True), {"b": {0}, "a": {1}}),
        (gap("a", 0.27, timed=True) | gap("b", 0.01, timed=True), {"a": {0}, "b": {1}}),
        (gap("a", 0.27) | gap("b", 0.01), {"a": {0}, "b": {1}}),
        (gap("x/a", 0.27) | gap("x/b", 0.01, timed=True), {"x/b": {0}, "x/a": {1}}),
        # parts of one run: a log and what was exported of it, and what its ranks print
        (gap("logs", 0.0112, timed=True) | gap("wandb", 0.01121), {"logs": {0}, "wandb": {0}}),
        (gap("rank0", 0.27, timed=True) | gap("rank1", 0.01, timed=True), {"rank0": {0}, "rank1": {0}}),
        (gap("a", 0.27, count=2) | gap("b", 0.01, count=2, timed=True), {"a": {0}, "b": {0}}),
    ],
)
def test_runs_in_folders_of_their_own_share_no_segment(
    tmp_path: Path, files: dict[str, str], segments: dict[str, set[int]]
) -> None:
    broken = {f"{folder}/engine.log": "[2026-03-02 10:01:30 TP0] KeyError: 'x'" for folder in segments}
    obs = made(tmp_path, files | broken)
    found: dict[str, set[int]] = {}
    for row in obs.metrics:
        assert row.where is not None
        found.setdefault(os.path.dirname(row.where.source), set()).add(row.segment)
    assert found == segments
    events = {os.path.dirname(e.where.source): {e.segment} for e in obs.events if e.kind == "traceback"}
    assert events == segments


# -- mode


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        ({"args.txt": "--debug-rollout-only", "train.log": LINE}, "rollout-only"),
        ({"args.txt": "--debug-train-only"}, "train-only"),
        ({"args.txt": "--load-debug-rollout-data /x/{rollout_id}.pt"}, "train-only"),
        ({"args.txt": "--colocate", "rollout.log": LINE}, "full"),
        ({"train.log": LINE}, "rollout-only"),
        ({"train.log": LINE + STEP.format("10:00:00", 0, 0)}, "full"),
        ({"engine.log": "[2026-03-02 10:00:00 TP0] Decode batch. #running-req: 1"}, "rollout-only"),
        ({"engine.log": '[2026-03-02 10:00:00] x - "POST /update_weights_from_tensor HTTP/1.1" 200 OK'}, "full"),
        ({"metrics.jsonl": rows({"train/step": 0, "train/loss": 1.0})}, "full"),
    ],
)
def test_mode(tmp_path: Path, files: Mapping[str, str], mode: str) -> None:
    assert made(tmp_path, files).mode == mode


# -- arguments


def test_the_last_occurrence_wins_and_lists_stay_lists() -> None:
    text = """python3 -u train_async.py \\
   --lr 1e-6 --colocate  # a comment with --fake-flag
   --cuda-graph-bs 1 2 4 --name "two words" --x=-5 --temp -1.5 \\
   --lr 2e-6 --empty ''
"""
    args = parse_args(text, "args.txt")
    assert args.flags["lr"] == "2e-6"
    assert args.repeats == {"lr": ("1e-6", "2e-6")}
    assert args.lines["cuda_graph_bs"] == 3
    assert args.flags["cuda_graph_bs"] == ["1", "2", "4"]
    assert args.flags["name"] == "two words"
    assert args.number("temp") == -1.5
    assert args.flags["x"] == "-5"
    assert args.on("colocate")
    assert "fake_flag" not in args.flags
    assert "train_async.py" in args.words


def test_dotted_arguments_are_verls() -> None:
    args = parse_args("data.train_batch_size=32 +trainer.logger='[\"console\"]'", "args.txt")
    assert args.framework == "verl"
    assert args.number("data.train_batch_size") == 32
    assert parse_args("framework=relax --lr 1", "a").framework == "relax"


def test_a_launch_script_may_be_given_as_the_arguments(tmp_path: Path) -> None:
    script = """#!/bin/bash
BATCH=128
ROLLOUT_ARGS=(
   --rollout-batch-size 8
   --n-samples-per-prompt 4   # few
   --global-batch-size ${BATCH}
)
MORE=(
   --use-dynamic-batch-size
)
ray job submit -- python3 train.py --colocate "${ROLLOUT_ARGS[@]}" ${MORE[@]}
"""
    (tmp_path / "args.txt").write_text(script)
    args = collect([tmp_path]).args
    assert (args.number("global_batch_size"), args.number("n_samples_per_prompt")) == (128, 4)
    assert args.flags["use_dynamic_batch_size"] is True
    assert args.flags["colocate"] is True


def test_a_member_of_an_enumeration_is_its_name() -> None:
    assert table_row("  attention_backend ....... AttnBackend.flash") == ("attention_backend", "flash")
    assert table_row("  attention_backend ....... <AttnBackend.auto: 5>") == ("attention_backend", "auto")
    assert table_row("  generate .... My.function") == ("generate", "My.function")


def test_effective_arguments_of_the_log_win_over_what_was_typed(tmp_path: Path) -> None:
    table = "--- arguments ---\n".replace("---", "-" * 20) + "  context_parallel_size ...... 1\n  load ...... None\n"
    table += "-" * 20 + " end of arguments " + "-" * 20 + "\n"
    obs = made(tmp_path, {"args.txt": "--context-parallel-size 2 --load /x", "train.log": table})
    assert obs.args.number("context_parallel_size") == 1
    assert obs.args.text("load") == "/x"  # a None that only says "not given" hides nothing


@pytest.mark.parametrize("text", ["{'a': ", "{'a' 1}", "[1, 2", "{" * 1000, "", "{'a': (}", "{1: {2: [3}"])
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        parse(text)


def test_literals() -> None:
    assert parse("{'a': np.float64(1.25), 'b': [1, (2, 'x\\'y')], 'c': None, 'd': tensor(3)}") == {
        "a": 1.25,
        "b": [1, [2, "x'y"]],
        "c": None,
        "d": 3,
    }
