"""`attach --once` and the tables: what a person reads without a dashboard."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rltop.cli.once import picture
from rltop.cli.output import age, clean, number, plain, table
from rltop.cli.ps import verdict_words
from rltop.client import Mirror
from tests.client.model import ModelDaemon, messages
from tests.client.router import small_run


def mirror_of(daemon: ModelDaemon) -> Mirror:
    mirror = Mirror()
    for message in messages(daemon.welcome()):
        mirror.apply(message)
    return mirror


def test_a_muted_check_is_called_so_in_every_list() -> None:
    daemon = ModelDaemon()
    small_run(daemon)
    mirror = mirror_of(daemon)
    mirror.state["check/train.nan"] = {**mirror.state["check/train.nan"], "muted": {"who": "ana", "reason": "known"}}
    assert any(line.startswith("fail (muted)  train.nan ") for line in picture(mirror))
    row = {"verdicts": {"fail": 2, "warn": 0}, "root_causes": ["train.nan"], "muted": ["train.nan"]}
    assert verdict_words(row) == "2 fail, 1 of them muted: train.nan"


def test_every_log_that_is_watched_has_a_line() -> None:
    daemon = ModelDaemon()
    small_run(daemon)
    mirror = mirror_of(daemon)
    assert not any(line.startswith("log ") for line in picture(mirror))
    now = mirror.server_time
    mirror.state["log/a.log"] = {"state": "followed", "lines": 204, "last": now - 12, "behind": 3 << 20, "dropped": 7}
    mirror.state["log/b.log"] = {"state": "unreadable", "lines": 0, "last": now - 12, "problem": "it is no text"}
    mirror.state["log/c.log"] = {"state": "gone", "lines": 9, "last": now - 90}
    mirror.state["log/d.log"] = {"state": "followed", "lines": 0, "last": now - 12}
    mirror.state["log/e*.log"] = {"state": "missing", "lines": 0, "last": None}
    lines = picture(mirror)
    at = next(number for number, line in enumerate(lines) if line.startswith("log "))
    assert [line.split(maxsplit=2) for line in lines[at + 1 : at + 6]] == [
        ["a.log", "204", "last 12s ago, 3.1 MB still to read, 7 lines left out"],
        ["b.log", "0", "cannot be read: it is no text"],
        ["c.log", "9", "the file is gone, last 1m30s ago"],
        ["d.log", "0", "empty"],
        ["e*.log", "0", "not there yet"],
    ]


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's clock shows UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_the_picture_has_header_checks_engines_metrics_and_events() -> None:
    daemon = ModelDaemon()
    small_run(daemon)
    assert picture(mirror_of(daemon)) == [
        "run cedar-1  running  rltop  full  for 1m40s",
        "phase train  rollout 3  since 10s (usually 4.5 s)",
        "backend megatron-core 0.16.1",
        "stand-in: the engine is rltop's CPU engine, not SGLang",
        "injected fault: nan-grad@1",
        "",
        "check  id            value  threshold  cause",
        "fail   train.nan     2      0          grad_norm is  [31mNaN at step 3",
        "pass   kl.on-policy  0      1e-08",
        "root cause: train.nan",
        "",
        "engine  kind  state    running  queued  tok/s  usage  weights  seen",
        "0       cpu   HEALTHY  4        -       812.5  -      -        1s",
        "",
        "metric              step  value  nan",
        "rollout/raw_reward  3     0.5    0",
        "train/grad_norm     3     NaN    2",
        "",
        "events",
        "     1  01-01 00:00:00  info   log       step 3 done",
    ]


def test_of_what_was_not_measured_only_the_step_1_checks_are_told() -> None:
    daemon = ModelDaemon()
    for name in ("kl.on-policy", "ckpt.layers", "ckpt.shards"):
        daemon.set(f"check/{name}", {"id": name, "status": "skip", "cause": "not seen yet"})
    lines = picture(mirror_of(daemon))
    assert lines[-2:] == [
        "skip   kl.on-policy  -      -          not seen yet",
        "2 more were not measured: rltop get checks",
    ]


def test_a_run_of_which_nothing_is_known_yet_has_a_picture() -> None:
    assert picture(mirror_of(ModelDaemon())) == ["run cedar-1  waiting"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "True"),
        (3, "3"),
        (0.1 + 0.2, "0.3"),
        (float("nan"), "NaN"),
        (float("-inf"), "-inf"),
        ({"warn": 0.7, "fail": None}, "warn 0.7"),
        ([1, None], "1, -"),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert number(value) == text


def test_json_has_words_for_what_it_has_no_numbers_for() -> None:
    value = {"a": [float("nan"), float("inf")], 1: (float("-inf"), b"\x01")}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {"a": ["NaN", "Infinity"], "1": ["-Infinity", "01"]}


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (61, "1m01s"), (7300, "2h01m"), (90000, "1d01h")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_text_from_a_run_can_not_command_the_terminal() -> None:
    assert clean("\x1b]0;owned\x07 red\r\n\u202e") == " ]0;owned  red   "
    assert table(["a", "b"], [["x\ty", 1]]) == ["a    b", "x y  1"]
