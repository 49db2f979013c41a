"""The trainer over engines that a (stand-in) daemon owns: they die, come back stale and drain while a run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltop.engines.client import EngineClient
from rltop.errors import RltopError
from rltop.protocol.messages import Record
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.fleet_rollouts import FleetRollouts, Order
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator
from rltop.train.ports import EngineFacts
from rltop.train.rollout_manager import RolloutManager
from rltop.train.rollout_only import RolloutLoop
from rltop.train.trainer_actor import TrainActor
from tests.train.fleet import FakeFleet, LocalManager
from tests.train.local import ingest, records_until_bye

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]

CONFIG = TrainConfig(
    num_rollout=4,
    rollout_batch_size=8,
    n_samples_per_prompt=4,
    apply_chat_template=True,
    rollout_num_engines=2,
    rollout_engine_wait_s=60.0,
)


Act = Callable[[FakeFleet], Callable[[], None] | None]
"""Done to the fleet just before a rollout asks; what it returns is done while the rollout runs."""


@dataclass
class FleetRun:
    """One run of the real loop, trainer, manager and engines; `at` says in which rollout what is done to them."""

    config: TrainConfig
    directory: Path
    at: dict[int, Act]
    first_state: str = "HEALTHY"

    def __post_init__(self) -> None:
        self.fleet = FakeFleet(self.directory / "engines", first_state=self.first_state)
        self.history = History()
        self.records: list[Record] = []
        self.manager = RolloutManager(self.config)

    def go(self) -> None:
        with ingest() as (address, socket), Reporter(address=address, run="test") as reporter:
            trainer = TrainActor(self.config, str(self.directory))
            narrator = Narrator(reporter, time.monotonic)
            slots = [{"id": str(at)} for at in range(self.config.rollout_num_engines)]
            rollouts = FleetRollouts(
                self.config,
                Interfering(self.manager, self),
                self.fleet,
                Order(slots=slots, launcher="local"),
                narrator,
                time.monotonic,
                lambda seconds: None,
                self.directory,
            )
            loop: Loop | RolloutLoop = RolloutLoop(self.config, rollouts, narrator, self.history)
            if self.config.trainer_ranks:
                loop = Loop(
                    config=self.config,
                    trainer=trainer,
                    rollouts=rollouts,
                    narrator=narrator,
                    clock=time.monotonic,
                    base_directory=self.directory / "initial",
                    history=self.history,
                )
            try:
                loop.run()
            finally:
                narrator.bye("done")
                self.records = records_until_bye(socket)
                trainer.disconnect()
                self.manager.connect([])
                self.fleet.close()

    def payloads(self, kind: str) -> list[dict[str, Any]]:
        return [record.payload for record in self.records if record.kind == kind]

    def metric(self, name: str) -> list[float]:
        return [one["values"][name] for one in self.payloads("metrics") if name in one["values"]]

    def dumped(self) -> list[list[dict[str, Any]]]:
        pattern = str(self.config.save_debug_rollout_data)
        paths = [Path(pattern.format(rollout_id=at)) for at in range(self.config.num_rollout)]
        return [torch.load(path, weights_only=True)["samples"] for path in paths]


class Interfering(LocalManager):
    """Does something to the fleet just before a rollout's first requests, and more while they are on their way."""

    def __init__(self, manager: RolloutManager, run: FleetRun) -> None:
        super().__init__(manager)
        self.run = run

    def call(self, method: str, *args: Any, **kw: Any) -> Any:
        act = self.run.at.pop(args[0], None) if method == "generate" else None
        meanwhile = act(self.run.fleet) if act is not None else None
        if meanwhile is None:
            return super().call(method, *args, **kw)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        try:
            return super().call(method, *args, **kw)
        finally:
            thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., FleetRun]]:
    made: list[FleetRun] = []

    def make(at: dict[int, Act], first_state: str = "HEALTHY", **changes: Any) -> FleetRun:
        config = replace(CONFIG, save_debug_rollout_data=f"{tmp_path}/dump/{{rollout_id}}.pt", **changes)
        made.append(FleetRun(config, tmp_path, at, first_state))
        return made[-1]

    yield make
    for one in made:
        one.fleet.close()


def assert_whole(run: FleetRun) -> None:
    """No sample lost, none twice, each of exactly its rollout's version: from the dumps."""
    count = run.config.samples_per_rollout
    for rollout_id, samples in enumerate(run.dumped()):
        assert [sample["index"] for sample in samples] == list(range(rollout_id * count, (rollout_id + 1) * count))
        assert {tuple(sample["weight_versions"]) for sample in samples} == {(str(rollout_id or "default"),)}
        assert {sample["status"] for sample in samples} <= {"completed", "truncated"}
    assert len(run.history.rewards) == run.config.num_rollout


