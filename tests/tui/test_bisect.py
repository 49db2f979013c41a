"""The Bisect screen under the fingers: look, scroll, see a trial's evidence, start, pause, stop, be refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rltop.bisect.story_of import story_of
from rltop.protocol.messages import Accepted, Rejected
from rltop.tui.screens.bisect import BisectScreen, EvidenceDialog
from rltop.tui.screens.plan import PlanDialog
from rltop.tui.widgets.bisect_view import lettered
from tests.bisect import stories
from tests.tui.dash import Dash, dash
from tests.tui.engine_scenes import owned


@asynccontextmanager
async def board(
    scene: str = "bisecting", size: tuple[int, int] = (120, 40), cell: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[Dash]:
    """The Bisect screen, open. cell: another bisection than the scene's."""
    async with dash(scene, size, **more) as made:
        if cell is not None:
            made.client.put("bisect", cell)
        await made.press("B")
        await made.until(lambda: isinstance(made.app.screen, BisectScreen))
        await made.tick(0)
        yield made


async def test_trials_belief_and_reasons_are_on_the_screen() -> None:
    async with board() as made:
        text = made.text
        for words in (
            "bisection 3: searching; so far cuda_graph x speculative (71%)",
            "58 min of 24 h, 20 to 90 min left",
            "✗ crashed",
            "✓ quiet",
            "◌ running",
            "◌ starting",
            "▲ lost",
            "b speculative",
            "95% ",
            "speculative x overlap_schedule",
            "try only cuda_graph, speculative: 97% of the belief",
            "build_tree_efficient, block 12, 0, 0 (core dump)",
            "kernel build_tree_efficient (speculative decoding): speculative x15",
            "captured from engine 2, generation 1, 57 requests, 13 at once",
            "begun by",
        ):
            assert words in text, words
        assert "none of these" not in text, "what is hardly believed is left out"


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 16), (200, 60)])
async def test_sixty_trials_show_the_newest_and_scroll(size: tuple[int, int]) -> None:
    async with board("bisected", size) as made:
        assert " 60 0 " in made.text
        await made.press("g")
        assert "\n   1 1 " in made.text
        await made.press("G", "tab", "pagedown", "escape")
        assert " 60 0 " in made.text
        assert max(map(len, made.lines)) <= size[0]


async def test_the_newest_trial_comes_into_sight_by_itself() -> None:
    async with board("bisected", (80, 24)) as made:
        cell = made.client.mirror.state["bisect"]
        rows = [*cell["trials"], stories.trial(61, ["deepep"], "running", 0.2)]
        made.client.put("bisect", cell | {"trials": rows})
        assert " 61 1 " in await made.tick()


async def test_evidence_of_a_trial() -> None:
    async with board() as made:
        await made.press("k", "k", "k", "enter")
        text = await made.shows("an illegal memory access")
        assert isinstance(made.app.screen, EvidenceDialog)
        for words in ("Trial 3", "ima/decode-graph/656fb6", "+ --disable-deepep", "without deepep, overlap_schedule"):
            assert words in text, words
        await made.press("escape")
        await made.press("q")
        await made.until(lambda: made.app.bisect is None)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (stories.running(state="paused"), "paused: no traffic, its engines stay reserved"),
        (stories.running(state="paused"), "5 1    ‖ paused "),
        (stories.found(), "✓ bisection 3: found: cuda_graph x speculative (97%)"),
        (stories.ended("none", "it crashes with all of them off"), "none of these toggles"),
        (
            stories.ended(
                "not-separable", "two are left", verdict={"left": [[["cuda_graph"], 0.5], [["deepep"], 0.4]]}
            ),
            "cuda_graph 50%, deepep 40%",
        ),
        (stories.ended("budget", "1440 minutes are over"), "the budget is spent"),
        (stories.ended("stopped", "stopped by ana"), "stopped by ana"),
        (stories.ended("failed", "the disk is full", error="the disk is full"), "✗ bisection 3: failed"),
        (
            stories.found(restored={"0": "original", "1": "no port was free"}),
            "not as it was: engine 1: no port was free",
        ),
        (stories.running(trials=[], posterior=[]), "no trial yet"),
        (stories.found(), "rltop bisect export writes it as a bug report"),
        (stories.ended("stopped", "the run went down", cut_off=True), "cut off: the run went down in the middle"),
        (stories.running(unserved="no engine serves: all are on trial"), "▲ no engine serves: all are on trial"),
        (stories.running(fixed=["deepep"]), "c deepep (never off)"),
        (
            stories.running(trials=[stories.trial(1, [], "crashed", 2.0, counts=False, fingerprint="oom/serve/1")]),
            "▲ other  ",
        ),
        ({"id": "9", "state": "strange", "trials": [None], "toggles": 3, "next": [{}]}, "bisection 9: strange"),
    ],
)
async def test_every_state_has_its_words(cell: dict[str, Any], words: str) -> None:
    async with board(size=(80, 24), cell=cell) as made:
        assert words in made.text


