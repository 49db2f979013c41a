"""Dumps as input: what a trainer takes, and one clear error for everything else, with and without torch."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rltop.errors import RltopError
from rltop.evidence.dump_file import DumpFile
from rltop.train import dump_preflight
from rltop.train.arguments import parse_args
from rltop.train.dump_preflight import check_dumps, judge
from rltop.train.load_dump import Expected, check_text, load_rollout, usable
from rltop.train.tiny_model import make_tiny_model

EXPECTED = Expected(group_size=2, step_size=4, vocab_size=100, max_positions=64)


def entry(at: int, **changes: Any) -> dict[str, Any]:
    """A sample as slime's `to_dict` writes it: tokens 1 2 3 | 4 5."""
    fields: dict[str, Any] = {
        "group_index": 10 + at // 2,
        "index": 40 + at,
        "rollout_id": None,
        "prompt": "ab",
        "tokens": [1, 2, 3, 4, 5],
        "response": "cd",
        "response_length": 2,
        "label": "x",
        "reward": float(at % 2),
        "loss_mask": None,
        "weight_versions": ["3"],
        "rollout_log_probs": [-0.5, -0.25],
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def entries(**changes: Any) -> list[dict[str, Any]]:
    """Four of them, the third changed. `...` leaves a field out."""
    return [entry(at, **(changes if at == 2 else {})) for at in range(4)]


def save(path: Path, samples: Any, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": 0, "samples": samples} | more, path)
    return path


def without_torch(path: Path, expected: Expected) -> Any:
    """The judgement beforehand, and the same reader's samples."""
    first = judge(path, expected)
    with DumpFile.open(path) as dump:
        samples = usable(path, dump.kind, dump, expected)
    assert [one.tokens for one in first] == [one.tokens for one in samples[:8]]
    return samples


def with_torch(path: Path, expected: Expected) -> Any:
    return load_rollout(str(path), 0, expected)


BOTH = pytest.mark.parametrize("load", [with_torch, without_torch], ids=["torch", "no torch"])
Load = Callable[[Path, Expected], Any]


@BOTH
def test_slimes_samples_become_samples_to_train_on(tmp_path: Path, load: Load) -> None:
    mask = torch.tensor([1, 0])
    changed = entries(tokens=torch.tensor([1, 2, 3, 4, 5]), loss_mask=mask, status="truncated", a_field_of_tomorrow=[7])
    samples = load(save(tmp_path / "0.pt", changed), EXPECTED)
    assert [(one.index, one.group_index, one.source_index) for one in samples] == [
        *((0, 0, 40), (1, 0, 41), (2, 1, 42), (3, 1, 43)),
    ]
    third = samples[2]
    assert (third.tokens, third.response_ids, third.loss_mask) == ((1, 2, 3, 4, 5), (4, 5), (1, 0))
    assert (third.status, third.reward, third.weight_version) == ("truncated", 0.0, "3")
    assert third.rollout_log_probs == (-0.5, -0.25)


@BOTH
def test_what_slime_leaves_out_is_not_needed(tmp_path: Path, load: Load) -> None:
    bare = dict.fromkeys(
        ("index", "group_index", "rollout_log_probs", "status", "metadata", "weight_versions", "label"), ...
    )
    samples = load(save(tmp_path / "0.pt", [entry(at, **bare) for at in range(4)]), EXPECTED)
    assert [one.group_index for one in samples] == [0, 0, 0, 0]
    assert samples[0].rollout_log_probs == ()


@BOTH
def test_a_removed_sample_stays_in_its_group_and_out_of_the_loss(tmp_path: Path, load: Load) -> None:
    samples = load(save(tmp_path / "0.pt", entries(remove_sample=True)), EXPECTED)
    assert [one.loss_mask for one in samples] == [None, None, (0, 0), None]


@BOTH
def test_one_of_several_rewards_is_chosen_by_name(tmp_path: Path, load: Load) -> None:
    path = save(tmp_path / "0.pt", [entry(at, reward={"acc": 0.5, "format": 1.0}) for at in range(4)])
    assert {one.reward for one in load(path, dataclasses.replace(EXPECTED, reward_key="acc"))} == {0.5}


@BOTH
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": ...}, ["samples[2].tokens", "missing"]),
        ({"response_length": ...}, ["samples[2].response_length", "missing"]),
        ({"response_length": 5}, ["samples[2].response_length", "5 of 5 tokens"]),
        ({"response_length": 0}, ["samples[2].response_length", "0 of 5 tokens"]),
        ({"tokens": [1, 2, 3, 4, 100]}, ["samples[2].tokens", "1..100", "vocabulary has 100", "another model"]),
        ({"tokens": [-1, 2, 3, 4, 5]}, ["samples[2].tokens", "-1..5"]),
        ({"tokens": [1] * 65}, ["samples[2].tokens", "65 tokens", "64 positions"]),
        ({"reward": None}, ["samples[2].reward", "missing"]),
        ({"reward": {"a": 1.0, "b": 0.0}}, ["samples[2].reward", "a, b", "--reward-key"]),
        ({"rollout_log_probs": [-0.5]}, ["samples[2].rollout_log_probs", "1 values for 2 response tokens"]),
        ({"loss_mask": [1, 1, 1]}, ["samples[2].loss_mask", "3 values for 2 response tokens"]),
        ({"multimodal_train_inputs": {"pixels": [1]}}, ["samples[2].multimodal_train_inputs", "text only"]),
        ({"group_index": 10}, ["group 10 has 3 samples in a row", "--n-samples-per-prompt is 2"]),
    ],
)
def test_a_sample_that_does_not_fit_is_named_with_its_field(
    tmp_path: Path, load: Load, changes: dict[str, Any], words: list[str]
) -> None:
    path = save(tmp_path / "0.pt", entries(**changes))
    with pytest.raises(RltopError) as caught:
        load(path, EXPECTED)
    assert caught.value.exit_code == 2
    for word in [str(path), *words]:
        assert word in str(caught.value)


