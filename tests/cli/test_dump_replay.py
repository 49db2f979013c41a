"""`rltop dump replay-reward`: how a reward function is found and called, what it may do wrong, what is said of it."""

from __future__ import annotations

import json
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from tests.cli.conftest import rltop
from tests.evidence.dump_files import rollout, sample, save

FUNCTIONS = """
    import asyncio, functools

    print("words of an import")

    async def as_slime(args, sample, **kwargs):
        await asyncio.sleep(0)
        print("words of a reward")
        return 1.0 - sample.reward

    def plain(sample):
        return float(sample.label == str(sample.index))

    def whole_sample(args, sample):
        assert sample.status == sample.Status.COMPLETED or sample.status.value == "truncated"
        assert sample.get_reward_value(args) == sample.reward
        assert sample.tokens[-sample.response_length:] == [ord(char) for char in sample.response]
        assert sample.metadata["difficulty"] == sample.index % 3
        assert sample.loss_mask is None and sample.effective_response_length == sample.response_length
        assert sample.remove_sample is False and sample.train_metadata is None and sample.later == "field"
        return sample.reward

    def many(args, samples):
        assert len({one.group_index for one in samples}) == 1
        return [float(at) for at in range(len(samples))]

    async def listed(samples: list):
        return [1.0 for _ in samples]

    def short(samples):
        return [1.0]

    def threshold(args, sample):
        return float(len(sample.response) > args.longest)

    def several(sample):
        return {"format": 0.5, "answer": 2.0, "comment": "good"}

    def breaks(sample):
        if sample.index % 4 == 1:
            raise KeyError("no such label")
        if sample.index == 2:
            raise SystemExit(3)
        if sample.index == 3:
            return "good"
        return sample.reward

    async def hangs(sample):
        if sample.index == 0:
            await asyncio.Event().wait()
        return 1.0

    class Scorer:
        def __call__(self, args, sample):
            return 0.25

    scorer = Scorer()
    partly = functools.partial(threshold, None)

    def three(args, sample, more):
        return 0.0
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the functions, and a dump of 16 samples, the odd ones with reward 1."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "rewards.py").write_text(textwrap.dedent(FUNCTIONS))
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("import pack\ndef one(sample):\n    return 1.0\n")
    rollout(tmp_path / "dumps" / "3.pt", later="field")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:  # functions of one test must not be another's
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """The command's JSON, its exit code looked at."""

    def ask(*words: str, code: int = 0) -> dict[str, Any]:
        ended = main(["dump", "replay-reward", *words, "--json"])
        told = capsys.readouterr()
        assert ended == code, told.err
        assert "Traceback" not in told.err
        found: dict[str, Any] = json.loads(told.out)
        return found

    return ask


def test_a_function_as_slime_calls_it(place: Path, answer: Answer) -> None:
    found = answer("rewards.py:as_slime", "dumps/3.pt")
    assert (found["scored"], found["total"]["changed"], found["total"]["up"], found["total"]["down"]) == (16, 16, 8, 8)
    assert found["groups"] == {
        "count": 4,
        "spread_before": 4,
        "spread_after": 4,
        "lost": 0,
        "gained": 0,
        "examples": [],
    }
    assert found["largest"][0] | {"prompt": "", "response": ""} == {
        "rollout_id": 3,
        "at": 0,
        "index": 0,
        "group_index": 0,
        "status": "completed",
        "before": 0.0,
        "after": 1.0,
        "prompt": "",
        "response": "",
    }


@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("rewards.plain", 1.0),
        ("rewards:plain", 1.0),
        ("./rewards.py:whole_sample", 0.5),
        ("rewards:many", 1.5),
        ("rewards:listed", 1.0),
        ("rewards:scorer", 0.25),
        ("pack.inner.one", 1.0),
        ("pack/inner.py:one", 1.0),
    ],
)
def test_every_way_to_name_and_to_write_one(place: Path, answer: Answer, function: str, after: float) -> None:
    found = answer(function, "dumps")
    assert (found["scored"], found["unscored"], found["total"]["mean_after"]) == (16, 0, after)


