"""Commands on engines: requests, refusals, two operators at once, operations that outlive their daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rltop.daemon.commands import Actions, Commands, Stage
from rltop.daemon.engine_commands import EngineCommands
from rltop.daemon.engines import EngineOptions, Engines
from rltop.daemon.ingest import Ingest
from rltop.engines.requests import (
    Ab,
    AbEnd,
    EngineSlot,
    Http,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
    Synced,
)
from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, Command, Rejected
from tests.daemon.fake_fleet import FakeFleet, make_fake
from tests.daemon.fakes import FakeCore, Trainer

FLEET: dict[str, Any] = {"engines": {}}


class Desk:
    """Commands and ingest over a fleet without processes. config: of the daemon."""

    def __init__(self, run_dir: Path, config: dict[str, Any] | None = None) -> None:
        self.core = FakeCore()
        self.lives = True
        self.asked: list[tuple[str, str]] = []
        self.fleets: list[FakeFleet] = []
        options = EngineOptions.of(FLEET if config is None else config)
        self.engines = Engines(
            self.core,
            options,
            run_dir=run_dir,
            trainer_lives=lambda: self.lives,
            make=make_fake(made=self.fleets.append),
        )
        actions = Actions(
            stop_trainer=self._nothing,
            shutdown=self._nothing,
            trainer_running=lambda: False,
            committed=self._committed,
            mute=lambda check_id, reason, who, since: None,
            unmute=lambda check_id: False,
            engines=EngineCommands(self.core.table, self.engines, self._ask_other),
        )
        self.commands = Commands(self.core, actions, epoch="e1")
        self.ingest = Ingest(self.core, host="here", alive=lambda pid: True, engines=self.engines)
        self.trainer = Trainer()
        self._ids = 0

    @property
    def fleet(self) -> FakeFleet:
        return self.fleets[-1]

    async def _nothing(self, stage: Stage) -> str:
        return ""

    async def _committed(self) -> bool:
        return True

    async def _ask_other(self, url: str, action: str) -> str:
        self.asked.append((url, action))
        if action == "profile":
            raise RltopError("the engine refused", where=url, why="status 400", exit_code=1)
        return f"{action} done"

    def have(self, *names: str, state: str = "HEALTHY") -> None:
        """Engines of the daemon's that are there."""
        self.engines.fleet.ids()
        for name in names:
            self.fleet.declare(EngineSlot(id=name), state)

    def record(self, kind: str, **payload: Any) -> None:
        self.ingest.take(self.trainer.record(kind, payload))

    async def take(self, name: str, target: str = "", *, who: str = "ana", **fields: Any) -> Accepted | Rejected:
        self._ids += 1
        return await self.commands.take(Command(name, target, **fields), f"c{self._ids}", who=who, role="control")

    async def done(self, name: str, target: str = "", **fields: Any) -> dict[str, Any]:
        answer = await self.take(name, target, **fields)
        assert isinstance(answer, Accepted), answer
        return await self.ended(answer.op)

    async def ended(self, op: str) -> dict[str, Any]:
        await self.until(lambda: self.cell(op)["state"] not in ("queued", "running"))
        return self.cell(op)

    def cell(self, op: str) -> dict[str, Any]:
        return dict(self.core.table.get(f"op/{op}"))

    def rows(self) -> list[dict[str, Any]]:
        """The journal's newest row of every operation, as another daemon reads it."""
        columns = ("op", "cmd_id", "t", "name", "target", "args", "who", "role", "reason", "state", "stage", "percent")
        newest = {row["op"]: row for (row,) in self.core.written.told("operation")}
        return [{key: row[key] for key in (*columns, "text", "ended", "plan")} for row in newest.values()]

    async def until(self, true: Callable[[], bool]) -> None:
        changed = asyncio.Event()
        self.core.changed = changed.set
        async with asyncio.timeout(10):
            while not true():
                changed.clear()
                await changed.wait()