@BOTH
def test_several_samples_of_one_trajectory_are_refused(tmp_path: Path, load: Load) -> None:
    path = save(tmp_path / "0.pt", [entry(at, rollout_id=at // 2) for at in range(4)])
    with pytest.raises(RltopError, match="several samples of one trajectory"):
        load(path, EXPECTED)


@BOTH
@pytest.mark.parametrize(
    ("count", "expected", "words"),
    [
        (3, EXPECTED, "3 samples are no whole groups of --n-samples-per-prompt 2"),
        (6, EXPECTED, "6 samples / --global-batch-size 4 leaves 2 over"),
        (2, EXPECTED, "2 samples / --global-batch-size 4 is not one step"),
        (4, dataclasses.replace(EXPECTED, replicas=3), "4 samples per step / 3 data parallel ranks leaves 1 over"),
        (0, EXPECTED, "there are no samples in it"),
    ],
)
def test_numbers_that_do_not_divide_are_written_out(
    tmp_path: Path, load: Load, count: int, expected: Expected, words: str
) -> None:
    path = save(tmp_path / "0.pt", [entry(at) for at in range(count)])
    with pytest.raises(RltopError) as caught:
        load(path, expected)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("share", "kept"),
    [(0.5, [0, 1, 6, 7]), (0.6, [0, 1, 6, 7]), (1.0, list(range(8)))],
)
def test_a_subsample_is_slimes_choice(tmp_path: Path, share: float, kept: list[int]) -> None:
    path = save(tmp_path / "0.pt", [entry(at) for at in range(8)])
    samples = with_torch(path, dataclasses.replace(EXPECTED, share=share))
    assert [one.source_index for one in samples] == [40 + at for at in kept]
    assert [one.index for one in samples] == list(range(len(kept)))


@pytest.mark.parametrize(
    ("share", "why"),
    [(0.1, "= 0 samples (slime would keep all)"), (0.25, "cut a group of 2"), (0.8, "cut a group of 2")],
)
def test_a_subsample_without_whole_groups_is_refused_with_one_that_has_them(
    tmp_path: Path, share: float, why: str
) -> None:
    path = save(tmp_path / "0.pt", [entry(at) for at in range(8)])
    with pytest.raises(RltopError) as caught:
        with_torch(path, dataclasses.replace(EXPECTED, share=share))
    assert why in caught.value.why
    better = float(caught.value.do.rpartition(" ")[2])
    assert len(with_torch(path, dataclasses.replace(EXPECTED, share=better))) == 4


class Hostile:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must never be printed",))


@BOTH
@pytest.mark.parametrize("where", ["sample", "file"])
def test_a_hostile_pickle_runs_nothing_and_is_named(
    tmp_path: Path, load: Load, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "0.pt"
    if where == "sample":
        save(path, entries(metadata={"x": Hostile()}))
    else:
        path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(RltopError) as caught:
        load(path, EXPECTED)
    assert caught.value.exit_code == 2
    assert "print: loading that would run code" in str(caught.value)
    assert "weights_only" not in str(caught.value)  # torch's own advice is to switch the protection off
    assert "must never" not in capsys.readouterr().out


@BOTH
@pytest.mark.parametrize("keep", [0, 1, 100, -100, -1])
def test_a_dump_that_was_cut_off_is_named(tmp_path: Path, load: Load, keep: int) -> None:
    path = save(tmp_path / "0.pt", entries())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RltopError) as caught:
        load(path, EXPECTED)
    assert caught.value.exit_code == 2
    assert caught.value.do
    assert str(path) in caught.value.where


@BOTH
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": [], "dp_shards": []}, "training data"),
        ({"rollout_id": 0, "rank": 0, "rollout_data": {"tokens": [[1]]}}, "training data"),
        ([1, 2], "no list `samples`"),
        ({"weights": torch.ones(2)}, "no list `samples`"),
    ],
)
def test_another_file_is_told_apart(tmp_path: Path, load: Load, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "0.pt")
    with pytest.raises(RltopError) as caught:
        load(tmp_path / "0.pt", EXPECTED)
    assert words in str(caught.value)
    assert "--save-debug-rollout-data" in caught.value.do