def test_what_it_prints_is_not_data(place: Path) -> None:
    ended = rltop("dump", "replay-reward", "rewards.py:as_slime", "dumps/3.pt")
    assert "words of" not in ended.stdout
    assert "words of an import" in ended.stderr
    assert "words of a reward" in ended.stderr
    assert "mean reward  0.5 before, 0.5 now" in ended.stdout


def test_exceptions_are_counted_and_told_with_the_sample(place: Path, answer: Answer) -> None:
    found = answer("rewards.py:breaks", "dumps/3.pt", code=1)
    assert (found["scored"], found["unscored"], found["total"]["changed"]) == (10, 6, 0)
    kinds = {one["kind"]: one for one in found["failures"]}
    assert kinds["KeyError"]["samples"] == 4
    assert kinds["KeyError"]["first"][:2] == [{"rollout_id": 3, "at": 1}, {"rollout_id": 3, "at": 5}]
    line = kinds["KeyError"]["where"].rpartition(":")
    assert Path(line[0]).name == "rewards.py"
    assert 'raise KeyError("no such label")' in Path(line[0]).read_text().splitlines()[int(line[2]) - 1]
    assert kinds["SystemExit"]["first"] == [{"rollout_id": 3, "at": 2}]
    assert kinds["result"]["why"] == "it returned a str, not a number"


def test_a_list_of_another_length_scores_nobody(place: Path, answer: Answer) -> None:
    found = answer("rewards.py:short", "dumps/3.pt", code=1)
    assert (found["scored"], found["unscored"]) == (0, 16)
    assert found["failures"][0]["why"] == "1 rewards for 4 samples"
    assert "groups" not in rltop("dump", "replay-reward", "rewards.py:short", "dumps/3.pt").stdout


def test_arguments_that_slime_would_have(place: Path, answer: Answer) -> None:
    found = answer("rewards.py:threshold", "dumps/3.pt", "--arg", "longest=13")
    assert found["total"]["mean_after"] == sum(len(sample(at)["response"]) > 13 for at in range(16)) / 16
    missing = answer("rewards.py:threshold", "dumps/3.pt", code=1)
    assert "--arg longest=VALUE" in missing["failures"][0]["why"]


def test_of_several_rewards_one_counts(place: Path, answer: Answer) -> None:
    found = answer("rewards.py:several", "dumps/3.pt", "--reward-key", "answer")
    assert found["total"]["mean_after"] == 2.0
    found = answer("rewards.py:several", "dumps/3.pt", code=1)  # two numbers: which?
    assert (found["scored"], found["unscored"]) == (0, 16)
    assert "a map of format, answer, comment: which of them counts?" in found["failures"][0]["why"]


@pytest.mark.parametrize(("value", "told"), [("nan", "NaN"), ("inf", "inf"), ("-inf", "-inf")])
def test_a_reward_that_is_no_number_is_not_scored(place: Path, answer: Answer, value: str, told: str) -> None:
    (place / "odd.py").write_text(
        f"def one(sample):\n    return float('{value}') if sample.index < 3 else 1.0\n"
        f"def several(sample):\n    return {{'score': float('{value}')}}\n"
        "def none(sample):\n    return None\n"
    )
    found = answer("odd.py:one", "dumps/3.pt", code=1)
    assert (found["scored"], found["unscored"]) == (13, 3)
    (failure,) = found["failures"]
    assert failure["why"] == f"it returned {told}, not a number"
    assert failure["first"][0] == {"rollout_id": 3, "at": 0}
    assert answer("odd.py:several", "dumps/3.pt", code=1)["unscored"] == 16
    assert answer("odd.py:none", "dumps/3.pt", code=1)["failures"][0]["why"] == "it returned None, not a number"


def test_an_async_function_that_hangs_is_given_up(place: Path, answer: Answer) -> None:
    found = answer("rewards.py:hangs", "dumps/3.pt", "--timeout", "0.2", code=1)
    assert (found["scored"], found["unscored"]) == (15, 1)
    assert found["failures"][0]["why"] == "no reward within 0.2 s"