@pytest.fixture
async def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


SLOTS = [{"id": "0", "kind": "cpu", "model_path": "/m", "args": ["--tp-size", "1"]}, {"id": "1", "model_path": "/m"}]


async def test_the_trainer_has_its_engines_started(desk: Desk) -> None:
    op = await desk.done("engines-start", args={"slots": SLOTS, "launcher": "local"}, who="trainer")
    assert (op["state"], op["engines"], op["target"]) == ("done", ["0", "1"], "")
    assert desk.fleet.requests == [
        StartEngines(
            slots=(
                EngineSlot(id="0", kind="cpu", model_path="/m", args=("--tp-size", "1")),
                EngineSlot(id="1", model_path="/m"),
            ),
            who="trainer",
        )
    ]
    engine = desk.core.table.get("engine/0")
    assert (engine["state"], engine["generation"], engine["owner"], engine["id"]) == ("HEALTHY", 1, "rltop", "0")
    assert engine["running"] is None, "a number of the scraper's, not known yet"
    fleet = desk.core.table.get("fleet")
    assert fleet == {
        "serving": 2,
        "total": 2,
        "keep": 1,
        "required": {"version": "default", "source": "trainer"},
        "safe_point": True,
        "ab": None,
    }


async def test_a_dry_run_of_a_start_makes_no_launcher(desk: Desk, tmp_path: Path) -> None:
    desk.have()
    launchers = desk.engines._launchers
    before, cluster = dict(launchers), tmp_path / "engines" / "cluster.json"
    wanted = {"slots": SLOTS, "launcher": "ray", "ray": {"address": "10.0.0.1:6379"}}
    answer = await desk.take("engines-start", args=wanted, dry_run=True)
    assert isinstance(answer, Accepted), answer
    assert launchers == before
    assert not cluster.exists()
    assert (await desk.done("engines-start", args=wanted))["state"] == "done"
    assert json.loads(cluster.read_text()) == {"address": "10.0.0.1:6379"}
    made = launchers["ray"]
    await desk.take("engines-start", args={**wanted, "ray": {"address": "10.0.0.2:6379"}}, dry_run=True)
    assert launchers["ray"] is made
    assert json.loads(cluster.read_text()) == {"address": "10.0.0.1:6379"}


async def test_toggles_of_an_engine_say_what_may_be_chosen_and_why_not(desk: Desk) -> None:
    desk.have("0")
    found = desk.core.table.get("toggles/0")
    assert found["cuda_graph"] == {
        "value": "on",
        "wanted": "on",
        "choices": ["on", "off"],
        "refused": {},
        "aliases": [],
        "verify": found["cuda_graph"]["verify"],
        "sides": {"engine": "on", "trainer": None},
        "free": "",
    }
    assert "/server_info" in found["cuda_graph"]["verify"]
    assert "one GPU" in found["dp_attention"]["refused"]["on"]
    assert found["deepep"]["sides"] == {"engine": None, "trainer": None}
    desk.record("run", framework="rltop", args={"moe_enable_deepep": True})
    desk.fleet.declare(EngineSlot(id="1"))
    assert desk.core.table.get("toggles/1")["deepep"]["sides"]["trainer"] == "on"


