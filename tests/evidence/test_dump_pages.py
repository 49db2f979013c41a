"""Pages of a dump: filter, sort, search, one sample in full; in slices, and of bad files an answer that says why."""

from __future__ import annotations

import json
import math
import pickle
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rltop.evidence.dump_find import find_dumps
from rltop.evidence.dump_pages import DumpPages
from rltop.evidence.dump_rows import Filter
from rltop.evidence.dump_whole import MOST_FIELD, brief, group_numbers
from rltop.protocol.messages import DumpPageAnswer, DumpPageQuery
from tests.evidence import dump_files


@pytest.fixture
def pages() -> Iterator[DumpPages]:
    found = DumpPages()
    yield found
    found.close()


def ask(pages: DumpPages, path: Path, **query: Any) -> DumpPageAnswer:
    """Ask until it is done."""
    (ref,) = find_dumps(str(path))
    for _ in range(10_000):
        answer = pages.answer(ref, DumpPageQuery(str(path), **query))
        if answer.done:
            return answer
    raise AssertionError("it is never done")


def places(answer: DumpPageAnswer) -> list[int]:
    return [row["at"] for row in answer.rows]


def test_rows_are_those_of_the_file(pages: DumpPages, tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "3.pt")
    answer = ask(pages, path, start=4, stop=7)
    assert places(answer) == [4, 5, 6]
    assert answer.rows[0] == {
        "at": 4,
        "index": 4,
        "group_index": 1,
        "reward": 0.0,
        "status": "completed",
        "length": len("answer 4 is 16"),
        "gap": None,
        "text": "answer 4 is 16",
    }
    assert places(ask(pages, path, start=500, stop=510)) == list(range(6, 16)), "behind the end the last page"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=DumpPageAnswer) == answer


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("reward>0.5 group=1", [5, 7]),
        ("status=trunc", [7, 15]),
        ("status!=completed", [7, 15]),
        ("ANSWER 225", [15]),
        ("truncated squared?", [7, 15]),
        ("length>=15", [10, 11, 12, 13, 14, 15]),
        ("version=7 at<2", [0, 1]),
        ("gap>0", []),
        ("reward>none", []),
    ],
)
def test_a_filter_takes_words_and_comparisons(pages: DumpPages, tmp_path: Path, text: str, wanted: list[int]) -> None:
    answer = ask(pages, dump_files.rollout(tmp_path / "3.pt"), filter=text)
    assert (places(answer), answer.count) == (wanted, len(wanted))


def test_a_sort_puts_what_is_not_known_last_and_nan_first(pages: DumpPages, tmp_path: Path) -> None:
    rewards = [0.5, None, math.nan, -1.0, {"score": 2.0}, {"why": "?"}]
    path = dump_files.save(
        tmp_path / "3.pt",
        {"rollout_id": 3, "samples": [dump_files.sample(at, reward=one) for at, one in enumerate(rewards)]},
    )
    assert places(ask(pages, path, sort="reward")) == [2, 3, 0, 4, 1, 5]
    assert places(ask(pages, path, sort="-reward")) == [2, 4, 0, 3, 1, 5]
    assert "no such sort" in ask(pages, path, sort="colour").why


def test_a_search_goes_both_ways_and_ends(pages: DumpPages, tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "3.pt")
    hit = ask(pages, path, search="ER 1", start=2, stop=5)
    assert (hit.found, places(hit)) == (10, [10, 11, 12])
    assert ask(pages, path, search="er 1", start=9, stop=0).found == 1
    assert ask(pages, path, search="er 1", start=0, stop=-1).found == -1
    assert ask(pages, path, search="no such", start=0, stop=5).found == -1
    assert ask(pages, path, search="er 1", start=1, stop=5, filter="reward=1").found == 5, "of the list: 11"


def test_a_group_is_the_neighbours_of_a_sample(pages: DumpPages, tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "3.pt")
    assert places(ask(pages, path, group_at=6)) == [4, 5, 6, 7]
    assert places(ask(pages, path, group_at=15, sort="-reward")) == [13, 15, 12, 14]
    assert ask(pages, path, group_at=99).count == 0


def test_a_large_group_is_gone_through_in_slices(tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "3.pt", 200, group_size=100)
    ticks = count()
    pages = DumpPages(budget_s=30.0, clock=lambda: float(next(ticks)))
    (ref,) = find_dumps(str(path))
    for query in (DumpPageQuery(str(path), start=150, want="whole"), DumpPageQuery(str(path), group_at=20, stop=9)):
        tries = 1
        while not (answer := pages.answer(ref, query)).done:
            assert all(one["response"] == "answer 150 is 22500" for one in answer.samples), "it is shown at once"
            tries += 1
        assert tries > 2
    assert (answer.count, places(answer)) == (100, list(range(9)))
    pages.close()


