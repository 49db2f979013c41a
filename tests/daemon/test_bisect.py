"""The commands of a bisection over real null engines: what begins, what is refused, paused, stopped, and restored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rltop.protocol.messages import Accepted, Rejected
from tests.daemon.bisect_rig import SCALE, Rig

pytestmark = pytest.mark.timeout(180)
TOGGLES = ["cuda_graph", "speculative", "overlap_schedule", "radix_cache"]
LONGEST_REQUEST_S = 5
"""24 tokens of 0.05 s, and its turn."""
CRASH = {"number": 1, "generation": 1, "t": 1.0, "rollout": 2, "cause": "it died"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Two engines that a batch may kill while the radix cache is on; ended whatever happens."""
    rig = Rig(tmp_path, fault="ima:radix_cache:hazard=0.4", engines=2, args=["--speculative-algorithm", "NGRAM"])
    async with rig.life():
        await rig.start()
        yield rig
        await rig.engines.stop_all(lambda stage: None)


def had(rig: Rig, fingerprint: str = "ima/decode/abc123", **more: Any) -> None:
    """Engine 0 crashed, as far as its cell says."""
    rig.core.update("engine/0", crashes=[{**CRASH, "fingerprint": fingerprint, **more}])


async def test_a_bisection_from_the_crash_to_the_culprit(rig: Rig) -> None:
    await rig.crash()
    await rig.crash("1")
    plan = await rig.take("bisect-start", args={"toggles": TOGGLES, "engine": "1"}, dry_run=True)
    assert isinstance(plan, Accepted)
    assert "a rehearsal, the fault ima was injected" in plan.plan[0]
    assert plan.plan[1] == (
        "reserve 1 of 2 engines (1), in-fleet: out of the rotation until the bisection ends, then back on its own flags"
    )
    pinned = next(line for line in plan.plan if "the same in every arm" in line)
    toggles = next(line for line in plan.plan if line.startswith("toggles: "))
    for name in toggles.removeprefix("toggles: ").split(", "):
        assert f"--{name.partition('=')[0].replace('_', '-')} " not in pinned, "what is tried is not pinned"
    assert pinned.count("--random-seed") == 1
    warned = plan.plan.index(next(step for step in plan.plan if step.startswith("warning: engine 0 has the same")))
    assert "may crash too; after three such crashes it is quarantined" in plan.plan[warned]
    assert "rltop engine set " in plan.plan[warned + 1]
    assert "--on 1,0, or --exclusive" in plan.plan[warned + 1]
    assert not rig.bisect(), "a dry run begins nothing"
    before = rig.flags("1")
    cell = await rig.bisection(toggles=TOGGLES, mode="in-fleet", engine="1")
    assert (cell["state"], cell["verdict"]["culprit"]) == ("found", ["radix_cache"])
    assert cell["verdict"]["p"] >= 0.95
    assert (cell["id"], cell["engines"], cell["time_scale"]) == ("1", ["1"], SCALE)
    assert cell["restored"] == {"1": "original"}
    assert rig.flags("1") == before
    assert cell["crash"]["fingerprint"].startswith("ima/")
    assert cell["crash"]["injected"] == "ima", "a rehearsal is called one"
    crashed = [row for row in cell["trials"] if row["outcome"] == "crashed"]
    assert crashed
    assert all("radix_cache" in row["on"] for row in crashed)
    # A crash, and the end of a short trial, cut off the requests in flight: none of it may have ended yet.
    quiet = [row for row in cell["trials"] if row["outcome"] == "quiet"]
    assert sum(row["requests"] for row in quiet) > 0
    assert all(row["requests"] for row in quiet if row["minutes"] > LONGEST_REQUEST_S * SCALE / 60)
    assert cell["posterior"][0]["culprit"] == ["radix_cache"]
    record = json.loads((rig.run_dir / "bisect" / "1" / "record.json").read_text())
    assert (record["state"], record["verdict"]["culprit"]) == ("found", ["radix_cache"])
    assert len(record["trials"]) == len(cell["trials"])
    assert record["ended"]
    told = rig.core.events("bisect")
    assert [event for event in told if event.get("outcome") == "crashed"]
    assert [event for event in told if event.get("verdict") == "found"]
    await rig.serving("1")
    assert rig.cell("engine/0")["generation"] == 2, "the other engine served on"
    assert [name for name, _ in record["earlier"]] == ["0"], "its crash tells of how often it comes"
    assert not [row for row in rig.cell("engine/1")["crashes"] if row["generation"] > 2], "trials are no news"