def test_limit_and_filter(place: Path, answer: Answer) -> None:
    assert answer("rewards.py:plain", "dumps/3.pt", "--limit", "5")["scored"] == 5
    found = answer("rewards.py:plain", "dumps/3.pt", "--filter", "status=truncated")
    assert list(found["by_status"]) == ["truncated"]
    assert found["scored"] == 2


def test_eval_dumps_only_when_they_are_asked_for(place: Path, answer: Answer) -> None:
    rollout(place / "dumps" / "eval_3.pt", 4)
    assert answer("rewards.py:plain", "dumps")["scored"] == 16
    assert answer("rewards.py:plain", "dumps", "--eval")["scored"] == 4


def test_a_dump_with_the_new_rewards(place: Path, answer: Answer) -> None:
    torch = pytest.importorskip("torch")
    found = answer("rewards.py:breaks", "dumps/3.pt", "--write", "out/{rollout_id}.pt", code=1)
    assert found["written"] == ["out/3.pt"]
    assert [one.name for one in (place / "out").iterdir()] == ["3.pt"]
    before = torch.load("dumps/3.pt", weights_only=True)
    assert torch.load("out/3.pt", weights_only=True) == before  # it returned what was there, or failed
    answer("rewards.py:as_slime", "dumps/3.pt", "--write", "out/{rollout_id}.pt")
    after = torch.load("out/3.pt", weights_only=True)
    assert [one["reward"] for one in after["samples"]] == [1.0 - one["reward"] for one in before["samples"]]
    assert {key: value for key, value in after["samples"][0].items() if key != "reward"} == {
        key: value for key, value in before["samples"][0].items() if key != "reward"
    }


REFUSED = [
    (["rewards.py"], "which function?", "rewards.py:FUNCTION"),
    (["gone.py:fn"], "no such file", "gone.py does not exist"),
    (["nosuch.module.fn"], "no such module", "nosuch"),
    (["rewards.py:plane"], "no such function", "it has plain"),
    (["rewards.py:Scorer"], "not a function", "Scorer is a type"),
    (["rewards.py:three"], "not a reward function", "fn(args, sample)"),
    (["broken.py:fn"], "its module can not be imported", "broken.py:2"),
    (["syntax.py:fn"], "its module can not be imported", "syntax.py:1"),
    (["leaves.py:fn"], "its module can not be imported", "SystemExit"),
    (["rewards.py:plain", "--arg", "x"], "not an attribute", "--arg NAME=VALUE"),
    (["rewards.py:plain", "--write", "out.json"], "not a dump's name", "--write out.json.pt"),
    (["rewards.py:plain", "--write", "dumps/3.pt"], "that is the dump itself", "another name"),
    (["rewards.py:plain", "--filter", "nowhere-in-it"], "no sample fits", "--filter nowhere-in-it"),
    (["rewards.py:plain", "--eval"], "no eval_ dump", "leave out --eval"),
]


