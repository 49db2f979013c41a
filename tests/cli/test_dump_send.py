"""`rltop dump send`: what is compared, what is refused before anything is sent, what is said when weights change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from rltop.cli.serving import check_state
from rltop.engines.resend import NotServing
from rltop.engines.weights import publish
from rltop.train.cpu_engine.engine import Engine
from tests.engines.conftest import connect, model_path, running
from tests.engines.contract import other_weights
from tests.engines.test_resend import drawn
from tests.evidence.dump_files import save

__all__ = ["model_path"]  # a fixture

URL = "http://engine"
Rows = list[dict[str, Any]]


@pytest.fixture
def engine(model_path: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine in this process, behind every URL."""
    with running(model_path) as started:
        monkeypatch.setattr("rltop.engines.client.AsyncEngineClient", lambda url: connect(started))
        yield started


@pytest.fixture
def rows(engine: Engine) -> Rows:
    """Six samples that the engine drew."""
    return asyncio.run(_drawn(engine))


async def _drawn(engine: Engine) -> Rows:
    async with connect(engine) as client:
        return await drawn(client, 6)


Send = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def send(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Send:
    """Writes a dump of rows and sends it; exit code, JSON and what stands on stderr."""

    def ask(rows: Rows, *words: str) -> tuple[int, dict[str, Any], str]:
        save(tmp_path / "dumps" / "3.pt", {"rollout_id": 3, "samples": rows})
        code = main(["dump", "send", URL, str(tmp_path / "dumps"), "--json", *words])
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return code, json.loads(told.out) if told.out else {}, told.err

    return ask


def test_an_engine_that_holds_what_the_dump_says(send: Send, rows: Rows) -> None:
    code, found, _ = send(rows)
    assert (code, found["compared"], found["differ"], found["gap"]["tokens"]) == (0, 6, 0, 48)
    assert found["gap"]["max"] < 1e-5
    assert found["by_version"]["default"]["samples"] == 6
    assert found["engine"]["weight_version"] == "default"
    assert "stand-in" in found["engine"]["stand_in"]


def test_for_people(send: Send, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows[2]["rollout_log_probs"][4] += 2.0
    send(rows)
    assert main(["dump", "send", URL, str(tmp_path / "dumps")]) == 1
    told = capsys.readouterr().out
    assert "6 compared, 1 differ, 0 failed" in told
    worst = next(line for line in told.splitlines() if line.endswith("differs"))
    assert worst.split()[:4] == ["3", "2", "8", "0.25"]


def test_other_weights_differ_and_are_named(
    send: Send, rows: Rows, engine: Engine, tmp_path: Path, model_path: Path
) -> None:
    published = publish(tmp_path / "other", 2, other_weights().items(), checkpoint=model_path)

    async def update() -> None:
        async with connect(engine) as client:
            await client.update_weights_from_disk(published, "2")

    asyncio.run(update())
    code, found, _ = send(rows, "--tolerance", "0.001")
    assert (code, found["differ"], found["engine"]["weight_version"]) == (1, 6, "2")
    assert list(found["by_version"]) == ["default"]


def test_answers_with_recorded_parameters_and_seeds_are_the_same(send: Send, rows: Rows) -> None:
    code, found, _ = send(rows, "--sample")
    assert (code, found["compared"], found["same_answers"]) == (0, 6, 6)
    rows[1]["tokens"][-3] ^= 1
    code, found, _ = send(rows, "--sample")
    assert (code, found["differ"], found["same_answers"]) == (1, 1, 5)
    assert found["worst"][0] | {"text": ""} == {
        "rollout_id": 3,
        "at": 1,
        "index": 1,
        "weight_versions": ["default"],
        "differs": True,
        "first_other_token": 5,
        "recorded_length": 8,
        "length": 8,
        "finish_reason": "length",
        "repeatable": True,
        "text": "",
    }


def test_another_answer_is_no_difference_where_nobody_could_repeat_it(send: Send, rows: Rows) -> None:
    for row in rows:
        row["metadata"] = {}
    code, found, _ = send(rows, "--sample")
    assert (code, found["compared"], found["differ"]) == (0, 6, 0)
    assert not found["worst"][0]["repeatable"]


def test_limit_and_filter(send: Send, rows: Rows) -> None:
    assert send(rows, "-n", "2")[1]["compared"] == 2
    assert send(rows, "--filter", "index=5")[1]["worst"][0]["at"] == 5


def test_samples_that_can_not_be_sent_are_counted(send: Send, rows: Rows) -> None:
    rows[0]["rollout_log_probs"] = None
    rows[1]["tokens"] = []
    code, found, _ = send(rows)
    assert (code, found["compared"]) == (0, 4)
    assert found["left_out"] == {"it has no rollout_log_probs": 1, "it has no tokens": 1}


def relax(rows: Rows) -> Rows:
    """The same samples as lines of Relax's `rollout_result/train/N.jsonl`."""
    return [
        {
            "rollout_id": 3,
            "sample_index": row["index"],
            "prompt": row["prompt"],
            "response": row["response"],
            "reward": 1.0,
            "prompt_length": len(row["tokens"]) - row["response_length"],
            "response_length": row["response_length"],
            "total_length": len(row["tokens"]),
            "response_token_ids": row["tokens"][-row["response_length"] :],
            "status": row["status"],
            "group_index": 0,
            "response_rollout_log_probs": row["rollout_log_probs"],
            "response_rollout_log_probs_mask": [1] * row["response_length"],
        }
        for row in rows
    ]


def test_lines_of_relax_get_their_prompts_tokens_from_the_engine(
    send: Send, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = relax(rows)
    lines[1]["prompt_length"] += 1
    lines[2]["response_rollout_log_probs"][3] = 0.0
    lines[2]["response_rollout_log_probs_mask"][3] = 0
    path = tmp_path / "rollout_result" / "train" / "3.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["dump", "send", URL, str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["compared"], found["differ"], found["gap"]["tokens"]) == (5, 0, 5 * 8 - 1)
    assert found["gap"]["max"] < 1e-5
    assert next(iter(found["left_out"])).startswith("its prompt had")


def test_an_odd_temperature_is_counted(send: Send, rows: Rows) -> None:
    rows[0]["metadata"]["sampling_params"]["temperature"] = "hot"
    code, found, _ = send(rows)
    assert (code, found["compared"], found["left_out"]) == (0, 5, {"its recorded temperature is 'hot'": 1})


def test_nothing_could_be_compared(send: Send, rows: Rows) -> None:
    for row in rows:
        row["rollout_log_probs"] = None
    assert send(rows)[0] == 1


def test_a_sample_that_the_engine_refuses_is_counted_with_its_words(send: Send, rows: Rows) -> None:
    rows[4]["tokens"] = [1] * 3000 + rows[4]["tokens"]
    code, found, _ = send(rows)
    assert (code, found["compared"]) == (1, 5)
    assert "context length" in found["failed"][0]["why"]
    assert found["failed"][0]["first"] == {"rollout_id": 3, "at": 4}


def test_another_vocabulary_is_refused(send: Send, rows: Rows) -> None:
    rows[0]["tokens"][-1] = 4711
    code, found, told = send(rows)
    assert (code, found) == (2, {})
    assert "it has token 4711, the engine's vocabulary 260" in told


def test_another_tokenizer_is_refused(send: Send, rows: Rows) -> None:
    for row in rows:
        row["tokens"] = [(token + 1) % 256 for token in row["tokens"]]
    code, _, told = send(rows)
    assert code == 2
    assert "tokenizer reads its prompt differently" in told
    code, found, _ = send(rows, "--force")
    assert (code, found["differ"]) == (1, 6)


def test_only_temperature_1_can_be_scored(send: Send, rows: Rows) -> None:
    for row in rows:
        row["metadata"]["sampling_params"]["temperature"] = 0.5
    code, _, told = send(rows)
    assert code == 2
    assert "it was sampled at 0.5" in told
    assert "--sample" in told


def test_nothing_is_sent_to_a_paused_engine(send: Send, rows: Rows, engine: Engine) -> None:
    engine.scheduler.pause("in_place")
    code, _, told = send(rows)
    engine.scheduler.resume()
    assert code == 1
    assert "paused" in told


@pytest.fixture
def saver(send: Send, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose memory can be released, in the place of the other one."""
    with running(model_path, "--enable-memory-saver") as started:
        monkeypatch.setattr("rltop.engines.client.AsyncEngineClient", lambda url: connect(started))
        yield started


def test_nothing_is_sent_where_nobody_knows_whether_memory_is_released(send: Send, rows: Rows, saver: Engine) -> None:
    async def release() -> None:
        async with connect(saver) as client:
            await client.release_memory()

    asyncio.run(release())
    code, _, told = send(rows)
    assert code == 1
    assert "--awake" in told
    assert "--enable-memory-saver" in told
    assert ("/generate", "POST") not in saver.scheduler.stats.http_requests


def test_with_awake_it_is_sent(send: Send, rows: Rows, saver: Engine) -> None:
    code, found, _ = send(rows, "--awake")
    assert (code, found["compared"]) == (0, 6)
    assert saver.scheduler.stats.http_requests["/generate", "POST"] == 7  # the tokenizer's one too


def test_weights_that_change_meanwhile_stop_it(
    send: Send, rows: Rows, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rltop.engines import resend

    score, seen = resend.score, [0]

    async def changing(*args: Any, **more: Any) -> Any:
        seen[0] += 1
        if seen[0] == 4:
            engine.scheduler.live.version = "9"
        return await score(*args, **more)

    monkeypatch.setattr(resend, "score", changing)
    code, found, _ = send(rows, "--concurrency", "1")
    assert (code, found["compared"]) == (1, 3)
    assert "'default' is required" in found["stopped"]


def test_what_a_run_says_of_its_engine() -> None:
    check_state(URL, "")
    check_state(URL, "HEALTHY in run sort")
    with pytest.raises(NotServing, match="lent to the trainer"):
        check_state(URL, "OFFLOADED in run sort")
    with pytest.raises(NotServing):
        check_state(URL, "CRASHED in run sort")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["ftp://node", "x.pt"], "not an engine's address"),
        (["http://127.0.0.1:1", "nosuch.pt"], "no such dump"),
        (["http://127.0.0.1:1", "x.pt", "--concurrency", "0"], "concurrency"),
    ],
)
def test_bad_input(words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "x.pt", {"rollout_id": 0, "samples": []})
    assert main(["dump", "send", words[0], str(tmp_path / words[1]), *words[2:]]) == 2
    assert what in capsys.readouterr().err


def test_an_engine_that_is_not_there(tmp_path: Path, runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "x.pt", {"rollout_id": 0, "samples": []})
    assert main(["dump", "send", "127.0.0.1:1", str(tmp_path / "x.pt")]) == 1
    assert "the engine does not answer" in capsys.readouterr().err