@pytest.mark.soak
def test_an_engine_that_dies_and_comes_back_stale_costs_no_sample(run: Callable[..., FleetRun]) -> None:
    made = run({1: lambda fleet: fleet.restart("1"), 2: lambda fleet: fleet.restart("0", told=False)})
    made.go()
    assert_whole(made)
    synced = [(target, kw["if_gen"], kw["args"]["version"]) for name, target, kw in made.fleet.sent[1:]]
    assert ("1", 2) in [one[:2] for one in synced]
    digests = {one["version"]: one["digest"] for one in made.payloads("weights")}
    for _, _, kw in made.fleet.sent[1:]:
        assert kw["args"]["digest"] == digests[kw["args"]["version"]]
    generations = {(s["metadata"]["engine"], s["metadata"]["engine_generation"]) for s in made.dumped()[3]}
    assert generations <= {("0", 2), ("1", 2)}
    assert made.history.syncs == 1 + made.config.num_rollout, "a repeated push is no sync of its own"
    assert len(made.metric("rollout/requests_retried")) == made.config.num_rollout


def test_one_engine_of_one_dies_and_the_rollout_waits_for_it(run: Callable[..., FleetRun]) -> None:
    made = run({1: lambda fleet: fleet.restart("0", told=False)}, rollout_num_engines=1, num_rollout=2)
    made.go()
    assert_whole(made)
    (sync,) = [one for one in made.payloads("weights") if one["rollout_id"] == 1][1:]
    assert (sync["version"], sync["ok"], list(sync["engines"])) == ("1", True, ["0"])
    told = [(one["id"], one["generation"], one["trouble"][:6]) for one in made.payloads("engine") if "trouble" in one]
    assert list(dict.fromkeys(told)) == [("0", 1, ""), ("0", 1, "gone: "), ("0", 2, "")]
    assert made.metric("rollout/engine_failures/0")[0] >= 1


@pytest.mark.soak
def test_engines_that_start_stale_are_verified_and_told_of(run: Callable[..., FleetRun]) -> None:
    made = run({}, first_state="STALE", num_rollout=1)
    made.go()
    assert_whole(made)
    assert [(target, kw["args"]["version"]) for _, target, kw in made.fleet.sent[1:3]] == [
        ("0", "default"),
        ("1", "default"),
    ]


@pytest.mark.soak
def test_an_engine_that_comes_back_in_the_first_rollout_is_only_looked_at(run: Callable[..., FleetRun]) -> None:
    made = run({0: lambda fleet: fleet.restart("0")}, rollout_num_engines=1, num_rollout=1)
    made.go()
    assert_whole(made)
    assert [one["transport"] for one in made.payloads("weights")] == ["start", "start", "disk"]


def test_rollouts_alone_go_on_when_an_engine_comes_back_stale(run: Callable[..., FleetRun]) -> None:
    """Nobody pushes weights: what it was started with is what it must hold."""
    made = run(
        {1: lambda fleet: fleet.restart("0", told=False)},
        "STALE",
        rollout_num_engines=1,
        num_rollout=2,
        debug_rollout_only=True,
    )
    made.go()
    assert [{sample["weight_versions"][0] for sample in samples} for samples in made.dumped()] == [{"default"}] * 2
    synced = [(target, kw["args"]["version"], kw["if_gen"]) for name, target, kw in made.fleet.sent if kw.get("if_gen")]
    assert synced == [("0", "default", 1), ("0", "default", 2)]
    assert made.payloads("weights") == []
    assert len(made.history.rewards) == 2


def test_drained_requests_are_asked_again_elsewhere(run: Callable[..., FleetRun]) -> None:
    def drain(fleet: FakeFleet) -> Callable[[], None]:
        def abort() -> None:
            fleet.set("0", state="DRAINING")
            with EngineClient(fleet.cells["0"]["url"]) as client:
                client.pause("abort")
                client.resume_generation()

        return abort

    made = run({1: drain}, num_rollout=2)
    made.go()
    assert_whole(made)
    last = [one for one in made.payloads("weights") if one["version"] == "2"]
    assert [list(one["engines"]) for one in last] == [["1"]], "who is not in rotation is not pushed"