def test_one_sample_in_full(pages: DumpPages, tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "rollout_data" / "3.pt", label="x" * 9000, trace={"a": [1, 2]})
    found = ask(pages, path, start=5, want="whole").samples[0]
    assert found["prompt"] == "What is 1 squared?"
    assert "".join(found["texts"]) == found["response"] == "answer 5 is 25"
    assert found["texts_from"] == "one character per token"
    assert found["prompt_tokens"] == 3
    assert found["group"] == {"n": 4, "missing": 0, "mean": 0.5, "std": 0.5, "advantage": 1.0}
    assert dict(found["fields"]) == {"metadata.engine": "0", "metadata.difficulty": "2", "trace": "{a: [1, 2]}"}
    assert len(found["label"]) < MOST_FIELD + 100
    assert "7000 characters left out" in found["label"]
    assert (found["gaps"], found["trained"], found["log_probs"]) == ({}, False, [])


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_train_dump_beside_it_gives_gaps_and_advantages(pages: DumpPages, tmp_path: Path, shuffled: bool) -> None:
    samples = [dump_files.sample(at) for at in range(16)]
    path = dump_files.rollout(tmp_path / "rollout_data" / "3.pt")
    trained = dump_files.train(tmp_path / "train_data" / "3.pt", samples)
    if shuffled:
        value = {"format_version": 2, "rollout_id": 3, "rank": 0, "dp_shards": []}
        entries = [
            {
                "rollout_position": at,
                "sample_index": at,
                "log_probs": [x - at for x in samples[at]["rollout_log_probs"]],
            }
            for at in reversed(range(16))
        ]
        dump_files.save(trained, value | {"samples": entries})
    rows = ask(pages, path).rows
    assert [round(row["gap"], 9) for row in rows] == [float(at) if shuffled else 0.125 for at in range(16)]
    found = ask(pages, path, start=5, want="whole").samples[0]
    assert found["trained"]
    assert found["gaps"]["n"] == found["length"]
    if shuffled:
        assert places(ask(pages, path, sort="-gap", stop=3)) == [15, 14, 13]
    else:
        assert found["advantages"] == [1.0] * found["length"]


def test_numbers_of_the_whole_file_come_in_slices_too(tmp_path: Path) -> None:
    samples = [dump_files.sample(at) for at in range(16)]
    path = dump_files.rollout(tmp_path / "rollout_data" / "3.pt")
    dump_files.train(tmp_path / "train_data" / "3.pt", samples)
    ticks = count()
    pages = DumpPages(budget_s=5.0, clock=lambda: float(next(ticks)))
    (ref,) = find_dumps(str(path))
    query = DumpPageQuery(str(path), want="stats")
    tries = 1
    while not (answer := pages.answer(ref, query)).done:
        assert answer.stats == {}, "no numbers of half a file"
        tries += 1
    pages.close()
    assert tries > 3
    assert answer.stats["rollout/raw_reward"] == 0.5
    assert answer.stats["rollout/truncated_ratio"] == 2 / 16
    assert answer.stats["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.125)
    assert "does not say how long" in answer.stats["perf/rollout_time"]
    assert answer.count == 16


def test_a_tokenizer_beside_the_dump_names_the_tokens(pages: DumpPages, tmp_path: Path) -> None:
    vocab = {"h": 0, "i": 1, "\u0120the": 2, "\u010a": 3, "\u00c3": 4, "\u00a9": 5}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [{"id": 9, "content": "<|end|>"}]}
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode(tokenizer))

    def texts(name: str, ids: list[int], response: str) -> tuple[list[str], str]:
        one = dump_files.sample(0, response=response) | {"tokens": [8, *ids], "response_length": len(ids)}
        path = dump_files.save(tmp_path / "rollout_data" / f"{name}.pt", {"rollout_id": 1, "samples": [one]})
        found = ask(pages, path, want="whole").samples[0]
        return found["texts"], found["texts_from"]

    assert texts("1", [0, 1, 2, 3, 4, 5, 9], "hi the\n\u00e9") == (
        ["h", "i", " the", "\n", "", "\u00e9", "<|end|>"],
        str(file),
    )
    file.rename(tmp_path / "tokenizer.json")
    pages.checkpoints = [tmp_path]
    path = dump_files.save(
        tmp_path / "else" / "rollout_data" / "1.pt",
        {"samples": [dump_files.sample(0, response="hi", tokens=[0, 1], response_length=2)]},
    )
    assert ask(pages, path, want="whole").samples[0]["texts"] == ["h", "i"], "of the checkpoint"
    (tmp_path / "tokenizer.json").rename(file)
    assert texts("2", [0, 1, 2], "something else")[1].endswith("does not give this response")
    assert texts("3", [0, 77], "hi there")[1].endswith("lacks some of its tokens")


