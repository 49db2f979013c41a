"""The kernel after the culprit: from the core dumps there are, from one more run, or from a launch that blocked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.engines.toggle_table import CORE_DUMP
from tests.daemon.bisect_rig import Rig

TOGGLES = ("radix_cache", "overlap_schedule")
STORY = (": found: ", "the kernel is kv_copy_kernel", "back on the original flags")
"""In this order: nobody understands the second before the first."""


@pytest.mark.parametrize("dumping", [True, False])
async def test_the_kernel_of_the_culprit(tmp_path: Path, dumping: bool) -> None:
    rig = Rig(tmp_path, fault="ima:radix_cache:batch=4,kernel=kv_copy_kernel", engines=1, name="run")
    if not dumping:
        del rig.slots[0]["env"][CORE_DUMP]
    async with rig.life():
        try:
            await rig.start()
            await rig.crash()
            before = rig.flags("0")
            cell = await rig.bisection(toggles=TOGGLES, traffic=None)
            assert (cell["state"], cell["verdict"]["culprit"]) == ("found", ["radix_cache"]), rig.story()
            assert cell["traffic"]["source"].startswith("crash dump of engine 0, generation 1"), "what was captured"
            kernel = cell["kernel"]
            assert kernel["name"] == "kv_copy_kernel", rig.story()
            assert kernel["weaker"] is False
            assert "a stand-in wrote it" in kernel["source"]
            runs = [text for text in rig.core.texts() if "once more" in text]
            assert bool(runs) is not dumping, "with a core dump nothing is run again"
            extra = cell["kernel_runs"]
            assert [run["outcome"] for run in extra] == ([] if dumping else ["crashed"])
            assert all("once more, with core dumps" in run["why"] and run["limit_min"] > 0 for run in extra)
            assert (cell["kernel_stage"], cell["unserved"]) == (None, None), "it is over"
            told = rig.core.texts("bisect")
            order = [next(at for at, text in enumerate(told) if word in text) for word in STORY]
            assert order == sorted(order)
            assert ("kv_copy_kernel" in cell["facts"][0]["text"]) is dumping
            if dumping:
                assert "coredump" in cell["facts"][0]["source"]
            assert cell["trials"]
            assert not any("once more" in row["why"] for row in cell["trials"]), "a run for the name is no trial"
            assert rig.flags("0") == before
            assert cell["restored"] == {"0": "original"}
        finally:
            await rig.engines.stop_all(lambda stage: None)
