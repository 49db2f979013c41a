"""`rltop dump show|diff|stats` on files, as somebody without a terminal sees them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from tests.evidence.dump_files import rollout, sample, save, train
from tests.evidence.files import lines
from tests.evidence.test_saved import Touch


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["dump", *map(str, argv)])
    told = capsys.readouterr()
    return code, told.out, told.err


def as_json(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    assert found["schema"] == 1
    return found


@pytest.fixture
def details(tmp_path: Path) -> Path:
    """A directory of --dump-details: rollouts 3 and 5, an evaluation, and the train dump of 3."""
    folder = tmp_path / "details"
    rollout(folder / "rollout_data" / "3.pt", 16)
    rollout(folder / "rollout_data" / "5.pt", 4, rollout_id=5)
    rollout(folder / "rollout_data" / "eval_3.pt", 2)
    train(folder / "train_data" / "3.pt", [sample(at) for at in range(16)], off=0.5)
    return folder


def test_show_tells_what_is_known_of_a_sample(details: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", details, "-n", 2)
    assert code == 0
    assert f"{details}/rollout_data/3.pt  rollout 3" in out
    assert f"train dump {details}/train_data/3.pt" in out
    assert "rollout/raw_reward" in out
    assert "sample 1  index 1  group 0  reward 1  completed  weights v7" in out
    assert "  What is 0 squared?" in out
    assert "|train - rollout| mean 0.5, max 0.5" in out
    assert "metadata.difficulty" in out
    assert "no dump of rollout 4" in err
    assert "left out of the evaluation (--eval): 1" in err
    assert "--offset 2" in err
    assert "\x1b" not in out


def test_show_colours_tokens_by_log_prob_and_underlines_the_gap(
    details: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = sample(0, response="abcd", rollout_log_probs=[-0.01, -0.5, -1.5, -3.0])
    path = save(details / "rollout_data" / "9.pt", {"rollout_id": 9, "samples": [one]})
    _, out, _ = run(capsys, "show", path, "--colour", "always")
    assert "  a\x1b[32mb\x1b[0m\x1b[33mc\x1b[0m\x1b[31md\x1b[0m\n" in out
    train(details / "train_data" / "9.pt", [one], rollout_id=9, off=0.25)
    _, out, _ = run(capsys, "show", path, "--colour", "always", "--plain")
    assert "\x1b[4ma\x1b[0m\x1b[32m\x1b[4mb" in out
    _, out, _ = run(capsys, "show", path)
    assert "unlikely   token 3 'd' -3" in out
    assert "apart      token 0 'a' -0.01 / -0.26" in out
    _, out, _ = run(capsys, "show", path, "--tokens")
    assert any(line.split()[:5] == ["1", "98", "-0.5", "-0.75", "0.25"] for line in out.splitlines())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--filter", "reward<0.5", "-n", "3"], [0, 2, 4]),
        (["--filter", "status=truncated"], [7, 15]),
        (["--filter", "group=2 reward=1"], [9, 11]),
        (["--filter", "index=5"], [5]),
        (["--filter", "text~is\\s1(44|69)$"], [12, 13]),
        (["--filter", 'text~"is 144"'], [12]),
        (["--filter", "metadata.difficulty=2 at<6"], [2, 5]),
        (["--filter", "version!=7"], []),
        (["--search", "ANSWER 11"], [11]),
        (["--sort", "-length", "-n", "1"], [10]),
        (["--sort", "reward", "-n", "2", "--offset", "7"], [14, 1]),
        (["--offset", "14"], [14, 15]),
    ],
)
def test_samples_are_filtered_sorted_and_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[int]
) -> None:
    path = rollout(tmp_path / "3.pt", 16)
    assert [one["at"] for one in as_json(capsys, "show", path, *options)["samples"]] == expected


def test_a_field_that_does_not_exist_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", rollout(tmp_path / "3.pt"), "--filter", "rewrad<0.5 reward<0.5")
    assert (code, out) == (0, "")
    assert "'rewrad<0.5' is looked for as a word; fields are at index group reward" in err


def test_a_list_goes_on_over_several_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at in (1, 2):
        rollout(tmp_path / f"{at}.pt", 4, rollout_id=at)
    found = as_json(capsys, "show", tmp_path / "{rollout_id}.pt", "--offset", 3, "-n", 2)
    assert [(Path(one["dump"]).name, one["at"]) for one in found["samples"]] == [("1.pt", 3), ("2.pt", 0)]
    found = as_json(capsys, "show", tmp_path / "*.pt", "--filter", "reward=1", "--offset", 1, "-n", 2)
    assert [(Path(one["dump"]).name, one["at"]) for one in found["samples"]] == [("1.pt", 3), ("2.pt", 1)]


def test_json_keeps_every_field_and_the_trainers(details: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = sample(0, later={"nested": [1]}, rollout_log_probs=[float("nan")] * 13)
    path = save(details / "rollout_data" / "9.pt", {"rollout_id": 9, "samples": [odd]})
    found = as_json(capsys, "show", path)
    (one,) = found["samples"]
    assert (one["later"], one["rollout_log_probs"][0], one["reward"]) == ({"nested": [1]}, "NaN", 0.0)
    assert "status" in one
    assert "log_probs" not in one
    (dump,) = found["dumps"]
    assert (dump["rollout_id"], dump["kind"], dump["eval"]) == (9, "rollout", False)
    assert "rollout/response_len/mean" in dump["metrics"]
    (first, *_) = as_json(capsys, "show", details / "rollout_data" / "3.pt", "-n", 1)["samples"]
    assert first["train"]["log_probs"][0] == pytest.approx(first["rollout_log_probs"][0] - 0.5)


def test_what_was_refused_is_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "executed"
    samples = [sample(0, metadata={"evil": Touch(mark), "good": "yes"}), sample(1)]
    path = save(tmp_path / "3.pt", {"rollout_id": 3, "samples": samples})
    code, out, _ = run(capsys, "show", path)
    assert code == 0
    assert "refused  metadata: posix.mkdir" in out
    assert "metadata.good  yes" in out
    assert "sample 1" in out
    assert not mark.exists()


def test_text_of_a_run_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "3.pt", {"samples": [sample(0, response="\x1b[2Jgone\x07", prompt="\x1b]0;title\x07")]})
    for colour in ("never", "always"):
        _, out, _ = run(capsys, "show", path, "--colour", colour)
        assert "\x1b[2J" not in out
        assert "\x1b]" not in out
        assert "\x07" not in out
        assert "<1B>[2Jgone<07>" in out, "as in the pager: what is not shown is said"


def test_a_tokenizer_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "3.pt", {"samples": [sample(0, response="abcd", tokens=[7, 0, 1], response_length=2)]})
    model = tmp_path / "model"
    model.mkdir()
    code, _, err = run(capsys, "show", path, "--tokenizer", model)
    assert (code, "it has no tokenizer.json" in err) == (2, True)
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"ab": 0, "cd": 1, "?": 7}}}')
    _, out, _ = run(capsys, "show", path, "--tokens")
    assert "'cd'" not in out
    code, out, _ = run(capsys, "show", path, "--tokens", "--tokenizer", model)
    assert (code, "'cd'" in out) == (0, True)


def test_stats_are_slimes_metrics_and_a_row_per_group(details: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "stats", details / "rollout_data" / "3.pt", "--rollout-time", 10, "--groups", 2)
    assert code == 0
    assert any(line.split() == ["rollout/truncated_ratio", "0.125"] for line in out.splitlines())
    assert any(line.split() == ["train/train_rollout_logprob_abs_diff", "0.5"] for line in out.splitlines())
    assert "perf/longest_sample_tokens_per_sec" in out
    assert "What is 1 squared?" in out
    assert "2 of 4 groups" in err
    found = as_json(capsys, "stats", details)
    first, second = found["dumps"]
    assert (first["samples"], second["samples"]) == (16, 4)
    assert (first["groups"][0]["reward_mean"], len(first["groups"])) == (0.5, 4)
    assert "perf/rollout_time" in first["absent"]
    (evaluation,) = as_json(capsys, "stats", details, "--eval")["dumps"]
    assert evaluation["metrics"]["eval/all"] == 0.5


def test_diff_says_where_two_dumps_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [sample(at) for at in range(8)]
    theirs = [*(sample(at) for at in range(4)), *(sample(at, response="answer X") for at in range(4, 8))]
    a = save(tmp_path / "a.pt", {"rollout_id": 1, "samples": ours})
    b = save(tmp_path / "b.pt", {"rollout_id": 2, "samples": theirs})
    code, out, _ = run(capsys, "diff", a, b)
    assert code == 0
    assert out.startswith("2 prompts in both, 0 only in A, 0 only in B\n8 pairs of responses: 4 the same, 4 part\n")
    assert "first diverging token: 7 at the earliest" in out
    assert any(line.startswith("token 7   52 '4 is 16'") for line in out.splitlines())
    found = as_json(capsys, "diff", a, b)
    assert found["summary"]["same"] == 4
    assert found["prompts"][0]["first"]["tokens"] == [ord("4"), ord("X")]


def test_diff_of_two_weight_versions_in_one_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [sample(at, weight_versions=["3"]) for at in range(4)]
    samples += [sample(at, weight_versions=["3", "4"], reward=1.0) for at in range(4)]
    path = save(tmp_path / "a.pt", {"rollout_id": 1, "samples": samples})
    found = as_json(capsys, "diff", path, "--versions", "3,4")["summary"]
    assert (found["pairs"], found["same"], found["reward_diff"]) == (4, 4, 0.5)
    code, _, err = run(capsys, "diff", path, "--versions", "3,9")
    assert (code, "nothing to compare" in err) == (2, True)


def test_lines_of_relax_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "rollout_id": 7,
            "sample_index": at,
            "group_index": 0,
            "prompt": "p",
            "response": "ab",
            "response_length": 2,
            "response_token_ids": [8, 9],
            "response_rollout_log_probs": [-0.5, -3.0],
            "reward": float(at),
            "status": "completed",
        }
        for at in range(2)
    ]
    folder = tmp_path / "save"
    lines(folder / "rollout_result" / "train" / "7.jsonl", rows)
    code, out, _ = run(capsys, "show", folder)
    assert code == 0
    assert "sample 1  index 1  group 0  reward 1  completed" in out
    assert "unlikely   token 1 'b' -3" in out


def empty(tmp_path: Path) -> list[object]:
    return ["show", tmp_path]


def cut(tmp_path: Path) -> list[object]:
    path = rollout(tmp_path / "3.pt")
    path.write_bytes(path.read_bytes()[:90])
    return ["show", path]


def no_dump(tmp_path: Path) -> list[object]:
    return ["stats", save(tmp_path / "3.pt", {"weights": [1.0]})]


def no_number(tmp_path: Path) -> list[object]:
    return ["show", rollout(tmp_path / "3.pt"), "--filter", "reward<low"]


def no_expression(tmp_path: Path) -> list[object]:
    return ["show", rollout(tmp_path / "3.pt"), "--filter", "text~("]


def no_sort(tmp_path: Path) -> list[object]:
    return ["show", rollout(tmp_path / "3.pt"), "--sort", "beauty"]


def no_file(tmp_path: Path) -> list[object]:
    return ["show", tmp_path / "{rollout_id}.pt"]


def no_other(tmp_path: Path) -> list[object]:
    return ["diff", rollout(tmp_path / "3.pt")]


def no_eval(tmp_path: Path) -> list[object]:
    return ["show", rollout(tmp_path / "3.pt"), "--eval"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (empty, "no dumps in this directory"),
        (cut, "truncated or damaged archive"),
        (no_dump, "it has no samples"),
        (no_number, "reward is a number, 'low' is none"),
        (no_expression, "no regular expression"),
        (no_sort, "cannot sort by 'beauty'"),
        (no_file, "no file fits"),
        (no_other, "nothing to compare it with"),
        (no_eval, "no eval_ dump"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Any, why: str) -> None:
    code, out, err = run(capsys, *case(tmp_path))
    assert (code, out) == (2, "")
    assert why in err
    assert "do:" in err


def test_samples_before_the_damage_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rollout(tmp_path / "3.pt")
    rollout(tmp_path / "4.pt", 2, rollout_id=4)
    path.write_bytes(path.read_bytes()[:5000])
    code, out, err = run(capsys, "show", tmp_path, "-n", 100, "--no-metrics")
    assert code == 2
    assert "sample 3  index 3" in out
    assert f"{tmp_path}/4.pt  rollout 4" in out
    assert "truncated or damaged archive" in err
    assert "samples before it" in err
    assert "do:" in err
    code, out, _ = run(capsys, "show", path, "-n", 100, "--json")
    found = json.loads(out)
    assert (code, len(found["samples"]) > 3, "truncated" in found["broken"]) == (2, True, True)
    code, out, _ = run(capsys, "show", path, "-n", 2, "--no-metrics")
    assert (code, "sample 1" in out) == (2, True)
    code, _, err = run(capsys, "stats", path)
    assert (code, "truncated" in err) == (2, True)


def test_stats_go_on_behind_a_damaged_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = rollout(tmp_path / "3.pt")
    broken.write_bytes(broken.read_bytes()[:5000])
    rollout(tmp_path / "4.pt", 2, rollout_id=4)
    code, out, err = run(capsys, "stats", tmp_path)
    assert (code, "4.pt  rollout 4" in out, "3.pt" in out) == (1, True, False)
    assert "rltop: " in err
    assert "do:" in err
    code, out, _ = run(capsys, "stats", tmp_path, "--json")
    told = json.loads(out)
    assert (code, len(told["dumps"]), len(told["broken"])) == (1, 1, 1)


def test_a_broken_dump_among_others_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout(tmp_path / "3.pt")
    (tmp_path / "4.pt").write_bytes(b"PK\x03\x04")
    code, out, err = run(capsys, "show", tmp_path, "-n", 1)
    assert code == 0
    assert "sample 0" in out
    assert "4.pt: truncated or damaged archive" in err


@pytest.mark.parametrize("share", [0.3, 0.9, 0.9999])
def test_a_dump_that_lost_its_end_says_so_on_every_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    path = rollout(tmp_path / "3.pt", 64)
    raw = path.read_bytes()
    path.write_bytes(raw[: min(int(len(raw) * share), len(raw) - 1)])
    code, out, err = run(capsys, "show", path, "-n", 2, "--plain")
    assert (code, "sample 1  index 1" in out) == (2, True)
    assert "DAMAGED: truncated or damaged archive" in out
    assert "truncated or damaged archive" in err
    assert "the next: --offset 2" in err
    code, out, _ = run(capsys, "show", path, "-n", 2, "--json")
    found = json.loads(out)
    assert (code, len(found["samples"]), "truncated" in found["broken"]) == (2, 2, True)
    assert "truncated" in found["dumps"][0]["damage"]
    code, out, _ = run(capsys, "show", path, "--sort", "-length", "-n", 1)
    assert (code, out.count("\nsample ")) == (2, 1)


def without_middle(raw: bytes) -> bytes:
    return raw[:3000] + raw[3100:]


def with_middle(raw: bytes) -> bytes:
    return raw[:3000] + bytes(100) + raw[3000:]


def lying_directory(raw: bytes) -> bytes:
    at = raw.rfind(b"PK\x05\x06")
    return raw[: at + 8] + b"\x09\x00\x09\x00" + raw[at + 12 :]


@pytest.mark.parametrize("harm", [without_middle, with_middle, lying_directory])
def test_a_damaged_directory_is_seen_when_the_dump_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Any
) -> None:
    path = rollout(tmp_path / "3.pt", 64)
    path.write_bytes(harm(path.read_bytes()))
    code, out, err = run(capsys, "show", path, "-n", 1, "--plain")
    assert (code, "DAMAGED: " in out, "damaged archive" in err) == (2, True, True)


def test_a_flipped_byte_is_found_where_all_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rollout(tmp_path / "3.pt", 64)
    raw = path.read_bytes()
    at = raw.rfind(b"answer 63 ")
    path.write_bytes(raw[:at] + b"ANSWER" + raw[at + 6 :])
    code, _, err = run(capsys, "stats", path)
    assert (code, "another checksum" in err) == (2, True)
    code, out, _ = run(capsys, "show", path, "--json", "-n", 100)
    assert (code, len(json.loads(out)["samples"])) == (2, 64)


def test_a_cut_plain_pickle_says_so_on_the_first_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "3.pkl"
    raw = pickle.dumps({"rollout_id": 3, "samples": [sample(at) for at in range(64)]})
    path.write_bytes(raw[: len(raw) // 2])
    code, out, _ = run(capsys, "show", path, "-n", 1)
    assert (code, "DAMAGED: truncated" in out) == (2, True)


def test_nan_and_missing_rewards_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = float("nan")
    rewards = [nan, 1.0, None, 1.0, {"score": 1.0, "acc": 0.0}, {"score": 0.0, "acc": 1.0}]
    samples = [sample(at, group_size=2, reward=reward) for at, reward in enumerate(rewards)]
    path = save(tmp_path / "3.pt", {"rollout_id": 3, "samples": samples})
    (found,) = as_json(capsys, "stats", path)["dumps"]
    first, second, third = found["groups"]
    assert found["metrics"]["rollout/raw_reward"] == "NaN"  # as slime logs it
    assert (first["reward_mean"], first["reward_std"], first["reward_max"]) == ("NaN", "NaN", "NaN")
    assert (second["without_reward"], second["reward_mean"], third["reward_std"]) == (1, 1.0, 0.5)
    said = "\n".join(found["remarks"])
    assert "1 of 6 samples have no reward that is a number" in said
    assert "1 rewards are NaN or Inf" in said
    assert "2 rewards are maps, of which 'score' counts" in said
    code, out, _ = run(capsys, "stats", path)
    assert (code, out.count("  note: ")) == (0, 3)
    code, out, _ = run(capsys, "show", path)
    assert (code, out.count("  note: ")) == (0, 3)
    assert "reward 1 (score)" in out
    assert as_json(capsys, "show", path)["dumps"][0]["remarks"] == found["remarks"]
    assert not any(
        "maps" in one for one in as_json(capsys, "stats", path, "--reward-key", "acc")["dumps"][0]["remarks"]
    )


def test_fields_that_contradict_each_other_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = [sample(0, tokens=[], response_length=3), sample(1, response_length=7, rollout_log_probs=[-0.5] * 3)]
    path = save(tmp_path / "3.pt", {"rollout_id": 3, "samples": [*odd, sample(2)]})
    _, out, _ = run(capsys, "show", path)
    assert "prompt, -" not in out
    assert "odd      0 tokens, fewer than the response_length 3" in out
    assert "odd      3 rollout_log_probs, but a response_length of 7" in out
    found = as_json(capsys, "show", path)["samples"]
    assert ["remarks" in one for one in found] == [True, True, False]


def test_entries_that_are_no_samples_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "3.pt", {"rollout_id": 3, "samples": [1, None, "s", sample(3)]})
    for command in ("show", "stats"):
        code, out, err = run(capsys, command, path)
        assert (code, "not samples: 3 of these entries" in err, "it is no map but int" in err) == (2, True, True)
        assert "3 entries are no samples and left out" in out
    code, out, _ = run(capsys, "stats", path, "--json")
    assert (code, json.loads(out)["dumps"][0]["samples"]) == (2, 1)


def test_what_holds_no_samples_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "executed"
    path = save(tmp_path / "3.pt", {"samples": {"a": 1, "b": 2}})
    code, _, err = run(capsys, "show", path)
    assert (code, "its `samples` is no list but a map of 2 ('a', 'b')" in err) == (2, True)
    (tmp_path / "4.pt").write_bytes(pickle.dumps(Touch(mark)))
    code, _, err = run(capsys, "show", tmp_path / "4.pt")
    assert (code, "not imported: posix.mkdir" in err, mark.exists()) == (2, True, False)
    save(tmp_path / "5.pt", {"weights": [1.0], "optimizer": {}})
    code, _, err = run(capsys, "show", tmp_path / "5.pt")
    assert (code, "a map of 2 ('weights', 'optimizer')" in err) == (2, True)


@pytest.mark.parametrize("pattern", ["x/{rollout_id:03d}.pt", "x/{{rollout_id:03d}}/{rollout_id:>04}.pt"])
def test_a_path_with_a_format_finds_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    from rltop.evidence.dump_find import filled

    for at in (7, 8):
        rollout(filled(f"{tmp_path}/{pattern}", at), 2, rollout_id=at)
    evaluation = filled(f"{tmp_path}/{pattern}", 7, evaluation=True)
    rollout(evaluation, 2, rollout_id=7)
    assert evaluation.name.startswith("eval_0")
    found = as_json(capsys, "stats", f"{tmp_path}/{pattern}")["dumps"]
    assert [one["rollout_id"] for one in found] == [7, 8]
    assert [one["path"] for one in as_json(capsys, "stats", f"{tmp_path}/{pattern}", "--eval")["dumps"]] == [
        str(evaluation)
    ]
