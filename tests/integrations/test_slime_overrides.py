"""What an override in slime's process looks at before it touches anything. With Ray and slime: tests/soak."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rltop.integrations.outbox import Outbox
from rltop.integrations.slime_attach import Attachment
from rltop.integrations.slime_overrides import Overrides, Wish, locate, read_wish, refusal

WISH = Wish(1, {"disable_cuda_graph": True})


def _group(count: int, **more: Any) -> Any:
    actors: list[Any] = [f"engine {at}" for at in range(count)]
    facts = {"all_engines": actors, "engines": actors, "nodes_per_engine": 1, "num_new_engines": 0}
    return SimpleNamespace(**facts | {"sglang_overrides": {"a": 1}, "worker_type": "regular"} | more)


class Manager:
    """The parts of slime's that are looked at."""

    def __init__(self, *groups: Any, **args: Any) -> None:
        self.args = SimpleNamespace(**{"use_fault_tolerance": True, "rollout_external": False, **args})
        self.servers = {"default": SimpleNamespace(server_groups=list(groups))}
        self.paused = 0

    def _get_updatable_server(self) -> Any:
        return self.servers["default"]

    def health_monitoring_pause(self) -> None:
        self.paused += 1

    def recover_updatable_engines(self) -> None:
        """slime's."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "a map"),
        ('{"engine": 1, "nope": 2}', "a map of"),
        ('{"engine": true, "server_args": {"a": 1}}', "number"),
        ('{"engine": -1, "server_args": {"a": 1}}', "number"),
        ('{"engine": 1}', "nothing to do"),
        ('{"engine": 1, "server_args": []}', "maps"),
        ('{"engine": 1, "env": {"A": 1}}', "A must be text"),
    ],
)
def test_a_wish_that_is_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_wish(text)


def test_engines_are_counted_through_the_groups() -> None:
    first, second = _group(2), _group(2)
    manager = Manager(first, second)
    assert locate(manager, 1) == (first, 1)
    assert locate(manager, 3) == (second, 1)
    assert locate(manager, 4) is None
    assert refusal(manager, {}, WISH) == ""


@pytest.mark.parametrize(
    ("manager", "env", "words"),
    [
        (None, {}, "not the RolloutManager"),
        (SimpleNamespace(servers={}), {}, "_get_updatable_server"),
        (Manager(_group(2)), None, "RAY_DEFAULT_ENV_VARS"),
        (Manager(_group(2), use_fault_tolerance=False), {}, "--use-fault-tolerance"),
        (Manager(_group(2), rollout_external=True), {}, "not slime's"),
        (Manager(), {}, "no model"),
        (Manager(SimpleNamespace(engines=[])), {}, "another one: no all_engines"),
        (Manager(_group(1)), {}, "no engine 1"),
        (Manager(_group(2, engines=["x", None])), {}, "down already"),
        (Manager(_group(2, num_new_engines=1)), {}, "coming back"),
    ],
)
def test_nothing_is_done_where_something_is_not_as_it_was_known(manager: Any, env: Any, words: str) -> None:
    assert words in refusal(manager, env, WISH)


def test_each_content_is_done_once_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stopped: list[Any] = []
    utils: Any = ModuleType("slime.ray.utils")
    utils.RAY_DEFAULT_ENV_VARS = {"KEEP": "1", "GO": "1"}
    monkeypatch.setitem(sys.modules, "slime.ray.utils", utils)
    monkeypatch.setattr("rltop.integrations.slime_overrides.shut_down", lambda group, at: stopped.append((group, at)))

    class Said(Outbox):
        def put(self, method: str, *args: Any, **kwargs: Any) -> None:
            calls.append(args)

    file = tmp_path / "wish.json"
    overrides = Overrides(str(file), Attachment(Said, {"RLTOP_INGEST": "x"}))
    group = _group(2)
    manager = Manager(group)
    look = overrides.look

    class Generating(Manager):
        def generate(self) -> None:
            look()

    running = Generating(group)
    running.generate()  # no file yet
    file.write_text('{"engine": 1, "server_args": {"a": null, "b": 2}, "env": {"GO": null, "NEW": "1"}}')
    look()  # not from within a RolloutManager: refused, and this content is done with
    assert calls.pop()[0] == "error"
    file.write_text('{"engine": 1, "server_args": {"a": null, "b": 2}, "env": {"GO": null, "NEW": "1"} }')
    running.generate()
    running.generate()
    assert stopped == [(group, 1)]
    assert running.paused == 1
    assert group.sglang_overrides == {"b": 2}
    assert utils.RAY_DEFAULT_ENV_VARS == {"KEEP": "1", "NEW": "1"}
    assert [(level, "engine 1 is down" in text) for level, text in calls] == [("warn", True)]
    assert manager.paused == 0
