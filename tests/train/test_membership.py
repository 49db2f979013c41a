"""Who is in rotation, who waits for weights, and that nobody with half a version is asked."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.train.membership import Membership, facts
from rltop.train.ports import EngineFacts, EngineReply, SyncReport


def cell(name: str, state: str, version: str = "3", generation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "state": state,
        "weight_version": version,
        "generation": generation,
        "url": f"http://{name}.{generation}",
        "kind": "cpu",
    } | more


def members(*cells: dict[str, Any]) -> Membership:
    made = Membership(["0", "1"])
    made.take({one["id"]: one for one in cells})
    return made


def ids(engines: list[EngineFacts]) -> list[str]:
    return [engine.id for engine in engines]


def report(version: str, **replies: EngineReply) -> SyncReport:
    return SyncReport(version, "d", "disk", {name.removeprefix("e"): reply for name, reply in replies.items()})


GOOD = EngineReply(ok=True, version="3", digest="d", same=True)


def test_healthy_and_suspect_engines_of_the_version_are_in_rotation_in_order() -> None:
    found = members(cell("1", "HEALTHY"), cell("0", "SUSPECT"))
    assert ids(found.rotation("3")) == ["0", "1"]
    assert found.rotation("4") == []


@pytest.mark.parametrize("state", ["STALE", "DRAINING", "STOPPING", "CRASHED", "WARMING", "OFFLOADED", "LOST", ""])
def test_nobody_else_is(state: str) -> None:
    assert ids(members(cell("0", state), cell("1", "HEALTHY")).rotation("3")) == ["1"]


def test_an_engine_on_trial_is_neither_asked_nor_pushed_to_nor_given_up() -> None:
    found = members(cell("0", "RESERVED", "1", generation=4), cell("1", "HEALTHY"))
    assert ids(found.rotation("3")) == ["1"]
    assert ids(found.loaded(0.0)) == ["1"]
    assert ids(found.behind("4", 0.0)) == ["1"]
    assert found.reserved()
    assert ("0", 3) in found.dead(), "what the generation before it was asked for is asked again elsewhere"
    assert not members(cell("0", "STALE"), cell("1", "HEALTHY")).reserved()


def test_engines_that_the_trainer_did_not_ask_for_are_not_its_own() -> None:
    assert members(cell("0", "HEALTHY"), cell("watched", "HEALTHY")).rotation("3")[0].id == "0"
    assert len(members(cell("watched", "HEALTHY")).rotation("3")) == 0


def test_a_stale_engine_is_behind_until_the_trainer_itself_saw_the_version_on_it() -> None:
    found = members(cell("0", "STALE"), cell("1", "HEALTHY"))
    assert ids(found.behind("3", 0.0)) == ["0"], "its label is no proof"
    found.took(report("3", e0=GOOD), found.behind("3", 0.0), now=0.0, seconds=0.1)
    assert found.behind("3", 0.0) == []
    assert ids(found.unpromoted("3")) == ["0"]
    assert ids(found.rotation("3")) == ["1"], "the daemon says when it is"
    found.take({"0": cell("0", "HEALTHY")})
    assert (ids(found.rotation("3")), found.unpromoted("3")) == (["0", "1"], [])


@pytest.mark.parametrize(
    "reply",
    [
        EngineReply(ok=False, version="2", message="status 400"),
        EngineReply(ok=False, version="", message="the engine does not answer"),
        EngineReply(ok=True, version="2"),
        EngineReply(ok=True, version="3", digest="e", same=False),
    ],
)
def test_an_engine_that_failed_a_push_is_out_until_it_is_pushed_again(reply: EngineReply) -> None:
    found = members(cell("0", "HEALTHY"), cell("1", "HEALTHY"))
    assert ids(found.took(report("3", e0=reply, e1=GOOD), found.loaded(0.0), now=0.0, seconds=0.1)) == ["1"]
    assert ids(found.rotation("3")) == ["1"], "whatever its label says"
    assert found.behind("3", 0.5) == [], "not at once again"
    assert ids(found.behind("3", 2.0)) == ["0"]
    assert ids(found.loaded(0.5)) == ["1"]
    found.took(report("3", e0=GOOD), found.behind("3", 2.0), now=2.0, seconds=0.1)
    assert ids(found.rotation("3")) == ["0", "1"]


def test_a_planted_difference_does_not_take_an_engine_out() -> None:
    found = members(cell("0", "HEALTHY"))
    planted = SyncReport("3", "d", "disk", {"0": EngineReply(ok=True, version="3", same=False)}, planted=True)
    assert ids(found.took(planted, found.loaded(0.0), now=0.0, seconds=0.1)) == ["0"]


def test_a_push_that_hangs_is_not_paid_for_in_every_round() -> None:
    found = members(cell("0", "SUSPECT"), cell("1", "HEALTHY"))
    hung = EngineReply(ok=False, version="", message="ReadTimeout")
    found.took(report("3", e0=hung), found.loaded(0.0), now=60.0, seconds=60.0)
    assert ids(found.loaded(600.0)) == ["1"]
    assert ids(found.loaded(660.0)) == ["0", "1"]


def test_another_generation_starts_without_a_past() -> None:
    found = members(cell("0", "HEALTHY"))
    found.took(report("3", e0=GOOD), found.loaded(0.0), now=0.0, seconds=0.1)
    found.take({"0": cell("0", "STALE", version="default", generation=2)})
    assert ids(found.behind("3", 0.0)) == ["0"]
    found.take({"0": cell("0", "HEALTHY", version="default", generation=3)})
    assert (found.rotation("3"), ids(found.behind("3", 0.0))) == ([], ["0"])


def test_an_engine_seen_with_another_version_is_pushed_at_once() -> None:
    found = members(cell("0", "HEALTHY"))
    found.distrust(("0", 1))
    assert (found.rotation("3"), ids(found.behind("3", 0.0))) == ([], ["0"])


def test_earlier_generations_and_fallen_engines_are_dead() -> None:
    found = members(cell("0", "HEALTHY", generation=3), cell("1", "CRASHED", generation=2))
    assert set(found.dead()) == {("0", 2), ("0", 1), ("1", 2), ("1", 1)}
    assert ("0", 1) not in members(cell("0", "DRAINING")).dead(), "it still answers what it was asked"


def test_a_daemon_that_does_not_know_an_engine_yet_changes_nothing() -> None:
    found = members(cell("0", "HEALTHY"), cell("1", "HEALTHY"))
    found.take({})
    assert ids(found.rotation("3")) == ["0", "1"]


def test_the_states_are_told_with_causes_and_versions() -> None:
    found = members(cell("0", "LOADING", cause="restart by ada"))
    assert found.told("3") == "engine 0: LOADING (restart by ada); engine 1: nothing is known of it"
    assert (
        members(cell("0", "STALE", version="2")).told("3").startswith("engine 0: STALE with weights '2' instead of '3'")
    )


def test_an_incomplete_cell_is_no_engine() -> None:
    assert facts({"id": "0", "url": None, "generation": None, "pid": None}).generation == 0
    assert members(cell("0", "HEALTHY", url=None)).rotation("3") == []
