"""Evidence that opens its source: lines of a log in a box, metrics in the charts."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.protocol.messages import LinesAnswer
from rltop.tui.evidence import ChartPlace, LinePlace, place_of
from rltop.tui.picture import CHARTS
from tests.tui.dash import Dash, dash
from tests.tui.fake import FakeClient
from tests.tui.scenes import verdict

LOG = [f"[2026-03-01 10:00:{i % 60:02}] model.py:9 - step {i}" for i in range(1, 200)]
BAD = "    torch.OutOfMemoryError: \x1b[31mCUDA out of memory.\x1b[0m Tried to allocate 20.00 GiB. GPU 0 has a total"
BAD += " capacity of 79.11 GiB of which 3.00 GiB is free. " + "Including non-PyTorch memory. " * 3 + "THE END"


def line(source: str, number: int | None, text: str = "") -> dict[str, Any]:
    return {"source": source, "line": number, "text": text}


async def with_evidence(running: Dash, *evidence: dict[str, Any]) -> None:
    """One failing check with this evidence, selected."""
    found = verdict("train.oom", "fail", cause="the trainer ran out of memory", evidence=list(evidence))
    running.client.put("check/train.oom", found)
    running.client.put("checks", {"root_causes": ["train.oom"], "summary": {"fail": 1}})
    await running.tick()
    await running.press("1", "g")


def log(client: FakeClient, at: int = 120) -> None:
    lines = [*LOG[: at - 1], BAD, *LOG[at:]]
    client.logs["trainer.log"] = LinesAnswer("trainer.log", 20, lines[19:])


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_line_of_a_verdict_is_shown_with_what_is_around_it(size: tuple[int, int]) -> None:
    async with dash("healthy", size=size) as running:
        log(running.client)
        await with_evidence(running, line("trainer.log", 120, "OutOfMemoryError"))
        assert "o source" in running.footer
        await running.press("o")
        shown = await running.shows(">120 ")
        assert "trainer.log:120 " in running.lines[0]
        assert running.client.opened == [("trainer.log", 120)]
        (marked,) = (row for row in running.lines if ">120 " in row)
        assert ">120     torch.OutOfMemoryError: CUDA out of memory." in marked, "marked, indented, no escapes"
        assert "THE END" in shown, "a long line is not cut"
        assert " 119 " in shown
        assert " 121 " in shown
        assert " 20 [" not in shown
        assert " 20 [" in await running.press("g")
        assert "199 [" in await running.press("G")
        assert "esc closes" in running.text
        assert "esc closes" not in await running.press("escape")


async def test_several_lines_are_gone_through_and_each_is_asked_for_once() -> None:
    async with dash("healthy") as running:
        log(running.client)
        running.client.logs["engine-0.log"] = LinesAnswer("engine-0.log", 7, ["Prefill batch", "boom"])
        await with_evidence(
            running, line("trainer.log", 120), line("engine-0.log", 8, "boom"), line("gone.log", 3, "was x")
        )
        await running.press("o")
        await running.shows("trainer.log:120 1/3")
        await running.press("tab")
        shown = await running.shows(">8 boom")
        assert "engine-0.log:8 2/3" in shown
        await running.press("tab")
        shown = await running.shows("cannot be shown: it is neither a log that this run's daemon follows")
        assert "was x" in shown, "what the verdict quotes is there all the same"
        await running.press("tab")
        await running.shows("trainer.log:120")
        await running.press("shift+tab")
        await running.shows("gone.log:3")
        assert len(running.client.opened) == 3


async def test_a_daemon_that_does_not_answer_is_said() -> None:
    async with dash("healthy") as running:
        running.client.busy = True
        await with_evidence(running, line("trainer.log", 120))
        await running.press("o")
        await running.shows("cannot be shown: no answer to 'lines?' in 10 s")
        await running.press("o")
        assert "cannot be shown" not in running.text


async def test_a_metric_is_shown_in_its_chart_at_its_step() -> None:
    async with dash("failing") as running:
        await running.press("1", "g")
        at = next(i for i, spec in enumerate(CHARTS) if spec.title == "grad_norm")
        for _ in range(10):
            if "train.nan" in running.view.selection(running.app.model.frame()).splitlines()[0]:
                break
            await running.press("down")
        assert "o source" in running.footer
        await running.press("o")
        charts = running.app.live.charts
        assert (running.app.live.active, charts.selected, charts.single) == ("charts", at, True)
        assert "@33" in running.text
        await running.press("escape", "escape")
        assert not charts.single


async def test_without_a_place_there_is_no_key() -> None:
    async with dash("healthy") as running:
        await with_evidence(running, line("weights", None, "version 3"))
        assert "o source" not in running.footer
        before = running.text
        assert await running.press("o") == before


async def test_ascii_screens_stay_ascii() -> None:
    async with dash("healthy", ascii_only=True) as running:
        running.client.logs["a.log"] = LinesAnswer("a.log", 1, ["caf\u00e9 \u2028 \t x"])
        await with_evidence(running, line("a.log", 1))
        await running.press("o")
        assert (await running.shows(">1 caf?")).isascii()


@pytest.mark.parametrize(
    ("source", "number", "place"),
    [
        ("x.log", 3, LinePlace("x.log", 3, "t")),
        ("x.log", 0, None),
        ("x.log", True, None),
        ("samples@5", None, None),
        ("weights@2", None, None),
        ("train/unknown@2", None, None),
        ("train/grad_norm@x", None, None),
        ("train/grad_norm@7", None, ChartPlace(2, "train/grad_norm", 7)),
        (3, 3, None),
    ],
)
def test_where_a_piece_of_evidence_can_be_looked_at(source: Any, number: Any, place: Any) -> None:
    state = {"metric/train/grad_norm": {"step": 9, "value": 0.1}}
    assert place_of({"source": source, "line": number, "text": "t"}, state) == place