def test_relaxs_lines_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in entries()))
    assert len(with_torch(path, EXPECTED)) == 4


def test_a_dump_of_another_tokenizer_is_told_by_its_text(tmp_path: Path) -> None:
    samples = with_torch(save(tmp_path / "0.pt", entries()), EXPECTED)
    check_text(tmp_path / "0.pt", samples, lambda ids: " cd\n")
    with pytest.raises(RltopError) as caught:
        check_text(tmp_path / "0.pt", samples, lambda ids: "zz")
    assert f"{tmp_path}/0.pt: samples[0].tokens" in caught.value.where
    assert "'zz' here" in caught.value.why
    assert "'cd'" in caught.value.why


SHAPE = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]


def replay(tmp_path: Path, *flags: str) -> None:
    check_dumps(parse_args(["--load-debug-rollout-data", f"{tmp_path}/{{rollout_id}}.pt", *SHAPE, *flags]))


def test_holes_are_found_before_anything_starts(tmp_path: Path) -> None:
    for rollout_id in (0, 1, 3):
        save(tmp_path / f"{rollout_id}.pt", entries())
    save(tmp_path / "eval_0.pt", entries())
    replay(tmp_path, "--num-rollout", "2")
    with pytest.raises(RltopError) as caught:
        replay(tmp_path, "--num-rollout", "4")
    assert "1 are not there" in caught.value.why
    assert "there are 0, 1, 3" in caught.value.why
    assert caught.value.do == "--num-rollout 2"


def test_a_path_without_any_dump_is_said(tmp_path: Path) -> None:
    with pytest.raises(RltopError) as caught:
        replay(tmp_path)
    assert (caught.value.what, caught.value.exit_code) == ("no such dump", 2)


def test_a_later_dump_that_is_broken_is_found_before_anything_starts(tmp_path: Path) -> None:
    save(tmp_path / "0.pt", entries())
    save(tmp_path / "1.pt", entries(reward=None))
    with pytest.raises(RltopError) as caught:
        replay(tmp_path, "--num-rollout", "2")
    assert f"{tmp_path}/1.pt: samples[2].reward" in caught.value.where


def test_the_tiny_models_vocabulary_and_a_checkpoints_are_known_beforehand(tmp_path: Path) -> None:
    save(tmp_path / "0.pt", entries(tokens=[1, 2, 3, 4, 260]))
    with pytest.raises(RltopError, match="cannot be trained on") as caught:
        replay(tmp_path, "--num-rollout", "1")
    assert "the model's vocabulary has 260" in caught.value.why
    checkpoint = make_tiny_model(tmp_path / "tiny")
    save(tmp_path / "0.pt", [entry(at, response="nothing like it") for at in range(4)])
    with pytest.raises(RltopError, match="another tokenizer"):
        replay(tmp_path, "--num-rollout", "1", "--hf-checkpoint", str(checkpoint))


def test_one_file_serves_every_rollout(tmp_path: Path) -> None:
    path = save(tmp_path / "7.pt", entries())
    check_dumps(parse_args(["--load-debug-rollout-data", str(path), *SHAPE, "--num-rollout", "100"]))


def test_of_a_large_dump_the_first_samples_are_judged(tmp_path: Path) -> None:
    path = save(tmp_path / "0.pt", entries(reward=None))
    assert len(judge(path, EXPECTED, most=2)) == 2
    with pytest.raises(RltopError, match="cannot be trained on"):
        judge(path, EXPECTED, most=3)


def test_rollouts_are_found_under_a_path_with_a_format(tmp_path: Path) -> None:
    for at in (7, 12):
        (tmp_path / f"{at:03d}.pt").write_bytes(b"")
    assert dump_preflight._ids(f"{tmp_path}/{{rollout_id:03d}}.pt") == [7, 12]
