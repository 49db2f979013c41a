"""A slime run that trains against the run's engines from outside: what an engine must hold, and when it may leave."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rltop.daemon import slime_trainer
from rltop.daemon.bisect import Bisections
from rltop.daemon.commands import Actions, Commands
from rltop.daemon.engine_commands import EngineCommands
from rltop.daemon.engines import EngineOptions, Engines
from rltop.daemon.slime_trainer import APART_S, FRESH_S, WRITING_S, SlimeOptions, SlimeTrainer
from rltop.engines.kept_weights import Kept, KeptWeights
from rltop.engines.requests import EngineSlot, Refused, Required, Restart, SetToggles, Start, Stop
from rltop.protocol.messages import Accepted, Command, Rejected
from tests.daemon.fake_fleet import FakeFleet, make_fake
from tests.daemon.fakes import FakeCore
from tests.engines.fake_slime_router import fake_slime_router
from tests.engines.test_kept_weights import version

BEGUN = 1_000_000.0
ADDRESSES = ("127.0.0.1:30000", "127.0.0.1:30001")


class Rig:
    """A SlimeTrainer with a clock and a word for each engine."""

    def __init__(self, tmp_path: Path, *, disk: bool = True, router: str = "", count: int = 2) -> None:
        self.now = BEGUN
        self.disk, self.folder = tmp_path / "weights", tmp_path / "engines"
        self.told: list[str] = []
        self.disk.mkdir(parents=True, exist_ok=True)
        self.options = SlimeOptions(ADDRESSES[:count], str(self.disk) if disk else "", router)
        self.slime = self.again()

    def again(self) -> SlimeTrainer:
        """As the next daemon of the run makes it."""
        self.slime = SlimeTrainer(self.options, self.folder, wall=lambda: self.now, tell=self._tell)
        return self.slime

    def _tell(self, level: str, text: str) -> None:
        self.told.append(text)

    def says(self, name: str, state: str, held: str | None, **more: Any) -> None:
        url = f"http://{ADDRESSES[int(name)]}"
        self.slime.see(name, {"state": state, "weight_version": held, "url": url, **more})

    def up(self, *versions: str) -> None:
        """Engines that came up with these labels, in 45 s."""
        for at in range(len(versions)):
            self.says(str(at), "LOADING", None)
        self.now += 45
        for at, held in enumerate(versions):
            self.says(str(at), "STALE", held)
            self.says(str(at), "HEALTHY", held)

    def turn(self) -> None:
        asyncio.run(self.slime.turn())

    def kept(self, number: int, *, cut: int = 0) -> Path:
        return version(self.disk, number, written=self.now, cut=cut)

    def push(self, number: int, *names: str) -> None:
        """As slime does: written, then brought into every engine."""
        self.kept(number)
        self.turn()
        for name in names:
            self.says(name, "HEALTHY", str(number))


def test_fresh_engines_serve_the_base_until_slime_pushes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    version(rig.disk, 9, written=BEGUN - 500)  # of an earlier run
    rig.turn()
    assert rig.slime.required() == Required(version="default", source="base")
    rig.up("default", "default")
    assert rig.slime.required() == Required(version="default", source="base")
    rig.now += 60
    rig.push(1, "0", "1")
    assert rig.slime.required() == Required(version="1", source="disk", path=str(rig.disk / "weight_v000001"))


def test_a_restarted_engine_needs_the_pushed_version_not_a_newer_one_on_the_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    rig.push(1, "0", "1")
    rig.now += 100
    rig.kept(2)
    rig.turn()
    rig.says("0", "CRASHED", None)
    assert rig.slime.required().version == "1"
    rig.says("0", "STALE", "default")
    rig.says("0", "STALE", "1")
    rig.says("0", "HEALTHY", "1")
    assert rig.slime.required().version == "1"
    assert len(rig.slime.pushes) == 1


def test_a_push_is_going_on_from_its_files_to_the_last_engine(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    assert not rig.slime.updating()
    rig.now += 10
    rig.kept(1)
    rig.turn()
    assert rig.slime.updating()
    rig.says("0", "HEALTHY", "1")
    assert rig.slime.updating()
    rig.says("1", "HEALTHY", "1")
    assert not rig.slime.updating()


def test_a_version_that_nobody_pushes_holds_nothing_up_for_long(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    rig.now += 10
    rig.kept(1)
    rig.turn()
    rig.now += WRITING_S + 1
    assert not rig.slime.updating()


def test_an_engine_that_missed_a_push_is_judged_after_a_while(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=False)
    rig.up("4", "4")
    rig.says("0", "HEALTHY", "5")
    assert rig.slime.updating()
    rig.now += APART_S + 1
    assert not rig.slime.updating()
    assert rig.slime.required() == Required(version="5", source="trainer")


def test_a_second_slime_run_begins_at_1_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=False)
    rig.up("50", "50")
    rig.says("0", "HEALTHY", "1")
    rig.says("1", "HEALTHY", "1")
    assert rig.slime.required().version == "1"


def test_a_push_into_an_engine_that_does_not_serve_counts(tmp_path: Path) -> None:
    """Else it would wait for ever for a version that nobody has any more."""
    rig = Rig(tmp_path, disk=False, count=1)
    rig.up("7")
    rig.says("0", "CRASHED", None)
    rig.says("0", "STALE", "default")
    assert rig.slime.required() == Required(version="7", source="trainer")
    rig.says("0", "STALE", "8")
    assert rig.slime.required().version == "8"
    rig.says("0", "STALE", "7")  # late, by a load that began before
    assert rig.slime.required().version == "8"


def test_the_next_daemon_goes_on_with_what_was_pushed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    rig.push(3, "0", "1")
    rig.again()
    rig.turn()
    assert rig.slime.required().version == "3"
    (rig.disk / "weight_v000003" / "model.safetensors.index.json").unlink()
    rig.again()
    rig.turn()  # neither an engine nor the disk has it: another slime run begins with a push of its own
    assert rig.slime.required() == Required(version="default", source="base")


def test_new_engines_join_a_slime_run_that_is_there(tmp_path: Path) -> None:
    """Its router lists their addresses: the base weights would be served under its newest version."""
    with fake_slime_router() as fake:
        fake.add({"url": f"http://{ADDRESSES[0]}", "worker_type": "regular"})
        rig = Rig(tmp_path, router=fake.address)
        version(rig.disk, 12, written=BEGUN - 50)
        rig.says("0", "LOADING", None)
        rig.turn()
        assert fake.urls() == []  # it does not serve yet
    assert rig.slime.required().version == "12"
    assert "weight version 12 it is" in rig.told[-1]
    assert rig.slime.attached()


def test_a_safe_point_is_idle_or_just_after_a_push(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    assert rig.slime.safe_point()
    rig.says("0", "HEALTHY", "default", running=3)
    assert not rig.slime.safe_point()
    rig.push(1, "0", "1")
    rig.says("0", "HEALTHY", "1", running=3)
    assert rig.slime.safe_point()
    rig.now += FRESH_S
    assert not rig.slime.safe_point()


def test_a_restart_is_refused_where_the_weights_can_not_be_had_again(tmp_path: Path) -> None:
    over_nccl = Rig(tmp_path / "a", disk=False)
    over_nccl.up("default", "default")
    assert over_nccl.slime.refused(Restart(targets=("0",))) is None
    over_nccl.says("0", "HEALTHY", "1")
    found = over_nccl.slime.refused(SetToggles(targets=("0",), changes={"cuda_graph": "off"}))
    assert isinstance(found, Refused)
    assert "NCCL" in found.why
    assert "--update-weight-transport disk" in found.do
    assert over_nccl.slime.refused(Stop(targets=("0",))) is None
    assert over_nccl.slime.refused(Start(targets=("0",))) is None


@pytest.mark.parametrize(("cut", "words"), [(1, "is cut off"), (None, "has no weight_v000002")])
def test_a_restart_is_refused_while_the_disk_has_no_whole_copy(tmp_path: Path, cut: int | None, words: str) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    rig.push(1, "0", "1")
    assert rig.slime.refused(Restart(targets=("0",))) is None
    rig.says("0", "HEALTHY", "2")
    if cut is not None:
        rig.kept(2, cut=cut)
    rig.turn()
    found = rig.slime.refused(Restart(targets=("0",)))
    assert found is not None
    assert words in found.why
    assert "--update-weight-disk-keep-files" in found.do


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_version_pushed_since_the_last_look_at_the_disk_is_no_reason_to_refuse(
    tmp_path: Path, dry_run: bool
) -> None:
    rig = Rig(tmp_path)
    rig.up("default", "default")
    await rig.slime.turn()
    rig.kept(1)
    rig.says("0", "HEALTHY", "1")
    rig.says("1", "HEALTHY", "1")
    found = rig.slime.refused(Restart(targets=("0",)))
    assert found is not None, "the last look is of before"
    assert "has no weight_v000001" in found.why

    core = FakeCore()
    options = EngineOptions.of({"engines": {"model_path": "/m", "count": 2}})
    engines = Engines(core, options, run_dir=tmp_path, trainer_lives=lambda: False, make=make_fake())
    assert isinstance(engines.fleet, FakeFleet)
    engines.fleet.declare(EngineSlot(id="0"), "HEALTHY")
    engines.slime = rig.slime
    commands = Commands(core, _actions(EngineCommands(core.table, engines, _ask_nobody)), epoch="e1")
    command = Command("engine-restart", "0", {}, dry_run=dry_run)
    assert isinstance(await commands.take(command, "c-1", who="ana", role="control"), Accepted)
    shutil.rmtree(rig.disk / "weight_v000001")
    refused = await commands.take(command, "c-2", who="ana", role="control")
    assert isinstance(refused, Rejected)
    assert (refused.code, "has no weight_v000001" in refused.why) == ("bad-args", True)
    await commands.finish()


async def test_a_disk_that_does_not_answer_holds_up_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.up("1", "1")
    answers = threading.Event()

    def hangs(disk: KeptWeights) -> list[Kept]:
        answers.wait()
        return []

    monkeypatch.setattr(KeptWeights, "scan", hangs)
    monkeypatch.setattr(slime_trainer, "LOOK_S", 0.0)
    await rig.slime.look()
    found = rig.slime.refused(Restart(targets=("0",)))
    assert found is not None
    assert (found.code, "did not answer" in found.why) == ("busy", True)
    answers.set()
    monkeypatch.undo()
    rig.kept(1)
    await rig.slime.look()
    assert rig.slime.refused(Restart(targets=("0",))) is None


def _actions(desk: EngineCommands) -> Actions:
    async def done(stage: object = None) -> str:
        return ""

    async def committed() -> bool:
        return True

    return Actions(
        stop_trainer=done,
        shutdown=done,
        trainer_running=lambda: False,
        committed=committed,
        mute=lambda check_id, reason, who, since: None,
        unmute=lambda check_id: False,
        engines=desk,
    )


async def _ask_nobody(url: str, action: str) -> str:
    raise AssertionError("these engines are rltop's")


def test_what_slime_does_meanwhile_is_said_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path, count=1)
    rig.up("default")
    request = Restart(targets=("0",))
    (router,) = rig.slime.warnings(request, ("0",))
    assert router.startswith("warning: no router in [engines]: slime goes on sending requests")
    for at in (1, 2):
        rig.now += 100
        rig.push(at, "0")
    rig.now += 20
    update, _ = rig.slime.warnings(request, ("0",))
    assert "ends slime's run (one every 100 s, the last 20 s ago, an engine took 45 s to come up)" in update
    assert update.endswith("--when safe-point begins right after one")
    assert "--when" not in rig.slime.warnings(Restart(targets=("0",), when="safe-point"), ("0",))[0]
    with fake_slime_router() as fake:
        routed = Rig(tmp_path / "b", router=fake.address)
        routed.up("default", "default")
        assert routed.slime.warnings(request, ("0",)) == []
        both = Restart(targets=("0", "1"), mode="at-once")
        assert "no other engine serves" in routed.slime.warnings(both, ("0", "1"))[0]


def test_the_next_engine_leaves_when_the_one_before_is_back_in_the_router(tmp_path: Path) -> None:
    """Else there is a moment in which the router has nobody to ask."""
    with fake_slime_router() as fake:
        first, second = (f"http://{address}" for address in ADDRESSES)
        for url in (first, second):
            fake.add({"url": url, "worker_type": "regular"})
        rig = Rig(tmp_path, router=fake.address)
        rig.up("default", "default")

        async def rolling() -> None:
            await rig.slime.leaving(first)
            rig.says("0", "STALE", "default")
            rig.says("0", "HEALTHY", "default")
            await rig.slime.leaving(second)

        fake.asked.clear()
        asyncio.run(rolling())
        assert fake.asked == [f"DELETE {first}", f"POST {first}", f"DELETE {second}"]
        rolls = rig.slime.warnings(Restart(targets=("0", "1")), ("0", "1"))
        assert rolls == []


@pytest.mark.parametrize("name", ["bisect-start", "bisect-resume"])
def test_no_engine_goes_on_trial_while_slime_uses_it(tmp_path: Path, name: str) -> None:
    with fake_slime_router() as fake:
        table = {"trainer": "slime", "model_path": "/m", "count": 1, "port": 30000, "router": fake.address}
        options = EngineOptions.of({"engines": table})
        core = FakeCore()
        engines = Engines(core, options, run_dir=tmp_path, trainer_lives=lambda: False, make=make_fake())
        bisections = Bisections(core, engines)
        assert engines.slime is not None

        fake.add({"url": f"http://{ADDRESSES[0]}", "worker_type": "regular"})
        asyncio.run(engines.slime.turn())
        answer = bisections.plan(Command(name, "", {}), "ana")
        assert isinstance(answer, Rejected)
        assert answer.why.startswith("slime trains against these engines")


def test_a_disk_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.disk.rmdir()
    rig.turn()
    assert rig.told == []  # slime makes it with its first version
    rig.up("1", "1")
    rig.turn()
    rig.turn()
    assert len(rig.told) == 1
    assert "No such file" in rig.told[0]


def test_options_say_what_slime_is_started_with() -> None:
    table = {"trainer": "slime", "model_path": "/m", "count": 2, "port": 30000, "host": "10.0.0.2"}
    options = EngineOptions.of({"engines": {**table, "weights_dir": "/w", "router": "10.0.0.1:3000"}})
    assert options is not None
    assert options.slime is not None
    assert options.slime.flags() == [
        "--rollout-external-engine-addrs 10.0.0.2:30000 10.0.0.2:30001",
        "--update-weight-mode full",
        "--update-weight-transport disk",
        "--update-weight-disk-dir /w",
        "--update-weight-disk-keep-files",
        "--sglang-router-port 3000",
    ]
    assert [(slot["host"], slot["port"]) for slot in options.slots] == [("10.0.0.2", 30000), ("10.0.0.2", 30001)]
    assert SlimeOptions.of({"model_path": "/m"}) is None