def test_an_engine_that_dies_in_the_sync_is_left_out_and_pushed_later(run: Callable[..., FleetRun]) -> None:
    """It goes without a word between two rollouts: the push finds it gone, the others get their weights."""
    made = run({2: lambda fleet: fleet.launch("1", 2, "STALE")})
    original = made.fleet.engines
    killed: list[str] = []

    def engines() -> Any:
        if len(made.history.steps) == 2 and not killed:
            killed.append("1")
            made.fleet.kill("1")
        return original()

    object.__setattr__(made.fleet, "engines", engines)
    made.go()
    assert_whole(made)
    (bad,) = [one for one in made.payloads("weights") if not all(each["ok"] for each in one["engines"].values())]
    assert bad["ok"], "nobody refused"
    assert bad["engines"]["0"]["ok"]
    assert bad["engines"]["1"]["gone"]
    assert "does not answer" in bad["engines"]["1"]["message"]
    assert ("1", 2) in [(target, kw["if_gen"]) for _, target, kw in made.fleet.sent[1:]]


@pytest.mark.soak
def test_the_fixed_map_waits_and_gives_the_same_bits(run: Callable[..., FleetRun], tmp_path: Path) -> None:
    calm = FleetRun(replace(CONFIG, deterministic=True, num_rollout=3), tmp_path / "calm", {})
    calm.go()
    made = run({1: lambda fleet: fleet.restart("1")}, deterministic=True, num_rollout=3)
    made.go()
    assert_whole(made)
    assert made.history.steps == calm.history.steps


def test_an_engine_that_never_comes_back_ends_the_run_with_the_states(run: Callable[..., FleetRun]) -> None:
    def kill(fleet: FakeFleet) -> None:
        fleet.set("0", state="QUARANTINED", cause="crashed 3 times")
        fleet.kill("0")

    made = run({1: kill}, rollout_num_engines=1, num_rollout=2, rollout_engine_wait_s=2.0)
    with pytest.raises(RltopError) as caught:
        made.go()
    assert caught.value.where == "rollout 1"
    assert "engine 0: QUARANTINED (crashed 3 times)" in caught.value.why
    logs = [one["text"] for one in made.payloads("log")]
    assert [text for text in logs if text.startswith("Rollout 1 waits for an engine: engine 0: QUARANTINED")]


@pytest.mark.soak
def test_a_lost_daemon_changes_nothing_but_a_line(run: Callable[..., FleetRun]) -> None:
    def lose(fleet: FakeFleet) -> None:
        fleet.problem = "the daemon closed the connection"
        fleet.cells = {}
        fleet.changed += 1

    def back(fleet: FakeFleet) -> None:
        fleet.problem = ""

    made = run({1: lose, 2: back}, num_rollout=4)
    made.go()
    assert_whole(made)
    logs = [one["text"] for one in made.payloads("log")]
    assert len([text for text in logs if "daemon is away" in text]) == 1
    assert len([text for text in logs if "daemon is back" in text]) == 1


def test_no_engine_that_comes_up_is_the_runs_end(run: Callable[..., FleetRun]) -> None:
    made = run({}, num_rollout=1, rollout_num_engines=1)

    def launch(name: str, generation: int, state: str) -> None:
        made.fleet.set(name, state="BACKOFF", generation=1, cause="unrecognized arguments: --foo", log="/l/stdout.log")

    object.__setattr__(made.fleet, "launch", launch)
    with pytest.raises(RltopError) as caught:
        made.go()
    assert (caught.value.what, caught.value.where) == ("no engine came up", "/l/stdout.log")
    assert "unrecognized arguments: --foo" in caught.value.why


class Telling(Narrator):
    """Its word about an engine's memory reaches the stand-in daemon, which then shows it."""

    fleet: FakeFleet

    def engine(self, facts: EngineFacts, state: str) -> None:
        super().engine(facts, state)
        if self.fleet.cells[facts.id]["state"] != "CRASHED":
            self.fleet.set(facts.id, state=state)


def test_lent_engines_come_back_through_a_push_and_one_that_died_meanwhile_is_left_out(
    run: Callable[..., FleetRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.train.test_fleet_rollouts.Narrator", Telling)
    made = run({}, num_rollout=3, colocate=True)
    Telling.fleet = made.fleet
    made.fleet.saver = True
    release, steps = FleetRollouts.offload, list[list[str]]()

    def offload(rollouts: FleetRollouts, *, late: bool = False) -> None:
        release(rollouts, late=late)
        steps.append([made.fleet.cells[name]["state"] for name in ("0", "1")])
        if len(steps) == 2:
            made.fleet.restart("1")

    monkeypatch.setattr(FleetRollouts, "offload", offload)
    made.go()
    assert steps == [["OFFLOADED", "OFFLOADED"], ["OFFLOADED", "OFFLOADED"], ["OFFLOADED", "CRASHED"]]
    pushes = [sorted(one["engines"]) for one in made.payloads("weights")]
    assert pushes == [["0", "1"], ["0", "1"], ["0"], ["0"]]
    assert all(reply["same"] for one in made.payloads("weights") for reply in one["engines"].values())
    assert len(made.history.rewards) == 3