@pytest.mark.parametrize(
    ("name", "target", "args", "request_"),
    [
        (
            "engine-set",
            "0,1",
            {"changes": {"cuda_graph": False}, "keep": 0, "when": "safe-point"},
            SetToggles(targets=("0", "1"), changes={"cuda_graph": "off"}, keep=0, when="safe-point"),
        ),
        (
            "engine-set",
            "all",
            {"changes": {"cuda_graph": "on"}, "mode": "at-once"},
            SetToggles(targets=("0", "1"), changes={"cuda_graph": "on"}, mode="at-once"),
        ),
        ("engine-restart", "1", {"keep": 2}, Restart(targets=("1",), keep=2)),
        ("engine-stop", "0", {"when": "safe-point"}, Stop(targets=("0",), when="safe-point")),
        ("engine-start", "0", {}, Start(targets=("0",))),
        ("engine-revert", "0", {}, Revert(targets=("0",))),
        (
            "engine-ab",
            "all",
            {"changes": {"speculative": "NGRAM"}},
            Ab(changes={"speculative": "NGRAM"}, targets=("0", "1")),
        ),
        ("engine-ab-end", "", {}, AbEnd()),
        ("engine-http", "1", {"action": "flush"}, Http(target="1", action="flush")),
    ],
)
async def test_a_command_becomes_a_request(
    desk: Desk, name: str, target: str, args: dict[str, Any], request_: Any
) -> None:
    desk.have("0", "1")
    op = await desk.done(name, target, args=args, reason="ticket 4")
    assert op["state"] == "done", op
    (found,) = desk.fleet.requests
    assert found == type(request_)(**{**_fields(request_), "reason": "ticket 4", "who": "ana"})