async def test_what_cannot_begin(rig: Rig) -> None:
    async def refused(**args: Any) -> Rejected:
        answer = await rig.take("bisect-start", args=args)
        assert isinstance(answer, Rejected), answer
        return answer

    assert "no engine has crashed" in (await refused()).why
    assert "engine 1 has not crashed" in (await refused(engine="1")).why
    rig.core.set("check/train.ima", {"status": "fail"})
    assert "the trainer faulted first" in (await refused()).why
    rig.core.set("check/train.ima", None)
    had(rig, "oom/load/abc123")
    assert "no engine crashed of an illegal memory access; there were oom/load/abc123" in (await refused()).why
    had(rig, "port/warm-up/abc123")
    assert "no toggle causes that" in (await refused(engine="0")).why
    had(rig)
    rig.core.set("check/train.ima", {"status": "fail"})
    assert "the trainer faulted first" in (await refused()).why
    rig.core.set("check/train.ima", None)
    rig.core.set("run", {"state": "running", "args": {"colocate": True}})
    shared = await refused()
    assert "take turns on the GPUs' memory (--colocate)" in shared.why
    assert "model_path and args of engines/0/1/crash.json" in shared.do
    rig.core.set("run", {"state": "running", "args": {"colocate": True, "debug_rollout_only": True}})
    assert "there is no toggle" in (await refused(toggles=["cuda_graf"])).why, "nobody takes their memory"
    rig.core.set("run", None)
    rig.core.set("engine/w0", {"id": "w0", "owner": "other", "generation": 1, "state": "HEALTHY"})
    assert "rltop did not start it, so it can not restart it" in (await refused(engine="w0")).why
    assert "there is no engine '9'" in (await refused(engine="9")).why
    assert "there is no toggle 'cuda_graf'" in (await refused(toggles=["cuda_graf"])).why
    assert "a quiet engine with it proves nothing" in (await refused(toggles=["launch_blocking"])).why
    assert "deepep is off already" in (await refused(toggles=["deepep"])).why
    assert (await refused(toggles=["launch_blocking"])).do == "leave launch_blocking out"
    assert "name some that are on: " in (await refused(toggles=["deepep"])).do
    assert "leave budget_min out" in (await refused(budget_min=float("nan"))).do
    assert "mode 'night' is not known" in (await refused(mode="night")).why
    assert "`budget_min` is a number above 0" in (await refused(budget_min=0)).why
    assert "nothing is surer than that" in (await refused(sure=0.999)).why
    assert "`traffic`" in (await refused(traffic=3)).why
    assert "unknown argument 'hours'" in (await refused(hours=3)).why
    assert "there is no engine '7'" in (await refused(engines=["7"])).why
    for name in ("bisect-pause", "bisect-resume", "bisect-stop"):
        answer = await rig.take(name)
        assert isinstance(answer, Rejected)
        assert answer.why.startswith("no bisection is running")
        assert answer.code == "not-running"
    assert not (rig.run_dir / "bisect").exists(), "nothing was begun"


async def test_paused_resumed_and_stopped_by_its_operator(rig: Rig) -> None:
    had(rig)
    before = rig.flags("0")
    op = await rig.begin("bisect-start", args={"toggles": ["overlap_schedule", "cuda_graph"], "time_scale": 6.0})
    assert isinstance(await rig.take("bisect-start"), Rejected), "one at a time"
    busy = await rig.take("engine-restart", "0")
    assert isinstance(busy, Rejected)
    assert busy.code == "busy"
    assert busy.do.startswith("a bisection holds it: rltop bisect status")
    await rig.until(lambda: any(row["ready"] for row in rig.bisect().get("trials", ())), "traffic")
    assert rig.cell("engine/0")["state"] == "RESERVED"
    await rig.ended(await rig.begin("bisect-pause"))
    assert rig.bisect()["state"] == "paused"
    await rig.until(lambda: rig.core.texts("bisect")[-1].endswith("and idle"), "it is said")
    assert rig.cell("engine/0")["state"] == "RESERVED"
    assert isinstance(await rig.take("bisect-pause"), Rejected)
    await rig.ended(await rig.begin("bisect-resume"))
    assert rig.bisect()["state"] == "running"
    assert isinstance(await rig.take("bisect-resume"), Rejected)
    stopped = await rig.ended(await rig.begin("bisect-stop", reason="the night is over"))
    assert stopped["state"] == "done", stopped
    assert "stopped by ana: the night is over" in (await rig.ended(op))["text"]
    cell = rig.bisect()
    assert (cell["state"], cell["restored"]) == ("stopped", {"0": "original"})
    assert {row["outcome"] for row in cell["trials"]} <= {"aborted", "quiet", "crashed"}
    assert rig.flags("0") == before
    await rig.serving("0")


@pytest.mark.soak
async def test_what_was_ended_without_a_daemon_is_cut_off_and_goes_on_when_asked(tmp_path: Path) -> None:
    """The daemon is killed, `rltop down` ends the engines, and the next `rltop up` finds the bisection."""
    rig = Rig(tmp_path, fault="ima:radix_cache:batch=4", args=["--speculative-algorithm", "NGRAM"])
    async with rig.life():
        await rig.start()
        await rig.crash()
        before = rig.flags("0")
        await rig.begin("bisect-start", args={"toggles": ["radix_cache", "speculative"], "time_scale": SCALE})
        await rig.until(lambda: any(row["ready"] for row in rig.bisect().get("trials", ())), "traffic")
    async with rig.life(begin=False):
        await rig.engines.stop_all(lambda stage: None)
    async with rig.life():
        try:
            cell = rig.bisect()
            assert (cell["state"], cell["cut_off"], cell["restored"]) == ("stopped", True, {"0": "original"})
            refused = await rig.take("bisect-resume")
            assert isinstance(refused, Rejected)
            assert "it is stopped" in refused.why
            row = {"name": "bisect-start", "args": {"id": "1"}, "who": "ana", "plan": []}
            plan = rig.bisections.resume(row)
            assert plan is not None
            assert not plan.engines, "its operation holds nobody: the engines have to start"
            assert "the run went down" in await plan.work(lambda stage: None)
            await rig.start()
            ended = await rig.ended(await rig.begin("bisect-resume"))
            assert ended["state"] == "done", ended
            cell = rig.bisect()
            assert (cell["state"], cell["verdict"]["culprit"], cell["cut_off"]) == ("found", ["radix_cache"], False)
            assert rig.flags("0") == before
            assert [text for text in rig.core.texts("bisect") if text.endswith("rltop bisect resume goes on with it")]
        finally:
            await rig.engines.stop_all(lambda stage: None)
