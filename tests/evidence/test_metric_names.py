"""The table of metric names: what it says of six trainers, a user's table on top, and what it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rltop.checks.observe import Where
from rltop.errors import RltopError
from rltop.evidence.metric_names import MOST_REMEMBERED, Names, load, normal, parse, shipped
from rltop.evidence.metrics import rows_of

WHERE = Where("m.jsonl", 1)


@pytest.mark.parametrize(
    ("framework", "theirs", "ours", "axis"),
    [
        ("verl", "actor/grad_norm", "train/grad_norm", "train"),
        ("verl", "critic/score/mean", "rollout/raw_reward", "rollout"),
        ("verl", "timing_s/gen", "perf/rollout_time", "rollout"),
        ("verl", "val-core/openai/gsm8k/reward/mean@1", "eval/openai/gsm8k/reward/mean@1", "eval"),
        ("NeMo_RL", "train/kl_penalty", "train/kl_loss", "train"),
        ("nemo-rl", "reward", "rollout/raw_reward", "rollout"),
        ("OpenRLHF", "actor_grad_norm", "train/grad_norm", "train"),
        ("openrlhf", "train/policy_loss", "train/pg_loss", "train"),
        ("openrlhf", "eval_aime_pass1", "eval/aime_pass1", "eval"),
        ("trl", "completions/clipped_ratio", "rollout/truncated_ratio", "rollout"),
        ("trl", "train/reward", "rollout/raw_reward", "rollout"),
        ("trl", "sampling/sampling_logp_difference/mean", "train/train_rollout_logprob_abs_diff", "train"),
        ("megatron", "grad norm", "train/grad_norm", "train"),
        # The framework is not known (a log): what all agree on.
        ("", "actor/ppo_kl", "train/ppo_kl", "train"),
        ("", "completions/max_length", "rollout/response_len/max", "rollout"),
        ("my-own", "learning_rate", "train/lr-pg_0", "train"),
    ],
)
def test_a_name_of_another_trainer_is_one_of_ours(framework: str, theirs: str, ours: str, axis: str) -> None:
    found = shipped().of(framework).find(theirs)
    assert found is not None
    assert (found.ours, found.axis) == (ours, axis)


@pytest.mark.parametrize("name", ["train/grad_norm", "rollout/raw_reward", "eval/aime", "perf/step_time", "mine"])
def test_our_own_names_and_unknown_ones_stay(name: str) -> None:
    for framework in ["", *shipped().frameworks]:
        assert shipped().of(framework).find(name) is None


def test_every_shipped_name_has_a_source_that_was_read_and_stands_once() -> None:
    rows = [row for part in shipped().parts for row in part.rows]
    assert all(row.source and row.checked for row in rows)
    assert not {key: n for key, n in Counter((row.framework, row.theirs) for row in rows).items() if n > 1}


def test_milliseconds_become_seconds() -> None:
    (row,) = rows_of({"elapsed time per iteration (ms)": 1250.0}, WHERE, axis="train", step=3)
    assert row.values["perf/step_time"] == 1.25
    assert row.values["elapsed time per iteration (ms)"] == 1250.0


def test_a_value_that_was_reported_under_our_name_counts() -> None:
    (row,) = rows_of({"step": 3, "actor/grad_norm": 9.0, "train/grad_norm": 1.0}, WHERE)
    assert row.values == {"actor/grad_norm": 9.0, "train/grad_norm": 1.0}


TWO = """
[[map]]
framework = "mine"
[map.names]
"kl" = ["train/kl_loss", "rollout/kl"]
"""


def test_the_records_own_step_decides_between_two_meanings() -> None:
    view = Names(parse(TWO, where="t")).of("mine")
    for side, ours in ((None, "train/kl_loss"), ("train", "train/kl_loss"), ("rollout", "rollout/kl")):
        found = view.find("kl", side)  # type: ignore[arg-type]
        assert found is not None
        assert found.ours == ours
    for ids, axis, ours in (
        ({"train/step": 4, "step_in_rollout": 0}, "train", "train/kl_loss"),
        ({"rollout_id": 4}, "rollout", "rollout/kl"),
    ):
        (row,) = rows_of({**ids, "kl": 0.5}, WHERE, names=view)
        assert (row.axis, row.values[ours]) == (axis, 0.5)


def test_a_user_table_replaces_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    own = tmp_path / "metric_names.toml"
    own.write_text(
        '[[map]]\nframework = "verl"\n[map.names]\n'
        '"actor/entropy" = ""\n"my/gn" = { to = "train/grad_norm", scale = 2 }\n'
        '[[map]]\n[map.names]\n"reward" = "rollout/my_reward"\n',
        encoding="utf-8",
    )
    names = load(own)
    verl = names.of("verl")
    assert verl.find("actor/entropy") is None
    assert verl.find("my/gn").scale == 2.0  # type: ignore[union-attr]
    assert verl.find("actor/pg_loss").ours == "train/pg_loss"  # type: ignore[union-attr]
    for framework in ("trl", ""):
        assert names.of(framework).find("reward").ours == "rollout/my_reward"  # type: ignore[union-attr]
    assert shipped().of("verl").find("actor/entropy") is not None


def test_what_two_frameworks_call_alike_and_mean_differently_stays_as_long_as_nobody_says_which() -> None:
    maps = "".join(
        f'[[map]]\nframework = "{name}"\n[map.names]\n"x" = "{ours}"\n"y" = "train/loss"\n'
        for name, ours in (("one", "train/loss"), ("two", "rollout/raw_reward"))
    )
    names = Names(parse(maps, where="t"))
    assert names.of("").find("x") is None
    assert names.of("").find("y") is not None
    assert names.of("two").find("x").ours == "rollout/raw_reward"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("version = 1\n[[map]\n", 2, "is no TOML"),
        ("version = 2\n", 1, "version must be 1"),
        ("\nnames = 3\n", 2, "unknown key 'names'"),
        ("map = 3\n", 1, "list of tables"),
        ('[[map]]\nframework = "a"\n[[map]]\nframe = "verl"\n', 4, "unknown key 'frame'"),
        ("[[map]]\nframework = 3\n", 2, "framework must be a text"),
        ('[[map]]\ntrain = "actor/"\n', 2, "list of beginnings"),
        ("[[map]]\nnames = 3\n", 2, "names must be a table"),
        ('[[map]]\n[map.names]\n"a" = "train/a"\n"b" = 3\n', 4, "'b' needs one of rltop's names"),
        ('[[map]]\n[map.names]\n"a" = { to = "train/a", factor = 3 }\n', 3, "unknown key 'factor'"),
        ('[[map]]\n[map.names]\n"a" = { to = "train/a", scale = 0 }\n', 3, "scale of 'a'"),
        ('[[map]]\n[map.names]\n"a" = { to = "train/a", scale = nan }\n', 3, "scale of 'a'"),
        ('[[map]]\n[map.names]\n"a/" = "train/a"\n', 3, "a beginning is renamed to a beginning"),
        ('[[map]]\n[map.names]\n"a" = ["train/a", "train/b"]\n', 3, "two meanings on one axis"),
        ('[[map]]\n[map.names]\n"a" = []\n', 3, "'a' needs one"),
        ('[[map]]\n[map.names]\n"" = "train/a"\n', 3, "1 to 200 characters"),
    ],
)
def test_a_table_that_can_not_be_used_is_told_with_its_line(text: str, line: int, what: str) -> None:
    with pytest.raises(RltopError) as caught:
        parse(text, where="metric_names.toml")
    assert what in caught.value.what
    assert caught.value.where == f"metric_names.toml:{line}"
    assert caught.value.exit_code == 2


def test_a_file_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none.toml", tmp_path / "latin.toml"):
        with pytest.raises(RltopError, match=r"can not be read|is no text"):
            load(path)


def test_a_program_that_makes_up_names_does_not_fill_the_memory() -> None:
    view = Names(parse(TWO, where="t")).of()
    for number in range(2 * MOST_REMEMBERED):
        assert view.find(f"x/{number}") is None
    assert len(view._remembered) == MOST_REMEMBERED


def test_a_framework_is_found_however_it_is_spelled() -> None:
    assert {normal(word) for word in ("NeMo-RL", "nemo_rl", " NEMO RL ")} == {"nemo-rl"}