def _fields(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


@pytest.mark.parametrize(
    ("name", "target", "fields", "why"),
    [
        ("engines-start", "", {"args": {}}, "needs `slots`"),
        ("engines-start", "", {"args": {"slots": [{"id": "0", "args": "--x"}]}}, "slot 0: Expected `array`"),
        ("engines-start", "", {"args": {"slots": [{"kind": "cpu"}]}}, "slot 0: Object missing required field `id`"),
        ("engines-start", "", {"args": {"slots": [{"id": "../x"}]}}, "'../x' is no id"),
        ("engines-start", "", {"args": {"slots": [{"id": "all"}]}}, "'all' is no id"),
        ("engines-start", "", {"args": {"slots": [{"id": "0"}, {"id": "0"}]}}, "two slots have one id"),
        ("engines-start", "", {"args": {"slots": [{"id": "0"}], "launcher": "slurm"}}, "unknown launcher 'slurm'"),
        ("engines-start", "", {"args": {"slots": [{"id": "0"}], "launcher": "ray"}}, "needs the address of a cluster"),
        ("engine-set", "0", {"args": {}}, "`changes` is a map"),
        ("engine-set", "0", {"args": {"changes": {"cuda_graph": None}}}, "'cuda_graph' needs a word"),
        ("engine-set", "0", {"args": {"changes": {"cuda_grph": "on"}}}, "did you mean 'cuda_graph'"),
        ("engine-set", "7", {"args": {"changes": {"cuda_graph": "on"}}}, "there is no engine '7'"),
        ("engine-set", "", {"args": {"changes": {"cuda_graph": "on"}}}, "say which engines"),
        ("engine-restart", "0", {"args": {"mode": "all"}}, "mode 'all' is not known"),
        ("engine-restart", "0", {"args": {"keep": -1}}, "`keep` is a number"),
        ("engine-restart", "0", {"args": {"keep": True}}, "`keep` is a number"),
        ("engine-restart", "0", {"args": {"when": "later"}}, "when 'later' is not known"),
        ("engine-restart", "0", {"args": {"force": True}}, "unknown argument 'force'"),
        ("engine-synced", "0", {"args": {"version": "3"}}, "one generation"),
        ("engine-synced", "0", {"args": {}, "if_gen": 1}, "needs `version`"),
        ("engine-synced", "0,1", {"args": {"version": "3"}}, "about one engine"),
        ("engine-http", "0,1", {"args": {"action": "flush"}}, "about one engine"),
        ("engine-http", "0", {"args": {}}, "needs `action`"),
        ("engine-http", "0", {"args": {"action": "abort"}}, "action 'abort' is not known"),
        ("engine-restart", "0", {"args": {"generations": [1]}}, "`generations` is a map"),
    ],
)
async def test_what_can_not_be_understood_changes_nothing(
    desk: Desk, name: str, target: str, fields: dict[str, Any], why: str
) -> None:
    desk.have("0", "1")
    before = len(desk.core.written.told("operation"))
    answer = await desk.take(name, target, **fields)
    assert isinstance(answer, Rejected)
    assert (answer.code, why in answer.why) == ("bad-args", True), answer
    assert len(desk.core.written.told("operation")) == before


async def test_a_refusal_of_the_rules_comes_with_its_reason(desk: Desk) -> None:
    desk.have("0")
    answer = await desk.take("engine-set", "0", args={"changes": {"speculative": "NGRAM", "deepep": "auto"}})
    assert answer == Rejected("refused-by-rules", "deepep=auto does not go with speculative", "one of them")


async def test_a_dry_run_is_the_diff_of_every_engine(desk: Desk) -> None:
    desk.have("0", "1")
    answer = await desk.take("engine-set", "all", args={"changes": {"cuda_graph": "off"}}, dry_run=True)
    assert answer == Accepted(
        "",
        [
            *("engine 0:", "  + --cuda_graph off"),
            *("engine 1:", "  + --cuda_graph off"),
            "SetToggles of engine 0, 1",
        ],
    )
    assert desk.core.table.get("engine/0")["generation"] == 1


async def test_stages_are_kept_with_their_times(desk: Desk) -> None:
    desk.have("0")
    desk.fleet.gate.clear()
    answer = await desk.take("engine-restart", "0")
    assert isinstance(answer, Accepted)
    await desk.until(lambda: desk.cell(answer.op)["stage"] == "engine 0: DRAINING")
    desk.core.time += 2.5
    desk.fleet.gate.set()
    op = await desk.ended(answer.op)
    assert [stage["text"].split()[-1] for stage in op["stages"]] == ["DRAINING", "LAUNCHING", "STALE", "HEALTHY"]
    assert [stage["t"] for stage in op["stages"]] == [1000.0, 1002.5, 1002.5, 1002.5]
    assert op["ended"] == 1002.5


async def test_of_two_operators_the_second_is_told(desk: Desk) -> None:
    """While the first one's operation goes on: busy. After it: another generation than he saw."""
    desk.have("0", "1")
    desk.fleet.gate.clear()
    seen = {"0": 1, "1": 1}
    first = await desk.take("engine-restart", "0", args={"generations": seen}, who="ana")
    assert isinstance(first, Accepted)
    second = await desk.take(
        "engine-set", "0,1", args={"changes": {"cuda_graph": "off"}, "generations": seen}, who="bo"
    )
    assert isinstance(second, Rejected)
    assert (second.code, "engine-restart, by ana" in second.why) == ("busy", True)
    dry = await desk.take("engine-stop", "0", dry_run=True)
    assert isinstance(dry, Accepted)
    assert dry.plan[-1].startswith("! refused for now: engine 0: operation 1")
    assert isinstance(await desk.take("engine-stop", "1", dry_run=True), Accepted), "the other engine is free"
    desk.fleet.gate.set()
    await desk.ended(first.op)
    second = await desk.take(
        "engine-set", "0,1", args={"changes": {"cuda_graph": "off"}, "generations": seen}, who="bo"
    )
    assert isinstance(second, Rejected)
    assert second.code == "stale-generation"
    assert second.why == "engine 0 is at generation 2, not 1 (operation 1: engine-restart, done, by ana)"
    third = await desk.take("engine-stop", "0", if_gen=1)
    assert isinstance(third, Rejected)
    assert third.code == "stale-generation"


async def test_a_sync_is_taken_while_the_operation_waits_for_it(desk: Desk) -> None:
    desk.have("0")
    desk.fleet.gate.clear()
    answer = await desk.take("engine-restart", "0")
    assert isinstance(answer, Accepted)
    await desk.until(lambda: desk.cell(answer.op)["state"] == "running")
    synced = await desk.done("engine-synced", "0", args={"version": "7"}, if_gen=1)
    assert synced["state"] == "done"
    assert desk.fleet.requests[-1] == Synced(target="0", generation=1, version="7", who="ana")
    desk.fleet.gate.set()
    await desk.ended(answer.op)
    late = await desk.take("engine-synced", "0", args={"version": "7"}, if_gen=1)
    assert isinstance(late, Rejected)
    assert late.code == "stale-generation"


async def test_an_operation_that_is_cancelled_lets_its_engine_go(desk: Desk) -> None:
    desk.have("0")
    desk.fleet.gate.clear()
    answer = await desk.take("engine-restart", "0")
    assert isinstance(answer, Accepted)
    await desk.until(lambda: desk.cell(answer.op)["stage"] != "")
    await desk.done("cancel", answer.op)
    assert desk.cell(answer.op)["state"] == "cancelled"
    desk.fleet.gate.set()
    assert (await desk.done("engine-restart", "0"))["state"] == "done"


async def test_what_an_engine_could_not_do_is_a_sentence_with_its_reason(desk: Desk) -> None:
    desk.have("0")
    op = await desk.done("engine-restart", "0", reason="it can not start")
    assert op["state"] == "failed"
    assert op["text"] == "engine 0 did not start\n  why: its port is taken"


async def test_the_next_daemon_goes_on_with_what_it_finds_half_done(desk: Desk, tmp_path: Path) -> None:
    """Killed while engine 0 of three is down: the operation ends under its own number, engine 0 is done once only."""
    desk.have("0", "1", "2")
    desk.fleet.gate.clear()
    answer = await desk.take("engine-restart", "all", reason="new driver")
    note = await desk.done("note", args={"text": "x"})
    assert isinstance(answer, Accepted)
    await desk.until(lambda: desk.core.table.get("engine/0")["state"] == "DRAINING")
    desk.fleet.slots["0"]["generation"] += 1  # what should be is written before it is done
    desk.fleet._publish("0")
    stages = desk.cell(answer.op)["stages"]
    later = Desk(tmp_path)
    later.core.set(f"op/{answer.op}", desk.cell(answer.op))
    later.commands.restore(desk.rows())
    assert later.cell(answer.op)["state"] == "queued"
    assert later.core.table.get(f"op/{note['op']}") is None, "a finished one is not begun again"
    later.have()
    later.commands.resume()
    op = await later.ended(answer.op)
    assert (op["state"], op["reason"], op["who"]) == ("done", "new driver", "ana")
    assert op["text"] == "engine 1, 2 done"
    assert op["stages"][: len(stages)] == stages
    assert [later.fleet.slots[name]["generation"] for name in "012"] == [2, 2, 2]
    again = await later.commands.take(Command("engine-restart", "all"), "c1", who="ana", role="control")
    assert isinstance(again, Accepted)
    assert again.op == answer.op
    await desk.commands.finish()


async def test_what_can_not_be_resumed_has_failed(desk: Desk, tmp_path: Path) -> None:
    desk.have("0")
    desk.fleet.gate.clear()
    await desk.take("engine-restart", "0")
    later = Desk(tmp_path, config={})
    later.commands.restore(desk.rows())
    later.commands.resume()
    assert later.cell("1")["state"] == "failed"
    assert "daemon ended" in later.cell("1")["text"]
    await desk.commands.finish()


# ---------------------------------------------------------------- engines of others


async def test_engines_of_others_take_only_what_http_allows(tmp_path: Path) -> None:
    desk = Desk(tmp_path, config={})
    desk.record("engine", id="0", url="http://there:30000", generation=1)
    engine = desk.core.table.get("engine/0")
    assert (engine["owner"], engine["cause"], engine["signals"], engine["since"]) == ("other", "", {}, 1000.0)
    assert "trouble" not in engine
    for target in ("0", "all"):
        answer = await desk.take("engine-restart", target)
        assert isinstance(answer, Rejected)
        assert "rltop did not start it, so it can not restart it" in answer.why
    assert isinstance(await desk.take("engine-restart", "9"), Rejected)
    assert isinstance(await desk.take("engines-start", args={"slots": SLOTS}), Rejected)
    assert (await desk.done("engine-http", "0", args={"action": "flush"}))["text"] == "flush done"
    failed = await desk.done("engine-http", "0", args={"action": "profile"})
    assert (failed["state"], "status 400" in failed["text"]) == ("failed", True)
    assert desk.asked == [("http://there:30000", "flush"), ("http://there:30000", "profile")]
    assert desk.fleets == [], "no fleet was made"


async def test_a_foreign_engine_in_a_run_with_a_fleet(desk: Desk) -> None:
    desk.have("0")
    desk.record("engine", id="x", url="http://there:30000")
    answer = await desk.take("engine-stop", "0,x")
    assert isinstance(answer, Rejected)
    assert "engine x: rltop did not start it" in answer.why
    assert (await desk.done("engine-http", "x", args={"action": "pause"}))["state"] == "done"
    assert desk.asked == [("http://there:30000", "pause")]


# ---------------------------------------------------------------- what the trainer says


async def test_the_trainer_does_not_overwrite_what_the_fleet_says(desk: Desk) -> None:
    desk.have("0")
    before = desk.core.table.get("engine/0")
    desk.record("engine", id="0", state="CRASHED", generation=9, url="http://elsewhere")
    assert desk.core.table.get("engine/0") == before
    desk.record("engine", id="0", generation=1, trouble="ReadTimeout")
    desk.record("engine", id="0", generation=1, trouble="")
    desk.record("engine", id="7", trouble="not ours")
    assert desk.fleet.saw == [("0", 1, False, "ReadTimeout"), ("0", 1, True, "")]
    assert desk.core.table.get("engine/0") == before
    assert "engine/7" not in desk.core.table


async def test_released_memory_is_told_to_the_fleet_once(desk: Desk) -> None:
    desk.have("0")
    for state in ("HEALTHY", "OFFLOADED", "OFFLOADED", "HEALTHY", "HEALTHY"):
        desk.record("engine", id="0", generation=1, state=state)
    assert desk.fleet.told == ["released 0", "resumed 0"]


async def test_the_devices_are_lent_from_the_release_until_the_memory_begins_to_come_back(desk: Desk) -> None:
    desk.have("0")
    engines = desk.engines
    for kind, fields, lent in (
        ("engine", {"id": "0", "generation": 1, "state": "OFFLOADED"}, True),
        ("phase", {"name": "train", "edge": "enter", "rollout_id": 0}, True),
        ("phase", {"name": "train", "edge": "leave", "rollout_id": 0}, True),
        ("phase", {"name": "onload", "edge": "enter", "rollout_id": 0}, False),
        ("phase", {"name": "onload", "edge": "leave", "rollout_id": 0}, False),
    ):
        desk.record(kind, **fields)
        assert engines.lent() is lent, (kind, fields)
    desk.record("engine", id="0", generation=1, state="OFFLOADED")
    assert engines.lent()
    desk.lives = False
    assert not engines.lent(), "who has gone has nothing"


async def test_required_weights_are_the_live_trainers(desk: Desk) -> None:
    desk.have("0")
    assert desk.engines.required().version == "default"
    said = {"0": {"ok": True, "version": "4", "digest": "d4"}, "1": {"ok": False, "digest": "other"}}
    desk.record("weights", version="4", rollout_id=4, digest="d4", engines=said)
    found = desk.engines.required()
    assert (found.version, found.source, found.digest) == ("4", "trainer", "d4")
    desk.record("weights", version="5", rollout_id=5, digest="d5", engines={"0": {"digest": "named otherwise"}})
    assert desk.engines.required().digest == "", "this engine can never answer it"
    assert desk.core.table.get("fleet")["required"] == {"version": "5", "source": "trainer"}


async def test_without_a_trainer_they_are_the_newest_published_ones_else_the_base(desk: Desk, tmp_path: Path) -> None:
    desk.lives = False
    base = desk.engines.required()
    assert (base.version, base.source) == ("default", "base")
    for name in ("weight_v000009", "weight_v000010", "weight_vx", ".weight_v000011-tmp"):
        (tmp_path / "train" / "weights" / name).mkdir(parents=True)
    found = desk.engines.required()
    assert (found.version, found.source, Path(found.path).name) == ("10", "disk", "weight_v000010")


async def test_updating_lasts_until_the_trainer_has_told_the_version(desk: Desk) -> None:
    desk.have("0")

    def phase(name: str, edge: str) -> None:
        desk.record("phase", name=name, edge=edge)

    assert (desk.engines.updating(), desk.engines.safe_point()) == (False, True)
    phase("rollout", "enter")
    assert (desk.engines.updating(), desk.engines.safe_point()) == (False, False)
    assert desk.core.table.get("fleet")["safe_point"] is False
    phase("rollout", "leave")
    phase("train", "enter")
    assert desk.engines.safe_point()
    phase("train", "leave")
    phase("update_weights", "enter")
    assert (desk.engines.updating(), desk.engines.safe_point()) == (True, False)
    phase("update_weights", "leave")
    assert desk.engines.updating(), "the engines hold a version that nobody has told yet"
    desk.record("weights", version="1", rollout_id=1)
    assert (desk.engines.updating(), desk.engines.safe_point()) == (False, True)
    assert desk.fleet.told == ["rollout done"]
    phase("update_weights", "enter")
    phase("update_weights", "leave")
    desk.core.time += 6
    assert not desk.engines.updating(), "a trainer that never tells does not hold them for ever"


async def test_an_engine_that_refused_a_sync_or_did_not_answer_is_told_to_the_fleet(desk: Desk) -> None:
    desk.have("0", "1", "2", "3")
    replies = {
        "0": {"ok": True, "version": "8", "same": True},
        "1": {"ok": False, "version": "7", "message": "status 400: it was refused"},
        "2": {"ok": False, "version": "", "message": "ReadTimeout", "gone": True},
        "3": {"ok": True, "version": "7"},
        "another's": {"ok": False, "version": ""},
    }
    desk.record("weights", version="8", rollout_id=8, ok=False, engines=replies)
    assert [text for text in desk.fleet.told if "not synced" in text] == [
        "engine 1 not synced: it did not take weight version '8': status 400: it was refused",
        "engine 2 not synced: it did not answer to weight version '8': ReadTimeout",
        "engine 3 not synced: it holds '7' after the update to '8'",
    ]
    desk.record("weights", version="9", rollout_id=9, ok=True, engines={"0": {"ok": True, "version": "9"}})
    assert len([text for text in desk.fleet.told if "not synced" in text]) == 3


async def test_samples_feed_a_comparison_by_the_engine_that_made_them(desk: Desk) -> None:
    desk.have("0", "1")
    made = [
        {"index": 0, "response": "", "engine": "0", "rollout_log_probs": [-1.0, -2.0], "log_probs": [-1.5, -2.0]},
        {"index": 1, "response": "", "engine": "0", "rollout_log_probs": [-1.0], "log_probs": [-1.1]},
        {"index": 2, "response": "", "engine": "1", "rollout_log_probs": [-1.0], "log_probs": [float("nan")]},
        {"index": 3, "response": "", "engine": "x", "rollout_log_probs": [-1.0], "log_probs": [-1.0]},
        {"index": 4, "response": "", "engine": "1"},
    ]
    desk.record("samples", rollout_id=3, samples=made)
    assert desk.fleet.told == ["engine 0, rollout 3: 0.200 over 3"]


async def test_the_cluster_of_the_engines_is_known_to_the_next_daemon(desk: Desk, tmp_path: Path) -> None:
    ray = {"address": "10.0.0.1:6379", "namespace": "rltop", "token_file": "/t", "other": "x"}
    await desk.done("engines-start", args={"slots": SLOTS, "launcher": "ray", "ray": ray})
    assert desk.fleet.requests[0] == StartEngines(
        slots=desk.fleet.requests[0].slots,  # type: ignore[union-attr]
        launcher="ray",
        ray=ray,
        who="ana",
    )
    file = tmp_path / "engines" / "cluster.json"
    assert file.stat().st_mode & 0o777 == 0o600
    later = Desk(tmp_path)
    later.have()
    assert list(later.engines._launchers) == ["ray"]


async def test_the_end_of_the_trainer_ends_its_engines(desk: Desk) -> None:
    desk.have("0", "1")
    desk.engines.trainer_ended("done")
    await desk.until(lambda: all(desk.core.table.get(f"engine/{name}")["state"] == "STOPPED" for name in "01"))
    assert any("the trainer ended (done): its engines are stopped" in text for text in desk.core.texts("engine"))


async def test_numbers_of_the_scraper_stay_until_the_process_is_another(desk: Desk) -> None:
    desk.have("0")
    desk.core.update("engine/0", running=5, tokens_per_s=80.0, seen=999.0)
    desk.fleet._publish("0")
    assert desk.core.table.get("engine/0")["running"] == 5
    desk.fleet.slots["0"]["generation"] = 2
    desk.fleet._publish("0")
    assert desk.core.table.get("engine/0")["running"] is None
    assert desk.core.table.get("engine/0")["seen"] is None


def test_options_are_those_of_the_file() -> None:
    assert EngineOptions.of({}) is None
    kept = EngineOptions.of(
        {"engines": {"keep_serving": 2, "restart": "never", "launcher": "ray", "ray_address": "a:1"}}
    )
    assert kept == EngineOptions({"keep_serving": 2, "restart": "never"}, "ray", "a:1")
    alone = EngineOptions.of(
        {"engines": {"model_path": "/m", "count": 2, "port": 30000, "args": ["--x"], "env": {"A": "1"}}}
    )
    assert alone is not None
    assert alone.slots == (
        {"kind": "sglang", "model_path": "/m", "args": ["--x"], "env": {"A": "1"}, "id": "0", "port": 30000},
        {"kind": "sglang", "model_path": "/m", "args": ["--x"], "env": {"A": "1"}, "id": "1", "port": 30001},
    )


SLIME: dict[str, Any] = {"engines": {"model_path": "/m", "port": 30000, "count": 2, "trainer": "slime"}}


async def test_engines_that_slime_uses_are_not_restarted_into_weights_that_nobody_has(tmp_path: Path) -> None:
    desk = Desk(tmp_path, SLIME)
    desk.have("0", "1")
    slime = desk.engines.slime
    assert slime is not None
    plan = await desk.take("engine-restart", "0", dry_run=True)
    assert isinstance(plan, Accepted), plan
    assert any(step.startswith("warning: no router in [engines]") for step in plan.plan)
    for name in ("0", "1"):
        for version in ("default", "1"):
            desk.engines.publish(name, {"id": name, "state": "HEALTHY", "weight_version": version, "url": "http://h:1"})
    refused = await desk.take("engine-restart", "0")
    assert isinstance(refused, Rejected), refused
    assert refused.why.startswith("slime pushed weight version 1 into these engines")
    assert isinstance(await desk.take("engine-stop", "0", dry_run=True), Accepted)
    assert desk.core.table.get("fleet")["required"] == {"version": "1", "source": "trainer"}


async def test_a_goodbye_of_slime_leaves_engines_that_rltop_owns(tmp_path: Path) -> None:
    desk = Desk(tmp_path, SLIME)
    desk.have("0")
    desk.record("run", framework="slime", name="x", args={}, start_rollout_id=0)
    desk.record("bye", reason="done", text="")
    assert desk.core.table.get("engine/0")["state"] == "HEALTHY"