async def test_until_the_engines_are_back_it_can_be_cut_short_and_no_other_begins() -> None:
    late = {"verdict": stories.found()["verdict"], "state": "found", "kernel": None}
    stage = {"kernel_stage": "cuda-gdb reads the core dump of trial 2"}
    runs = {"kernel_runs": [{"engine": "1", "why": "once more", "outcome": "running", "limit_min": 40}]}
    async with board(cell=stories.running(**late, **stage, **runs), control=True) as made:
        assert "kernel    cuda-gdb reads the core dump of trial 2" in made.text
        assert "no trial  for the kernel, engine 1: once more: running for at most 40 min" in made.text
        assert "x stop" in made.footer
        assert "s start" not in made.footer
        assert "it has its result" in await made.press("p")
        made.client.put("bisect", stories.ended("stopped", "the run went down", cut_off=True))
        await made.tick()
        assert "p resume" in made.footer
        await made.press("p")
        await made.shows("enter goes on")
        assert made.client.orders[-1][0] == "bisect-resume"


async def test_a_long_list_of_who_does_not_serve_costs_one_line_above() -> None:
    why = "no engine serves the run: " + ", ".join(f"engine {n} is on trial" for n in range(8))
    async with board(size=(80, 24), cell=stories.running(unserved=why)) as made:
        assert sum("no engine serves the run" in line for line in made.lines[:6]) == 1
        assert "engine 7 is on trial" in " ".join(made.text.split())


async def test_trials_alike_that_come_are_one_line() -> None:
    (one,) = stories.running()["next"]
    async with board(cell=stories.running(next=[{**one, "engine": str(n)} for n in range(8)])) as made:
        assert made.text.count("try only cuda_graph, speculative") == 1
        assert "(12 min on engine 0, 1, 2, 3, 4, 5, 6, 7)" in " ".join(made.text.split())


async def test_a_daemon_without_bisections_says_how_to_begin() -> None:
    async with board("engines") as made:
        assert "No bisection in this run." in made.text
        assert "rltop bisect start" in made.text
        assert "there may be nothing to hunt" in made.text
        assert "rltop drill ima rehearses one" in made.text
    async with board("healthy") as made:
        assert "rltop owns none of its engines" in made.text
    async with board("fresh") as made:
        assert "No engine is known yet." in made.text


async def test_culprits_without_room_for_their_bars_are_told_in_words() -> None:
    cell = stories.running(toggles=[*stories.TOGGLES, *(f"toggle_{n}" for n in range(12))])
    async with board(size=(80, 24), cell=cell) as made:
        assert "more: below, or enlarge" in made.text
        assert "it takes  cuda_graph x speculative 71%, speculative 16%" in made.text
    async with board(size=(200, 60), cell=cell) as made:
        assert "more: below" not in made.text


def test_a_long_culprit_is_named_by_letters_and_means_the_same() -> None:
    story = story_of(stories.running(toggles=["cuda_graph", "cuda_graph_padding"]))
    assert story is not None
    told = lettered("cuda_graph_padding, alone or with cuda_graph", story)
    assert told == "b, alone or with a"


async def test_ascii_has_no_other_character() -> None:
    async with board("bisecting", (80, 24), ascii_only=True) as made:
        assert made.text.isascii()
        await made.press("enter")
        await made.shows("arguments, against everything on")
        assert made.text.isascii()


async def test_without_control_nothing_can_be_sent() -> None:
    async with board() as made:
        for key in ("p", "x", "s"):
            assert "read-only: attach with --control" in (await made.press(key))
        assert made.client.orders == []


async def test_pause_and_stop_show_the_plan_and_need_a_reason() -> None:
    async with board(control=True) as made:
        made.client.plan = Accepted("", ["end bisection 3", "engines 0, 1: back on their own flags"])
        await made.press("x")
        await made.shows("back on their own flags")
        assert isinstance(made.app.screen, PlanDialog)
        assert made.client.sent == []
        await made.press("enter", *"late", "enter")
        await made.until(lambda: bool(made.client.sent))
        name, target, args, more = made.client.orders[-1]
        assert (name, target, args, more["reason"]) == ("bisect-stop", "", {}, "late")
        await made.until(lambda: isinstance(made.app.screen, BisectScreen))
        await made.press("p")
        await made.shows("enter goes on")
        assert made.client.orders[-1][0] == "bisect-pause"
        await made.press("escape")
        made.client.put("bisect", stories.running(state="paused"))
        await made.tick()
        assert "resume" in made.footer
        await made.press("p")
        await made.shows("enter goes on")
        assert made.client.orders[-1][0] == "bisect-resume"
        await made.press("escape")
        assert "one runs already" in await made.press("s")


async def test_a_start_from_the_engine_screen_hunts_that_engine_and_is_compare_and_set() -> None:
    async with dash("engines", control=True) as made:
        made.client.put("engine/2", owned("2", 2, state="BACKOFF", fingerprint="ima/decode/abc123"))
        await made.press("e")
        await made.until(lambda: made.app.engines is not None and made.app.screen is made.app.engines)
        await made.press("j", "j")
        assert "B bisect" in made.footer
        assert "B: which toggles does that crash take?" in made.text
        made.client.plan = Rejected("bad-args", "the trainer faulted first", "")
        await made.press("B")
        await made.until(lambda: isinstance(made.app.screen, BisectScreen))
        await made.press("s")
        await made.shows("the trainer faulted first")
        name, _, args, more = made.client.orders[-1]
        assert (name, args["engine"], more["dry_run"]) == ("bisect-start", "2", True)
        assert args["generations"] == {"0": 2, "1": 2, "2": 2, "3": 2}
        await made.press("escape")
        await made.press("q")
        await made.until(lambda: made.app.screen is made.app.engines)