def test_a_long_file_is_read_in_slices(tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "3.pt", 300)
    ticks = count()
    pages = DumpPages(budget_s=20.0, clock=lambda: float(next(ticks)))  # every look at the clock costs a second
    (ref,) = find_dumps(str(path))
    query = DumpPageQuery(str(path), filter="reward=1", sort="-length", stop=5)
    answers = [pages.answer(ref, query)]
    while not answers[-1].done:
        answers.append(pages.answer(ref, query))
    assert len(answers) > 10
    gone = [one.indexed for one in answers]
    assert gone == sorted(gone)
    assert answers[0].rows, "what is known so far is shown at once"
    assert (answers[-1].count, answers[-1].indexed) == (150, 300)
    assert places(answers[-1]) == places(ask(DumpPages(), path, filter="reward=1", sort="-length", stop=5))
    search = DumpPageQuery(str(path), search="answer 299", stop=1)
    tries = 1
    while not (answer := pages.answer(ref, search)).done:
        tries += 1
    assert (answer.found, tries > 5) == (299, True)
    pages.close()


def test_a_file_that_is_replaced_is_read_anew_and_a_broken_one_says_why(pages: DumpPages, tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "3.pt", 4)
    (ref,) = find_dumps(str(path))
    assert ask(pages, path, start=0, stop=99).count == 4
    dump_files.rollout(tmp_path / "new.pt", 6).replace(path)
    assert ask(pages, path, start=0, stop=99).count == 6
    (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:200])
    (tmp_path / "cut.pt").replace(path)
    answer = pages.answer(ref, DumpPageQuery(str(path)))
    assert (answer.rows, answer.done) == ([], True)
    assert answer.why
    path.unlink()
    assert "No such file" in pages.answer(ref, DumpPageQuery(str(path))).why


def test_of_a_file_that_was_cut_off_what_is_before_the_cut_is_shown(pages: DumpPages, tmp_path: Path) -> None:
    rows = [json.dumps(dump_files.sample(at)) for at in range(50)]
    lines = tmp_path / "rollout_result" / "train" / "3.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_text("\n".join(rows)[:-40])
    answer = ask(pages, lines, stop=3)
    assert places(answer) == [0, 1, 2]
    path = tmp_path / "4.pkl"
    path.write_bytes(
        pickle.dumps({"rollout_id": 4, "samples": [dump_files.sample(at) for at in range(50)]}, protocol=2)
    )
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    answer = ask(pages, path, stop=3)
    assert places(answer) == [0, 1, 2]
    assert answer.ended
    assert 20 < answer.count < 50
    assert "samples before it" in answer.why
    listed = ask(pages, path, filter="reward=1", sort="-length", stop=3)
    assert (listed.count, "samples before it" in listed.why) == (answer.count // 2, True)
    assert ask(pages, path, want="stats").stats["rollout/raw_reward"] > 0


def test_a_value_of_a_dump_is_told_in_bounded_space() -> None:
    deep: Any = "end"
    for _ in range(50):
        deep = [deep]
    assert brief(deep) == "[[[[[[...]]]]]]"
    assert len(brief({str(at): list(range(1000)) for at in range(1000)})) < MOST_FIELD + 1000
    assert "more of 1000" in brief(list(range(1000)), 50)
    assert brief(array("d", [0.5] * 9)) == "9 times 0.5"
    assert brief(array("q", range(1000)), 20).endswith("more of 1000]")
    assert brief({"a": None, "b": "x", "c": True}) == "{a: -, b: 'x', c: True}"


def test_an_empty_filter_takes_everything() -> None:
    assert Filter("   ").takes(None, None)  # type: ignore[arg-type]  # it looks at nothing


def test_a_group_counts_whom_it_left_out_and_keeps_its_nan() -> None:
    nan = float("nan")
    assert group_numbers(1.0, [0.0, 1.0, None]) == {"n": 3, "missing": 1, "mean": 0.5, "std": 0.5, "advantage": 1.0}
    told = group_numbers(1.0, [nan, 1.0])
    assert (told["n"], told["missing"]) == (2, 0)
    assert all(math.isnan(told[name]) for name in ("mean", "std", "advantage"))
    assert group_numbers(None, [None, None])["missing"] == 2
