"""GPU memory beside a watched run, as the driver tells it."""

from __future__ import annotations

from rltop.daemon.watched_gpus import Gpus
from rltop.engines.gpu_memory import Holder, Reading
from tests.daemon.fakes import FakeCore

HELD = Reading("nvml", (Holder(1, "GPU-b", 7, 100), Holder(0, "GPU-a", 8, 900), Holder(0, "GPU-a", 9, 1000)))


async def test_who_holds_what_in_the_order_of_the_driver() -> None:
    core = FakeCore()
    assert await Gpus(core, read=lambda: HELD, names=lambda pid: f"p{pid}").once()
    cell = core.table.get("gpus")
    assert cell["source"] == "nvml"
    assert [(gpu["index"], gpu["used_mib"]) for gpu in cell["gpus"]] == [(0, 1900), (1, 100)]
    assert [holder["name"] for holder in cell["gpus"][0]["holders"]] == ["p9", "p8"]


async def test_a_machine_without_a_driver_is_asked_once_and_a_driver_that_goes_takes_its_key_along() -> None:
    core, asked = FakeCore(), []
    answers = [HELD, Reading("none")]

    async def no_sleep(_: float) -> None:
        asked.append(1)

    await Gpus(core, read=lambda: answers.pop(0), sleep=no_sleep).run()
    assert asked == [1]
    assert core.table.get("gpus") is None