@pytest.mark.parametrize(("words", "what", "also"), REFUSED, ids=[what for _, what, _ in REFUSED])
def test_bad_input(
    place: Path,
    words: list[str],
    what: str,
    also: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "broken.py").write_text("x = 1\nraise ValueError('no model here')\n")
    (place / "syntax.py").write_text("def fn(:\n")
    (place / "leaves.py").write_text("raise SystemExit(0)\n")
    assert main(["dump", "replay-reward", words[0], "dumps/3.pt", *words[1:]]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert also in told
    assert "Traceback" not in told


def test_lines_of_relax(place: Path, answer: Answer) -> None:
    path = place / "rollout_result" / "train" / "3.jsonl"
    path.parent.mkdir(parents=True)
    fields = ("group_index", "prompt", "response", "response_length", "label", "reward", "status")
    rows = [{"sample_index": at} | {name: sample(at)[name] for name in fields} for at in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = answer("rewards.py:plain", "rollout_result")
    assert (found["scored"], found["total"]["changed"], found["total"]["mean_after"]) == (16, 8, 1.0)
    assert found["rollouts"] == [3]


def test_a_dump_that_ends_too_early_keeps_what_was_scored(place: Path, answer: Answer) -> None:
    rows = [{"index": at, "prompt": "p", "response": "r", "reward": 0.0} for at in range(6)]
    whole = pickle.dumps({"rollout_id": 9, "samples": rows}, protocol=2)
    (place / "cut").mkdir()
    (place / "cut" / "9.pkl").write_bytes(whole[:-30])
    found = answer("rewards.py:plain", "cut", code=1)
    assert 0 < found["scored"] < 6
    assert f"9.pkl, from sample {found['scored']} on" in found["broken"][0]


def test_a_cut_dump_is_scored_and_not_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path = rollout(place / "cut" / "3.pt", 64)
    path.write_bytes(path.read_bytes()[:-2000])
    rollout(place / "cut" / "4.pt", 4, rollout_id=4)
    code = main(["dump", "replay-reward", "rewards.py:plain", "cut", "--write", "out/{rollout_id:03d}.pt"])
    told = capsys.readouterr()
    assert code == 2
    assert "samples of rollouts 3 to 4 scored, 0 not" in told.out
    assert "BROKEN" in told.out
    assert "not written again" in told.err
    assert "truncated or damaged archive" in told.err
    assert [one.name for one in (place / "out").iterdir()] == ["004.pt"]


def test_entries_that_are_no_samples_are_not_scored(place: Path, answer: Answer) -> None:
    save(place / "odd" / "3.pt", {"rollout_id": 3, "samples": [7, sample(1)]})
    found = answer("rewards.py:plain", "odd", code=1)
    assert (found["scored"], "entry 0: no sample: it is no map but int" in found["broken"][0]) == (1, True)


class Hostile:
    """What unpickling would call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("pwned"),))


def test_what_a_dump_wants_to_import_is_not_made_and_named(place: Path, answer: Answer) -> None:
    rows = [sample(at) for at in range(3)]
    rows[1]["metadata"] = Hostile()
    save(place / "hostile.pt", {"rollout_id": 0, "samples": rows})
    found = answer("rewards.py:plain", "hostile.pt")
    assert found["scored"] == 3
    assert [name.partition(":")[0] for name in found["not_made"]] == ["metadata"]
    assert not (place / "pwned").exists()


def test_rollouts_without_a_dump_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout(place / "dumps" / "6.pt", rollout_id=6)
    assert main(["dump", "replay-reward", "rewards.py:plain", "dumps"]) == 0
    told = capsys.readouterr()
    assert "no dump of rollout 4, 5" in told.err
    assert "32 samples of rollouts 3 to 6" in told.out


def test_several_dumps_do_not_fit_into_one_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout(place / "dumps" / "4.pt", rollout_id=4)
    assert main(["dump", "replay-reward", "rewards.py:plain", "dumps", "--write", "out.pt"]) == 2
    assert "{rollout_id}" in capsys.readouterr().err


def test_a_train_dump_has_no_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(place / "train" / "0.pt", {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": [], "dp_shards": []})
    assert main(["dump", "replay-reward", "rewards.py:plain", "train/0.pt"]) == 2
    assert "--save-debug-rollout-data" in capsys.readouterr().err


def test_slimes_own_sample_where_the_function_imported_slime(place: Path, answer: Answer) -> None:
    """A function that compares with slime's Enum needs slime's class; here a stand-in of its shape."""
    (place / "slime" / "utils").mkdir(parents=True)
    for folder in ("slime", "slime/utils"):
        (place / folder / "__init__.py").write_text("")
    (place / "slime" / "utils" / "types.py").write_text(
        "class Sample:\n    @staticmethod\n    def from_dict(data):\n        found = Sample()\n"
        "        found.__dict__.update(data)\n        return found\n"
    )
    (place / "theirs.py").write_text(
        "from slime.utils.types import Sample\n"
        "async def fn(args, sample, **kw):\n    return float(type(sample) is Sample)\n"
    )
    assert answer("theirs.fn", "dumps/3.pt")["total"]["mean_after"] == 1.0
