"""A crash just after a resume: the trials sleep and wake too, and nobody takes a sleeping engine for a hung one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.engines.client import AsyncEngineClient
from rltop.protocol.messages import Accepted
from tests.daemon.bisect_rig import Rig


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_trials_sleep_and_wake(tmp_path: Path) -> None:
    rig = Rig(tmp_path, fault="ima:radix_cache:hazard=0.02", args=("--enable-memory-saver",), name="run")
    async with rig.life():
        try:
            await rig.start()
            async with AsyncEngineClient(rig.cell("engine/0")["url"]) as engine:
                await engine.release_memory()
                await engine.resume_memory()
                await engine.update_weights_from_disk(str(tmp_path / "model"), "default")
            await rig.crash()
            toggles = ["radix_cache", "resume_order"]
            plan = await rig.take("bisect-start", args={"toggles": toggles, "time_scale": 60.0}, dry_run=True)
            assert isinstance(plan, Accepted), plan
            assert any("sleeps and wakes" in step for step in plan.plan)
            assert any("just after its memory was resumed" in step for step in plan.plan)
            cell = await rig.bisection(toggles=toggles)
            assert (cell["state"], cell["verdict"]["culprit"]) == ("found", ["radix_cache"]), rig.story()
            slept = [text for text in rig.core.texts() if "OFFLOADED" in text]
            assert slept, "the replay had it sleep"
            log = "\n".join(path.read_text() for path in rig.run_dir.glob("engines/0/*/stdout.log"))
            assert "Health check failed" not in log, "nobody asked it meanwhile"
            assert not [row for row in cell["trials"] if row["outcome"] == "lost"], cell["trials"]
            assert cell["restored"] == {"0": "original"}
        finally:
            await rig.engines.stop_all(lambda stage: None)
